"""Sampling of structures by the diffusion (AlphaFold3, algorithm 18).

Random numbers are drawn before the arithmetic: `draw_steps` draws the inputs of `sample`, so a run
is a function of its draws.

Legend: M copies, A atoms. Coordinates and noise levels in Å.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from bevatron.models.alphafold3.augmentation import Move, centre_and_move, draw_moves, draw_noise
from bevatron.models.common.folding.normal import Normal

GAMMA, SMALLEST_RAISED = 0.8, 1.0
"""A step to a level above the second (Å) first raises the noise by this fraction."""
NOISE_SCALE, STEP_SCALE = 1.003, 1.5
DRAWN_AT_ONCE = 20
"""Steps per draw; a draw takes some sixty launches, whatever its size."""

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""Maps noisy coordinates [..., M, A, 3] and their levels [..., M] to denoised coordinates."""


class StepDraw(NamedTuple):
    """Random numbers of one step.

    Attributes
    ----------
    move : rigid motion of every copy
    normal : standard normal numbers for the noise
    """

    move: Move
    normal: Float[Tensor, "*batch M A 3"]


def draw_steps(num_steps: int, shape: tuple[int, ...], normal: Normal) -> Iterator[StepDraw]:
    """Draw the numbers of several steps at once, as needed; shape is [..., M, A]."""
    for first in range(0, num_steps, DRAWN_AT_ONCE):
        count = min(DRAWN_AT_ONCE, num_steps - first)
        moves = draw_moves((count, *shape[:-1]), normal)
        noise = draw_noise((count, *shape), normal)
        for rotation, translation, numbers in zip(*moves, noise, strict=True):
            yield StepDraw(Move(rotation, translation), numbers)


def raised(levels: Float[Tensor, "_"]) -> Float[Tensor, "_"]:
    """Return the noise levels at which `sample` denoises, Å: one fewer than those of a schedule."""
    return levels[:-1] * (1 + GAMMA * (levels[1:] > SMALLEST_RAISED).to(levels.dtype))


def sample(
    denoise: Denoiser,
    levels: Float[Tensor, "_"],
    start: Float[Tensor, "*batch M A 3"],
    steps: Iterable[StepDraw],
    mask: Bool[Tensor, "*batch A"],
) -> Float[Tensor, "*batch M A 3"]:
    """Denoise random coordinates step by step, without gradients.

    Raises ValueError if there are draws of more or fewer steps.

    Parameters
    ----------
    denoise : the denoiser
    levels : noise levels of `edm.schedule`: 20 steps for the rollout, 200 for predictions
    start : standard normal numbers
    mask : false for padded atoms, which stay at 0

    Returns
    -------
    Coordinates in Å. The supplement's line 9 has the coordinates before the noise was raised in
    its numerator; published models have those after.
    """
    with torch.no_grad():
        keep = mask[..., None, :, None].to(start.dtype)
        x = levels[0] * start * keep
        high = raised(levels)
        added = NOISE_SCALE * (high.square() - levels[:-1].square()).sqrt()
        share = STEP_SCALE * (high - levels[1:]) / high
        for level, noise, step, draw in zip(high, added, share, steps, strict=True):
            x = centre_and_move(x, draw.move, mask)
            x = torch.addcmul(x, draw.normal * keep, noise)
            denoised = denoise(x, level.expand(x.shape[:-2]))
            x = torch.lerp(x, denoised, step)
        return x * keep
