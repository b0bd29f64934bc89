"""The outer product mean: two custom operators that compute a few rows of the pair at a time.

The norms are LayerNorm kernels. cuBLAS computes the outer products and the sums of their gradients,
[lines H, S] by [S, N H]; the kernels of the last layer and its gradients read and write them
in that layout. The backward pass recomputes outer products that were too many to keep.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from bevatron.kernels.pair.layer_norm.triton import NormedRows
from bevatron.kernels.pair.outer_product_mean.triton_kernels import (
    layer_back_kernel,
    layer_kernel,
    layer_weight_kernel,
    scaled_kernel,
)
from bevatron.kernels.shared.autograd import needs_grad
from bevatron.kernels.shared.chunked_linear import (
    BiasGradient,
    WeightGradient,
    chunks,
    linear,
    wide_product,
)
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.launch import num_sms
from bevatron.kernels.shared.triton_launch import launch
from bevatron.kernels.shared.triton_math import allows_tf32

CHUNK_LINES = 4
"""A chunk has a multiple of this many lines of the pair."""
KEPT_BYTES = 1280 * 2**20
"""Maximum of outer products kept for the backward pass; more are recomputed.

768 residues in 16 bits take 1152 MiB. This is a limit, not a fraction of the input: outer products
grow as the pair does, so a fraction would keep all or none.
"""
LAYER = {"BM": 128, "BN": 128, "BK": 64, "STAGES": 3, "num_warps": 8}
BACK = {"BM": 128, "BN": 64, "STAGES": 3, "num_warps": 8}
WEIGHT = {"BM": 128, "BN": 128, "BK": 32, "STAGES": 4, "num_warps": 4}
SINGLE = {"BM": 64, "BN": 64, "BK": 32, "STAGES": 2, "num_warps": 8}
SINGLE_BACK = {"BM": 32, "BN": 32, "STAGES": 1, "num_warps": 8}
"""Blocks of the last layer, of its input gradient and its weight gradient; then in float32."""
BACK_ELEMENTS = 2**14
"""Elements of a block of gradients of the last layer's result; a program loads whole rows."""
PARTS_PER_SM = 2
"""Programs per SM that share the weight gradient."""
ELEMENTS, PER_SM = 4096, 8
"""`scaled_kernel`: elements of a block, and the most programs per SM."""


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
    """Compute the same as the reference; see `bevatron.kernels.pair.outer_product_mean`."""
    joint = torch.cat([a_weight, b_weight])
    joint_bias = None
    if a_bias is not None or b_bias is not None:
        zero = torch.zeros(len(a_weight), dtype=joint.dtype, device=joint.device)
        joint_bias = torch.cat([zero if bias is None else bias for bias in (a_bias, b_bias)])
    N, H, samples = m.shape[-2], len(a_weight), m.shape[:-3].numel()
    given = (m, norm_weight, norm_bias, joint, joint_bias, out_weight, out_bias)
    few = samples * (N * H) ** 2 * m.element_size() <= KEPT_BYTES
    keeps = few and needs_grad(*given)
    y: Tensor = mean_of_products(
        *(m, mask.detach().to(m.dtype), norm_weight, norm_bias, joint, joint_bias),
        *(out_weight, out_bias, eps, mask_eps, keeps),
    )[0]
    return y


def _new_outputs(
    m: Tensor, joint_weight: Tensor, out_weight: Tensor, keeps: bool
) -> tuple[Tensor, Tensor, Tensor]:
    N, H, samples = m.shape[-2], len(joint_weight) // 2, m.shape[:-3].numel()
    y = m.new_empty((*m.shape[:-3], N, N, len(out_weight)))
    products = m.new_empty((samples if keeps else 0, N, H, N * H))
    return y, m.new_empty((2, *m.shape[:-1]), dtype=torch.float32), products


@custom_op(
    "outer_product_mean",
    outputs="y statistics products",
    fake=_new_outputs,
)
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
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the result, mean and 1/sigma of the rows of m as [2, ...] in float32, and products.

    ``joint_weight`` is [2 H, C], for a, then for b. Outer products are [batch, N, H, N H], with
    batch 0 if they are not kept.
    """
    y, statistics, products = _new_outputs(m, joint_weight, out_weight, keeps)
    mean, rstd = statistics
    rows = NormedRows.of(m, norm_weight, norm_bias, mean, rstd, eps)
    _, all_a, all_b = _projections(m, mask, rows, joint_weight, joint_bias)
    weight = out_weight.to(m.dtype).contiguous()
    bias = None if out_bias is None else out_bias.to(m.dtype).contiguous()
    N = m.shape[-2]
    samples = y.view(len(all_a), N, N, len(weight))
    each = zip(samples, all_a, all_b, _flat(mask), _each(products, len(samples)), strict=True)
    for sample, a, b, kept, outer in each:
        _layer_of_products(a, b, _reciprocal(kept, mask_eps), weight, bias, outer, sample)
    return y, statistics, products


@mean_of_products.backward("m norm_weight norm_bias joint_weight joint_bias out_weight out_bias")
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
    products: Tensor,
    eps: float,
    mask_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors but the mask, without elements for biases not given."""
    mean, rstd = statistics.clone()
    rows = NormedRows.of(m, norm_weight, norm_bias, mean, rstd, eps)
    normed, all_a, all_b = _projections(m, mask, rows, joint_weight, joint_bias)
    N, H = m.shape[-2], len(joint_weight) // 2
    weight = out_weight.to(m.dtype).contiguous()
    dab = m.new_empty((*all_a.shape[:-1], 2 * H))
    dout, dout_bias = WeightGradient(out_weight), BiasGradient(out_bias, m)
    dy = dy.contiguous().view(len(all_a), N, N, len(weight))
    per_sample = (dy, all_a, all_b, dab, _flat(mask), _each(products, len(dy)))
    for sample, a, b, both, kept, outer in zip(*per_sample, strict=True):
        scale = _reciprocal(kept, mask_eps)
        wanted = dout, None if out_bias is None else dout_bias
        found = _layer_of_products_backward(a, b, scale, weight, outer, sample, *wanted)
        for gradient, half in zip(found, both.chunk(2, dim=-1), strict=True):
            _scale(gradient.flatten(0, 1), kept, half.flatten(0, 1))
    dprojected = dab.view(-1, 2 * H)
    djoint, djoint_bias = WeightGradient(joint_weight), BiasGradient(joint_bias, m)
    djoint.add(dprojected, normed)
    djoint_bias.add(dprojected)
    dm = torch.mm(dprojected, joint_weight.to(m.dtype), out=normed)
    dnorm_weight, dnorm_bias = torch.empty_like(norm_weight), torch.empty_like(norm_bias)
    # In place of the gradient of the normalised rows.
    rows.backward(dm, dm, dnorm_weight, dnorm_bias)
    return (
        *(dm.view(m.shape), dnorm_weight, dnorm_bias, djoint.result(), djoint_bias.result()),
        *(dout.result(), dout_bias.result()),
    )


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
        _scale(half, kept, masked.view(half.shape))
    return normed, a, b


def _scale(x: Tensor, scale: Tensor, out: Tensor, wants_sum: bool = False) -> Tensor:
    """Write rows [n, C], each times its contiguous ``scale``; return partial sums over rows."""
    rows, C = x.shape
    width = 1 << (C - 1).bit_length()
    block = max(1, ELEMENTS // width)
    programs = min(-(-rows // block), PER_SM * num_sms(x.device))
    shares = x.new_empty((programs if wants_sum else 0, C), dtype=torch.float32)
    if rows:
        launch(
            scaled_kernel,
            (programs,),
            (x, scale, out, shares),
            (rows, x.stride(0), out.stride(0)),
            C=C,
            C_PAD=width,
            BLOCK=block,
            WANTS_SUM=wants_sum,
        )
    return shares


def layer_of_products(
    a: Tensor, b: Tensor, count: Tensor, out_weight: Tensor, out_bias: Tensor | None
) -> Tensor:
    """Compute the same as the reference; see `bevatron.kernels.pair.outer_product_mean`."""
    (R, H), N, samples = a.shape[-2:], b.shape[-2], a.shape[:-3].numel()
    few = samples * R * N * H**2 * a.element_size() <= KEPT_BYTES
    keeps = few and needs_grad(a, b, out_weight, out_bias)
    y: Tensor = products_layer(a, b, count.detach(), out_weight, out_bias, keeps)[0]
    return y


def _new_layer(a: Tensor, b: Tensor, out_weight: Tensor, keeps: bool) -> tuple[Tensor, Tensor]:
    (R, H), N, samples = a.shape[-2:], b.shape[-2], a.shape[:-3].numel()
    y = a.new_empty((*a.shape[:-3], R, N, len(out_weight)))
    return y, a.new_empty((samples if keeps else 0, R, H, N * H))


@custom_op("layer_of_products", outputs="y products", fake=_new_layer)
def products_layer(
    a: Tensor, b: Tensor, count: Tensor, out_weight: Tensor, out_bias: Tensor | None, keeps: bool
) -> tuple[Tensor, Tensor]:
    """Return the result, and outer products [batch, R, H, N H], with batch 0 if not kept."""
    y, products = _new_layer(a, b, out_weight, keeps)
    weight = out_weight.to(a.dtype).contiguous()
    bias = None if out_bias is None else out_bias.to(a.dtype).contiguous()
    all_a, all_b, scale, samples = _by_sample(a, b, count, y)
    for each in zip(all_a, all_b, scale, _each(products, len(samples)), samples, strict=True):
        _layer_of_products(*each[:3], weight, bias, *each[3:])
    return y, products


@products_layer.backward("a b out_weight out_bias")
def products_layer_backward(
    dy: Tensor,
    a: Tensor,
    b: Tensor,
    count: Tensor,
    out_weight: Tensor,
    out_bias: Tensor | None,
    products: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return gradients of all tensors but the count, without elements for a bias not given."""
    weight = out_weight.to(a.dtype).contiguous()
    dout, dout_bias = WeightGradient(out_weight), BiasGradient(out_bias, a)
    wanted = dout, None if out_bias is None else dout_bias
    da, db = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (a, b))
    samples = _by_sample(a, b, count, dy.contiguous())
    into = da.view(samples[0].shape), db.view(samples[1].shape)
    each = zip(*into, *samples[:3], _each(products, len(samples[3])), samples[3], strict=True)
    for to_a, to_b, one, other, scale, outer, sample in each:
        found = _layer_of_products_backward(one, other, scale, weight, outer, sample, *wanted)
        to_a.copy_(found[0])
        to_b.copy_(found[1])
    return da, db, dout.result(), dout_bias.result()


def _by_sample(
    a: Tensor, b: Tensor, count: Tensor, y: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return a, b, one over the count, and y, contiguous with a single axis of samples."""
    scale = 1.0 / count.to(torch.float32).contiguous()
    samples = a.shape[:-3].numel()
    a, b = (x.reshape(samples, *x.shape[-3:]).contiguous() for x in (a, b))
    return a, b, scale.view(samples, *scale.shape[-2:]), y.view(samples, *y.shape[-3:])


def _layer_of_products(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    outer: Tensor | None,
    y: Tensor,
) -> None:
    """Write the results of a sample, a few lines at a time, and its outer products if kept."""
    for part in _parts(a, b):
        P = _outer(a[:, part], b, None if outer is None else outer[part])
        _layer(P, weight, bias, scale[part], y[part])


def _layer_of_products_backward(
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    weight: Tensor,
    outer: Tensor | None,
    dy: Tensor,
    dout: WeightGradient,
    dout_bias: BiasGradient | None,
) -> tuple[Tensor, Tensor]:
    """Return a sample's gradients of a and b; accumulate those of the last layer."""
    da, db, N = torch.empty_like(a), WeightGradient(b.flatten(1)), b.shape[1]
    for part in _parts(a, b):
        g = torch.empty_like(dy[part]).view(-1, len(weight))
        shares = _scale(dy[part].view(g.shape), scale[part], g, wants_sum=dout_bias is not None)
        if dout_bias is not None:
            dout_bias.add(shares)
        P = _outer(a[:, part], b) if outer is None else outer[part].flatten(0, 1)
        dout.add_part(_layer_weight(g, P, weight, N))
        dP = P if outer is None else torch.empty_like(P)
        _layer_backward(g, weight, dP, N)
        torch.mm(b.flatten(1), dP.t(), out=da[:, part].flatten(1))
        db.add(a[:, part].flatten(1).t(), dP)
        del P, dP
    return da, db.total().view(b.shape)


def _parts(a: Tensor, b: Tensor) -> Iterator[slice]:
    """Cut the residues of a [S, R, H] so that their outer products with b fit in a buffer."""
    (R, H), N = a.shape[1:], b.shape[1]
    return chunks(R, N * H * H * a.element_size(), CHUNK_LINES)


def _each(products: Tensor, samples: int) -> Sequence[Tensor | None]:
    """Return the kept outer products of each sample, or None for each."""
    return list(products) if len(products) else [None] * samples


def _outer(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
    """Return the products [lines H, N H] of some residues of a [S, lines, H] with all of b."""
    out = None if out is None else out.flatten(0, 1)
    return torch.mm(a.flatten(1).t(), b.flatten(1), out=out)


def _layer(P: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor, y: Tensor) -> None:
    """Write the last layer's results for some lines of the pair, [lines, N, Z], times a scale."""
    (lines, length, out), H = y.shape, _hidden(weight)
    pairs, blocks = lines * length, _blocks(P, LAYER)
    launch(
        layer_kernel,
        (-(-pairs // blocks["BM"]), -(-out // blocks["BN"])),
        (P, weight, weight if bias is None else bias, scale, y),
        (pairs, length, out),
        H=H,
        HAS_BIAS=bias is not None,
        **blocks,
    )


def _layer_backward(g: Tensor, weight: Tensor, dP: Tensor, length: int) -> None:
    """Write the gradient of the outer products from ``g`` [pairs, Z], the last layer's."""
    (pairs, out), H, blocks = g.shape, _hidden(weight), {**_blocks(g, BACK, SINGLE_BACK)}
    padded = max(16, 1 << (out - 1).bit_length())
    for side in ("BM", "BN"):
        blocks[side] = max(16, min(blocks[side], BACK_ELEMENTS // padded))
    grid, numbers = (-(-pairs // blocks["BM"]),), (pairs, length, out)
    launch(layer_back_kernel, grid, (g, weight, dP), numbers, H=H, OUT_PAD=padded, **blocks)


def _layer_weight(g: Tensor, P: Tensor, weight: Tensor, length: int) -> Tensor:
    """Return ``g^T P`` [Z, H H] in float32."""
    (pairs, out), H, blocks = g.shape, _hidden(weight), _blocks(g, WEIGHT)
    grid = (-(-H * H // blocks["BN"]), -(-out // blocks["BM"]))
    most = max(1, PARTS_PER_SM * num_sms(g.device) // (grid[0] * grid[1]))
    each = -(-pairs // (most * blocks["BK"])) * blocks["BK"]
    parts = g.new_empty((-(-pairs // each), *weight.shape), dtype=torch.float32)
    numbers = (pairs, each, length, out)
    launch(layer_weight_kernel, (*grid, len(parts)), (g, P, parts), numbers, H=H, **blocks)
    return parts.sum(0)


def _hidden(weight: Tensor) -> int:
    """Return H, of which the last layer takes H x H products."""
    return math.isqrt(weight.shape[1])


def _blocks(
    like: Tensor, half: Mapping[str, int], whole: Mapping[str, int] = SINGLE
) -> Mapping[str, Any]:
    """Choose blocks by the type."""
    single = like.dtype == torch.float32
    tf32 = single and allows_tf32()
    return {**(whole if single else half), "PRECISION": "tf32" if tf32 else "ieee"}


def _reciprocal(mask_SN: Tensor, mask_eps: float) -> Tensor:
    """Return one over the number of rows that have both residues, in float32."""
    return 1.0 / (mask_eps + wide_product(mask_SN.t(), mask_SN))


def _flat(mask: Tensor) -> Tensor:
    """Return [batch, S, N], contiguous, because kernels read it residue by residue."""
    return mask.reshape(mask.shape[:-2].numel(), *mask.shape[-2:]).contiguous()
