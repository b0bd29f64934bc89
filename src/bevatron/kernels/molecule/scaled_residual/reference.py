"""A residual stream in plain PyTorch: the specification."""

from torch import Tensor

from bevatron.kernels.shared.dtypes import wide_type


def scaled_residual(stream: Tensor, update: Tensor, scale: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute ``stream + scale * update`` in the stream's type, and rounded to the update's."""
    wide = wide_type(stream)
    u = update.to(wide)
    if scale is not None:
        u = u * scale.detach().to(wide)[:, None]
    z = (stream.to(wide) + u).to(stream.dtype)
    return z, z.to(update.dtype)
