"""Attention within each of many small molecules, with a bias for every pair of atoms."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support

__all__ = ["molecule_attention", "molecule_attention_with_bias"]

_operator = registry.operator("molecule_attention", __name__, takes=support.no_float64_on_gpu)


def molecule_attention(
    q: Float[Tensor, "N *packed H D"],
    k: Float[Tensor, "N H D"] | None,
    v: Float[Tensor, "N H D"] | None,
    bias: Float[Tensor, "P H"] | None,
    graph_ptr: Int[Tensor, " _"],
    pair_ptr: Int[Tensor, " _"],
    scale: float | None = None,
    *,
    dropout: float = 0.0,
    seed: Int[Tensor, ""] | None = None,
) -> Float[Tensor, "N H D"]:
    r"""Attend within every molecule of a batch.

    For atoms i and j of one molecule and head h

    .. math::

        a_{ijh} = \operatorname{softmax}_j\big( c\, q_{ih} \cdot k_{jh} + b_{ijh} \big), \qquad
        o_{ih} = \sum_j \frac{m_{ijh}}{1 - p}\, a_{ijh}\, v_{jh}

    with the dropout's mask m. It is the biased self-attention of Graphormer, Transformer-M and
    GPS++ (arXiv 2302.02947) on concatenated molecules, without padding. Raises ValueError if a
    shape or type does not fit, or there is dropout without a seed.

    Parameters
    ----------
    q, k, v
        [N, H, D] in any strides; or all three in ``q`` [N, 3, H, D], as one projection returns
        them, and None for the others: then their gradient is one tensor too.
    bias
        b, one row per pair of atoms: those of molecule g are rows ``pair_ptr[g]`` to
        ``pair_ptr[g + 1]``, n_g^2 of them, the pair (i, j) at i n_g + j. Any strides; loads
        coalesce if pairs are contiguous, ``bias.t().contiguous().t()``, and the gradient has the
        strides of the bias. None = no bias.
    graph_ptr : [G + 1], offsets of the molecules' atoms
    pair_ptr
        [G + 1], offsets of their pairs. A molecule with atoms but no pairs is skipped: its result
        is zero, and padding costs nothing. Rows of ``bias`` past the last pair are not read, and
        their gradient is zero.
    scale : c, not 0; 1/sqrt(D) if not given
    dropout : p, the probability that a weight is dropped
    seed
        One integer on the device, drawn for every call; needed with dropout. The mask
        is a hash of it, the two atoms' places in the batch and the head, the same for every
        implementation and in the backward pass.

    Returns
    -------
    Tensor
        [N, H, D] contiguous, of the type of ``q``. Softmax and sums are float32 for 16-bit types.

    Examples
    --------
    Molecules of 1 and 3 atoms with 2 heads of 8:

    >>> import torch
    >>> q, k, v = torch.randn(3, 4, 2, 8)
    >>> graph_ptr, pair_ptr = torch.tensor([0, 1, 4]), torch.tensor([0, 1, 10])
    >>> out = molecule_attention(q, k, v, torch.zeros(10, 2), graph_ptr, pair_ptr)
    >>> torch.equal(out[0], v[0])
    True
    """
    scale = _checked(q, k, v, bias, graph_ptr, pair_ptr, scale, dropout, seed)
    run = _operator.dispatch(q)
    out: Tensor = run(q, k, v, bias, graph_ptr, pair_ptr, scale, dropout, seed)[0]
    return out


def molecule_attention_with_bias(
    q: Float[Tensor, "N *packed H D"],
    k: Float[Tensor, "N H D"] | None,
    v: Float[Tensor, "N H D"] | None,
    bias: Float[Tensor, "P H"] | None,
    graph_ptr: Int[Tensor, " _"],
    pair_ptr: Int[Tensor, " _"],
    scale: float | None = None,
    *,
    dropout: float = 0.0,
    seed: Int[Tensor, ""] | None = None,
) -> tuple[Float[Tensor, "N H D"], Float[Tensor, "P H"] | None]:
    """Compute `molecule_attention` and return the bias for one other consumer.

    The kernel that writes the bias gradient adds the gradient of the second result, such as that of
    the next block: one pass instead of two. Raises ValueError as `molecule_attention` does.

    Parameters
    ----------
    q, k, v, bias, graph_ptr, pair_ptr, scale, dropout, seed : see `molecule_attention`

    Returns
    -------
    The result, and the bias.

    Examples
    --------
    >>> import torch
    >>> q, k, v = torch.randn(3, 2, 1, 8)
    >>> graph_ptr, pair_ptr = torch.tensor([0, 2]), torch.tensor([0, 4])
    >>> out, bias = molecule_attention_with_bias(q, k, v, torch.zeros(4, 1), graph_ptr, pair_ptr)
    >>> bias.shape
    torch.Size([4, 1])
    """
    scale = _checked(q, k, v, bias, graph_ptr, pair_ptr, scale, dropout, seed)
    run = _operator.dispatch(q)
    found: tuple[Tensor, Tensor | None] = run(
        q, k, v, bias, graph_ptr, pair_ptr, scale, dropout, seed
    )
    return found


def _checked(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    bias: Tensor | None,
    graph_ptr: Tensor,
    pair_ptr: Tensor,
    scale: float | None,
    dropout: float,
    seed: Tensor | None,
) -> float:
    """Check the arguments and return the scale."""
    _check(q, k, v)
    _check_pairs(q, bias, graph_ptr, pair_ptr)
    if not 0.0 <= dropout < 1.0:
        raise ValueError(f"molecule_attention: dropout is {dropout}, expected 0 <= p < 1")
    if dropout > 0.0 and seed is None:
        raise ValueError("molecule_attention: dropout needs a seed, one integer on the device")
    if scale == 0.0:
        raise ValueError("molecule_attention: the scale is 0")
    return q.shape[-1] ** -0.5 if scale is None else float(scale)


def _check(q: Tensor, k: Tensor | None, v: Tensor | None) -> None:
    if k is None and v is None and q.ndim == 4 and q.shape[1] == 3:
        return
    if q.ndim != 3 or k is None or v is None:
        raise ValueError(
            f"molecule_attention: q has shape {tuple(q.shape)}, expected [N, H, D] with k and v, "
            "or [N, 3, H, D] without"
        )
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape != q.shape or tensor.dtype != q.dtype:
            raise ValueError(
                f"molecule_attention: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected "
                f"{q.dtype} {tuple(q.shape)} like q"
            )


def _check_pairs(q: Tensor, bias: Tensor | None, graph_ptr: Tensor, pair_ptr: Tensor) -> None:
    if bias is not None and (bias.ndim != 2 or bias.shape[1] != q.shape[-2]):
        raise ValueError(
            f"molecule_attention: bias has shape {tuple(bias.shape)}, expected one row per pair "
            f"and one column for each of {q.shape[-2]} heads"
        )
    if graph_ptr.ndim != 1 or graph_ptr.shape != pair_ptr.shape or len(graph_ptr) == 0:
        raise ValueError(
            f"molecule_attention: graph_ptr and pair_ptr have shapes {tuple(graph_ptr.shape)} and "
            f"{tuple(pair_ptr.shape)}, expected both [G + 1]"
        )
