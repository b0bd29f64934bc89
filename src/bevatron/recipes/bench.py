"""`bevatron bench`: rates of store, loader and packing on the user's own data and machine."""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import numpy as np

from bevatron.data.dataset import Subset
from bevatron.data.loader import Loader
from bevatron.data.packing import Algorithm, Plan, pack
from bevatron.data.samples import collate_structures
from bevatron.data.store.store import Store
from bevatron.errors import ConfigError, OutOfMemoryError
from bevatron.models.mace import (
    MACE,
    PRESETS,
    MaceConfig,
    MaceTask,
    Statistics,
    load_model,
    statistics,
)
from bevatron.output import note, number
from bevatron.parallel.mesh import choose_device
from bevatron.recipes.mace import SYSTEM
from bevatron.recipes.mace.capacity import find_capacity
from bevatron.recipes.mace.data import batch_sizes
from bevatron.recipes.mace.step_cost import (
    TERMS,
    StepCost,
    StepMeter,
    fit_cost,
    saturation,
    smallest_measured,
)
from bevatron.recipes.mace.stores import open_store
from bevatron.train.precision import dtype_of
from bevatron.train.report import plots

Rows = list[dict[str, Any]]
Dtype = Literal["float32", "float64"]

SATURATED = 0.9
"""Fraction of the highest rate above which a device counts as saturated."""

POOR_FIT = 0.2
"""Relative error from which on fitted costs balance no batches."""


READS = 5000
"""Samples that are read to time a store."""


def store_rates(path: Path) -> Rows:
    """Time opening a store and reading random samples, checksum included."""
    began = time.perf_counter()
    store = open_store(path)
    opened = time.perf_counter() - began
    order = np.random.default_rng(0).integers(len(store), size=READS).tolist()
    for index in order[: READS // 5]:
        store[index]
    times = []
    for index in order:
        began = time.perf_counter()
        store[index]
        times.append(time.perf_counter() - began)
    sizes = batch_sizes(store)
    return [
        {
            "samples": len(store),
            "atoms": f"{sizes['atoms'].mean():.1f}",
            "edges": f"{sizes['edges'].mean():.0f}",
            "open ms": f"{opened * 1e3:.1f}",
            "read µs (median)": f"{median(times) * 1e6:.1f}",
            "read µs (99 %)": f"{np.quantile(times, 0.99) * 1e6:.1f}",
        }
    ]


def loader_rates(path: Path, capacity: int, workers: Sequence[int]) -> Rows:
    """Time the second epoch of batches for several numbers of worker processes."""
    store = open_store(path)
    plan = _plan(store, capacity, 1, "balanced")
    rows = []
    for count in workers:
        atoms, graphs = 0, 0
        with Loader(store, plan.flat(0), collate_structures, workers=count) as loader:
            for _ in loader:
                pass  # starts the workers and fills the page cache
            loader.set_batches(plan.flat(0))
            began = time.perf_counter()
            for loaded in loader:
                atoms += loaded.batch.num_atoms
                graphs += loaded.batch.num_graphs
        seconds = time.perf_counter() - began
        rows.append(
            {
                "workers": count,
                "structures/s": f"{graphs / seconds:,.0f}",
                "atoms/s": f"{atoms / seconds:,.0f}",
                "batches/s": f"{plan.num_steps / seconds:,.0f}",
            }
        )
    return rows


def packing_figures(path: Path, capacity: int, ranks: int) -> Rows:
    """Compare the packing algorithms on the sizes of a store."""
    store = open_store(path)
    rows = []
    for algorithm in get_args(Algorithm):
        began = time.perf_counter()
        plan = _plan(store, capacity, ranks, algorithm)
        rows.append(
            {
                "algorithm": algorithm,
                "steps": plan.num_steps,
                "fill": f"{plan.fill:.1%}",
                "slowest rank over mean (%)": f"{100 * (plan.imbalance - 1):.2f}",
                "ms": f"{(time.perf_counter() - began) * 1e3:.1f}",
            }
        )
    return rows


def _plan(store: Store, capacity: int, ranks: int, algorithm: Algorithm) -> Plan:
    atoms = batch_sizes(store)["atoms"]
    size = max(1, int(capacity / atoms.mean())) if algorithm == "fixed_count" else None
    return pack(
        atoms,
        capacity,
        ranks,
        algorithm=algorithm,
        batch_size=size,
        oversized="alone",
        names=store.describe,
    )


def step_meter(path: Path, model: str, device: str, dtype: Dtype) -> StepMeter:
    """Build a meter of the training steps of a preset, run or model folder on a store's structures.

    Raises ConfigError if there is neither a preset nor a folder of that name, or no such device.
    """
    store = open_store(path)
    if model in PRESETS:
        cutoff = float(store.manifest["settings"]["cutoff"])
        config = MaceConfig.preset(model, r_max=cutoff)
        some = Subset(store, np.arange(min(len(store), 1000)))
        found = statistics(some, e0="least_squares")
        elements = {int(z) for array, _ in store.flat("atomic_numbers") for z in np.unique(array)}
        module = MACE(_with_elements(config, found, sorted(elements)))
    elif Path(model).is_dir():
        module = load_model(model)
    else:
        known = ", ".join(sorted(PRESETS))
        raise ConfigError(f"--model: '{model}' is neither a folder nor a preset (known: {known})")
    place = choose_device(device, 0)
    return StepMeter(module, MaceTask(), store, place, dtype_of(dtype))


def cost_model(meter: StepMeter, most: int = 4096) -> tuple[Rows, list[str]]:
    """Measure steps of random and of dense batches and fit the cost model that packing balances.

    Raises ConfigError if batches of ``most`` atoms or fewer are too few for a fit.

    Returns
    -------
    The measured steps with their fitted times, and lines on how to use the fit.
    """
    costs = _measured(meter, most, seconds_at_most=20.0)
    sizes = [cost.sizes["atoms"] for cost in costs]
    costs += [meter.measure(meter.densest_batch(n)) for n in sizes[:: max(1, len(sizes) // 4)]]
    if len(costs) < len(TERMS) + 1:
        raise ConfigError(
            f"--most: batches of {most} atoms or fewer gave {len(costs)} measurements, a fit needs "
            f"{len(TERMS) + 1}; give more"
        )
    factors, error = fit_cost(costs)
    rows = []
    for cost in costs:
        fitted = factors["constant"] + sum(factors[name] * cost.sizes[name] for name in TERMS)
        rows.append(
            {**_named(cost), "ms": f"{cost.seconds * 1e3:.2f}", "fitted ms": f"{fitted * 1e3:.2f}"}
        )
    per = {"atoms": "an atom", "edges": "an edge", "graphs": "a structure", "constant": "a step"}
    lines = [
        "µs: " + ", ".join(f"{number(factors[key] * 1e6)} {one}" for key, one in per.items()),
        f"root mean square of the relative error: {error:.1%}",
    ]
    if error > POOR_FIT:
        lines.append(
            "too large to use: repeat on a machine with nothing else to do, or raise --most"
        )
        return rows, lines
    named = (("atoms", "atoms"), ("edges", "edges"), ("constant", "graphs"))
    values = " ".join(f"{name} {factors[key] * 1e6:.4g}" for name, key in named)
    return rows, [*lines, f"use it: --batch.cost {values}"]


def _measured(meter: StepMeter, most: int, *, seconds_at_most: float = 60.0) -> list[StepCost]:
    costs = []
    for cost in saturation(meter, most=most, seconds_at_most=seconds_at_most):
        note(f"{cost.sizes['atoms']:,} atoms: {number(cost.seconds * 1e3)} ms a step")
        costs.append(cost)
    if costs:
        return costs
    first = smallest_measured(meter)
    if most < first:
        raise ConfigError(f"--most: batches are measured from {first} atoms on, got {most}")
    raise OutOfMemoryError(f"a batch of {first} atoms, the smallest measured, does not fit")


def capacity_curves(
    meters: Mapping[str, Callable[[], StepMeter]], most: int, out: Path | None = None
) -> tuple[Rows, list[str]]:
    """Measure atoms per second by the size of a batch, and on a GPU the largest that fits.

    Parameters
    ----------
    meters : by precision, a function that makes a meter; one is freed before the next is made
    most : atoms of the largest batch of a curve
    out : figure to write

    Returns
    -------
    The curves as rows; and lines: where they saturate, and the largest batch that fits.
    """
    rows: Rows = []
    lines, measured = [], {}
    for name, make in meters.items():
        meter = make()
        measured[name] = costs = _measured(meter, most)
        rows += [_capacity_row(name, cost) for cost in costs]
        how = "captured as CUDA graphs" if meter.captured else "launched one by one"
        lines.append(
            f"{name} (steps {how}): from about {saturated_from(costs):,} atoms on the rate is "
            "within 10 % of its highest"
        )
        if meter.device.type == "cuda":
            fits = find_capacity(meter)
            listed = " and ".join(f"{value:,} {what}" for what, value in fits.items())
            lines.append(f"{name}: largest capacity that fits: {listed}")
        del meter
    if out is not None:
        lines.append(f"figure: {plots.save(capacity_picture(measured), out)}")
    return rows, lines


def saturated_from(costs: Sequence[StepCost]) -> int:
    """Return the atoms of the smallest batch whose rate is within 10 % of the highest."""
    rates = {cost.sizes["atoms"]: cost.sizes["atoms"] / cost.seconds for cost in costs}
    highest = max(rates.values())
    return min(atoms for atoms, rate in rates.items() if rate > SATURATED * highest)


def capacity_picture(measured: Mapping[str, Sequence[StepCost]]) -> Any:
    """Draw atoms per second and time of a step by the atoms of a batch, a curve per precision.

    Batches of equally many atoms are one point, of their median time.
    """
    rates, times = [], []
    for name, costs in measured.items():
        seconds: dict[int, list[float]] = {}
        for cost in costs:
            seconds.setdefault(cost.sizes["atoms"], []).append(cost.seconds)
        points = [(atoms, median(seconds[atoms])) for atoms in sorted(seconds)]
        sizes = [atoms for atoms, _ in points]
        rates.append(plots.Curve(name, sizes, [atoms / each for atoms, each in points]))
        times.append(plots.Curve(name, sizes, [each * 1e3 for _, each in points]))
    panels = [
        plots.Panel("Rate", "atoms per second", rates, logarithmic=False, from_zero=True),
        plots.Panel("Time", "ms per step", times),
    ]
    return plots.curves(panels, "atoms of a batch", logarithmic_x=True)


def _named(cost: StepCost) -> dict[str, int]:
    return {SYSTEM.samples if name == "graphs" else name: n for name, n in cost.sizes.items()}


def _capacity_row(name: str, cost: StepCost) -> dict[str, Any]:
    return {
        "dtype": name,
        **_named(cost),
        "ms": f"{cost.seconds * 1e3:.2f}",
        "atoms/s": f"{cost.sizes['atoms'] / cost.seconds:,.0f}",
        "peak MiB": f"{cost.peak_bytes / 2**20:,.0f}" if cost.peak_bytes else "",
    }


def _with_elements(config: MaceConfig, found: Statistics, elements: Sequence[int]) -> MaceConfig:
    return config.with_data(
        atomic_numbers=tuple(elements),
        atomic_energies=((0.0,) * len(elements),),
        avg_num_neighbors=found.avg_num_neighbors,
    )
