"""Compiles two kernels ahead of a launch, for a GPU that is not there; prints what was done."""

import json
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget

from bevatron.kernels.shared import triton_compile


@triton.jit
def add_one(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)  # [BLOCK]
    tl.store(x_ptr + i, x + 1, mask=i < n)


@triton.jit
def double(x_ptr, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < n)  # [BLOCK]
    tl.store(x_ptr + i, 2 * x, mask=i < n)


def as_on_hopper(**more: Any) -> GPUTarget:
    """Let Triton compile for an H100, with ``more`` of a driver."""
    target = GPUTarget("cuda", 90, 32)
    driver = SimpleNamespace(
        get_current_target=lambda: target,
        get_current_device=lambda: 0,
        get_current_stream=lambda _: 0,
        **more,
    )
    triton.runtime.driver.set_active(driver)
    return target


def say(found: dict[str, Any]) -> None:
    """Print a line in one piece, as several processes print."""
    os.write(1, f"{json.dumps(found)}\n".encode())


def main(how: str) -> None:
    as_on_hopper(
        launcher_cls=lambda source, metadata: say(
            {"launcher": [source.name, metadata.num_warps, os.getpid()]}
        )
    )
    x, lines = torch.zeros(16), []

    def work() -> None:
        for _ in range(2):
            add_one[(1,)](x, 16, BLOCK=16)
            double[(1,)](x, 16, BLOCK=16)
        double[(1,)](x, 16, BLOCK=32)
        if how == "failing":
            raise RuntimeError("no such thing")

    if how == "hanging":
        triton_compile.MOST_SECONDS = 3.0
        triton_compile._is_new = lambda *_: os.kill(os.getpid(), signal.SIGSTOP)
    number = triton_compile.compile_ahead(work, 1 if how == "alone" else 2, lines.append)
    say({"compiled": number, "lines": lines, "x": x.tolist()})


if __name__ == "__main__":
    main(sys.argv[1])
