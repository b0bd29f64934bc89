"""A residual stream accumulated in its own type and read in the type of the matmuls."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry

__all__ = ["scaled_residual"]

_operator = registry.operator("scaled_residual", __name__)


def scaled_residual(
    stream: Float[Tensor, "M C"],
    update: Float[Tensor, "M C"],
    scale: Float[Tensor, " M"] | None = None,
) -> tuple[Float[Tensor, "M C"], Float[Tensor, "M C"]]:
    r"""Add a scaled update to a stream: :math:`z_m = e_m + s_m u_m`.

    Raises ValueError if a shape does not match.

    Parameters
    ----------
    stream : e; float32 if ``update`` has 16 bits, so that the sum over many layers stays precise
    update : u
    scale
        s, a factor per row, such as a row dropout; not differentiated. None = 1.

    Returns
    -------
    z in the type of the stream, and z rounded to that of the update, for matmuls. The two are one
    tensor if the types are equal. The gradients of both are accumulated in float32.

    Examples
    --------
    >>> import torch
    >>> wide, narrow = scaled_residual(torch.ones(1, 2), torch.ones(1, 2).half())
    >>> wide, narrow
    (tensor([[2., 2.]]), tensor([[2., 2.]], dtype=torch.float16))
    """
    if stream.shape != update.shape or (scale is not None and scale.shape != stream.shape[:1]):
        raise ValueError(
            f"scaled_residual: stream {tuple(stream.shape)}, update {tuple(update.shape)} and "
            f"scale {None if scale is None else tuple(scale.shape)} do not go together"
        )
    run = _operator.dispatch(stream)
    result: tuple[Tensor, Tensor] = run(stream, update, scale)
    return result
