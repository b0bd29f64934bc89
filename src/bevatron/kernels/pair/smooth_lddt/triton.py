"""Smooth lDDT in Triton: two custom operators and their launches."""

import torch
from torch import Tensor

from bevatron.kernels.pair.smooth_lddt.triton_kernels import rows_kernel
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide
from bevatron.kernels.shared.triton_launch import launch

BLOCK, BLOCK_M = 32, 32
"""Atoms along each side of a block of pairs, all that a program holds."""


def smooth_lddt(predicted: Tensor, truth: Tensor, radius: Tensor) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.smooth_lddt`."""
    score: Tensor = scores(wide(predicted), wide(truth), wide(radius))[0]
    return score


@custom_op(
    "smooth_lddt",
    outputs="score count",
    fake=lambda predicted: (
        predicted.new_empty(predicted.shape[:2]),
        predicted.new_empty(predicted.shape[:2]),
    ),
)
def scores(predicted: Tensor, truth: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """Return the score of every copy and the number of its pairs."""
    predicted, truth, radius = predicted.contiguous(), truth.contiguous(), radius.contiguous()
    structures, copies, atoms, _ = predicted.shape
    score = predicted.new_empty(structures, copies, atoms)
    count = torch.empty_like(score)
    _launch(predicted, truth, radius, predicted, score, count, predicted, gradient=False)
    total = count.sum(-1) + 1e-10
    return score.sum(-1) / total, total


@scores.backward(of="predicted")
def scores_backward(
    dscore: Tensor, predicted: Tensor, truth: Tensor, radius: Tensor, count: Tensor
) -> Tensor:
    """Return the gradient with respect to the copies."""
    predicted, truth, radius = predicted.contiguous(), truth.contiguous(), radius.contiguous()
    gradient = torch.empty_like(predicted)
    scale = (dscore / count).contiguous()
    _launch(predicted, truth, radius, scale, scale, scale, gradient, gradient=True)
    return gradient


def _launch(
    predicted: Tensor,
    truth: Tensor,
    radius: Tensor,
    scale: Tensor,
    score: Tensor,
    count: Tensor,
    result: Tensor,
    *,
    gradient: bool,
) -> None:
    structures, copies, atoms, _ = predicted.shape
    if not predicted.numel():
        return
    launch(
        rows_kernel,
        (-(-atoms // BLOCK), structures * copies),
        (predicted, truth, radius, scale, score, count, result),
        (atoms, copies),
        BLOCK=BLOCK,
        BLOCK_M=BLOCK_M,
        GRADIENT=gradient,
    )
