"""Weights rounded and concatenated in one launch, by many programs for each of them."""
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from bevatron.kernels.shared.launch import pointers
from bevatron.kernels.shared.triton_launch import launch

MOST = 4
"""Tensors."""
BLOCK = 1024


def join(tensors: Sequence[Tensor], joint: Tensor) -> None:
    """Write at most `MOST` tensors one after another, in the type of ``joint``."""
    missing = MOST - len(tensors)
    sizes = [*map(Tensor.numel, tensors), *[0] * missing]
    given = pointers(joint, *(tensor.contiguous() for tensor in tensors), *[None] * missing)
    launch(join_kernel, (-(-sum(sizes) // BLOCK),), (*given, joint), tuple(sizes), BLOCK=BLOCK)


@triton.jit
def _load_piece(Tensor, i, count):
    """Load those of these elements that a tensor has, zero for others."""
    return tl.load(Tensor + i, mask=(i >= 0) & (i < count), other=0.0).to(tl.float32)  # [BLOCK]


@triton.jit
def join_kernel(A, B, C, D, Joint, of_a, of_b, of_c, of_d, BLOCK: tl.constexpr):
    """Write BLOCK elements of the joint tensor."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    after_a, after_b = i - of_a, i - of_a - of_b
    x = _load_piece(A, i, of_a) + _load_piece(B, after_a, of_b)  # [BLOCK]
    # [BLOCK]
    x += _load_piece(C, after_b, of_c) + _load_piece(D, after_b - of_c, of_d)
    inside = i < of_a + of_b + of_c + of_d
    tl.store(Joint + i, x.to(Joint.dtype.element_ty), mask=inside)
