"""Averages of an alignment's rows over tokens, with weights that all rows share."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import as_one_type, check_axes, check_shapes

__all__ = ["pair_weighted_averaging"]

_operator = registry.operator("pair_weighted_averaging", __name__, takes=support.up_to_float32)


def pair_weighted_averaging(
    v: Float[Tensor, "*batch S N C"],
    gate: Float[Tensor, "*batch S N C"],
    weights: Float[Tensor, "*batch H N N"],
) -> Float[Tensor, "*batch S N C"]:
    r"""Average the tokens of every row and gate the result.

    .. math:: o_{si}^h = \sigma(g_{si}^h) \odot \sum_j w_{ij}^h v_{sj}^h

    AlphaFold3, algorithm 10, lines 5 and 6; the weights are a softmax over j of what the pair
    gives. Raises ValueError if shapes or types do not fit; KernelError if Triton is requested and
    cannot run. The kernel has first derivatives.

    Parameters
    ----------
    v, gate
        Channels of all heads, C = H D; the gate before its sigmoid. Parts of a joint projection are
        read in place.
    weights : of each head, the same for all rows

    Returns
    -------
    Tensor
        Same shape and type as ``v``. Saved for the backward pass: inputs and result.

    Examples
    --------
    >>> import torch
    >>> v, gate = torch.ones(2, 3, 5, 8)
    >>> pair_weighted_averaging(v, gate, torch.full((4, 5, 5), 0.2))[0, 0]
    tensor([0.7311, 0.7311, 0.7311, 0.7311, 0.7311, 0.7311, 0.7311, 0.7311])
    """
    try:
        *batch, _, N, C = v.shape
        H = weights.shape[-3]
    except (IndexError, ValueError):
        check_axes("pair_weighted_averaging", "[..., S, N, C]", v=v)
        check_axes("pair_weighted_averaging", "[..., H, N, N]", weights=weights)
        raise
    if H < 1 or C % H:
        raise ValueError(f"pair_weighted_averaging: {C} channels of v do not make {H} heads")
    wanted = {"gate": (gate, tuple(v.shape)), "weights": (weights, (*batch, H, N, N))}
    check_shapes("pair_weighted_averaging", wanted, v=v)
    # Autocast leaves a softmax in float32.
    others = as_one_type("pair_weighted_averaging", v=v, gate=gate, weights=weights)
    result: Tensor = _operator.dispatch(v)(v, *others)
    return result
