"""Attention of GAT and GATv2 over the entries of a sparse matrix."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.graph.csr import Csr, no_argument
from bevatron.kernels.graph.csr.dropout import as_seed
from bevatron.kernels.graph.graph_attention import partial
from bevatron.kernels.shared.checks import check_devices, check_float64, check_shapes

__all__ = ["graph_attention", "graph_attention_v2", "partial"]

_gat = registry.operator("graph_attention", __name__)
_gatv2 = registry.operator("graph_attention_v2", __name__, triton="triton_v2")


def graph_attention(
    csr: Csr,
    x: Float[Tensor, "columns H C"],
    row_score: Float[Tensor, "rows H"],
    col_score: Float[Tensor, "columns H"],
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    *,
    seed: int | Tensor | None = None,
) -> Float[Tensor, "rows H C"]:
    r"""Compute GAT attention: score, softmax and sum in one pass over entries.

    For row i, head h and the columns j stored in row i

    .. math::

        z_{ih} = \sum_j d_{ijh}\, a_{ij}\, \operatorname{softmax}_j\big(
        \operatorname{LeakyReLU}(l_{ih} + r_{jh})\big)\, x_{jh}

    with the scores l and r, the matrix's values a (ones if it has none) and the mask of attention
    dropout d, 0 or 1/(1 - dropout). Velickovic et al., arXiv 1710.10903, equation 4 with :math:`l =
    XA_1, r = XA_2`. Raises ValueError if a shape or number does not fit, naming the argument.

    Parameters
    ----------
    csr : values multiply the attention after the softmax; they get a gradient if they require one
    x : values, float64, float32, bfloat16 or float16
    row_score, col_score : l and r
    negative_slope : slope of LeakyReLU below zero
    dropout : probability that an entry is dropped from a head's sum; 0 for inference
    seed
        Seed of the mask, which is a function of (seed, row, column, head) alone. A tensor on the
        device may change between replays of a captured graph. None: drawn from torch's generator.

    Returns
    -------
    Tensor
        Same type as ``x``; zero for a row without entries.

    Examples
    --------
    >>> import torch
    >>> csr = Csr.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (2, 2))
    >>> x, score = torch.tensor([[[2.0]], [[4.0]]]), torch.zeros(2, 1)
    >>> graph_attention(csr, x, score, score).flatten()
    tensor([3., 0.])
    """
    _check("graph_attention", csr, x, negative_slope, dropout)
    (rows, columns), heads = csr.shape, x.shape[1]
    wanted = {"row_score": (row_score, (rows, heads)), "col_score": (col_score, (columns, heads))}
    check_shapes("graph_attention", wanted, x=x)
    check_float64("graph_attention", x=x, row_score=row_score, col_score=col_score)
    mask_seed = as_seed(seed, x.device) if dropout > 0.0 else None
    run = _gat.dispatch(x)
    result: Tensor = run(csr, x, row_score, col_score, negative_slope, dropout, mask_seed)
    return result


def graph_attention_v2(
    csr: Csr,
    x: Float[Tensor, "columns H C"],
    query: Float[Tensor, "rows H C"],
    weight: Float[Tensor, "H C"],
    negative_slope: float = 0.2,
    dropout: float = 0.0,
    *,
    seed: int | Tensor | None = None,
) -> Float[Tensor, "rows H C"]:
    r"""Compute GATv2 attention, whose score depends on row and column jointly.

    .. math::

        z_{ih} = \sum_j d_{ijh}\, a_{ij}\, \operatorname{softmax}_j\big(
        w_h \cdot \operatorname{LeakyReLU}(q_{ih} + x_{jh})\big)\, x_{jh}

    Brody et al., arXiv 2105.14491, equation 7, with :math:`q = W_l h_i` and :math:`x = W_r h_j`.
    Raises ValueError if a shape or number does not fit, naming the argument.

    Parameters
    ----------
    csr, x, negative_slope, dropout, seed : see `graph_attention`
    query : q, for the rows
    weight : w

    Returns
    -------
    Tensor
        Same type as ``x``; zero for a row without entries.

    Examples
    --------
    >>> import torch
    >>> csr = Csr.from_coo(torch.tensor([0, 0]), torch.tensor([0, 1]), (2, 2))
    >>> x = torch.tensor([[[2.0]], [[4.0]]])
    >>> graph_attention_v2(csr, x, x, torch.zeros(1, 1)).flatten()
    tensor([3., 0.])
    """
    _check("graph_attention_v2", csr, x, negative_slope, dropout)
    _, heads, channels = x.shape
    wanted = {
        "query": (query, (csr.shape[0], heads, channels)),
        "weight": (weight, (heads, channels)),
    }
    check_shapes("graph_attention_v2", wanted, x=x)
    check_float64("graph_attention_v2", x=x, query=query, weight=weight)
    mask_seed = as_seed(seed, x.device) if dropout > 0.0 else None
    run = _gatv2.dispatch(x)
    result: Tensor = run(csr, x, query, weight, negative_slope, dropout, mask_seed)
    return result


def _check(name: str, csr: Csr, x: Tensor, negative_slope: float, dropout: float) -> None:
    try:
        if x.dim() != 3 or len(x) != csr.shape[1]:
            raise no_argument(name, csr, x=x) or ValueError(
                f"{name}: x has shape {tuple(x.shape)}, expected [columns, heads, channels] with "
                f"{csr.shape[1]} columns"
            )
        check_devices(name, x=x, matrix=csr.col, values=csr.values)
    except AttributeError as error:
        raise no_argument(name, csr, x=x) or error from None
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"{name}: dropout is {dropout}, expected 0 <= dropout < 1")
    if not 0.0 <= negative_slope <= 1.0:
        raise ValueError(f"{name}: negative_slope is {negative_slope}, expected 0 to 1")
