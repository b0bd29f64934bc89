"""The launches of attention with a shared bias, prepared once for each layout of its tensors."""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import Tensor

from bevatron.kernels.pair.pair_attention.launch import (
    alignment,
    constants_of,
    mask_strides,
    prepared,
    strides,
    strides_alike,
)
from bevatron.kernels.pair.pair_attention.tiles import LARGEST_BIAS_FIRST, choose, padded
from bevatron.kernels.pair.pair_attention.triton_backward import (
    dbias_kernel,
    dkv_kernel,
    dq_kernel,
    sum_kernel,
)
from bevatron.kernels.pair.pair_attention.triton_forward import (
    MARKS,
    careful_kernel,
    forward_kernel,
)
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.layouts import per_layout
from bevatron.kernels.shared.tiles import Tiles
from bevatron.kernels.shared.triton_launch import Launch

LOG2E = 1.4426950408889634
PROGRAMS_PER_SM = 3
"""Programs of the bias gradient that run at once."""
ENDS = 4
"""Overhead of a program of the bias gradient, in units of the time of a row."""
MOST_PARTS = 16
FEWEST_ROWS = 8
"""Of a part: what bounds the memory for parts of the bias gradient."""
SUM_BLOCK = 1024


@per_layout
def forward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    scale: float,
    heads_first: bool,
    tf32: bool,
) -> tuple[int, Launch, Launch | None]:
    """Return the number of programs, their launch and that of those who look after them.

    If each has an SM of its own it takes care itself: a second launch would take longer.
    """
    q, k, v, gate, out = _heads_first(heads_first, q, k, v, gate, out)
    B, S, H, Nq, D = q.shape
    Nk = k.shape[3]
    tiles = choose("forward", padded(D), q.element_size(), Nq, Nk)
    align, bias_align = alignment(q, k, v, gate, out), alignment(bias)
    programs = B * S * H * -(-Nq // tiles.rows)
    numbers = (
        *strides(align, q, k, v),
        *strides(bias_align, bias),
        *mask_strides(mask),
        *strides(align, gate, out),
        *(S, H, Nq, Nk, scale),
    )
    constants = {
        "HAS_BIAS": bias is not None,
        "HAS_GATE": gate is not None,
        **strides_alike(q, k, v),
        **constants_of(q, tiles, align, bias, Nk, mask, tf32),
    }
    alone = programs <= num_sms(q.device)
    if alone:
        tiles = replace(tiles, registers=0)
    first = prepared(
        *(forward_kernel, programs, tiles, q.device, numbers), CAREFUL=alone, **constants
    )
    if alone:
        return programs, first, None
    groups = -(-programs // MARKS.value)
    careful = prepared(
        *(careful_kernel, groups, tiles, q.device, (*numbers, programs)), **constants
    )
    return programs, first, careful


def _heads_first(heads_first: bool, *tensors: Tensor | None) -> Any:
    """View tensors of the caller's layout as [B, S, H, N, D]."""
    if heads_first:
        return tensors
    return [None if tensor is None else tensor.transpose(2, 3) for tensor in tensors]


@dataclass(frozen=True)
class BackwardLaunches:
    """Launches in their order.

    Attributes
    ----------
    stats_width : numbers kept for each query
    is_turned : whether ``dkv`` reads a transposed copy of the bias
    parts : that ``dbias`` leaves and ``sums`` adds
    """

    stats_width: int
    is_turned: bool
    parts: int
    dq: Launch
    dkv: Launch
    dbias: Launch | None
    sums: Launch | None


@per_layout
def backward_launches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    copies: Tensor | None,
    gate: Tensor | None,
    out: Tensor,
    dout: Tensor,
    gated: Tensor | None,
    dq: Tensor,
    dk: Tensor,
    dbias: Tensor,
    scale: float,
    heads_first: bool,
    wants_dbias: bool,
    tf32: bool,
) -> BackwardLaunches:
    """Prepare all launches; "gated" is the gradient past the gate, if there is one."""
    q, k, v, gate, out, dout, gated, dq, dk = _heads_first(
        heads_first, q, k, v, gate, out, dout, gated, dq, dk
    )
    width = 2 if _dkv_tiles(q, bias, k.shape[3]).rows >= 64 else 4
    rows = _Rows(q, k, v, bias, scale, width, tf32)
    past_gate = dout if gated is None else gated
    parts, dbias_launch, sums = 0, None, None
    if bias is not None and wants_dbias:
        parts, dbias_launch, sums = rows.dbias(bias, copies, past_gate, dbias)
    return BackwardLaunches(
        stats_width=width,
        is_turned=_is_turned(bias, q.shape[1]),
        parts=parts,
        dq=rows.dq(mask, gate, out, dout, dq),
        dkv=rows.dkv(mask, past_gate, dk),
        dbias=dbias_launch,
        sums=sums,
    )


class _Rows(NamedTuple):
    """Arguments shared by the backward launches, heads first; `width` is of the statistics."""

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None
    scale: float
    width: int
    tf32: bool

    def numbers(
        self, read: Tensor | None, mask: Tensor | None, *others: Tensor | None
    ) -> tuple[int, tuple[float, ...]]:
        """Return the unit of strides and what kernels take first; ``read`` is the bias."""
        q, k, v = self[:3]
        align, (_, S, H, Nq, _) = alignment(q, k, v, *others), q.shape
        return align, (
            *strides(align, q, k, v),
            *strides(alignment(self.bias), read),
            *mask_strides(mask),
            *strides(align, *others),
            *(S, H, Nq, k.shape[3], self.scale * LOG2E),
        )

    def constants(
        self, tiles: Tiles, align: int, mask: Tensor | None, dout: Tensor
    ) -> dict[str, Any]:
        """Return the compile-time constants of all kernels."""
        q, k, v, bias = self[:4]
        shared = constants_of(q, tiles, align, bias, k.shape[3], mask, self.tf32)
        return strides_alike(q, k, v, dout) | shared | {"STATS_WIDTH": self.width}

    def dq(
        self, mask: Tensor | None, gate: Tensor | None, out: Tensor, dout: Tensor, dq: Tensor
    ) -> Launch:
        """Prepare the launch of dq."""
        q, (B, S, H, Nq, D) = self.q, self.q.shape
        tiles = choose("dq", padded(D), q.element_size(), Nq, self.k.shape[3])
        align, numbers = self.numbers(self.bias, mask, gate, out, dout, dq)
        return prepared(
            *(dq_kernel, B * S * H * -(-Nq // tiles.rows), tiles, q.device),
            (*numbers, self.scale),
            HAS_BIAS=self.bias is not None,
            HAS_GATE=gate is not None,
            **self.constants(tiles, align, mask, dout),
        )

    def dkv(self, mask: Tensor | None, dout: Tensor, dk: Tensor) -> Launch:
        """Prepare the launch of dk and dv."""
        q, bias, (B, S, H, _, _), Nk = self.q, self.bias, self.q.shape, self.k.shape[3]
        tiles, turned = _dkv_tiles(q, bias, Nk), _is_turned(bias, S)
        read = bias.mT.contiguous() if bias is not None and turned else bias
        align, numbers = self.numbers(read, mask, dout, dk)
        return prepared(
            *(dkv_kernel, B * S * H * -(-Nk // tiles.columns), tiles, q.device),
            (*numbers, self.scale),
            HAS_BIAS=bias is not None,
            BIAS_TURNED=turned,
            BIAS_FIRST=_is_first(q, bias),
            **self.constants(tiles, align, mask, dout),
        )

    def dbias(
        self, bias: Tensor, mask: Tensor | None, dout: Tensor, dbias: Tensor
    ) -> tuple[int, Launch, Launch | None]:
        """Prepare two launches; first the number of parts that the second adds, if many."""
        q, (B, S, H, Nq, D), Nk = self.q, self.q.shape, self.k.shape[3]
        shared_by = _shared_by(bias, S)
        tiles = choose("dbias", padded(D), q.element_size(), Nq, Nk)
        blocks = B * bias.shape[1] * H * -(-Nq // tiles.rows) * -(-Nk // tiles.columns)
        rows = _rows_of_a_part(blocks, shared_by, num_sms(q.device) * PROGRAMS_PER_SM)
        parts = -(-shared_by // rows) if shared_by else 0
        align, numbers = self.numbers(bias, mask, dout)
        made = prepared(
            *(dbias_kernel, blocks * parts, tiles, q.device),
            (*numbers, bias.shape[1], rows, dbias.numel()),
            STAGES=tiles.stages,
            **self.constants(tiles, align, mask, dout),
        )
        if parts == 1:
            return parts, made, None
        grid, numbers = (-(-dbias.numel() // SUM_BLOCK),), (dbias.numel(), parts)
        options = {"BLOCK": SUM_BLOCK, "num_warps": 4, "num_stages": 2}
        return parts, made, Launch(sum_kernel, grid, numbers, **options)


def _dkv_tiles(q: Tensor, bias: Tensor | None, num_keys: int) -> Tiles:
    kernel = "dkv_bias_first" if _is_first(q, bias) else "dkv"
    return choose(kernel, padded(q.shape[4]), q.element_size(), q.shape[3], num_keys)


def _is_turned(bias: Tensor | None, rows: int) -> bool:
    """Whether dk and dv read a transposed copy of the bias: rows enough share it."""
    return bias is not None and _shared_by(bias, rows) >= FEWEST_ROWS


def _is_first(q: Tensor, bias: Tensor | None) -> bool:
    """Whether dk and dv read the bias before their first product, as their tiles are cut."""
    small = q.element_size() == 2 and padded(q.shape[4]) <= LARGEST_BIAS_FIRST
    return small and _is_turned(bias, q.shape[1])


def _rows_of_a_part(blocks: int, shared_by: int, at_once: int) -> int:
    """Deal the rows that share a bias to programs, so that they fill the device evenly.

    Programs run ``at_once`` at a time, each for as long as its rows and its ends take.
    """

    def duration(parts: int) -> int:
        rows = max(1, -(-shared_by // parts))
        return -(-blocks * -(-shared_by // rows) // at_once) * (rows + ENDS)

    most = max(1, min(MOST_PARTS, shared_by // FEWEST_ROWS))
    return max(1, -(-shared_by // min(range(1, most + 1), key=duration)))


def _shared_by(bias: Tensor | None, rows: int) -> int:
    return 1 if bias is None or bias.shape[1] == rows else rows
