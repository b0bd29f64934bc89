"""Weights joined by the kernel, interpreted or compiled."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs the package triton")

from bevatron.kernels.shared.triton_joined import join

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("sizes", [(700, 3), (1024, 1, 500, 2049), (5,)])
def test_tensors_lie_one_after_another_rounded(sizes):
    tensors = [torch.randn(size, device=DEVICE) for size in sizes]
    tensors[0] = tensors[0].half()
    joint = torch.empty(sum(sizes) + 1, device=DEVICE, dtype=torch.float16).fill_(7.0)
    join(tensors, joint[:-1])
    assert torch.equal(joint[:-1], torch.cat([tensor.half() for tensor in tensors]))
    assert joint[-1] == 7.0
