"""`bevatron bench`: each command prints the rows of one function of `recipes`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from bevatron.output import Result, print_rows, say
from bevatron.recipes.arguments import Capacity, Device, Dtype, RunFolder, StoreFolder

if TYPE_CHECKING:
    from bevatron.recipes.mace.step_cost import StepMeter


@dataclass(frozen=True)
class StepOptions:
    """The training steps to measure.

    Attributes
    ----------
    model : a preset, a run or a model folder
    """

    store: StoreFolder
    model: str = "default"
    device: Device = "auto"

    def meter(self, dtype: Dtype) -> "StepMeter":
        """Build a meter of these steps."""
        from bevatron.recipes.bench import step_meter

        return step_meter(self.store, self.model, self.device, dtype)


Steps = Annotated[StepOptions, tyro.conf.arg(name="")]


def bench_store(store: StoreFolder) -> Result:
    """Measure how long it takes to open a store and to read a sample.

    Examples
    --------
    bevatron bench store water-store
    """
    from bevatron.recipes.bench import store_rates

    return _rows(store_rates(store))


def bench_loader(
    store: StoreFolder, capacity: Capacity = 1024, workers: tuple[int, ...] = (0, 1, 2)
) -> Result:
    """Measure the throughput of the loader for several numbers of worker processes.

    Parameters
    ----------
    workers : numbers of worker processes to try

    Examples
    --------
    bevatron bench loader water-store --workers 0 1 2 4
    """
    from bevatron.recipes.bench import loader_rates

    return _rows(loader_rates(store, capacity, workers))


def bench_packing(store: StoreFolder, capacity: Capacity = 1024, ranks: int = 8) -> Result:
    """Compare how the packing algorithms fill batches and balance ranks.

    Parameters
    ----------
    ranks : processes that share an epoch

    Examples
    --------
    bevatron bench packing water-store --capacity 512 --ranks 8
    """
    from bevatron.recipes.bench import packing_figures

    return _rows(packing_figures(store, capacity, ranks))


def bench_cost(steps: Steps, dtype: Dtype = "float32", most: int = 4096) -> Result:
    """Fit the cost of a training step by atoms, edges and structures, for balanced batches.

    Parameters
    ----------
    most : atoms of the largest batch

    Examples
    --------
    bevatron bench cost water-store --model runs/water
    """
    from bevatron.recipes.bench import cost_model

    rows, lines = cost_model(steps.meter(dtype), most)
    return _rows(rows, lines)


def bench_capacity(
    steps: Steps,
    dtype: tuple[Dtype, ...] = ("float32", "float64"),
    most: int = 65536,
    out: Path = Path("capacity.png"),
) -> Result:
    """Measure atoms per second by batch size, and on a GPU the largest batch that fits.

    Parameters
    ----------
    dtype : precisions, one curve each
    most : atoms of the largest batch
    out : file for the figure

    Examples
    --------
    bevatron bench capacity water-store --model paper --dtype float32
    """
    from bevatron.recipes.bench import capacity_curves

    rows, lines = capacity_curves({name: partial(steps.meter, name) for name in dtype}, most, out)
    return _rows(rows, lines)


def bench_profile(
    run: RunFolder,
    steps: int | None = None,
    warm: int = 10,
    device: str | None = None,
    out: Path | None = None,
) -> Result:
    """Trace steps of a run: time by kind of work, idle time, memory by module, what would help.

    The run itself is not changed: the steps start from new weights.

    Parameters
    ----------
    run : folder of a run, or a YAML file
    steps : number of steps to time, and then to trace; 50 on a GPU, 3 elsewhere by default
    warm : Warm-up steps; in the first, all batch shapes are captured where CUDA graphs are used
    device : ``auto``, cpu, cuda or cuda:N; the run's by default
    out : folder for profile.json and figures; ``profile`` in the run's folder by default

    Examples
    --------
    bevatron bench profile runs/water --steps 20
    """
    from bevatron.recipes.bench_profile import profile_folder

    tables, lines = profile_folder(run, steps, warm, device, out)

    def show() -> None:
        for title, rows in tables:
            print_rows(rows, title)
        say(*lines)

    return Result({**dict(tables), "notes": list(lines)}, show)


def _rows(rows: Sequence[dict[str, Any]], lines: Sequence[str] = ()) -> Result:
    """Make a result of one table and the lines below it."""

    def show() -> None:
        print_rows(rows)
        say(*lines)

    return Result({"rows": list(rows), "notes": list(lines)}, show)
