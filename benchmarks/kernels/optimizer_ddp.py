"""Times clipping from DDP's buckets on several GPUs, against a norm taken after the reduction.

    torchrun --nproc-per-node 2 -m benchmarks.kernels.optimizer_ddp

A step is forward, backward with DDP's reduction over NCCL, and `FusedAdamEMA`. "buckets" takes the
global norm from DDP's buckets (`clip_from_buckets`), "after" lets the optimiser read all gradients
again. Both must give the same norms and weights as one device that sees all rows. A trace tells how
much of the time of the sums of squares overlaps with the reduction of the buckets.
"""

import argparse
import itertools
import os
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.common.arguments import add_out
from benchmarks.common.report import write_result
from benchmarks.common.timing import median_ms
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from bevatron.train.fused_optim import FusedAdamEMA

LAYERS, WIDTH, ROWS, CLIP = 24, 2048, 4096, 1e-3
CHECKED_STEPS, TIMED_STEPS, WARM_UP = 3, 20, 5


def network() -> nn.Module:
    """Make 24 layers with 101 million parameters."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers).cuda()


def rows_of(step: int, rank: int) -> torch.Tensor:
    """Draw a rank's rows of a step."""
    generator = torch.Generator(device="cuda").manual_seed(1000 * step + rank)
    return torch.randn(ROWS, WIDTH, device="cuda", generator=generator)


def loss_of(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute a loss with matmuls in bfloat16."""
    with torch.autocast("cuda", torch.bfloat16):
        y = model(x)
    return (y.float() - x).square().mean()


def prepared(how: str) -> tuple[nn.Module, FusedAdamEMA]:
    """Make the model and its optimiser; ``alone`` is one device without DDP."""
    model = network()
    if how != "alone":
        model = DistributedDataParallel(model)
    optimizer = FusedAdamEMA(model.parameters(), lr=1e-4, clip=CLIP)
    if how == "buckets":
        optimizer.clip_from_buckets(model)
    return model, optimizer


def learned(how: str) -> tuple[list[torch.Tensor], list[float]]:
    """Return weights and norms after a few steps."""
    model, optimizer = prepared(how)
    norms = []
    for step in range(CHECKED_STEPS):
        if how == "alone":
            ranks = range(distributed.get_world_size())
            for rank in ranks:
                (loss_of(model, rows_of(step, rank)) / len(ranks)).backward()
        else:
            loss_of(model, rows_of(step, distributed.get_rank())).backward()
        optimizer.step()
        norms.append(float(optimizer.grad_norm))
    return [parameter.detach().clone() for parameter in model.parameters()], norms


def check() -> None:
    """Compare both ways with one device; exit if they differ."""
    weights, norms = learned("alone")
    start = [parameter.detach() for parameter in network().parameters()]
    moved = max(float((a - b).abs().max()) for a, b in zip(weights, start, strict=True))
    for how in ("after", "buckets"):
        others, found = learned(how)
        for norm, expected in zip(found, norms, strict=True):
            if not abs(norm - expected) < 1e-3 * expected:
                raise SystemExit(f"{how}: norm {norm}, on one device {expected}")
        # Adam's first steps do not depend on the size of gradients, so most weights must agree.
        off = [
            ((a - b).abs() > 0.1 * moved).float().mean()
            for a, b in zip(weights, others, strict=True)
        ]
        if not float(torch.stack(off).max()) < 0.02:
            raise SystemExit(f"{how}: weights differ from those of one device")


def step_ms(step: Callable[[int], None]) -> float:
    """Median milliseconds of a step, from the device's clock."""
    numbers = itertools.count()
    return median_ms(lambda: step(next(numbers)), TIMED_STEPS, warm_up=WARM_UP)


def overlap(step: Callable[[int], None]) -> dict[str, float]:
    """Trace steps: milliseconds of reductions and of sums of squares, and the overlapped part.

    Sums of squares run in their own streams; those that end before the last reduction of a step
    overlap with communication.
    """
    sums, reductions, hidden = 0.0, 0.0, 0.0
    for i in range(CHECKED_STEPS):
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            step(i)
            torch.cuda.synchronize()
        on_device = [e for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        events = [e for e in on_device if not e.is_user_annotation]
        travel = [e for e in events if "nccl" in e.name.lower()]
        last = max(e.time_range.end for e in travel)
        main = {e.device_resource_id for e in events if "gemm" in e.name or "nvjet" in e.name}
        apart = {e.device_resource_id for e in travel} | main
        squares = [e for e in events if e.device_resource_id not in apart]
        reductions += sum(e.time_range.elapsed_us() for e in travel)
        sums += sum(e.time_range.elapsed_us() for e in squares)
        hidden += sum(e.time_range.elapsed_us() for e in squares if e.time_range.end <= last)
    number = 1e3 * CHECKED_STEPS
    return {
        "reductions ms": reductions / number,
        "sums of squares ms": sums / number,
        "of it beside reductions": hidden / sums if sums else 0.0,
    }


def stepping(how: str) -> Callable[[int], None]:
    """Return a step of one way."""
    model, optimizer = prepared(how)
    x = rows_of(0, distributed.get_rank())

    def step(_number: int) -> None:
        loss_of(model, x).backward()
        optimizer.step()

    return step


def main() -> None:
    """Check, time both ways and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_out(parser)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    distributed.init_process_group(
        "nccl", device_id=torch.device("cuda", torch.cuda.current_device())
    )
    check()
    rows: list[dict[str, Any]] = []
    for how in ("after", "buckets", "after", "buckets"):
        row = {"norm": how, "GPUs": distributed.get_world_size(), "step ms": step_ms(stepping(how))}
        rows.append(row)
        if distributed.get_rank() == 0:
            print(row, flush=True)
    # Last, because launches stay slower after profiling.
    rows[-1] |= overlap(stepping("buckets"))
    if distributed.get_rank() == 0:
        parameters = LAYERS * WIDTH * (WIDTH + 1)
        notes = (
            f"{parameters / 1e6:.0f} million float32 parameters, {ROWS} rows on each GPU, matmuls "
            "in bfloat16; DDP over NCCL with buckets of 25 MB; clipping, AdamW, moving average. "
            "Norms and weights were first compared with those of one device."
        )
        write_result("kernels/optimizer_ddp", rows, notes, device="cuda", folder=options.out)
    distributed.barrier()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
