"""Sum rows into segments: atoms into structures, edges into atoms."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared.checks import check_index

__all__ = ["scatter_sum"]

_operator = registry.operator("scatter_sum", __name__)


def scatter_sum(
    values: Float[Tensor, "E *rest"],
    index: Int[Tensor, "E"],
    num_segments: int,
    ordered: bool = False,
) -> Float[Tensor, "N *rest"]:
    r"""Sum all rows with the same index: :math:`y_n = \sum_{e: index_e = n} v_e`.

    Raises ValueError if ``values`` and ``index`` differ in length.

    Parameters
    ----------
    values : rows of any shape
    index : the segment of each row, in 0..num_segments-1, in any order
    num_segments : number of segments; one without rows gets zero
    ordered : whether the index is known to ascend, which saves sorting it

    Returns
    -------
    Tensor
        Summed in a fixed order, so that results repeat bit for bit (the reference: on a CPU);
        16-bit types in float32.

    Examples
    --------
    >>> import torch
    >>> scatter_sum(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 0]), 3)
    tensor([5., 0., 2.])
    """
    if index.ndim != 1 or values.shape[:1] != index.shape:
        raise ValueError(
            f"scatter_sum: {tuple(values.shape)} values do not go with {tuple(index.shape)} indices"
        )
    check_index("scatter_sum", "index", index, (len(index),), values=values)
    result: Tensor = _operator.dispatch(values)(values, index, num_segments, ordered)
    return result
