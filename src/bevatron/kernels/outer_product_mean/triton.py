"""The outer product mean: two custom operators that work a few rows of the pair at a time.

Norms are the LayerNorm's kernels, products the device library's, with a kernel that orders outer
products between them. The backward pass makes the outer products again.
"""

from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.autograd import empty_gradients, of_given
from bevatron.kernels.layer_norm.triton import on_device
from bevatron.kernels.layer_norm.triton_rows import NormedRows
from bevatron.kernels.outer_product_mean.triton_kernels import regroup_kernel
from bevatron.kernels.products import BiasGradient, WeightGradient, chunks, linear

CHUNK_LINES = 4
"""Lines of the pair in a chunk are a multiple."""
BLOCK = 4096
"""Elements that a program of `regroup_kernel` copies."""


def outer_product_mean(
    m: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    a_weight: Tensor,
    b_weight: Tensor,
    out_weight: Tensor,
    a_bias: Tensor | None,
    b_bias: Tensor | None,
    out_bias: Tensor | None,
    eps: float,
    mask_eps: float,
) -> Tensor:
    """Compute what the reference computes; see `bevatron.kernels.outer_product_mean`."""
    joint = torch.cat([a_weight, b_weight])
    joint_bias = None
    if a_bias is not None or b_bias is not None:
        zero = torch.zeros(len(a_weight), dtype=joint.dtype, device=joint.device)
        joint_bias = torch.cat([zero if bias is None else bias for bias in (a_bias, b_bias)])
    y: Tensor = mean_of_products(
        *(m, mask.detach().to(m.dtype), norm_weight, norm_bias, joint, joint_bias),
        *(out_weight, out_bias, eps, mask_eps),
    )[0]
    return y


@torch.library.custom_op("bevatron::outer_product_mean", mutates_args=())
def mean_of_products(
    m: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    joint_weight: Tensor,
    joint_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    eps: float,
    mask_eps: float,
) -> tuple[Tensor, Tensor]:
    """Return the result, and mean and 1/sigma of the rows of m as [2, ...] in float32.

    ``joint_weight`` is [2 H, C], of a and then of b.
    """
    y, statistics = _new_outputs(m, out_weight)
    mean, rstd = statistics
    rows = NormedRows.of(m, norm_weight, norm_bias, mean, rstd, eps)
    _, ab = _projections(m, mask, rows, joint_weight, joint_bias)
    weight = out_weight.to(m.dtype)
    bias = None if out_bias is None else out_bias.to(m.dtype)
    N, H = m.shape[-2], len(joint_weight) // 2
    for sample, ab_SNH, kept in zip(
        y.view(len(ab), N, N, len(weight)), ab, _flat(mask), strict=True
    ):
        a, b = (half.contiguous() for half in ab_SNH.split(H, dim=-1))
        scale = _reciprocal(kept, mask_eps)
        for part in chunks(N, _bytes_per_line(m, H), CHUNK_LINES):
            pairs = sample[part].view(-1, len(weight))
            linear(_by_pair(_outer(a[:, part], b), H), weight, bias, out=pairs)
            sample[part] *= scale[part, :, None]
    return y, statistics


@mean_of_products.register_fake
def _(m: Tensor, mask: Tensor, *weights: Any) -> tuple[Tensor, Tensor]:
    del mask
    return _new_outputs(m, weights[4])


@torch.library.custom_op("bevatron::outer_product_mean_backward", mutates_args=())
def mean_of_products_backward(
    dy: Tensor,
    m: Tensor,
    mask: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    joint_weight: Tensor,
    joint_bias: Tensor | None,
    out_weight: Tensor,
    out_bias: Tensor | None,
    statistics: Tensor,
    eps: float,
    mask_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors but the mask, without elements for biases not given."""
    mean, rstd = statistics.clone()
    rows = NormedRows.of(m, norm_weight, norm_bias, mean, rstd, eps)
    normed, ab = _projections(m, mask, rows, joint_weight, joint_bias)
    S, N = m.shape[-3:-1]
    H, weight = len(joint_weight) // 2, out_weight.to(m.dtype)
    dab = m.new_empty(ab.shape)
    dout, dout_bias = WeightGradient(out_weight), BiasGradient(out_bias, m)
    dy = dy.reshape(len(ab), N, N, len(weight))
    for sample, ab_SNH, dab_SNH, kept in zip(dy, ab, dab, _flat(mask), strict=True):
        a, b = (half.contiguous() for half in ab_SNH.split(H, dim=-1))
        scale, db = _reciprocal(kept, mask_eps), WeightGradient(b.view(S, -1))
        for part in chunks(N, _bytes_per_line(m, H), CHUNK_LINES):
            g = (sample[part] * scale[part, :, None]).to(m.dtype).view(-1, len(weight))
            dout_bias.add(g)
            dout.add(g, _by_pair(_outer(a[:, part], b), H))
            douter = _by_channel(torch.mm(g, weight), N, H)
            dab_SNH[:, part, :H] = torch.mm(b.view(S, -1), douter.t()).view(S, -1, H)
            db.add(a[:, part].reshape(S, -1).t(), douter)
        dab_SNH[..., H:] = db.result().view(S, N, H)
    dab *= mask.reshape(*dab.shape[:-1], 1)
    dprojected = dab.view(-1, 2 * H)
    djoint, djoint_bias = WeightGradient(joint_weight), BiasGradient(joint_bias, m)
    djoint.add(dprojected, normed)
    djoint_bias.add(dprojected)
    dm = torch.mm(dprojected, joint_weight.to(m.dtype), out=normed)
    dnorm_weight, dnorm_bias = torch.empty_like(norm_weight), torch.empty_like(norm_bias)
    # In place: on the gradient of the normalised rows.
    rows.backward(dm, dm, dnorm_weight, dnorm_bias)
    return (
        *(dm.view(m.shape), dnorm_weight, dnorm_bias, djoint.result(), djoint_bias.result()),
        *(dout.result(), dout_bias.result()),
    )


@mean_of_products_backward.register_fake
def _(dy: Tensor, m: Tensor, mask: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    del dy, mask
    return tuple(empty_gradients(m, m, *rest[:6]))


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:8], output[1])
    ctx.eps, ctx.mask_eps = inputs[8:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, dstatistics: Tensor | None) -> tuple[Tensor | None, ...]:
    del dstatistics  # nobody outside sees the statistics
    if dy is None:
        return (None,) * 10
    given = [tensor for i, tensor in enumerate(ctx.saved_tensors[:8]) if i != 1]
    found = mean_of_products_backward(dy, *ctx.saved_tensors, ctx.eps, ctx.mask_eps)
    dm, *others = of_given(given, found)
    return dm, None, *others, None, None


mean_of_products.register_autograd(_backward, setup_context=_save)


def _projections(
    m: Tensor, mask: Tensor, rows: NormedRows, joint_weight: Tensor, joint_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the normalised rows, and a and b as [batch, S, N, 2 H]."""
    normed = rows.make()
    bias = None if joint_bias is None else joint_bias.to(m.dtype)
    ab = linear(normed, joint_weight.to(m.dtype), bias)
    ab *= mask.reshape(-1, 1)
    return normed, ab.view(m.shape[:-3].numel(), *m.shape[-3:-1], len(joint_weight))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Return the outer products [i H, N H] of residues i of a with all of b."""
    S = len(b)
    return torch.mm(a.reshape(S, -1).t(), b.view(S, -1))


def _by_pair(outer: Tensor, H: int) -> Tensor:
    """Order [i H, N H] as [i N, H H]."""
    lines, length = outer.shape[0] // H, outer.shape[1] // H
    return _regroup(outer, outer.new_empty((lines * length, H * H)), lines, length, H, back=False)


def _by_channel(pairs: Tensor, length: int, H: int) -> Tensor:
    """Order [i N, H H] as [i H, N H]."""
    lines = len(pairs) // length
    return _regroup(pairs, pairs.new_empty((lines * H, length * H)), lines, length, H, back=True)


def _regroup(source: Tensor, target: Tensor, lines: int, length: int, H: int, back: bool) -> Tensor:
    with on_device(source):
        regroup_kernel[(-(-length * H * H // BLOCK), lines)](
            source, target, length, H=H, BLOCK=BLOCK, BACK=back
        )
    return target


def _reciprocal(mask_SN: Tensor, mask_eps: float) -> Tensor:
    """Return one over the number of rows in which both residues are there, in float32."""
    kept = mask_SN.float()
    return 1.0 / (mask_eps + kept.t() @ kept)


def _flat(mask: Tensor) -> Tensor:
    return mask.reshape(mask.shape[:-2].numel(), *mask.shape[-2:])


def _bytes_per_line(m: Tensor, H: int) -> int:
    return 2 * m.shape[-2] * H * H * m.element_size()


def _new_outputs(m: Tensor, out_weight: Tensor) -> tuple[Tensor, Tensor]:
    N = m.shape[-2]
    y = m.new_empty((*m.shape[:-3], N, N, len(out_weight)))
    return y, m.new_empty((2, *m.shape[:-1]), dtype=torch.float32)
