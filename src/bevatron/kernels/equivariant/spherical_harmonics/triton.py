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
from bevatron.kernels.shared.custom_op import custom_op

BLOCK = 128
INTERPRETED_BLOCK = 4096


def spherical_harmonics(l_max: int, vectors: Tensor) -> Tensor:
    """Evaluate all degrees at once."""
    result: Tensor = forward(vectors, l_max)
    return result


@custom_op("spherical_harmonics", fake=lambda v, l_max: v.new_empty(v.shape[0], (l_max + 1) ** 2))
def forward(v: Tensor, l_max: int) -> Tensor:
    """Y [E, S] of v [E, 3]."""
    y = v.new_empty(v.shape[0], (l_max + 1) ** 2)
    _launch("forward", l_max, v.contiguous(), y)
    return y


@forward.backward()
def backward(g: Tensor, v: Tensor, l_max: int) -> Tensor:
    """Gradient of g . Y by v."""
    by_v = v.new_empty(v.shape)
    _launch("backward", l_max, g.contiguous(), v.contiguous(), by_v)
    return by_v


@backward.backward()
def double_backward(w: Tensor, g: Tensor, v: Tensor, l_max: int) -> tuple[Tensor, Tensor]:
    """Gradients of w . backward(g, v) by g and v."""
    by_g, by_v = v.new_empty(g.shape), v.new_empty(v.shape)
    inputs = (w.contiguous(), g.contiguous(), v.contiguous())
    _launch("double_backward", l_max, *inputs, by_g, by_v)
    return by_g, by_v


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
    """Build a kernel, and its source known to tracebacks."""
    source = write_source(l_max, kind)
    name = f"<bevatron spherical_harmonics {kind} {l_max}>"
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    namespace: dict[str, Any] = {"__name__": __name__, "jit": triton.jit, "tl": tl}
    exec(compile(source, name, "exec"), namespace)  # noqa: S102  our own text, written just now
    return namespace[f"harmonics_{kind}"]
