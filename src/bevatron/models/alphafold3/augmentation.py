"""Random rigid motions of structures (AlphaFold3, algorithm 19).

Legend: M copies, A atoms. Coordinates in Å.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.kernels.shared.standing_weights import once
from bevatron.maths.rigid import normalise_quaternion, rotation_of_quaternion
from bevatron.models.common.folding.normal import Normal


class Move(NamedTuple):
    """A random rigid motion of every copy.

    Attributes
    ----------
    rotation : uniform; multiplies columns
    translation : standard normal, Å
    """

    rotation: Float[Tensor, "*batch M 3 3"]
    translation: Float[Tensor, "*batch M 1 3"]


def draw_moves(shape: tuple[int, ...], normal: Normal) -> Move:
    """Draw rigid motions [..., M] by standard normal numbers.

    A rotation is that of a quaternion of four normal numbers.
    """
    numbers = normal((*shape, 7))
    rotation = rotation_of_quaternion(normalise_quaternion(numbers[..., :4]))
    return Move(rotation, numbers[..., None, 4:])


def draw_noise(shape: tuple[int, ...], normal: Normal) -> Float[Tensor, "*batch M A 3"]:
    """Draw normal numbers of copies [..., M, A]; padded atoms change none of the others."""
    *copies, A = shape
    return normal((A, *copies, 3)).movedim(0, -2)


def _weights(mask: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the mask as factors, and what each atom contributes to the mean."""
    keep = mask[..., None, :, None].to(dtype)
    return keep, keep / keep.sum(-2, keepdim=True).clamp(min=1)


def centre_and_move(
    x: Float[Tensor, "*batch _ A 3"], move: Move, mask: Bool[Tensor, "*batch A"]
) -> Float[Tensor, "*batch M A 3"]:
    """Move copies to the mean of their atoms, rotate and translate them.

    Parameters
    ----------
    x : coordinates, of M copies or of one for all
    move : a motion for every copy
    mask : atoms that enter the mean; the others are set to 0
    """
    keep, share = once(lambda: _weights(mask, x.dtype), mask, to=x.dtype)
    centre = (x * share).sum(-2, keepdim=True)
    # Sums of three products, not a matmul, which may round its inputs to TF32 or bfloat16.
    turned = ((x - centre)[..., None, :] * move.rotation[..., None, :, :]).sum(-1)
    return (turned + move.translation) * keep
