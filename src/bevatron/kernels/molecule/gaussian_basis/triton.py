"""Gaussian kernels in Triton: two custom operators, their kernels and launches.

A program evaluates all K kernels, padded to K_PAD, of BLOCK distances in registers. The backward
kernel strides over the blocks of distances, recomputes the kernels, writes the gradient of each
distance, accumulates [BLOCK, K_PAD] sums for the gradients of mean and std, and writes one partial
sum per program, [2, K], which the host adds.
"""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.dtypes import wide_type
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.triton_math import LOG2E, accumulator
from bevatron.kernels.shared.triton_partial_sums import sum_partials

ELEMENTS = 2048
PROGRAMS_PER_SM = 4
ROOT = tl.constexpr(0.3989422804014327)
"""1 / sqrt(2 pi)."""


def gaussian_basis(
    distances: Tensor, mean: Tensor, std: Tensor, scale: float, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.molecule.gaussian_basis`."""
    tensors = (distances.contiguous(), mean.contiguous(), std.contiguous())
    psi: Tensor = evaluate(*tensors, scale, epsilon, dtype)
    return psi


@custom_op(
    "gaussian_basis",
    fake=lambda distances, mean, dtype: distances.new_empty(
        (distances.shape[0], mean.shape[0]), dtype=dtype
    ),
)
def evaluate(
    distances: Tensor, mean: Tensor, std: Tensor, scale: float, epsilon: float, dtype: torch.dtype
) -> Tensor:
    """Return all kernels of all distances."""
    psi = distances.new_empty((len(distances), len(mean)), dtype=dtype)
    if psi.numel():
        pad, block = _block(len(mean))
        gaussian_basis_forward[(triton.cdiv(len(distances), block),)](
            *(distances, mean, std, psi, len(distances), scale, epsilon),
            K=len(mean), K_PAD=pad, BLOCK=block, WIDE=accumulator(mean),
            num_warps=4,
        )  # fmt: skip
    return psi


@evaluate.backward(
    "distances mean std",
    fake=lambda distances, mean: (
        distances.new_empty(distances.shape),
        mean.new_empty((2, mean.shape[0]), dtype=wide_type(mean)),
    ),
    unpack=lambda ddistances, sums: (ddistances, *sums),
)
def evaluate_backward(
    dpsi: Tensor, distances: Tensor, mean: Tensor, std: Tensor, scale: float, epsilon: float
) -> tuple[Tensor, Tensor]:
    """Return the gradient of the distances, and [2, K]: those of mean and std."""
    dpsi, wide = dpsi.contiguous(), wide_type(mean)
    ddistances = distances.new_empty(distances.shape)
    sums = mean.new_zeros((2, len(mean)), dtype=wide)
    if dpsi.numel():
        pad, block = _block(len(mean))
        most = PROGRAMS_PER_SM * num_sms(dpsi.device)
        programs = min(triton.cdiv(len(distances), block), most)
        parts = mean.new_empty((programs, 2, len(mean)), dtype=wide)
        gaussian_basis_backward[(programs,)](
            *(dpsi, distances, mean, std, ddistances, parts, len(distances), scale, epsilon),
            K=len(mean), K_PAD=pad, BLOCK=block, WIDE=accumulator(mean),
            num_warps=4,
        )  # fmt: skip
        sum_partials(parts, sums)
    return ddistances, sums


@triton.jit
def _kernels(distance, mean, std, scale, epsilon):
    """Compute psi and the reduced distances z, [BLOCK, K_PAD], and 1/s, [K_PAD]."""
    inverse = 1.0 / (tl.abs(std) + epsilon)
    z = (distance[:, None] - mean[None, :]) * inverse[None, :]  # [BLOCK, K_PAD]
    return tl.exp2(z * z * (-0.5 * LOG2E)) * (inverse * (scale * ROOT))[None, :], z, inverse


@triton.jit(do_not_specialize=["count"])
def gaussian_basis_forward(
    Distances, Mean, Std, Psi, count, scale: tl.constexpr, epsilon: tl.constexpr,
    K: tl.constexpr, K_PAD: tl.constexpr,
    BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Evaluate all kernels of BLOCK distances."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    col = tl.arange(0, K_PAD)
    distance = tl.load(Distances + row, mask=row < count, other=0.0).to(WIDE)  # [BLOCK]
    mean = tl.load(Mean + col, mask=col < K, other=0.0).to(WIDE)  # [K_PAD]
    std = tl.load(Std + col, mask=col < K, other=1.0).to(WIDE)  # [K_PAD]
    psi, _, _ = _kernels(distance, mean, std, scale, epsilon)  # [BLOCK, K_PAD]
    mask = (row < count)[:, None] & (col < K)[None, :]
    tl.store(Psi + row[:, None] * K + col[None, :], psi.to(Psi.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def gaussian_basis_backward(
    DPsi, Distances, Mean, Std, DDistances, Parts, count, scale: tl.constexpr,
    epsilon: tl.constexpr, K: tl.constexpr,
    K_PAD: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the distances and partial sums of those of mean and std."""
    col = tl.arange(0, K_PAD)
    mean = tl.load(Mean + col, mask=col < K, other=0.0).to(WIDE)  # [K_PAD]
    std = tl.load(Std + col, mask=col < K, other=1.0).to(WIDE)  # [K_PAD]
    dmean = tl.zeros([BLOCK, K_PAD], WIDE)
    dwidth = tl.zeros([BLOCK, K_PAD], WIDE)
    inverse = 1.0 / (tl.abs(std) + epsilon)
    for block in range(tl.program_id(0), tl.cdiv(count, BLOCK), tl.num_programs(0)):
        row = tl.cast(block, tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = (row < count)[:, None] & (col < K)[None, :]
        distance = tl.load(Distances + row, mask=row < count, other=0.0).to(WIDE)  # [BLOCK]
        dpsi_ptr = DPsi + row[:, None] * K + col[None, :]
        psi, z, _ = _kernels(distance, mean, std, scale, epsilon)
        weighted = psi * tl.load(dpsi_ptr, mask=mask, other=0.0).to(WIDE)  # [BLOCK, K_PAD]
        weighted_z = weighted * z
        dmean += weighted_z
        dwidth += weighted_z * z - weighted
        ddistance = -tl.sum(weighted_z * inverse[None, :], 1)  # [BLOCK]
        tl.store(DDistances + row, ddistance.to(DDistances.dtype.element_ty), mask=row < count)
    part = Parts + tl.program_id(0).to(tl.int64) * 2 * K + col
    tl.store(part, tl.sum(dmean, 0) * inverse, mask=col < K)  # [K_PAD]
    sign = tl.where(std < 0, -1.0, 1.0)
    tl.store(part + K, tl.sum(dwidth, 0) * inverse * sign, mask=col < K)  # [K_PAD]


def _block(kernels: int) -> tuple[int, int]:
    pad = int(triton.next_power_of_2(kernels))
    return pad, max(1, ELEMENTS // pad)
