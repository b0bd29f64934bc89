"""Noisy copies of a known structure, which the denoiser is trained on (AlphaFold3, section 3.7.1).

Legend: M copies, A atoms. Coordinates and noise levels in Å.
"""

from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.models.alphafold3 import edm
from bevatron.models.alphafold3.augmentation import Move, centre_and_move, draw_moves, draw_noise
from bevatron.models.common.folding.normal import Normal


class CopyDraw(NamedTuple):
    """Random numbers of the copies of a training step.

    Attributes
    ----------
    move : rigid motion of every copy
    level : standard normal number of every copy, for its noise level
    normal : standard normal numbers for the noise
    """

    move: Move
    level: Float[Tensor, "*batch M"]
    normal: Float[Tensor, "*batch M A 3"]


class NoisyCopies(NamedTuple):
    """Input and target of the denoiser.

    Attributes
    ----------
    x : noisy coordinates
    sigma : noise level of each copy
    target : coordinates without noise
    """

    x: Float[Tensor, "*batch M A 3"]
    sigma: Float[Tensor, "*batch M"]
    target: Float[Tensor, "*batch M A 3"]


def draw_copies(shape: tuple[int, ...], normal: Normal) -> CopyDraw:
    """Draw the numbers of copies [..., M, A]."""
    move = draw_moves(shape[:-1], normal)
    return CopyDraw(move, normal(shape[:-1]), draw_noise(shape, normal))


def noisy_copies(
    position: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    draw: CopyDraw,
) -> NoisyCopies:
    """Move copies of a structure and add noise.

    Parameters
    ----------
    position : coordinates
    resolved : which atoms have any; the others are at 0 before the noise
    draw : what `draw_copies` returns
    """
    sigma = edm.training_sigma(draw.level)
    target = centre_and_move(position[..., None, :, :], draw.move, resolved)
    return NoisyCopies(target + sigma[..., None, None] * draw.normal, sigma, target)
