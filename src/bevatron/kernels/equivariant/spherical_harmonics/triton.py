"""Spherical harmonics in Triton: one edge per lane, polynomials unrolled in registers.

``forward`` -> ``backward`` -> ``double_backward``; the last is not differentiable. `polynomials`
generates the source of the three kernels.
"""

import linecache
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.equivariant.spherical_harmonics.polynomials import write_source

BLOCK = 128
INTERPRETED_BLOCK = 4096


def spherical_harmonics(l_max: int, vectors: Tensor) -> Tensor:
    """Evaluate all degrees at once."""
    result: Tensor = forward(vectors, l_max)
    return result


@torch.library.custom_op("bevatron::spherical_harmonics", mutates_args=())
def forward(v: Tensor, l_max: int) -> Tensor:
    """Y [E, S] of v [E, 3]."""
    y = v.new_empty(v.shape[0], (l_max + 1) ** 2)
    _launch("forward", l_max, v.contiguous(), y)
    return y


@torch.library.custom_op("bevatron::spherical_harmonics_backward", mutates_args=())
def backward(g: Tensor, v: Tensor, l_max: int) -> Tensor:
    """Gradient of g . Y by v."""
    by_v = v.new_empty(v.shape)
    _launch("backward", l_max, g.contiguous(), v.contiguous(), by_v)
    return by_v


@torch.library.custom_op("bevatron::spherical_harmonics_double_backward", mutates_args=())
def double_backward(w: Tensor, g: Tensor, v: Tensor, l_max: int) -> tuple[Tensor, Tensor]:
    """Gradients of w . backward(g, v) by g and v."""
    by_g, by_v = v.new_empty(g.shape), v.new_empty(v.shape)
    inputs = (w.contiguous(), g.contiguous(), v.contiguous())
    _launch("double_backward", l_max, *inputs, by_g, by_v)
    return by_g, by_v


@forward.register_fake
def _(v: Tensor, l_max: int) -> Tensor:
    return v.new_empty(v.shape[0], (l_max + 1) ** 2)


@backward.register_fake
def _(g: Tensor, v: Tensor, l_max: int) -> Tensor:
    del g, l_max
    return v.new_empty(v.shape)


@double_backward.register_fake
def _(w: Tensor, g: Tensor, v: Tensor, l_max: int) -> tuple[Tensor, Tensor]:
    del w, l_max
    return v.new_empty(g.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    del output
    *tensors, ctx.l_max = inputs
    ctx.save_for_backward(*tensors)


def _forward_gradient(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
    return backward(g, *ctx.saved_tensors, ctx.l_max), None


def _backward_gradient(ctx: Any, w: Tensor) -> tuple[Tensor, Tensor, None]:
    return *double_backward(w, *ctx.saved_tensors, ctx.l_max), None


torch.library.register_autograd(forward, _forward_gradient, setup_context=_save)
torch.library.register_autograd(backward, _backward_gradient, setup_context=_save)


def _launch(kind: str, l_max: int, *tensors: Tensor) -> None:
    """Launch a kernel over all edges; vectors have 3 numbers each."""
    count = tensors[-1].shape[0]
    if not count:
        return
    block = BLOCK if tensors[0].is_cuda else INTERPRETED_BLOCK
    grid = (triton.cdiv(count, block),)
    wide = tensors[-1].dtype == torch.float64
    _kernel(kind, l_max)[grid](*tensors, count, BLOCK=block, WIDE=wide)


@cache
def _kernel(kind: str, l_max: int) -> Any:
    """Make a kernel, and its source known to tracebacks."""
    source = write_source(l_max, kind)
    name = f"<bevatron spherical_harmonics {kind} {l_max}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": __name__, "jit": triton.jit, "tl": tl}
    exec(compile(source, name, "exec"), namespace)  # noqa: S102  our own text, written just now
    return namespace[f"harmonics_{kind}"]
