"""While the tests run, an interpreted kernel that leaves its tensors raises; see bounds."""

import pytest
import torch

pytest.importorskip("triton")
import triton
import triton.language as tl

import bounds

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are not interpreted")


@triton.jit
def copy(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i, mask=i < n, other=0.0), mask=i < n)  # [BLOCK]


@triton.jit
def add(X, Y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(Y + i, tl.load(X + i, mask=i < 1, other=0.0), mask=i < n)  # [BLOCK]


def run(kernel, x, y, n):
    bounds.install()  # as the first import of a kernel of the package does
    kernel[(2,)](x, y, n, BLOCK=8)


def test_a_kernel_that_stays_within_its_tensors_runs():
    x, y = torch.randn(12), torch.zeros(12)
    run(copy, x, y, 12)
    assert torch.equal(x, y)
    run(copy, x[:0], y[:0], 0)
    whole = torch.zeros(40)
    run(copy, x[::2], whole[3:], 11)  # up to where the last element is
    assert torch.equal(whole[3:14], x[:11])


@pytest.mark.parametrize(("kernel", "x", "y"), [(copy, 11, 12), (copy, 12, 11), (add, 12, 11)])
def test_a_kernel_that_touches_what_is_beside_its_tensors_raises(kernel, x, y):
    memory = torch.zeros(200)
    with pytest.raises(Exception, match=f"{kernel.__name__} touches 1 elements beyond"):
        run(kernel, memory[:x], memory[100:][:y], 12)
