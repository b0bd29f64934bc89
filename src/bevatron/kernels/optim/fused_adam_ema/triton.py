"""The fused optimiser step in Triton: three launches for any number of parameters.

``_norms`` writes the sum of squares of each tile of the gradient. ``_judge``, a single program,
adds the tiles in order, decides whether the step is sound, and writes the float64 coefficients of
each parameter's step. ``_adam`` updates one chunk of one parameter per program: the gradient, the
moments and the averages are flat [n]; a table of addresses locates the parameters.
Clipping by the norm of each parameter takes one more launch: ``_chunk_norms`` uses the chunks of
``_adam`` in place of tiles, and ``_clips`` adds those of each parameter.
Nothing is atomic. n is the number of elements of a flat tensor, P the number of parameters.
"""

from math import inf, log
from typing import no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.optim.fused_adam_ema import ALIGNMENT, AdamSettings, AdamTensors, starts_of
from bevatron.kernels.shared.launch import on_device

TILE = 4096
"""Elements whose squares one program sums."""
CHUNK = 1024
"""Elements that one program updates; all belong to one parameter."""
INTERPRETED_CHUNK = 8192


def fused_adam_ema(tensors: AdamTensors, settings: AdamSettings) -> None:
    """Launch the three kernels."""
    parameters = tensors.parameters
    interpreted = tensors.gradient.device.type == "cpu"
    chunk = INTERPRETED_CHUNK if interpreted else CHUNK
    if "chunks" not in tensors.kept:
        tensors.kept["chunks"] = table = chunk_table(parameters, chunk)
        numbers = torch.arange(len(parameters) + 1, device=table.device)
        tensors.kept["first_chunks"] = torch.searchsorted(table[:, 3].contiguous(), numbers)
        tensors.kept["aligned"] = all(p.data_ptr() % 16 == 0 for p in parameters)
    with on_device(tensors.gradient):
        _launch(tensors, settings, chunk)
    # As torch's optimisers do, so that autograd notices changes to saved tensors.
    torch.autograd.graph.increment_version(parameters)


def chunk_table(parameters: list[Tensor], chunk: int) -> Tensor:
    """Return a row per program, int64: address, offset in the flat tensors, count, parameter."""
    rows = [
        (p.data_ptr() + at * p.element_size(), start + at, min(chunk, p.numel() - at), i)
        for i, (p, start) in enumerate(zip(parameters, starts_of(parameters), strict=False))
        for at in range(0, p.numel(), chunk)
    ]
    return torch.tensor(rows, dtype=torch.int64).reshape(-1, 4).to(parameters[0].device)


def _launch(tensors: AdamTensors, settings: AdamSettings, chunk: int) -> None:
    """Update everything in place.

    This is no custom operator: it is not differentiable, and the dispatcher takes milliseconds to
    inspect thousands of tensors.
    """
    gradient, steps, active = tensors.gradient, tensors.steps, tensors.active
    table, known_squares = tensors.kept["chunks"], tensors.squares
    (beta1, beta2), eps = settings.betas, settings.eps
    clip = inf if settings.clip is None else settings.clip
    per_tensor = settings.per_tensor and settings.clip is not None
    wide = gradient.dtype == torch.float64
    num_tiles = len(table) if per_tensor else triton.cdiv(gradient.numel(), TILE)
    if known_squares is not None and not per_tensor:
        squares, num_tiles = known_squares, len(known_squares)
    else:
        squares = torch.empty(num_tiles, dtype=gradient.dtype, device=gradient.device)
    num_rates = (4 if per_tensor else 3) * len(steps) + 1
    rates = torch.empty(num_rates, dtype=torch.float64, device=gradient.device)
    if per_tensor:
        _chunk_norms[(num_tiles,)](table, gradient, squares, CHUNK=chunk)
        first_chunks = tensors.kept["first_chunks"]
        _clips[(len(steps),)](squares, first_chunks, rates, len(steps), CLIP=clip, BLOCK=256)
    elif known_squares is None:
        _norms[(num_tiles,)](gradient, squares, gradient.numel(), TILE=TILE)
    _judge[(1,)](
        squares, num_tiles, steps, tensors.lr_scale, tensors.weight_decay,
        tensors.lr_scale if active is None else active, len(steps), tensors.controls,
        tensors.loss, tensors.verdict, rates,
        LOG_BETA1=log(beta1) if beta1 > 0 else -inf, LOG_BETA2=log(beta2) if beta2 > 0 else -inf,
        CLIP=clip, DECOUPLED=settings.decoupled, PER_TENSOR=per_tensor,
        SOME_IDLE=active is not None, BLOCK=4096,
        num_warps=16,
    )  # fmt: skip
    _adam[(len(table),)](
        table, gradient, tensors.first, tensors.second,
        *(gradient if t is None else t for t in (tensors.largest, tensors.averages, tensors.copy)),
        rates, tensors.lr_scale if active is None else active, len(steps), gradient.numel(),
        tensors.controls, tensors.verdict,
        BETA1=beta1, BETA2=beta2, EPS=eps, AMSGRAD=tensors.largest is not None,
        AVERAGES=0 if tensors.averages is None else len(tensors.averages),
        DECOUPLED=settings.decoupled, PER_TENSOR=per_tensor, SOME_IDLE=active is not None,
        COPIED=tensors.copy is not None, ALIGNED=tensors.kept["aligned"],
        ACCUMULATOR=tl.float64 if wide else tl.float32, CHUNK=chunk, ALIGNMENT=ALIGNMENT,
        num_warps=4,
    )  # fmt: skip


@triton.jit
@no_type_check
def _norms(gradient, squares, numel, TILE: tl.constexpr):
    """Write the sum of squares of one tile, in the gradient's type."""
    tile = tl.program_id(0).to(tl.int64)
    at = tile * TILE + tl.arange(0, TILE)
    g = tl.load(gradient + at, mask=at < numel, other=0.0)  # [TILE]
    tl.store(squares + tile, tl.sum(g * g))  # []


@triton.jit
@no_type_check
def _chunk_norms(table, gradient, squares, CHUNK: tl.constexpr):
    """Write the sum of squares of one chunk of one parameter."""
    chunk = tl.program_id(0).to(tl.int64)
    start, count = tl.load(table + 4 * chunk + 1), tl.load(table + 4 * chunk + 2)  # []
    offset = tl.arange(0, CHUNK)
    g = tl.load(gradient + start + offset, mask=offset < count, other=0.0)  # [CHUNK]
    tl.store(squares + chunk, tl.sum(g * g))  # []


@triton.jit
@no_type_check
def _clips(squares, first_chunks, rates, num_parameters, CLIP: tl.constexpr, BLOCK: tl.constexpr):
    """Write the clipping factor of one parameter to ``rates``, after the rates of `_judge`."""
    parameter = tl.program_id(0).to(tl.int64)
    begin, end = tl.load(first_chunks + parameter), tl.load(first_chunks + parameter + 1)  # []
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(begin, end, BLOCK):
        at = start + lane
        sums += tl.load(squares + at, mask=at < end, other=0.0).to(tl.float64)  # [BLOCK]
    clipped = tl.minimum(CLIP / (tl.sqrt(tl.sum(sums)) + 1e-6), 1.0)  # []
    tl.store(rates + 3 * num_parameters + 1 + parameter, clipped)


@triton.jit
@no_type_check
def _judge(
    squares, num_tiles, steps, lr_scale, weight_decay, active, num_parameters, controls, loss,
    verdict, rates,
    LOG_BETA1: tl.constexpr, LOG_BETA2: tl.constexpr, CLIP: tl.constexpr, DECOUPLED: tl.constexpr,
    PER_TENSOR: tl.constexpr, SOME_IDLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the verdict, increment the step counters, and write each parameter's coefficients.

    ``rates`` holds [P] learning rates over the first moment's bias correction, [P] square roots of
    the second moment's, [P] weight decays (times the learning rate if decoupled), then the global
    clipping factor. If PER_TENSOR, `_clips` has already written [P] factors after it.
    """
    lane = tl.arange(0, BLOCK)
    sums = tl.zeros((BLOCK,), dtype=tl.float64)
    for start in range(0, num_tiles, BLOCK):
        at = start + lane
        sums += tl.load(squares + at, mask=at < num_tiles, other=0.0).to(tl.float64)  # [BLOCK]
    norm = tl.sqrt(tl.sum(sums))  # []
    value = tl.load(loss).to(tl.float64)  # []
    # Like isfinite: NaN compares false.
    sound = (norm < float("inf")) & (tl.abs(value) < float("inf"))
    fine = sound & (value <= tl.load(controls + 1)) & (tl.load(verdict) < 0.5)  # []
    tl.store(verdict, tl.where(fine, 0.0, 1.0))
    tl.store(verdict + 1, norm)
    tl.store(verdict + 2, tl.where(fine, 1.0, 0.0))
    rate = tl.load(controls)  # []
    for start in range(0, num_parameters, BLOCK):
        at = start + lane
        mask = at < num_parameters
        count = tl.where(fine, 1.0, 0.0)
        if SOME_IDLE:
            count = count * tl.load(active + at, mask=mask, other=0.0).to(tl.float64)  # [BLOCK]
        step = tl.load(steps + at, mask=mask, other=1.0).to(tl.float64) + count  # [BLOCK]
        tl.store(steps + at, step.to(tl.float32), mask=mask)
        scaled = rate * tl.load(lr_scale + at, mask=mask, other=0.0).to(tl.float64)  # [BLOCK]
        decay = tl.load(weight_decay + at, mask=mask, other=0.0).to(tl.float64)  # [BLOCK]
        first = 1.0 - tl.exp(step * LOG_BETA1)
        second = tl.sqrt(1.0 - tl.exp(step * LOG_BETA2))
        tl.store(rates + at, scaled / first, mask=mask)
        tl.store(rates + num_parameters + at, second, mask=mask)
        if DECOUPLED:
            decay = decay * scaled
        tl.store(rates + 2 * num_parameters + at, decay, mask=mask)
    if not PER_TENSOR:
        clipped = tl.minimum(CLIP / (norm + 1e-6), 1.0)
        tl.store(rates + 3 * num_parameters, clipped)


@triton.jit
@no_type_check
def _adam(
    table, gradient, first, second, largest, averages, copy, rates, active, num_parameters, numel,
    controls, verdict,
    BETA1: tl.constexpr, BETA2: tl.constexpr, EPS: tl.constexpr, AMSGRAD: tl.constexpr,
    AVERAGES: tl.constexpr, DECOUPLED: tl.constexpr, PER_TENSOR: tl.constexpr,
    SOME_IDLE: tl.constexpr, COPIED: tl.constexpr, ALIGNED: tl.constexpr,
    ACCUMULATOR: tl.constexpr, CHUNK: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Update one chunk of one parameter."""
    row = table + 4 * tl.program_id(0).to(tl.int64)
    # []
    address, start, count, parameter = (
        tl.load(row),
        tl.load(row + 1),
        tl.load(row + 2),
        tl.load(row + 3),
    )
    start = tl.multiple_of(start, ALIGNMENT)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    weights = address.to(gradient.dtype)
    offset = tl.arange(0, CHUNK)
    mask, at = offset < count, start + offset
    size = tl.load(rates + parameter).to(ACCUMULATOR)  # []
    root = tl.load(rates + num_parameters + parameter).to(ACCUMULATOR)  # []
    decay = tl.load(rates + 2 * num_parameters + parameter).to(ACCUMULATOR)  # []
    scale = rates + 3 * num_parameters
    if PER_TENSOR:
        scale += 1 + parameter
    scale = tl.load(scale).to(ACCUMULATOR)  # []
    # If the step is not sound, nothing is read, and nothing written but the zeroed gradient.
    sound = offset < tl.where(tl.load(verdict + 2) > 0.5, count, 0)  # [CHUNK]
    g = tl.load(gradient + at, mask=sound, other=0.0).to(ACCUMULATOR) * scale  # [CHUNK]
    w = tl.load(weights + offset, mask=sound, other=0.0).to(ACCUMULATOR)  # [CHUNK]
    old = w
    if DECOUPLED:
        w = w * (1.0 - decay)
    else:
        g = g + decay * w
    m = tl.load(first + at, mask=sound, other=0.0).to(ACCUMULATOR)  # [CHUNK]
    v = tl.load(second + at, mask=sound, other=0.0).to(ACCUMULATOR)  # [CHUNK]
    m = m + (1.0 - BETA1) * (g - m)
    v = BETA2 * v + (1.0 - BETA2) * g * g
    moves = sound
    if SOME_IDLE:
        moves = offset < tl.where(tl.load(active + parameter) > 0.0, count, 0)  # [CHUNK]
        moves = moves & sound
    tl.store(first + at, m, mask=moves)
    tl.store(second + at, v, mask=moves)
    if AMSGRAD:
        v = tl.maximum(tl.load(largest + at, mask=sound, other=0.0).to(ACCUMULATOR), v)  # [CHUNK]
        tl.store(largest + at, v, mask=moves)
    w = w - size * m / (tl.sqrt(v) / root + EPS)
    if SOME_IDLE:
        w = tl.where(moves, w, old)
    tl.store(weights + offset, w, mask=moves)
    if COPIED:
        tl.store(copy + at, w.to(copy.dtype.element_ty), mask=sound)
    for k in tl.static_range(AVERAGES):
        average = averages + k * numel.to(tl.int64) + at
        a = tl.load(average, mask=sound, other=0.0).to(ACCUMULATOR)  # [CHUNK]
        alpha = tl.load(controls + 2 + k).to(ACCUMULATOR)  # []
        tl.store(average, a + alpha * (w - a), mask=sound)
    tl.store(gradient + at, tl.zeros((CHUNK,), dtype=ACCUMULATOR), mask=mask)
