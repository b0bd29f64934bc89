"""GATv2's attention in Triton, on the kernels of `dot_attention`: its score takes all channels."""

from torch import Tensor

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.dot_attention.triton import run


def graph_attention_v2(
    csr: Csr,
    x: Tensor,
    query: Tensor,
    weight: Tensor,
    negative_slope: float,
    dropout: float,
    seed: Tensor | None,
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.graph.graph_attention`."""
    return run(
        *(csr, query, x, None, None, None, weight, True),
        seed=seed,
        slope=negative_slope,
        dropout=dropout,
    )
