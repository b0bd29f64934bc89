"""What pair operators are compared with: plain PyTorch, SDPA, flex_attention, cuEquivariance.

Every function takes the tensors of a case by name. Plain PyTorch is written as models write it; of
it the compiled peer is made, and in float64 it is what results are checked against.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap a function once for all calls: torch.compile itself takes the host milliseconds."""
    return torch.compile(function, dynamic=False)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias)


def add_dropped(x: Tensor, update: Tensor, mask: Tensor) -> Tensor:
    return torch.addcmul(x, update, mask.to(x.dtype))


def add_layer(x: Tensor, update: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return add_dropped(x, F.linear(update, weight, bias), mask)


def add_turned(x: Tensor, update: Tensor, mask: Tensor) -> Tensor:
    return torch.addcmul(x, update.transpose(0, 1), mask[:, None].to(x.dtype))


def swiglu(gate: Tensor, value: Tensor) -> Tensor:
    return F.silu(gate) * value


def layer_norm_linear(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight: Tensor) -> Tensor:
    return F.linear(layer_norm(x, norm_weight, norm_bias), weight)


def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    gate_weight: Tensor,
) -> Tensor:
    n = layer_norm(x, norm_weight, norm_bias)
    return F.linear(F.silu(F.linear(n, gate_weight)) * F.linear(n, up_weight), down_weight)


def conditioned_transition(
    x: Tensor,
    s: Tensor,
    norm_weight: Tensor,
    scale_weight: Tensor,
    scale_bias: Tensor,
    shift_weight: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor,
    down_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
) -> Tensor:
    c = F.layer_norm(s, norm_weight.shape, norm_weight)
    n = torch.sigmoid(F.linear(c, scale_weight, scale_bias)) * F.layer_norm(x, x.shape[-1:])
    n = n + F.linear(c, shift_weight)
    hidden = F.silu(F.linear(n, gate_weight)) * F.linear(n, up_weight)
    return torch.sigmoid(F.linear(s, out_weight, out_bias)) * F.linear(hidden, down_weight)


def joined_linear(x: Tensor, *weights: Tensor) -> Sequence[Tensor]:
    """Apply layers of the same width in one matmul."""
    return F.linear(x, torch.cat(weights)).chunk(len(weights), -1)


def joined_transition(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, **w: Tensor) -> Tensor:
    """Compute gates and values in one matmul."""
    n = layer_norm(x, norm_weight, norm_bias)
    gate, value = joined_linear(n, w["gate_weight"], w["up_weight"])
    return F.linear(F.silu(gate) * value, w["down_weight"])


def joined_conditioned_transition(x: Tensor, s: Tensor, norm_weight: Tensor, **w: Tensor) -> Tensor:
    """Compute scales and shifts in one matmul, gates and values in another."""
    c = F.layer_norm(s, norm_weight.shape, norm_weight)
    scale, shift = joined_linear(c, w["scale_weight"], w["shift_weight"])
    n = torch.sigmoid(scale + w["scale_bias"]) * F.layer_norm(x, x.shape[-1:]) + shift
    gate, value = joined_linear(n, w["gate_weight"], w["up_weight"])
    y = F.linear(F.silu(gate) * value, w["down_weight"])
    return torch.sigmoid(F.linear(s, w["out_weight"], w["out_bias"])) * y


def triangle_multiply(
    z: Tensor,
    norm_in_weight: Tensor,
    norm_in_bias: Tensor,
    a_weight: Tensor,
    a_gate_weight: Tensor,
    b_weight: Tensor,
    b_gate_weight: Tensor,
    norm_out_weight: Tensor,
    norm_out_bias: Tensor,
    out_weight: Tensor,
    out_gate_weight: Tensor,
    mask: Tensor,
) -> Tensor:
    n, kept = layer_norm(z, norm_in_weight, norm_in_bias), mask.to(z.dtype)[..., None]
    a = kept * F.linear(n, a_gate_weight).sigmoid() * F.linear(n, a_weight)
    b = kept * F.linear(n, b_gate_weight).sigmoid() * F.linear(n, b_weight)
    x = layer_norm(torch.einsum("ikc,jkc->ijc", a, b), norm_out_weight, norm_out_bias)
    return F.linear(n, out_gate_weight).sigmoid() * F.linear(x, out_weight)


def cuequivariance_triangle_multiply(z: Tensor, mask: Tensor, **w: Tensor) -> Tensor:
    from cuequivariance_torch import triangle_multiplicative_update

    result: Tensor = triangle_multiplicative_update(
        z[None],
        direction="outgoing",
        mask=mask.to(z.dtype)[None],
        norm_in_weight=w["norm_in_weight"],
        norm_in_bias=w["norm_in_bias"],
        p_in_weight=torch.cat([w["a_weight"], w["b_weight"]]),
        g_in_weight=torch.cat([w["a_gate_weight"], w["b_gate_weight"]]),
        norm_out_weight=w["norm_out_weight"],
        norm_out_bias=w["norm_out_bias"],
        p_out_weight=w["out_weight"],
        g_out_weight=w["out_gate_weight"],
    )
    return result.squeeze(0)  # an index would copy the gradient


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attend in the layout of projections, [B, S, N, H, D]."""
    logits = torch.einsum("bsihd,bsjhd->bshij", q * q.shape[-1] ** -0.5, k) + bias
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None, None, :], float("-inf"))
    return torch.einsum("bshij,bsjhd->bsihd", logits.softmax(-1), v)


def sdpa(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    if mask is None:
        added = bias.squeeze(0).expand(q.shape[1], -1, -1, -1)
    else:
        added = bias.squeeze(0).masked_fill(~mask[0, :, None, None], float("-inf"))
    heads = [x.squeeze(0).transpose(1, 2) for x in (q, k, v)]  # an index would copy the gradient
    return F.scaled_dot_product_attention(*heads, attn_mask=added).transpose(1, 2).unsqueeze(0)


def flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    return compiled(_flex_of_rows)(q, k, v, bias, mask)


def flex_of_heads(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attend with contiguous heads, [1, S, H, N, D], which flex_attention is fastest with."""
    return compiled(_flex)(q, k, v, bias, mask)


def _flex_of_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    return _flex(*(x.transpose(2, 3) for x in (q, k, v)), bias, mask).transpose(2, 3)


def _flex(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    bias = bias.squeeze((0, 1))

    def score(x: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        x = x + bias[head, i, j]
        return x if mask is None else torch.where(mask[0, row, j], x, -float("inf"))

    found: Tensor = flex_attention(q.squeeze(0), k.squeeze(0), v.squeeze(0), score_mod=score)
    return found.unsqueeze(0)


def cuequivariance_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None
) -> Tensor:
    from cuequivariance_torch import triangle_attention

    rows = [tensor.transpose(2, 3) for tensor in (q, k, v)]
    if mask is None:
        mask = torch.ones(*q.shape[:2], k.shape[2], dtype=torch.bool, device=q.device)
    result = triangle_attention(*rows, bias=bias, mask=mask[:, :, None, None])
    if isinstance(result, tuple):
        result = result[0]
    return result.transpose(2, 3)


def trifast_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None
) -> Tensor:
    """Attend with as many rows as queries and keys; here the mask says what to leave out."""
    from trifast import triangle_attention

    heads = [tensor.permute(0, 3, 1, 2, 4) for tensor in (q, k, v)]
    if mask is None:
        mask = torch.ones(*q.shape[:2], k.shape[2], dtype=torch.bool, device=q.device)
    result: Tensor = triangle_attention(*heads, bias.squeeze(1), ~mask)
    return result.permute(0, 2, 3, 1, 4)


def outer_product_mean(
    m: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    a_weight: Tensor,
    b_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor,
) -> Tensor:
    n, kept = layer_norm(m, norm_weight, norm_bias), mask.to(m.dtype)[..., None]
    a, b = F.linear(n, a_weight) * kept, F.linear(n, b_weight) * kept
    outer = torch.einsum("sic,sjd->ijcd", a, b).flatten(-2)
    return F.linear(outer, out_weight, out_bias) / (1e-3 + torch.einsum("sic,sjc->ijc", kept, kept))


def global_attention(
    m: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor,
) -> Tensor:
    n, kept, D = layer_norm(m, norm_weight, norm_bias), mask.to(m.dtype), len(k_weight)
    mean = torch.einsum("sn,snc->nc", kept, n) / kept.sum(0)[:, None]
    q = F.linear(mean, q_weight).unflatten(-1, (-1, D)) * D**-0.5
    logits = torch.einsum("nhd,snd->nhs", q, F.linear(n, k_weight))
    weights = logits.masked_fill(~mask.T[:, None], float("-inf")).softmax(-1)
    o = torch.einsum("nhs,snd->nhd", weights, F.linear(n, v_weight)).flatten(1)
    return F.linear(F.linear(n, gate_weight, gate_bias).sigmoid() * o, out_weight, out_bias)


def qkvg(
    x: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    bias_weight: Tensor | None = None,
) -> Tensor:
    """Apply one layer of joined weights; with a bias its own layer beside it."""
    n = layer_norm(x, norm_weight, norm_bias)
    joint = F.linear(n, torch.cat([q_weight, k_weight, v_weight, gate_weight]))
    return joint if bias_weight is None else beside(joint, F.linear(n, bias_weight), x)


class _Beside(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, joint: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
        ctx.widths = bias.shape[-1], residual.shape[-1]
        return joint.view_as(joint)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # type: ignore[override]
        heads, channels = ctx.widths
        dbias = dy[..., :heads].movedim(-1, -3).contiguous().movedim(-3, -1)
        return dy, dbias, dy[..., :channels]


def beside(joint: Tensor, bias: Tensor, residual: Tensor) -> Tensor:
    """Return the first, and concatenate nothing: the others get parts of its gradient.

    The bias of an attention gets that of the first channels, heads first as attention hands it
    back; so does the residual.
    """
    found: Tensor = _Beside.apply(joint, bias, residual)  # type: ignore[no-untyped-call]
    return found


def invariant_point_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_points: Tensor,
    k_points: Tensor,
    v_points: Tensor,
    bias: Tensor,
    z: Tensor,
    head_weights: Tensor,
) -> Tensor:
    """Algorithm 22 of AlphaFold2 with all pairs of points, as OpenFold writes it."""
    D, P = q.shape[-1], q_points.shape[-1]
    squares = (q_points[:, None] - k_points[None]).square().sum((2, 4)).movedim(-1, 0)
    gamma = F.softplus(head_weights)[:, None, None] * (2 / (27 * P)) ** 0.5 / 2
    logits = torch.einsum("ihd,jhd->hij", q, k) * (3 * D) ** -0.5 + bias - gamma * squares
    weights = logits.softmax(-1)
    scalars = torch.einsum("hij,jhd->ihd", weights, v)
    points = torch.einsum("hij,jxhp->ixhp", weights, v_points)
    pairs = torch.einsum("hij,ijz->ihz", weights, z)
    return torch.cat([scalars.flatten(1), points.flatten(1), pairs.flatten(1)], -1)
