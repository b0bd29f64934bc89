"""Attention with one query per column as two custom operators, for 16-bit rows of few channels.

Between forward and backward are kept the input, two float32 numbers per row and a few rows of
channels per column. What concerns columns only is small and stays float32.
"""

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from bevatron.kernels.autograd import empty_gradients
from bevatron.kernels.global_attention.triton_kernels import (
    attend_kernel,
    combine_kernel,
    mean_kernel,
    output_back_kernel,
    output_kernel,
    query_back_kernel,
    rows_back_kernel,
)
from bevatron.kernels.layer_norm.triton import on_device, sum_shares
from bevatron.kernels.rows import processors

WIDTHS, LARGEST_HEADS = {16, 32, 64}, 16
"""More would not fit the registers."""
BLOCK = 64
"""Rows of a column in a block."""
PER_PROCESSOR = 4
"""Programs side by side on a processor, about."""

Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
Ten = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def takes(m: Tensor, gate_weight: Tensor, k_weight: Tensor, out_weight: Tensor) -> bool:
    """Say whether sizes and type are such as these kernels are for."""
    heads = gate_weight.shape[0] // k_weight.shape[0]
    widths = {m.shape[-1], *out_weight.shape}
    return m.element_size() == 2 and widths <= WIDTHS and heads <= LARGEST_HEADS and m.numel() > 0


@dataclass(frozen=True)
class Columns:
    """An alignment as columns, and how their rows are dealt to programs.

    Attributes
    ----------
    m
        [samples, S, N, C], channels one after another.
    mask
        [samples, S, N], of the type of the rows.
    norm
        Weight and bias.
    mean, rstd
        [samples, S, N] in float32.
    parts, heads
        Of a column's rows; and heads, padded for matrix products.
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
        wanted = PER_PROCESSOR * processors(m.device)
        parts = max(1, min(-(-S // BLOCK), wanted // (len(m) * N)))
        vectors = norm[0].contiguous(), norm[1].contiguous()
        mean, rstd = statistics
        return cls(m, mask.contiguous(), vectors, mean, rstd, parts, LARGEST_HEADS)

    @property
    def count(self) -> int:
        """How many columns there are."""
        return self.m.shape[0] * self.m.shape[2]

    @property
    def items(self) -> int:
        """How many parts of columns there are."""
        return self.count * self.parts

    @property
    def walkers(self) -> int:
        """How many programs share the items where each leaves shares of weights' gradients."""
        return min(self.items, PER_PROCESSOR * processors(self.m.device) // 2)

    @property
    def geometry(self) -> tuple[int, ...]:
        """Sizes, strides and numbers as kernels take them."""
        return (*self.m.shape[1:3], *self.m.stride()[:3], self.parts)

    def new(self, *shape: int) -> Tensor:
        """Allocate float32 numbers."""
        return self.m.new_empty(shape, dtype=torch.float32)

    def constants(self, stages: int) -> dict[str, Any]:
        """Return what all kernels are compiled for."""
        return {"C": self.m.shape[-1], "BLOCK": BLOCK, "STAGES": stages, "num_warps": 4}

    def by_head(self, tensor: Tensor) -> Tensor:
        """Pad [column, H, ...] to `heads`."""
        padded = tensor.new_zeros((tensor.shape[0], self.heads, *tensor.shape[2:]))
        padded[:, : tensor.shape[1]] = tensor
        return padded


@dataclass(frozen=True)
class Layers:
    """The weights: as the rows' type for rows, in float32 (rounded to it) for columns."""

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
        rounded = [weight.to(m.dtype).contiguous() for weight in weights]
        return cls(*(weight.float() for weight in rounded[:3]), *rounded[3:])

    @property
    def head(self) -> int:
        """Channels of a head."""
        return len(self.k)

    def query(self, mean: Tensor) -> tuple[Tensor, Tensor]:
        """Return q [column, H, D], scaled, and what meets rows: [column, H, C]."""
        q = (mean @ self.q.t()).view(len(mean), -1, self.head) * self.head**-0.5
        return q, q @ self.k

    def values(self, attended: Tensor) -> Tensor:
        """Return o [column, H D] of [column, H, C]."""
        return (attended @ self.v.t()).flatten(1)


@torch.library.custom_op("bevatron::global_attention", mutates_args=())
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
    """Return the result, and what is kept for the backward pass.

    That is the rows' statistics [2, samples, S, N] and, for every column, the mean of its rows
    followed by one over their number [C + 1], the sum of attended rows [H, C] and its log [H].
    """
    y, statistics, mean, attended, log_sum = _new_outputs(m, q_weight, k_weight, out_weight)
    weights = (q_weight, k_weight, v_weight, gate_weight, gate_bias, out_weight, out_bias)
    layers, H, C = Layers.of(m, *weights), attended.shape[1], m.shape[-1]
    columns = Columns.of(m, mask, (norm_weight, norm_bias), statistics)
    sums, counts = columns.new(columns.count, columns.parts, C), columns.new(columns.items)
    grid = (columns.items,)
    with on_device(m):
        mean_kernel[grid](
            *(columns.m, *columns.norm, columns.mask, columns.mean, columns.rstd, sums, counts),
            *(*columns.geometry, eps),
            **columns.constants(3),
        )
    mean[:, C] = 1.0 / (mask_eps + counts.view(-1, columns.parts).sum(1))
    torch.mul(sums.sum(1), mean[:, C:], out=mean[:, :C])
    query = columns.by_head(layers.query(mean[:, :C])[1].to(m.dtype))
    largest, total = columns.new(2, columns.items, columns.heads)
    sums = columns.new(columns.items, columns.heads, C)
    found = columns.new(columns.count, columns.heads, C), columns.new(columns.count, columns.heads)
    with on_device(m):
        attend_kernel[grid](
            *(columns.m, *columns.norm, columns.mask, columns.mean, columns.rstd, query),
            *(largest, total, sums, *columns.geometry),
            HEADS=columns.heads,
            **columns.constants(3),
        )
        combine_kernel[(columns.count,)](
            largest, total, sums, *found, columns.parts, C=C, HEADS=columns.heads
        )
    attended.copy_(found[0][:, :H])
    log_sum.copy_(found[1][:, :H])
    o = layers.values(attended)
    with on_device(m):
        output_kernel[grid](
            *(
                columns.m,
                *columns.norm,
                columns.mean,
                columns.rstd,
                o,
                layers.gate,
                layers.gate_bias,
                layers.out,
            ),
            *(layers.out_bias, y, *columns.geometry),
            HD=o.shape[1],
            Z=y.shape[-1],
            **columns.constants(3),
        )
    return y, statistics, mean, attended, log_sum


@attend.register_fake
def _(m: Tensor, *rest: Any) -> Saved:
    return _new_outputs(m, rest[3], rest[4], rest[8])


@torch.library.custom_op("bevatron::global_attention_backward", mutates_args=())
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
) -> Ten:
    """Return gradients of all tensors but the mask."""
    weights = (q_weight, k_weight, v_weight, gate_weight, gate_bias, out_weight, out_bias)
    found = cast("Ten", tuple(empty_gradients(m, m, norm_weight, norm_bias, *weights)))
    dm, dnorm_weight, dnorm_bias, dq_weight, dk_weight, dv_weight = found[:6]
    layers, H, C = Layers.of(m, *weights), attended.shape[1], m.shape[-1]
    columns = Columns.of(m, mask, (norm_weight, norm_bias), statistics)
    do = _output_backward(columns, layers, dy, layers.values(attended), dm, found[6:])
    do = do.view(len(do), H, -1)
    dattended = do @ layers.v
    dv_weight.copy_(do.flatten(0, 1).t() @ attended.flatten(0, 1))
    q, query = layers.query(mean[:, :C])
    # Rounded before the sum over rows is made of it: what it is taken from is rounded too.
    dattended = dattended.to(m.dtype)
    softmax = (
        columns.by_head(query.to(m.dtype)),
        columns.by_head(dattended),
        columns.by_head(log_sum),
        columns.by_head((dattended * attended).sum(-1)),
    )
    dquery = columns.new(columns.count, columns.parts, columns.heads, C)
    with on_device(m):
        query_back_kernel[(columns.items,)](
            *(columns.m, *columns.norm, columns.mask, columns.mean, columns.rstd, *softmax),
            *(dquery, *columns.geometry),
            HEADS=columns.heads,
            **columns.constants(2),
        )
    dquery = dquery.sum(1)[:, :H]
    dk_weight.copy_(q.flatten(0, 1).t() @ dquery.flatten(0, 1))
    dq = (dquery @ layers.k.t()).flatten(1) * layers.head**-0.5
    dq_weight.copy_(dq.t() @ mean[:, :C])
    dmean = (dq @ layers.q) * mean[:, C:]
    norm_shares = columns.new(columns.walkers, 2, C)
    with on_device(m):
        rows_back_kernel[(columns.walkers,)](
            *(columns.m, *columns.norm, columns.mask, columns.mean, columns.rstd, *softmax),
            *(dmean, dm, norm_shares, *columns.geometry, columns.items),
            HEADS=columns.heads,
            **columns.constants(2),
        )
    sum_shares(norm_shares, *columns.norm, dnorm_weight, dnorm_bias)
    return found


@attend_backward.register_fake
def _(dy: Tensor, m: Tensor, mask: Tensor, *rest: Any) -> Ten:
    del dy, mask
    return cast("Ten", tuple(empty_gradients(m, m, *rest[:9])))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Saved) -> None:
    ctx.save_for_backward(*inputs[:11], *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *others: Tensor | None) -> tuple[Tensor | None, ...]:
    del others  # nobody outside sees them
    if dy is None:
        return (None,) * 13
    dm, *found = attend_backward(dy, *ctx.saved_tensors)
    return dm, None, *found, None, None


attend.register_autograd(_backward, setup_context=_save)


def _output_backward(
    columns: Columns,
    layers: Layers,
    dy: Tensor,
    o: Tensor,
    dn: Tensor,
    gradients: tuple[Tensor, ...],
) -> Tensor:
    """Return the gradient of o [column, H D]; write the gate's part of that of normalised rows.

    ``gradients``: of the gate's weight and bias, the output's weight and bias.
    """
    (Z, HD), C, walkers = layers.out.shape, columns.m.shape[-1], columns.walkers
    do = columns.new(columns.count, columns.parts, HD)
    out_shares, gate_shares = columns.new(walkers, Z, HD), columns.new(walkers, HD, C)
    bias_shares = columns.new(walkers, HD + Z)
    with on_device(dn):
        output_back_kernel[(walkers,)](
            *(dy.contiguous(), columns.m, *columns.norm, columns.mean, columns.rstd, o),
            *(layers.gate, layers.gate_bias, layers.out, dn, do, out_shares, gate_shares),
            *(bias_shares, *columns.geometry, columns.items),
            HD=HD,
            Z=Z,
            **columns.constants(2),
        )
    dgate, dgate_bias, dout, dout_bias = gradients
    dgate.copy_(gate_shares.sum(0))
    dout.copy_(out_shares.sum(0))
    biases = bias_shares.sum(0)
    dgate_bias.copy_(biases[:HD])
    dout_bias.copy_(biases[HD:])
    return do.sum(1)


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
    )
