"""``batch.capacity: auto``: the run chooses the number of atoms of a batch.

A GPU needs large batches to be busy, a model needs many steps to learn. So ``auto`` is the smallest
batch within 5 % of the highest rate of training, but leaves at least 100 steps an epoch and fits
into memory. The rate is measured once, on steps of the run's own model; a plan of their memory
says in advance which batches fit. The choice for a model, its data and a GPU is stored with
Triton's kernels. A data set so small that 100 steps an epoch leave no choice is trained on at once.
"""

import json
import logging
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bevatron import __version__
from bevatron.errors import BevatronError, ConfigError, OutOfMemoryError
from bevatron.files import checksum, write_json_atomically
from bevatron.output import note
from bevatron.parallel.collectives import broadcast_json, gather_json
from bevatron.parallel.mesh import open_mesh
from bevatron.recipes.mace.step_cost import StepCost, StepMeter, non_negative
from bevatron.train.memory_plan import NotPlannableError
from bevatron.train.settings import TrainConfig
from bevatron.typing import IntArray

log = logging.getLogger(__name__)

ON_CPU = 256
"""Atoms of a batch on a CPU, which any batch keeps busy."""

FIRST = 256
"""Atoms of the smallest batch that is measured."""

PLANNED = 2048
"""Atoms of the batch whose memory is planned; larger ones need a multiple of it."""

NEAR_HIGHEST = 0.95
"""Fraction of the highest rate that a batch must reach."""

STEPS_PER_EPOCH = 100
"""Minimum number of steps of an epoch, where structures are small enough."""

EDGE_BYTES = 2**18
"""Memory of an edge and its share of an atom that a step is sure not to exceed.

mp-0-large takes 42 kB, and a captured step twice that."""

SECONDS = 6.0
"""Time for measuring, once kernels are compiled."""

MEMORY_SHARE = 0.9
"""Share of the free memory that training may use."""


def capacity_of_run(
    path: Path,
    config: TrainConfig,
    sizes: Mapping[str, IntArray],
    make: Callable[[torch.device], StepMeter],
    accumulate: int = 1,
    described: Mapping[str, Any] | None = None,
) -> tuple[dict[str, int], str]:
    """Choose the capacity of a run's batches once: the minimum over ranks, kept for a resume.

    Parameters
    ----------
    path : file in the run's folder that stores it
    config : names the device
    sizes : ``atoms`` and ``edges`` of every sample, [n] each
    make : makes a rank's meter on its device
    accumulate : batches per rank and step
    described : plain values of model and loss, on which the time of a step depends

    Returns
    -------
    The capacity by name, and a line for the log.
    """
    with open_mesh(config.device, config.timeout_minutes * 60) as mesh:
        # Rank 0 decides: another rank could already see the file that it writes below.
        if broadcast_json(path.exists(), mesh):
            kept: dict[str, int] = json.loads(path.read_text())
            return kept, f"{_batches_of(kept)}, as chosen when the run began"
        per_step = mesh.world * accumulate
        chosen = unmeasured_capacity(sizes, mesh.device, per_step)
        if chosen is None:
            kept_at = place_of_choice({**(described or {}), "ranks": per_step}, sizes, mesh.device)
            chosen = _chosen_before(kept_at)
        if chosen is None:
            if mesh.is_main:
                note("batch.capacity auto: compiling kernels (once for all runs), measuring steps")
            chosen = choose_capacity(make(mesh.device), per_step)
            with suppress(BevatronError, OSError):  # it only saves time
                kept_at.parent.mkdir(parents=True, exist_ok=True)
                write_json_atomically(kept_at, chosen)
        found = gather_json(chosen, mesh)
        # Edges are limited where some rank has little memory.
        names = dict.fromkeys(name for one, _ in found for name in one)
        capacity = {name: min(one[name] for one, _ in found if name in one) for name in names}
        if mesh.is_main:
            path.parent.mkdir(parents=True, exist_ok=True)  # the run makes its folder later
            write_json_atomically(path, capacity, ConfigError)
        return capacity, f"{_batches_of(capacity)}{found[0][1]}"


def _batches_of(capacity: dict[str, int]) -> str:
    listed = " and ".join(f"{value:,} {name}" for name, value in capacity.items())
    return f"batches of {listed}"


def place_of_choice(
    described: Mapping[str, Any], sizes: Mapping[str, IntArray], device: torch.device
) -> Path:
    """Return where the choice for a model, its data and a GPU with so much memory is kept.

    Free memory counts to 5 %: what was chosen within `MEMORY_SHARE` of it fits into the least.
    """
    free, total = torch.cuda.mem_get_info(device)
    key = {
        **described,
        "sizes": [checksum(sizes[name].tobytes()) for name in ("atoms", "edges")],
        "gpu": [torch.cuda.get_device_name(device), total, round(math.log(free, 1.05))],
        "versions": [str(torch.__version__), __version__],
    }
    folder = os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache"
    name = checksum(json.dumps(key, sort_keys=True, default=str).encode())
    return Path(folder) / f"bevatron-capacity-{name}.json"


def _chosen_before(path: Path) -> tuple[dict[str, int], str] | None:
    try:
        capacity, why = json.loads(path.read_text())
        found = {str(name): int(value) for name, value in capacity.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return None
    return found, f"{why} (measured before)"


def unmeasured_capacity(
    sizes: Mapping[str, IntArray], device: torch.device, batches_per_step: int
) -> tuple[dict[str, int], str] | None:
    """Choose where rates do not matter: on a CPU, and where few atoms have to make many steps.

    Returns what `choose_capacity` does, None if that has to measure.
    """
    atoms, edges = sizes["atoms"], sizes["edges"]
    total, largest = int(atoms.sum()), int(atoms.max())
    if device.type != "cuda":
        return {"atoms": max(ON_CPU, largest)}, " (batch.capacity auto, on a CPU)"
    allowed = max(total // (STEPS_PER_EPOCH * batches_per_step), largest)
    densest = float(np.max(edges / np.maximum(atoms, 1)))
    free, _ = torch.cuda.mem_get_info(device)
    if allowed > FIRST or allowed * max(densest, 1.0) * EDGE_BYTES > MEMORY_SHARE * free:
        return None
    return {"atoms": allowed}, f": {_steps(total // (allowed * batches_per_step))}"


def _steps(number: int) -> str:
    return f"{max(number, 1):,} step{'s' if number > 1 else ''} an epoch"


def choose_capacity(meter: StepMeter, batches_per_step: int) -> tuple[dict[str, int], str]:
    """Choose the smallest batch that trains at nearly the highest rate, and measure that it fits.

    Raises OutOfMemoryError if not even the largest structure fits.

    Parameters
    ----------
    batches_per_step : batches of all ranks in an optimiser step

    Returns
    -------
    The capacity by name, and the reasons, which follow "batches of 3,000 atoms".
    """
    atoms = meter.sizes["atoms"]
    total, largest = int(atoms.sum()), int(atoms.max())
    available = available_bytes(meter)
    ceiling = planned_ceiling(meter, available)
    allowed = max(total // (STEPS_PER_EPOCH * batches_per_step), largest)
    costs = measured_rates(meter, ceiling)
    near = smallest_near_highest(costs) if costs else largest
    number = min(max(near, largest), allowed)
    fits = _fits(meter, number, available) if ceiling is None else number <= ceiling
    capacity = {"atoms": number} if fits else largest_capacity(meter, available, number)
    reasons = [_steps(total // (capacity["atoms"] * batches_per_step))]
    if costs:
        reasons.insert(0, f"{rate_share(costs, capacity['atoms']):.0%} of the highest rate")
    most = min(ceiling or 0, total)
    more = f"; {most:,} would fit" if most > capacity["atoms"] else ""
    return capacity, f": {', '.join(reasons)}{more}"


def planned_ceiling(meter: StepMeter, available: float) -> int | None:
    """Plan how many atoms of the densest structures fit; None if steps cannot be planned."""
    batch = meter.densest_batch(max(PLANNED, int(meter.sizes["atoms"].max())))
    try:
        stays, added = meter.planned(batch)
    except NotPlannableError:
        return None
    except Exception as error:  # noqa: BLE001  a plan only saves trials: a step meets it again
        log.warning("the memory of a step is not planned (%s: %s)", type(error).__name__, error)
        return None
    return int((available - stays) * meter.sizes["atoms"][batch].sum() / max(added, 1))


def _fits(meter: StepMeter, number: int, available: float) -> bool:
    """Measure whether a batch of the densest structures fits."""
    try:
        return meter.measure(meter.densest_batch(number), repeats=1).needed_bytes <= available
    except OutOfMemoryError:
        return False


def measured_rates(meter: StepMeter, most: int | None = None) -> list[StepCost]:
    """Measure batches of doubled size until rate, memory or time allow no larger ones.

    ``most`` atoms fit, None = not known.
    """
    costs: list[StepCost] = []
    number, began = FIRST, time.monotonic()
    while time.monotonic() - began < SECONDS and (most is None or number <= most):
        try:
            costs.append(meter.measure(meter.random_batch(number, seed=number), repeats=3))
        except OutOfMemoryError:
            break
        if len(costs) == 1:
            began = time.monotonic()  # the first compiles the kernels
        elif _rate(costs[-1]) < (1 + (1 - NEAR_HIGHEST) / 2) * _rate(costs[-2]):
            break
        number *= 2
    return costs


def _rate(cost: StepCost) -> float:
    return cost.sizes["atoms"] / cost.seconds


def smallest_near_highest(costs: Sequence[StepCost]) -> int:
    """Return the atoms of the smallest batch near the highest rate, in multiples of 32.

    Between two measured batches the time of a step is taken as linear in their atoms.
    """
    wanted = NEAR_HIGHEST * max(map(_rate, costs))
    found = float(costs[0].sizes["atoms"])
    for below, above in pairwise(costs):
        if _rate(below) >= wanted:
            break
        per_atom, rest = _line(below, above)
        found = float(above.sizes["atoms"])
        if _rate(above) >= wanted and per_atom * wanted < 1:
            found = min(found, wanted * rest / (1 - wanted * per_atom))
    return int(-(-found // 32) * 32)


def rate_share(costs: Sequence[StepCost], atoms: int) -> float:
    """Return the rate of batches of `atoms` atoms over the highest, from the nearest two."""
    highest = max(map(_rate, costs))
    if len(costs) < 2 or atoms <= costs[0].sizes["atoms"]:
        return min(atoms / costs[0].seconds / highest, 1.0)
    pairs = list(pairwise(costs))
    pair = next((p for p in pairs if p[1].sizes["atoms"] >= atoms), pairs[-1])
    per_atom, rest = _line(*pair)
    return min(atoms / (per_atom * atoms + rest) / highest, 1.0)


def _line(below: StepCost, above: StepCost) -> tuple[float, float]:
    """Return slope and intercept of the seconds of a step by its atoms."""
    a, b = below.sizes["atoms"], above.sizes["atoms"]
    per_atom = (above.seconds - below.seconds) / max(b - a, 1)
    return per_atom, below.seconds - per_atom * a


def available_bytes(meter: StepMeter) -> float:
    """Return how much of the GPU's memory training may use."""
    free, _ = torch.cuda.mem_get_info(meter.device)
    return MEMORY_SHARE * (free + torch.cuda.memory_reserved(meter.device))


MOST_ATOMS = 1 << 20
"""Of a batch, whatever the memory."""


def find_capacity(meter: StepMeter) -> dict[str, int]:
    """Find the largest batches, in atoms and in edges, that fit into the device's memory.

    The ratio of edges to atoms is that of the whole data set, so that batches can fill both.
    Batches with few and with many edges per atom give the memory of an atom and of an edge; the
    predicted capacity is then tried with a batch that fills both, and reduced until it fits. Raises
    ConfigError on a CPU, whose memory is shared with everything else; OutOfMemoryError if not even
    the largest structure fits.

    Parameters
    ----------
    meter : measures steps on a GPU

    Returns
    -------
    ``atoms`` and ``edges``, as `bevatron.train.settings.BatchConfig.capacity` takes them.
    """
    if meter.device.type != "cuda":
        raise ConfigError("the largest batch that fits is measured on a GPU only")
    return largest_capacity(meter, available_bytes(meter), MOST_ATOMS)


def largest_capacity(meter: StepMeter, available: float, most: int) -> dict[str, int]:
    """Find the largest batches for which training fits into a number of bytes.

    Raises OutOfMemoryError if not even the largest structure fits.

    Parameters
    ----------
    available : bytes
    most : maximum number of atoms

    Returns
    -------
    dict
        ``atoms`` and ``edges``, at least those of the largest structure.
    """
    atoms, edges = meter.sizes["atoms"], meter.sizes["edges"]
    largest = {"atoms": int(atoms.max()), "edges": int(edges.max())}
    per_atom = float(edges.sum()) / max(float(atoms.sum()), 1.0)

    def capacity(number: float) -> dict[str, int]:
        wanted = {"atoms": int(number), "edges": int(number * per_atom)}
        return {name: max(value, largest[name]) for name, value in wanted.items()}

    costs = _costs_of_trials(meter, largest["atoms"])
    number = 0.0
    if costs:
        table = np.array([[c.sizes["atoms"], c.sizes["edges"], 1.0] for c in costs])
        needed = np.array([cost.needed_bytes for cost in costs], dtype=np.float64)
        of_atom, of_edge, constant = non_negative(table, needed)
        number = (available - constant) / max(of_atom + of_edge * per_atom, 1.0)
        number = min(number, float(most))
    while True:
        found = capacity(number)
        try:
            if meter.measure(meter.full_batch(found), repeats=1).needed_bytes <= available:
                return found
        except OutOfMemoryError:
            if found == largest:
                raise
        if found == largest:
            raise OutOfMemoryError(
                f"a batch of {largest['atoms']} atoms and {largest['edges']} edges, as large as "
                "the largest structures, does not fit"
            )
        number *= 0.9


def _costs_of_trials(meter: StepMeter, least: int) -> list[StepCost]:
    """Measure batches of two sizes and densities; none if ``least`` atoms do not fit."""
    first = max(512, least)
    while True:
        try:
            return [
                meter.measure(choose(number), repeats=1)
                for number in (first, 2 * first)
                for choose in (meter.random_batch, meter.densest_batch)
            ]
        except OutOfMemoryError:
            if first == least:
                return []
        first = max(first // 2, least)
