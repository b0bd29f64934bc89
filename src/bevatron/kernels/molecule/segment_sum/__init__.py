"""Sum consecutive rows: the atoms of each molecule."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry

__all__ = ["segment_sum", "segment_sum_with_input"]

_operator = registry.operator("segment_sum", __name__)


def segment_sum(
    values: Float[Tensor, "M C"], ptr: Int[Tensor, " _"], scale: Float[Tensor, " M"] | None = None
) -> Float[Tensor, "_ C"]:
    r"""Sum the rows of each segment: :math:`y_s = \sum_{m = ptr_s}^{ptr_{s+1} - 1} c_m v_m`.

    Raises ValueError if a shape does not match.

    Parameters
    ----------
    values : [M, C]
    ptr
        [S + 1], ascending, offsets of the segments; the last is their end. Rows past it
        belong to no segment.
    scale
        c, a factor per row such as a row dropout; not differentiated. None = 1.

    Returns
    -------
    Tensor
        [S, C], of the type of ``values``; summed in float32 for 16-bit types, in a fixed order.

    Examples
    --------
    >>> import torch
    >>> segment_sum(torch.tensor([[1.0], [2.0], [4.0]]), torch.tensor([0, 2, 2, 3]))
    tensor([[3.],
            [0.],
            [4.]])
    """
    _check(values, ptr)
    sums: Tensor = _operator.dispatch(values)(values, ptr, scale)[0]
    return sums


def segment_sum_with_input(
    values: Float[Tensor, "M C"], ptr: Int[Tensor, " _"], scale: Float[Tensor, " M"] | None = None
) -> tuple[Float[Tensor, "_ C"], Float[Tensor, "M C"]]:
    """Compute `segment_sum` and return its input for one other consumer.

    The kernel that broadcasts a segment's gradient to its rows adds the gradient of the second
    result: one pass instead of two. Raises ValueError if a shape does not match.

    Parameters
    ----------
    values, ptr, scale : see `segment_sum`

    Returns
    -------
    The sums, and the values.

    Examples
    --------
    >>> import torch
    >>> segment_sum_with_input(torch.tensor([[1.0], [2.0]]), torch.tensor([0, 2]))[0]
    tensor([[3.]])
    """
    _check(values, ptr)
    run = _operator.dispatch(values)
    found: tuple[Tensor, Tensor] = run(values, ptr, scale)
    return found


def _check(values: Tensor, ptr: Tensor) -> None:
    if values.ndim != 2 or ptr.ndim != 1 or len(ptr) == 0:
        raise ValueError(
            f"segment_sum: values {tuple(values.shape)} and ptr {tuple(ptr.shape)}, expected "
            "[M, C] and [S + 1]"
        )
