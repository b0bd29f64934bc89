"""Smooth lDDT in Triton: two custom operators and their launches."""

import torch
from torch import Tensor

from bevatron.kernels.pair.smooth_lddt.triton_kernels import near_kernel, rows_kernel
from bevatron.kernels.shared.autograd import needs_grad
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_launch import launch

BLOCK = 32
"""Atoms along each side of a block of pairs, all that a program holds."""
TILES = Tiles(BLOCK, BLOCK, registers=96)


def smooth_lddt(predicted: Tensor, truth: Tensor, radius: Tensor) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.smooth_lddt`."""
    given = wide(predicted), wide(truth), wide(radius)
    score: Tensor = scores(*given, needs_grad(predicted))[0]
    return score


def _new_outputs(predicted: Tensor, wants_gradient: bool) -> tuple[Tensor, Tensor]:
    shape = predicted.shape if wants_gradient else (0,)
    return predicted.new_empty(predicted.shape[:2]), predicted.new_empty(shape)


@custom_op("smooth_lddt", outputs="score gradient", fake=_new_outputs)
def scores(
    predicted: Tensor, truth: Tensor, radius: Tensor, wants_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Return the score of every copy and, if wanted, its gradient with respect to the copy."""
    predicted, truth, radius = predicted.contiguous(), truth.contiguous(), radius.contiguous()
    structures, copies, atoms, _ = predicted.shape
    blocks = -(-atoms // BLOCK)
    gradient = _new_outputs(predicted, wants_gradient)[1]
    score, count = predicted.new_empty((structures, copies, atoms)), torch.empty_like(radius)
    near = truth.new_empty((structures, blocks, blocks + 1), dtype=torch.int32)
    launch(
        near_kernel,
        (blocks, structures),
        (truth, radius, near, count),
        (atoms, blocks),
        BLOCK=BLOCK,
    )
    total = count.sum(-1) + 1e-10
    launch(
        rows_kernel,
        (blocks, structures * copies),
        (predicted, truth, radius, near, total, score, gradient),
        (atoms, copies, blocks),
        BLOCK=BLOCK,
        GRADIENT=wants_gradient,
        num_warps=TILES.warps,
        **TILES.register_limit(predicted.device),
    )
    return score.sum(-1), gradient


@scores.backward(of="predicted", fake="gradient")
def scores_backward(dscore: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient with respect to the copies."""
    return gradient * dscore[..., None, None]
