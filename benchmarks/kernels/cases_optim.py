"""Times the second half of a step on a GPU: clipping, optimiser and averaged weights.

    python -m benchmarks.kernels.run

`FusedAdamEMA` as users call it beside torch's fused AdamW with `clip_grad_norm_` and
`_foreach_lerp_`, and the half that `DeviceUpdate` records of a captured step. Both are checked
against AdamW in float64 first. The floor counts every tensor once: weights, gradient, moments and
averages read, all but the gradient written, and the gradient read once more for its norm; over the
rate of a large copy.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.common.report import write_result
from torch import nn

from bevatron.models.mace import MACE, MaceConfig
from bevatron.train.capture.cuda_graphs import GraphPool
from bevatron.train.capture.device_update import DeviceUpdate
from bevatron.train.fused_optim import FusedAdamEMA
from bevatron.train.optim import AveragedWeights, clip_gradients, make_optimizer
from bevatron.train.settings import OptimConfig
from bevatron.train.state import TrainState

OPTIM = OptimConfig(algorithm="amsgrad", clip=10.0, ema=0.99, fused=True)
CLIP, DECAY = 0.1, 0.999
BLOCK = (
    *[(128,)] * 20,
    *[(256,)] * 20,
    *[(128, 128)] * 21,
    *[(256, 256)] * 8,
    *[(512, 128)] * 8,
    *[(256, 1024)] * 2,
    *[(4, 128)] * 2,
    *[(8, 256)] * 4,
)
"""Shapes of one block of an Evoformer-like network; 48 of these have 4,080 tensors."""


class Many(nn.Module):
    """Parameters of a network with thousands of small layers."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def backward(self) -> None:
        """Give every parameter a gradient, as a backward pass does."""
        weights = list(self.weights)
        torch.autograd.backward(weights, torch._foreach_mul([w.detach() for w in weights], 2.0))  # noqa: SLF001


def mace(preset: str, num_elements: int) -> MACE:
    """Make a model for the first so many elements."""
    config = MaceConfig.preset(preset).with_data(
        atomic_numbers=tuple(range(1, num_elements + 1)),
        atomic_energies=((-1.0,) * num_elements,),
        avg_num_neighbors=20.0,
    )
    return MACE(config)


def milliseconds(
    work: Callable[[], Any], repeats: int = 30, before: Callable[[], Any] | None = None
) -> float:
    """Median time from the first launch to the end of the device's work."""
    times = []
    for i in range(repeats + 3):
        if before is not None:
            before()
            torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if i >= 3:
            times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_rate() -> float:
    """Bytes per second of a large copy, read and written."""
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) * 1e3


def launched(model: nn.Module) -> Callable[[], Any]:
    """Do the same without recording, as the plain step does."""
    optimizer = make_optimizer(model, OPTIM)
    ema = AveragedWeights(model, 0.99)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def work() -> None:
        clip_gradients(parameters, OPTIM.clip)
        optimizer.step()
        ema.update(model)

    return work


def recorded(model: nn.Module) -> Callable[[], Any]:
    """Record the captured step's second half."""
    ema = AveragedWeights(model, 0.99)
    update = DeviceUpdate(TrainState(model, make_optimizer(model, OPTIM), ema), OPTIM.clip)
    update.set(1e-3, float("inf"))
    return GraphPool(torch.device("cuda")).capture(update.run, update.warm_up)


def replay_of(work: Callable[[], Any]) -> Callable[[], Any]:
    """Record a call that has been made before as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def host_ms(work: Callable[[], Any], before: Callable[[], Any], repeats: int = 10) -> float:
    """Median time until a call returns, the device idle before."""
    times = []
    for _ in range(repeats):
        before()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def fused_times(model: Many, copies: torch.dtype | None) -> dict[str, float]:
    """Time `FusedAdamEMA`: a step after a backward pass, and its replay."""
    parameters = list(model.parameters())
    optimizer = FusedAdamEMA(parameters, weight_decay=0.01, clip=CLIP, decay=DECAY, copies=copies)
    found = {
        "launched ms": milliseconds(optimizer.step, 10, model.backward),
        "host ms": host_ms(optimizer.step, model.backward),
    }
    model.backward()
    optimizer.advance()
    found["recorded ms"] = milliseconds(replay_of(optimizer.step))
    for parameter in parameters:
        parameter.grad = None
    return found


def torch_step(parameters: list[nn.Parameter], copies: torch.dtype | None) -> Callable[[], None]:
    """Do what `FusedAdamEMA.step` does with what torch has for it."""
    optimizer = torch.optim.AdamW(parameters, weight_decay=0.01, fused=True, capturable=True)
    averages = [parameter.detach().clone() for parameter in parameters]
    weights = [parameter.detach() for parameter in parameters]
    twins = [] if copies is None else [weight.to(copies) for weight in weights]

    def work() -> None:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        torch._foreach_lerp_(averages, weights, 1 - DECAY)
        if twins:
            torch._foreach_copy_(twins, weights)

    return work


def torch_times(model: Many, copies: torch.dtype | None) -> dict[str, float]:
    """Time torch's way; its gradients stay as they are."""
    parameters = list(model.parameters())
    model.backward()
    work = torch_step(parameters, copies)
    found = {"torch launched ms": milliseconds(work, 10), "torch host ms": host_ms(work, work, 5)}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    found["torch recorded ms"] = milliseconds(replay_of(work))
    for parameter in parameters:
        parameter.grad = None
    return found


def check() -> None:
    """Compare three recorded and three launched steps with AdamW in float64."""
    torch.manual_seed(0)
    model = Many(list(BLOCK)).cuda()
    exact = [nn.Parameter(weight.detach().double()) for weight in model.parameters()]
    averages = [weight.detach().clone() for weight in exact]
    ours = FusedAdamEMA(model.parameters(), lr=1e-2, weight_decay=0.01, clip=CLIP, decay=DECAY)
    theirs = torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.01)
    replay = None
    for step in range(1, 7):
        model.backward()
        for parameter, weight in zip(model.parameters(), exact, strict=True):
            weight.grad = parameter.grad.double()
        if step == 4:
            replay = replay_of(ours.step)
        if replay is None:
            ours.step()
        else:
            ours.advance()
            replay()
        nn.utils.clip_grad_norm_(exact, CLIP)
        theirs.step()
        share = 1 - min(DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(averages, exact, share)
    for got, want in ((list(model.parameters()), exact), (ours.averages, averages)):
        for a, b in zip(got, want, strict=True):
            error = (a.detach().double() - b.detach()).abs().max() / b.detach().abs().max()
            if not float(error) < 1e-5:
                raise SystemExit(f"FusedAdamEMA is off by {float(error):.1e}")


def public_rows(rate: float) -> list[dict[str, Any]]:
    """Time 93 million parameters in 4,080 tensors."""
    rows: list[dict[str, Any]] = []
    for copies in (None, torch.bfloat16):
        torch.manual_seed(0)
        model = Many(list(BLOCK) * 48).cuda()
        numbers = sum(p.numel() for p in model.parameters())
        floor = (40 + (copies is not None) * 2) * numbers / rate * 1e3
        row: dict[str, Any] = {
            "model": f"FusedAdamEMA, AdamW{', bfloat16 copies' if copies is not None else ''}",
            "tensors": len(list(model.parameters())),
            "numbers": numbers,
        }
        row |= {**fused_times(model, copies), "floor ms": floor}
        row |= {f"{how}/floor": row[f"{how} ms"] / floor for how in ("recorded", "launched")}
        row |= torch_times(model, copies)
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Check, measure and write the result."""
    check()
    rate = copy_rate()
    rows = public_rows(rate)
    models = {
        "MACE paper, 10 elements": mace("paper", 10),
        "MACE MP-0 medium, 89 elements": mace("mp-0-medium", 89),
        "4000 tensors of 4096": Many([(4096,)] * 4000),
        "4000 tensors of 64": Many([(64,)] * 4000),
    }
    for name, model in models.items():
        model.cuda().float()
        numbers = sum(p.numel() for p in model.parameters())
        floor = 12 * 4 * numbers / rate * 1e3
        row = {"model": f"DeviceUpdate, AMSGrad: {name}", "tensors": len(list(model.parameters()))}
        row |= {"numbers": numbers, "torch launched ms": milliseconds(launched(model), 10)}
        row |= {"recorded ms": milliseconds(recorded(model)), "floor ms": floor}
        rows.append(row | {"recorded/floor": row["recorded ms"] / floor})
        print(rows[-1], flush=True)
    notes = (
        "float32; clipping by the global norm, averages. launched: from the first launch of a step "
        "to the end of the device's work, the device idle before; host: until the call returns; "
        f"recorded: replay of a CUDA graph. Copy rate {rate / 1e12:.2f} TB/s; medians."
    )
    write_result("kernels/optimizer", rows, notes, device="cuda")


if __name__ == "__main__":
    main()
