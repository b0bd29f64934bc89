"""`bevatron bench`: each command prints the rows of one function of `recipes`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bevatron.recipes.arguments import RunFolder, StoreFolder, print_rows, say

if TYPE_CHECKING:
    from bevatron.recipes.mace.step_cost import StepMeter


Dtype = Literal["float32", "float64"]


@dataclass(frozen=True)
class StepOptions:
    """Which training steps to measure.

    Attributes
    ----------
    store
        A prepared store.
    model
        A preset, a run or a model folder.
    device
        auto, cpu, cuda or cuda:N.
    """

    store: StoreFolder
    model: str = "default"
    device: str = "auto"

    def meter(self, dtype: Dtype) -> "StepMeter":
        """Make a meter of these steps."""
        from bevatron.recipes.bench import step_meter

        return step_meter(self.store, self.model, self.device, dtype)


Steps = Annotated[StepOptions, tyro.conf.arg(name="")]


def bench_store(store: StoreFolder) -> None:
    """Measure how long it takes to open a store and to read a sample.

    Parameters
    ----------
    store
        A prepared store.
    """
    from bevatron.recipes.bench import store_rates

    print_rows(store_rates(store))


def bench_loader(
    store: StoreFolder, capacity: int = 1024, workers: tuple[int, ...] = (0, 1, 2)
) -> None:
    """Measure how many structures a second reach the step for numbers of worker processes.

    Parameters
    ----------
    store
        A prepared store.
    capacity
        Atoms of a batch at most.
    workers
        Numbers to try.
    """
    from bevatron.recipes.bench import loader_rates

    print_rows(loader_rates(store, capacity, workers))


def bench_packing(store: StoreFolder, capacity: int = 1024, ranks: int = 8) -> None:
    """Compare how the packing algorithms fill batches and balance ranks.

    Parameters
    ----------
    store
        A prepared store.
    capacity
        Atoms of a batch at most.
    ranks
        Processes that share an epoch.
    """
    from bevatron.recipes.bench import packing_figures

    print_rows(packing_figures(store, capacity, ranks))


def bench_cost(steps: Steps, dtype: Dtype = "float32", most: int = 4096) -> None:
    """Fit what a training step costs by atoms, edges and structures, for balanced batches.

    Parameters
    ----------
    steps
        Which training steps.
    dtype
        Precision.
    most
        Atoms of the largest batch.
    """
    from bevatron.recipes.bench import cost_model

    rows, lines = cost_model(steps.meter(dtype), most)
    print_rows(rows)
    say(*lines)


def bench_capacity(
    steps: Steps,
    dtype: tuple[Dtype, ...] = ("float32", "float64"),
    most: int = 65536,
    out: Path = Path("capacity.png"),
) -> None:
    """Measure atoms per second by the size of a batch, and on a GPU the largest that fits.

    Parameters
    ----------
    steps
        Which training steps.
    dtype
        Precisions, a curve each.
    most
        Atoms of the largest batch.
    out
        Picture to write.
    """
    from bevatron.recipes.bench import capacity_curves

    rows, lines = capacity_curves({name: partial(steps.meter, name) for name in dtype}, most, out)
    print_rows(rows)
    say(*lines)


def bench_profile(
    run: RunFolder,
    steps: int = 50,
    warm: int = 10,
    device: str | None = None,
    out: Path | None = None,
) -> None:
    """Trace steps of a run: time by kind of work, idle time, memory by module, what would help.

    The run itself is not touched: the steps begin with new weights in a folder of their own.

    Parameters
    ----------
    run
        Folder of a run, or a YAML file.
    steps
        To time, and then to trace.
    warm
        Steps before; the first records all shapes of batches where steps are CUDA graphs.
    device
        auto, cpu, cuda or cuda:N instead of that of the run.
    out
        Folder for profile.json and pictures; ``profile`` in the run's folder by default.
    """
    from bevatron.recipes.bench_profile import profile_folder

    tables, lines = profile_folder(run, steps, warm, device, out)
    for title, rows in tables:
        say(f"\n{title}")
        print_rows(rows)
    say(*lines)
