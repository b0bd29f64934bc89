"""The outer product mean: two custom operators that work a few rows of the pair at a time.

Norms are the LayerNorm's kernels. Outer products, and sums of their gradients, are kernels: they
write and read them by pairs of residues, as the last layer's products, of the device library, need
them. The backward pass makes the outer products again.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.autograd import empty_gradients, of_given
from bevatron.kernels.layer_norm.triton import on_device
from bevatron.kernels.layer_norm.triton_rows import NormedRows
from bevatron.kernels.outer_product_mean.triton_kernels import (
    outer_back_kernel,
    outer_kernel,
    scaled_kernel,
)
from bevatron.kernels.products import BiasGradient, WeightGradient, chunks, linear
from bevatron.kernels.rows import processors
from bevatron.kernels.triton_products import allows_tf32

CHUNK_LINES = 4
"""Lines of the pair in a chunk are a multiple."""
OUTER = {"BM": 128, "BN": 128, "BK": 32, "STAGES": 4, "num_warps": 4}
HALF = {"BM": 128, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}
HALF_SMALL = {"BM": 64, "BN": 64, "BK": 64, "STAGES": 4, "num_warps": 4}
SINGLE = {"BM": 64, "BN": 64, "BK": 32, "STAGES": 2, "num_warps": 8}
"""Blocks of the outer products of 16-bit numbers, of sums over them, of few such, of float32."""
ELEMENTS, PER_PROCESSOR = 4096, 8
"""Of `scaled_kernel`: numbers in a block, and programs side by side at most."""


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
    _, all_a, all_b = _projections(m, mask, rows, joint_weight, joint_bias)
    weight = out_weight.to(m.dtype)
    bias = None if out_bias is None else out_bias.to(m.dtype)
    N, H = m.shape[-2], len(joint_weight) // 2
    samples = y.view(len(all_a), N, N, len(weight))
    for sample, a, b, kept in zip(samples, all_a, all_b, _flat(mask), strict=True):
        scale = _reciprocal(kept, mask_eps)
        for part in chunks(N, _bytes_per_line(m, H), CHUNK_LINES):
            pairs = sample[part].view(-1, len(weight))
            linear(_outer(a[:, part], b), weight, bias, out=pairs)
            _scale(pairs, scale[part], pairs)
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
    normed, all_a, all_b = _projections(m, mask, rows, joint_weight, joint_bias)
    N, H, weight = m.shape[-2], len(joint_weight) // 2, out_weight.to(m.dtype)
    dab = m.new_empty((*all_a.shape[:-1], 2 * H))
    dout, dout_bias = WeightGradient(out_weight), BiasGradient(out_bias, m)
    dy = dy.contiguous().view(len(all_a), N, N, len(weight))
    for sample, a, b, both, kept in zip(dy, all_a, all_b, dab, _flat(mask), strict=True):
        scale = _reciprocal(kept, mask_eps)
        db = torch.empty_like(b, dtype=torch.float32)
        for part in chunks(N, _bytes_per_line(m, H), CHUNK_LINES):
            dpairs = sample[part].view(-1, len(weight))
            g = torch.empty_like(dpairs)
            dout_bias.add(_scale(dpairs, scale[part], g, wants_sum=out_bias is not None))
            outer = _outer(a[:, part], b)
            dout.add(g, outer)
            douter = torch.mm(g, weight, out=outer)
            _sum_over_pairs(douter, b, both[:, part, :H], kept[:, part])
            _sum_over_lines(douter, a[:, part], db, add=part.start > 0)
        torch.mul(db, kept[..., None], out=both[..., H:])
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalised rows, and a and b as [batch, S, N, H]."""
    normed = rows.make()
    bias = None if joint_bias is None else joint_bias.to(m.dtype)
    ab = linear(normed, joint_weight.to(m.dtype), bias)
    samples, kept = m.shape[:-3].numel(), mask.contiguous()
    a, b = m.new_empty((2, samples, *m.shape[-3:-1], len(joint_weight) // 2))
    for half, masked in zip(ab.chunk(2, dim=-1), (a, b), strict=True):
        _scale(half, kept, masked)
    return normed, a, b


def _scale(x: Tensor, scale: Tensor, out: Tensor, wants_sum: bool = False) -> Tensor:
    """Write rows [n, C] times a number each, contiguous ``scale``; return shares of their sum."""
    rows, C = x.shape
    width = 1 << (C - 1).bit_length()
    block = max(1, ELEMENTS // width)
    programs = min(-(-rows // block), PER_PROCESSOR * processors(x.device))
    shares = x.new_empty((programs if wants_sum else 0, C), dtype=torch.float32)
    if rows:
        with on_device(x):
            scaled_kernel[(programs,)](
                *(x, scale, out, shares, rows, x.stride(0)),
                C=C,
                C_PAD=width,
                BLOCK=block,
                WANTS_SUM=wants_sum,
            )
    return shares


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """Return the outer products [pairs, H H] of some residues of a [S, lines, H] with all of b."""
    (S, lines, H), length = a.shape, b.shape[1]
    P = a.new_empty((lines * length, H * H))
    blocks = _blocks(a, lines * H, length * H, OUTER)
    grid = (-(-lines * H // blocks["BM"]) * -(-length * H // blocks["BN"]),)
    with on_device(a):
        outer_kernel[grid](a, b, P, S, a.stride(0), b.stride(0), lines, length, H=H, **blocks)
    return P


def _sum_over_pairs(dP: Tensor, b: Tensor, da: Tensor, kept: Tensor) -> None:
    """Write the masked gradient of some residues of a, [S, lines, H]."""
    _launch_back(dP, b, da, kept, of_lines=True, add=False)


def _sum_over_lines(dP: Tensor, a: Tensor, db: Tensor, add: bool) -> None:
    """Write or add to ``db`` [S, N, H] in float32 what some residues of a make of it."""
    _launch_back(dP, a, db, a, of_lines=False, add=add)


def _launch_back(
    dP: Tensor, x: Tensor, out: Tensor, kept: Tensor, of_lines: bool, add: bool
) -> None:
    S, _, H = x.shape
    blocks = _blocks(x, S, out.shape[1] * H)
    lines, length = (out, x) if of_lines else (x, out)
    grid = (-(-out.shape[1] * H // blocks["BN"]), -(-S // blocks["BM"]))
    with on_device(x):
        outer_back_kernel[grid](
            *(dP, x, out, kept, S, x.stride(0), out.stride(0), out.stride(1), kept.stride(0)),
            *(lines.shape[1], length.shape[1]),
            H=H,
            OF_LINES=of_lines,
            ADD=add,
            **blocks,
        )


def _blocks(
    like: Tensor, rows: int, columns: int, half: Mapping[str, int] = HALF
) -> Mapping[str, Any]:
    """Choose blocks of a result with so many rows and columns, at least one for a processor."""
    single = like.dtype == torch.float32
    tf32 = single and allows_tf32()
    programs = -(-rows // half["BM"]) * -(-columns // half["BN"])
    if programs < processors(like.device):
        half = HALF_SMALL
    return {**(SINGLE if single else half), "PRECISION": "tf32" if tf32 else "ieee"}


def _reciprocal(mask_SN: Tensor, mask_eps: float) -> Tensor:
    """Return one over the number of rows in which both residues are there, in float32."""
    kept = mask_SN.float()
    return 1.0 / (mask_eps + kept.t() @ kept)


def _flat(mask: Tensor) -> Tensor:
    """Return [batch, S, N], contiguous: kernels read it residue after residue."""
    return mask.reshape(mask.shape[:-2].numel(), *mask.shape[-2:]).contiguous()


def _bytes_per_line(m: Tensor, H: int) -> int:
    """Count twice: a chunk of half the usual size, of which more stays in the cache."""
    return 2 * m.shape[-2] * H * H * m.element_size()


def _new_outputs(m: Tensor, out_weight: Tensor) -> tuple[Tensor, Tensor]:
    N = m.shape[-2]
    y = m.new_empty((*m.shape[:-3], N, N, len(out_weight)))
    return y, m.new_empty((2, *m.shape[:-1]), dtype=torch.float32)
