"""Sampling of structures by the diffusion (AlphaFold3, algorithms 18 and 19).

Random numbers are drawn in front of the arithmetic: `draw_start` and `draw_steps` take a generator,
`sample` takes what they give, so that a run is a function of its draws.

Legend: M copies, A atoms. Coordinates and noise levels in Å.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

GAMMA, SMALLEST_RAISED = 0.8, 1.0
"""A step to a level above the second (Å) first raises the noise by this share."""
NOISE_SCALE, STEP_SCALE = 1.003, 1.5

Denoiser = Callable[[Tensor, Tensor], Tensor]
"""Maps noisy coordinates [..., M, A, 3] and their levels [..., M] to denoised coordinates."""


class Move(NamedTuple):
    """A random rigid motion of every copy.

    Attributes
    ----------
    rotation
        Uniform; multiplies columns.
    translation
        Standard normal, Å.
    """

    rotation: Float[Tensor, "*batch M 3 3"]
    translation: Float[Tensor, "*batch M 1 3"]


class StepDraw(NamedTuple):
    """Random numbers of one step.

    Attributes
    ----------
    move
        Rigid motion of every copy.
    normal
        Standard normal numbers for the noise.
    """

    move: Move
    normal: Float[Tensor, "*batch M A 3"]


def draw_moves(
    shape: tuple[int, ...],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Move:
    """Draw rigid motions [..., M] on the generator's device.

    A rotation is that of a quaternion of four normal numbers.
    """
    numbers = torch.randn((*shape, 7), generator=generator, device=generator.device, dtype=dtype)
    w, x, y, z = (numbers[..., :4] / numbers[..., :4].norm(dim=-1, keepdim=True)).unbind(-1)
    rows = (
        (1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)),
        (2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)),
        (2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)),
    )
    rotation = torch.stack([torch.stack(row, -1) for row in rows], -2)
    return Move(rotation, numbers[..., None, 4:])


def draw_start(
    shape: tuple[int, ...], generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*batch M A 3"]:
    """Draw what sampling starts from: standard normal numbers [..., M, A, 3]."""
    return torch.randn((*shape, 3), generator=generator, device=generator.device, dtype=dtype)


def draw_steps(
    num_steps: int,
    shape: tuple[int, ...],
    generator: torch.Generator,
    dtype: torch.dtype = torch.float32,
) -> Iterator[StepDraw]:
    """Draw each step's numbers when it is reached; shape is [..., M, A]."""
    for _ in range(num_steps):
        move = draw_moves(shape[:-1], generator, dtype)
        yield StepDraw(move, draw_start(shape, generator, dtype))


def centre_and_move(
    x: Float[Tensor, "*batch _ A 3"], move: Move, mask: Bool[Tensor, "*batch #A"]
) -> Float[Tensor, "*batch M A 3"]:
    """Move copies to the mean of their atoms, rotate and translate them: algorithm 19.

    Parameters
    ----------
    x
        Coordinates, of M copies or of one for all.
    move
        A motion for every copy.
    mask
        Which atoms the mean is taken over; the others are set to 0.
    """
    keep = mask[..., None, :, None].to(x.dtype)
    count = keep.sum(-2, keepdim=True).clamp(min=1)
    centre = (x * keep).sum(-2, keepdim=True) / count
    return (move.translation + (x - centre) @ move.rotation.transpose(-1, -2)) * keep


def sample(
    denoise: Denoiser,
    levels: Float[Tensor, "_"],
    start: Float[Tensor, "*batch M A 3"],
    steps: Iterable[StepDraw],
    mask: Bool[Tensor, "*batch A"],
) -> Float[Tensor, "*batch M A 3"]:
    """Denoise random coordinates step by step, without gradients: algorithm 18.

    Parameters
    ----------
    denoise
        The denoiser.
    levels
        Of `edm.schedule`: T = 20 for the rollout of a training step, 200 for predictions.
    start
        Standard normal numbers.
    steps
        Draws of T steps.
    mask
        False for padded atoms, which stay at 0.

    Returns
    -------
    Coordinates in Å. The supplement's line 9 has the coordinates before the noise was raised in
    its numerator; published models have those after.
    """
    with torch.no_grad():
        keep = mask[..., None, :, None].to(start.dtype)
        x = levels[0] * start * keep
        for level, following, draw in zip(levels, levels[1:], steps, strict=False):
            x = centre_and_move(x, draw.move, mask)
            raised = level * (1 + GAMMA * (following > SMALLEST_RAISED).to(level.dtype))
            added = (raised.square() - level.square()).sqrt()
            x = x + NOISE_SCALE * added * draw.normal * keep
            denoised = denoise(x, raised.expand(x.shape[:-2]))
            x = x + STEP_SCALE * (following - raised) * (x - denoised) / raised
    return x
