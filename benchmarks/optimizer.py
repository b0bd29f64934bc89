"""Times the second half of a step on a GPU: clipping, optimiser and averaged weights.

    python benchmarks/optimizer.py

The floor counts every tensor once: weights, gradient, moments and averages read, all but the
gradient written, and the gradient read once more for its norm; over the rate of a large copy.
"""

import statistics
from collections.abc import Callable
from typing import Any

import torch
from report import write_result
from torch import nn

from bevatron.models.mace import MACE, MaceConfig
from bevatron.train.cuda_graphs import Recorder
from bevatron.train.device_update import DeviceUpdate
from bevatron.train.optim import AveragedWeights, clip_gradients, make_optimizer
from bevatron.train.settings import OptimConfig
from bevatron.train.state import TrainState

OPTIM = OptimConfig(algorithm="amsgrad", clip=10.0, ema=0.99, fused=True)


class Many(nn.Module):
    """Parameters of a network with thousands of small layers."""

    def __init__(self, number: int, size: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(size)) for _ in range(number))


def mace(preset: str, num_elements: int) -> MACE:
    """Make a model for the first so many elements."""
    config = MaceConfig.preset(preset).with_data(
        atomic_numbers=tuple(range(1, num_elements + 1)),
        atomic_energies=((-1.0,) * num_elements,),
        avg_num_neighbors=20.0,
    )
    return MACE(config)


def milliseconds(work: Callable[[], Any], repeats: int = 30) -> float:
    """Median time on the device."""
    times = []
    for i in range(repeats + 3):
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
    return Recorder(torch.device("cuda")).record(update.run, update.rehearse)


def main() -> None:
    """Measure and write the result."""
    rate, rows = copy_rate(), []
    models = {
        "MACE paper, 10 elements": mace("paper", 10),
        "MACE MP-0 medium, 89 elements": mace("mp-0-medium", 89),
        "4000 tensors of 4096": Many(4000, 4096),
        "4000 tensors of 64": Many(4000, 64),
    }
    for name, model in models.items():
        model.cuda().float()
        numbers = sum(p.numel() for p in model.parameters())
        floor = 12 * 4 * numbers / rate * 1e3
        plain, graph = milliseconds(launched(model)), milliseconds(recorded(model))
        row = {"model": name, "tensors": len(list(model.parameters())), "numbers": numbers}
        row |= {"launched ms": plain, "recorded ms": graph, "floor ms": floor}
        rows.append(row | {"recorded/floor": graph / floor})
        print(rows[-1], flush=True)
    notes = (
        f"float32, AMSGrad, clipping, averages; copy rate {rate / 1e12:.2f} TB/s, medians of 30."
    )
    write_result("optimizer", rows, notes, device="cuda")


if __name__ == "__main__":
    main()
