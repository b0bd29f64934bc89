r"""The radial basis in Triton: Bessel functions times a polynomial cutoff, :math:`R = c f u`.

With :math:`f = \sin(w r)/r`: :math:`f' = (w \cos(w r) - f)/r`, :math:`f'' = -(w^2 \sin(w r) + 2
f')/r`. With :math:`x = r/r_{max}`, :math:`k = p(p+1)(p+2)/2`: :math:`u' = -k x^{p-1} (1-x)^2 /
r_{max}`, :math:`u'' = -k x^{p-2} (1-x) (p - 1 - (p+1) x) / r_{max}^2`.

One kernel per order of derivative; a program owns ``BLOCK`` edges and evaluates all functions,
padded to ``FUNCTIONS``, in registers. ``forward`` -> ``backward`` -> ``double_backward``; the last
is not differentiable.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from torch import Tensor

from bevatron.errors import KernelError
from bevatron.kernels.shared.custom_op import custom_op
from bevatron.kernels.shared.triton_math import cutoff

BLOCK = 128
INTERPRETED_BLOCK = 4096


def radial_basis(
    lengths: Tensor, frequencies: Tensor, prefactor: Tensor, r_max: Tensor, order: int
) -> Tensor:
    """Evaluate all functions at once."""
    constants = (frequencies, prefactor, r_max)
    if any(tensor.requires_grad for tensor in constants):
        raise KernelError(
            "radial_basis: Triton differentiates with respect to the lengths only; "
            "use(radial_basis='reference') gives those by frequencies, prefactor and r_max"
        )
    dtype = lengths.dtype
    result: Tensor = forward(lengths, *(tensor.to(dtype) for tensor in constants), order)
    return result


@custom_op("radial_basis", fake=lambda r, w: r.new_empty(r.shape[0], w.shape[0]))
def forward(r: Tensor, w: Tensor, c: Tensor, r_max: Tensor, order: int) -> Tensor:
    """R [E, B] of r [E]."""
    out = r.new_empty(r.shape[0], w.shape[0])
    _launch(radial_basis_forward, (r.contiguous(), w, c, r_max, out), order)
    return out


@forward.backward("r")
def backward(g: Tensor, r: Tensor, w: Tensor, c: Tensor, r_max: Tensor, order: int) -> Tensor:
    """Gradient of g . R with respect to r."""
    by_r = torch.empty_like(r, memory_format=torch.contiguous_format)
    _launch(radial_basis_backward, (g.contiguous(), r.contiguous(), w, c, r_max, by_r), order)
    return by_r


@backward.backward("g r")
def double_backward(
    v: Tensor, g: Tensor, r: Tensor, w: Tensor, c: Tensor, r_max: Tensor, order: int
) -> tuple[Tensor, Tensor]:
    """Gradients of v . backward(g, r) by g and r."""
    by_g = torch.empty_like(g, memory_format=torch.contiguous_format)
    by_r = torch.empty_like(r, memory_format=torch.contiguous_format)
    inputs = (v.contiguous(), g.contiguous(), r.contiguous())
    _launch(radial_basis_double_backward, (*inputs, w, c, r_max, by_g, by_r), order)
    return by_g, by_r


def _launch(kernel: Any, tensors: tuple[Tensor, ...], order: int) -> None:
    """Launch a kernel over all edges; the last tensor has a row for each."""
    last = tensors[-1]
    num_functions = next(t.shape[1] for t in tensors if t.ndim == 2)
    if not last.shape[0]:
        return
    block = BLOCK if last.is_cuda else INTERPRETED_BLOCK
    kernel[(triton.cdiv(last.shape[0], block),)](
        *tensors, last.shape[0], num_functions,
        P=order, BLOCK=block, FUNCTIONS=triton.next_power_of_2(num_functions),
        WIDE=last.dtype == torch.float64,
    )  # fmt: skip


@triton.jit
@no_type_check
def radial_basis_forward(
    r_ptr, w_ptr, c_ptr, r_max_ptr, out_ptr, count, num_functions,
    P: tl.constexpr, BLOCK: tl.constexpr, FUNCTIONS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute R = c f u."""
    T: tl.constexpr = tl.float64 if WIDE else tl.float32
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = tl.arange(0, FUNCTIONS)
    r = tl.load(r_ptr + e, mask=e < count, other=1.0).to(T)  # [BLOCK]
    w = tl.load(w_ptr + b, mask=b < num_functions, other=0.0).to(T)  # [FUNCTIONS]
    r_max = tl.load(r_max_ptr).to(T)  # []
    u, _, _ = cutoff(r, r_max, P)
    f = tl.sin(w[None, :] * r[:, None]) / r[:, None]  # [BLOCK, FUNCTIONS]
    offsets = e[:, None] * num_functions + b[None, :]
    mask = (e < count)[:, None] & (b < num_functions)[None, :]
    out_ptr += offsets
    tl.store(out_ptr, tl.load(c_ptr).to(T) * f * u[:, None], mask=mask)  # [BLOCK, FUNCTIONS]


@triton.jit
@no_type_check
def radial_basis_backward(
    g_ptr, r_ptr, w_ptr, c_ptr, r_max_ptr, dr_ptr, count, num_functions,
    P: tl.constexpr, BLOCK: tl.constexpr, FUNCTIONS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute dr = sum over functions of g R'."""
    T: tl.constexpr = tl.float64 if WIDE else tl.float32
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = tl.arange(0, FUNCTIONS)
    offsets = e[:, None] * num_functions + b[None, :]
    mask = (e < count)[:, None] & (b < num_functions)[None, :]
    r = tl.load(r_ptr + e, mask=e < count, other=1.0).to(T)  # [BLOCK]
    w = tl.load(w_ptr + b, mask=b < num_functions, other=0.0).to(T)  # [FUNCTIONS]
    g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(T)  # [BLOCK, FUNCTIONS]
    r_max = tl.load(r_max_ptr).to(T)  # []
    u, du, _ = cutoff(r, r_max, P)
    phase = w[None, :] * r[:, None]  # [BLOCK, FUNCTIONS]
    f = tl.sin(phase) / r[:, None]
    df = (w[None, :] * tl.cos(phase) - f) / r[:, None]
    c = tl.load(c_ptr).to(T)  # []
    first = c * (df * u[:, None] + f * du[:, None])  # [BLOCK, FUNCTIONS]
    tl.store(dr_ptr + e, tl.sum(g * first, axis=1), mask=e < count)  # [BLOCK]


@triton.jit
@no_type_check
def radial_basis_double_backward(
    v_ptr, g_ptr, r_ptr, w_ptr, c_ptr, r_max_ptr, grad_g_ptr, grad_r_ptr, count, num_functions,
    P: tl.constexpr, BLOCK: tl.constexpr, FUNCTIONS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Compute grad_g = v R' and grad_r = v times the sum over functions of g R''."""
    T: tl.constexpr = tl.float64 if WIDE else tl.float32
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b = tl.arange(0, FUNCTIONS)
    offsets = e[:, None] * num_functions + b[None, :]
    mask = (e < count)[:, None] & (b < num_functions)[None, :]
    r = tl.load(r_ptr + e, mask=e < count, other=1.0).to(T)  # [BLOCK]
    v = tl.load(v_ptr + e, mask=e < count, other=0.0).to(T)  # [BLOCK]
    w = tl.load(w_ptr + b, mask=b < num_functions, other=0.0).to(T)  # [FUNCTIONS]
    g = tl.load(g_ptr + offsets, mask=mask, other=0.0).to(T)  # [BLOCK, FUNCTIONS]
    c = tl.load(c_ptr).to(T)  # []
    r_max = tl.load(r_max_ptr).to(T)  # []
    u, du, ddu = cutoff(r, r_max, P)
    phase = w[None, :] * r[:, None]  # [BLOCK, FUNCTIONS]
    sine = tl.sin(phase)
    f = sine / r[:, None]
    df = (w[None, :] * tl.cos(phase) - f) / r[:, None]
    ddf = -(w[None, :] * w[None, :] * sine + 2.0 * df) / r[:, None]
    first = c * (df * u[:, None] + f * du[:, None])
    second = c * (ddf * u[:, None] + 2.0 * df * du[:, None] + f * ddu[:, None])
    tl.store(grad_g_ptr + offsets, v[:, None] * first, mask=mask)  # [BLOCK, FUNCTIONS]
    tl.store(grad_r_ptr + e, v * tl.sum(g * second, axis=1), mask=e < count)  # [BLOCK]
