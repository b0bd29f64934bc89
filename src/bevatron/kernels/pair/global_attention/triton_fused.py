"""Attention with one query per column as two custom operators, for 16-bit rows of few channels.

Saved for the backward pass: the input, two float32 numbers per row and a few rows of channels per
column. Everything that acts on columns only is small and stays float32.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
import triton.language as tl
from torch import Tensor

from bevatron.kernels.pair.global_attention.triton_columns import (
    add_kernel,
    query_grad_kernel,
    query_kernel,
    value_back_kernel,
)
from bevatron.kernels.pair.global_attention.triton_kernels import (
    attend_kernel,
    combine_kernel,
    mean_kernel,
    output_back_kernel,
    output_kernel,
    query_back_kernel,
    rows_back_kernel,
)
from bevatron.kernels.shared.autograd import empty_gradients
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.triton_launch import launch
from bevatron.kernels.shared.triton_partial_sums import sum_weight_and_bias_partials

WIDTHS, LARGEST_HEADS = {16, 32, 64}, 16
"""More heads do not fit the registers."""
BLOCK = 64
"""Rows of a column in a block."""
PER_SM = 4
"""Programs per SM, about."""
COLUMNS = 16
"""Columns per program of the kernels that read no rows."""
SHARE_NUMBERS, SHARES = 128, 8
"""Weight gradients: elements that a program adds, and partial sums it loads at once."""

TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
Ten = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def takes(m: Tensor, gate_weight: Tensor, k_weight: Tensor, out_weight: Tensor) -> bool:
    """Whether these kernels support the sizes and the type."""
    heads = gate_weight.shape[0] // k_weight.shape[0]
    widths = {m.shape[-1], *out_weight.shape}
    return m.element_size() == 2 and widths <= WIDTHS and heads <= LARGEST_HEADS and m.numel() > 0


@dataclass(frozen=True)
class Columns:
    """An alignment as columns, and how programs share their rows.

    Attributes
    ----------
    m : [samples, S, N, C], channels one after another
    mask : [samples, S, N], of the type of the rows
    norm : weight and bias
    mean, rstd : [samples, S, N] in float32
    parts, heads : parts of a column's rows; and heads, padded for matmuls
    """

    m: Tensor
    mask: Tensor
    norm: tuple[Tensor, Tensor]
    mean: Tensor
    rstd: Tensor
    parts: int
    heads: int

    @classmethod
    def of(
        cls, m: Tensor, mask: Tensor, norm: tuple[Tensor, Tensor], statistics: Tensor
    ) -> "Columns":
        """Describe an alignment [..., S, N, C]."""
        S, N, C = m.shape[-3:]
        m = m.reshape(-1, S, N, C)
        m = m if m.stride(-1) == 1 else m.contiguous()
        wanted = PER_SM * num_sms(m.device)
        parts = max(1, min(-(-S // BLOCK), wanted // (len(m) * N)))
        vectors = norm[0].contiguous(), norm[1].contiguous()
        mean, rstd = statistics
        return cls(m, mask.contiguous(), vectors, mean, rstd, parts, LARGEST_HEADS)

    @property
    def count(self) -> int:
        """Number of columns."""
        return self.m.shape[0] * self.m.shape[2]

    @property
    def items(self) -> int:
        """Number of parts of columns."""
        return self.count * self.parts

    @property
    def walkers(self) -> int:
        """Number of programs, each of which writes a part of the weights' gradients."""
        return min(self.items, PER_SM * num_sms(self.m.device) // 2)

    @property
    def geometry(self) -> tuple[int, ...]:
        """Sizes, strides and numbers as kernels take them."""
        return (*self.m.shape[1:3], *self.m.stride()[:3], self.parts)

    def new(self, *shape: int) -> Tensor:
        """Allocate float32 numbers."""
        return self.m.new_empty(shape, dtype=torch.float32)

    def constants(self, stages: int) -> dict[str, Any]:
        """Return the compile-time constants of all kernels."""
        return {"C": self.m.shape[-1], "BLOCK": BLOCK, "STAGES": stages, "num_warps": 4}

    def launch(
        self, kernel: Any, tensors: tuple[Tensor, ...], *numbers: float, **constants: Any
    ) -> None:
        """Launch a kernel of `triton_columns`: a program for `COLUMNS` columns and a head."""
        grid = (-(-self.count // COLUMNS), constants["H"])
        constants |= {"C": self.m.shape[-1], "BLOCK": COLUMNS, "num_warps": 8}
        launch(kernel, grid, tensors, (self.count, self.parts, *numbers), **constants)


@dataclass(frozen=True)
class Layers:
    """The weights; those that multiply rows have the type of the rows."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor
    gate_bias: Tensor
    out: Tensor
    out_bias: Tensor

    @classmethod
    def of(cls, m: Tensor, *weights: Tensor) -> "Layers":
        """Take the seven weights in the operator's order."""
        given = [weight.contiguous() for weight in weights]
        return cls(*given[:3], *(weight.to(m.dtype) for weight in given[3:]))

    @property
    def heads(self) -> dict[str, int]:
        """Channels of a head, and how many heads there are, as kernels take them."""
        return {"D": len(self.k), "H": len(self.q) // len(self.k)}

    @property
    def scale(self) -> float:
        """Of the logits."""
        return float(len(self.k) ** -0.5)


def _new_outputs(m: Tensor, q_weight: Tensor, k_weight: Tensor, out_weight: Tensor) -> Saved:
    S, N, C = m.shape[-3:]
    H, columns = len(q_weight) // len(k_weight), m.shape[:-3].numel() * N

    def new(*shape: int) -> Tensor:
        return m.new_empty(shape, dtype=torch.float32)

    return (
        m.new_empty((*m.shape[:-1], len(out_weight))),
        new(2, m.shape[:-3].numel(), S, N),
        new(columns, C + 1),
        new(columns, H, C),
        new(columns, H),
        new(columns, len(q_weight)),
    )


@custom_op(
    "global_attention",
    outputs="y statistics mean attended log_sum value",
    fake=_new_outputs,
)
def attend(
    m: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    eps: float,
    mask_eps: float,
) -> Saved:
    """Return the result and what the backward pass needs.

    That is the rows' statistics [2, samples, S, N] and, per column, the mean of its rows
    followed by one over their number [C + 1], the attended rows [H, C], their logsumexp [H] and
    their values [H D].
    """
    y, statistics, mean, attended, log_sum, value = _new_outputs(m, q_weight, k_weight, out_weight)
    weights = (q_weight, k_weight, v_weight, gate_weight, gate_bias, out_weight, out_bias)
    layers, H, C = Layers.of(m, *weights), attended.shape[1], m.shape[-1]
    columns = Columns.of(m, mask, (norm_weight, norm_bias), statistics)
    sums, counts = columns.new(columns.count, columns.parts, C), columns.new(columns.items)
    grid = (columns.items,)
    rows = (columns.m, *columns.norm, columns.mask, columns.mean, columns.rstd)
    launch(
        mean_kernel,
        grid,
        (*rows, sums, counts),
        (*columns.geometry, eps),
        **columns.constants(3),
    )
    _, query = _queries(columns, layers, mean, (sums, counts), mask_eps)
    largest, total = columns.new(2, columns.items, columns.heads)
    sums = columns.new(columns.items, columns.heads, C)
    launch(
        attend_kernel,
        grid,
        (*rows, query, largest, total, sums),
        columns.geometry,
        H=H,
        HEADS=columns.heads,
        **columns.constants(3),
    )
    launch(
        combine_kernel,
        (columns.count,),
        (largest, total, sums, layers.v, attended, log_sum, value),
        (columns.parts,),
        C=C,
        D_PAD=max(16, len(layers.v)),
        HEADS=columns.heads,
        DTYPE=TYPES[m.dtype],
        **layers.heads,
    )
    gate_and_out = (layers.gate, layers.gate_bias, layers.out, layers.out_bias)
    launch(
        output_kernel,
        grid,
        (columns.m, *columns.norm, columns.mean, columns.rstd, value, *gate_and_out, y),
        columns.geometry,
        HD=value.shape[1],
        Z=y.shape[-1],
        **columns.constants(3),
    )
    return y, statistics, mean, attended, log_sum, value


@attend.backward(
    "m norm_weight norm_bias q_weight k_weight v_weight gate_weight gate_bias out_weight out_bias"
)
def attend_backward(
    dy: Tensor,
    m: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    statistics: Tensor,
    mean: Tensor,
    attended: Tensor,
    log_sum: Tensor,
    value: Tensor,
) -> Ten:
    """Return gradients of all tensors but the mask."""
    weights = (q_weight, k_weight, v_weight, gate_weight, gate_bias, out_weight, out_bias)
    found = cast("Ten", tuple(empty_gradients(m, m, norm_weight, norm_bias, *weights)))
    dm, dnorm_weight, dnorm_bias, dq_weight, dk_weight, dv_weight = found[:6]
    layers, H, C = Layers.of(m, *weights), attended.shape[1], m.shape[-1]
    columns = Columns.of(m, mask, (norm_weight, norm_bias), statistics)
    do_parts = _output_backward(columns, layers, dy, value, dm, found[6:])
    do, delta = columns.new(columns.count, value.shape[1]), columns.new(columns.count, H)
    dattended = m.new_empty(attended.shape)
    columns.launch(
        value_back_kernel,
        (do_parts, layers.v, attended, do, dattended, delta),
        **layers.heads,
    )
    dv_weight.copy_(_by_head(do, H).t() @ attended.flatten(0, 1))
    q, query = _queries(columns, layers, mean)
    softmax = (query, dattended, log_sum, delta)
    dquery_parts = columns.new(columns.count, columns.parts, H, C)
    rows = (columns.m, *columns.norm, columns.mask, columns.mean, columns.rstd)
    launch(
        query_back_kernel,
        (columns.items,),
        (*rows, *softmax, dquery_parts),
        columns.geometry,
        H=H,
        HEADS=columns.heads,
        **columns.constants(2),
    )
    dquery, dmean = columns.new(2, *attended.shape)
    dq = torch.empty_like(q)
    columns.launch(
        query_grad_kernel,
        (dquery_parts, mean, layers.q, layers.k, dquery, dq, dmean),
        layers.scale,
        DTYPE=TYPES[m.dtype],
        **layers.heads,
    )
    dk_weight.copy_(_by_head(q, H).t() @ dquery.flatten(0, 1))
    dq_weight.copy_(dq.t() @ mean[:, :C])
    norm_shares = columns.new(columns.walkers, 2, C)
    launch(
        rows_back_kernel,
        (columns.walkers,),
        (*rows, *softmax, dmean, dm, norm_shares),
        (*columns.geometry, columns.items),
        H=H,
        HEADS=columns.heads,
        **columns.constants(2),
    )
    sum_weight_and_bias_partials(norm_shares, *columns.norm, dnorm_weight, dnorm_bias)
    return found


def _by_head(rows: Tensor, heads: int) -> Tensor:
    """View [columns, H D] as [columns H, D]."""
    return rows.view(len(rows) * heads, -1)


def _queries(
    columns: Columns,
    layers: Layers,
    mean: Tensor,
    parts: tuple[Tensor, Tensor] | None = None,
    mask_eps: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Return the scaled queries [columns, H D], and Query [columns, H, C] in the type of the rows.

    ``mean`` is read, or computed from the partial sums of the columns and their row counts.
    """
    heads = layers.heads
    q = columns.new(columns.count, len(layers.q))
    query = columns.m.new_empty((columns.count, heads["H"], columns.m.shape[-1]))
    columns.launch(
        query_kernel,
        (*(parts or (mean, mean)), layers.q, layers.k, mean, q, query),
        *(mask_eps, layers.scale),
        FIRST=parts is not None,
        **heads,
    )
    return q, query


def _output_backward(
    columns: Columns,
    layers: Layers,
    dy: Tensor,
    value: Tensor,
    dn: Tensor,
    gradients: tuple[Tensor, ...],
) -> Tensor:
    """Return partial gradients of o; write the gate's part of the normalised rows' gradient.

    ``gradients``: of the gate's weight and bias, and of the output's weight and bias.
    """
    (Z, HD), C, walkers = layers.out.shape, columns.m.shape[-1], columns.walkers
    do = columns.new(columns.count, columns.parts, HD)
    numbers = HD * C + Z * HD + HD + Z
    shares = columns.new(walkers, numbers)
    dgate, dgate_bias, dout, dout_bias = gradients
    given = (dy.contiguous(), columns.m, *columns.norm, columns.mean, columns.rstd, value)
    launch(
        output_back_kernel,
        (walkers,),
        (*given, layers.gate, layers.gate_bias, layers.out, dn, do, shares),
        (*columns.geometry, columns.items),
        HD=HD,
        Z=Z,
        **columns.constants(2),
    )
    launch(
        add_kernel,
        (-(-numbers // SHARE_NUMBERS),),
        (shares, dgate, dout, dgate_bias, dout_bias),
        (walkers,),
        C=C,
        HD=HD,
        Z=Z,
        BLOCK=SHARE_NUMBERS,
        AT_ONCE=SHARES,
        num_warps=4,
    )
    return do
