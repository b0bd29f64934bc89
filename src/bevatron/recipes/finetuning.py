"""Fine-tuning: a model for new data that begins with the weights of another."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from bevatron.data.dataset import Dataset, Subset
from bevatron.errors import ConfigError, DataError
from bevatron.models.mace import MACE, Statistics, load_matching, statistics
from bevatron.models.mace.finetune import TransferRow, adapted_config
from bevatron.recipes.potential import Potential
from bevatron.recipes.structures import StructureData
from bevatron.typing import Arrays, FloatArray

REFIT_STRUCTURES = 2000
"""Structures whose interaction energies are computed to refit E0."""


@dataclass(frozen=True)
class FinetuneConfig:
    """What a new run takes over from the model it starts from.

    Attributes
    ----------
    elements
        ``data``: the new model knows the elements of the data; ``all``: those of the old one too.
    e0
        ``refit``: least squares of the energies that the old model's interaction does not explain,
        so that its energies fit the new data's level of theory from the first step; ``keep``: the
        old model's; ``data``: as data.e0 says.
    keep_heads
        Keep the old heads beside those of the data. Data for an old head, given under its name in
        data.heads, go on training it.
    new_heads
        A new head begins as a ``copy`` of the old model's first one, or ``random``.
    frozen
        Names of parameters that are not trained, with wildcards: ``embedding.*``,
        ``interactions.0.*``.
    """

    elements: Literal["data", "all"] = "data"
    e0: Literal["refit", "keep", "data"] = "refit"
    keep_heads: bool = False
    new_heads: Literal["copy", "random"] = "copy"
    frozen: tuple[str, ...] = ()


def initialise(
    source: MACE, config: FinetuneConfig, data: StructureData, found: Statistics
) -> tuple[MACE, list[str]]:
    """Make the model to fine-tune.

    Parameters
    ----------
    source
        The model to start from.
    config
        What is taken over.
    data
        The new data; the heads of the new model are `StructureData.heads`.
    found
        Their statistics.

    Returns
    -------
    The model, and lines for the log that say what became of every tensor.

    Raises
    ------
    CheckpointError
        If the models have no element in common.
    ConfigError
        If the old E0 are to be kept but the data have further elements.
    """
    numbers = set(found.atomic_numbers)
    if config.elements == "all":
        numbers |= set(source.config.atomic_numbers)
    elements = tuple(sorted(numbers))
    notes = []
    if config.e0 == "keep":
        unknown = sorted(numbers - set(source.config.atomic_numbers))
        if unknown:
            raise ConfigError(
                f"finetune.e0: 'keep' has no energy for the elements {unknown}, which the model to "
                "start from does not know; use 'refit' or 'data'"
            )
    energies = _energies(found, elements)
    if config.e0 == "refit":
        energies, lines = _refit(source, data, found, elements)
        notes += lines
    kept = source.config.heads if config.keep_heads else ()
    kept = data.heads if config.e0 == "keep" else kept
    energies = _with_old(source, data.heads, elements, energies, kept)
    target = adapted_config(
        source.config, atomic_numbers=elements, heads=data.heads, atomic_energies=energies.tolist()
    )
    model = MACE(target, torch.float64)
    rows = load_matching(
        model,
        source.state_dict(),
        source.config.heads,
        keep_energies=True,
        new_heads=config.new_heads,
    )
    return model, [*notes, *transfer_table(rows)]


def transfer_table(rows: Sequence[TransferRow]) -> list[str]:
    """Write what became of every tensor as lines of a table."""
    width = max((len(row.name) for row in rows), default=4)
    lines = [f"{'weight':<{width}}  {'status':<8}  shape"]
    for row in rows:
        shape = "x".join(map(str, row.shape)) or "scalar"
        note = f"  ({row.note})" if row.note else ""
        lines.append(f"{row.name:<{width}}  {row.status:<8}  {shape}{note}")
    counts = {status: sum(row.status == status for row in rows) for status in _STATUSES}
    lines.append("start: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
    return lines


_STATUSES = ("loaded", "resized", "new", "ignored")


def old_energies(source: MACE, elements: Sequence[int]) -> dict[str, dict[int, float]]:
    """Return E0 of the old model's heads for some elements; 0 for one that it does not know."""
    known = source.config.atomic_numbers
    rows = source.state_dict()["atomic_energies"].double().tolist()
    return {
        head: {z: rows[i][known.index(z)] if z in known else 0.0 for z in elements}
        for i, head in enumerate(source.config.heads)
    }


def _energies(found: Statistics, elements: Sequence[int]) -> FloatArray:
    """Spread E0 of the data's elements over the model's; 0 where the data have none."""
    rows = np.zeros((len(found.atomic_energies), len(elements)))
    for column, z in enumerate(elements):
        if z in found.atomic_numbers:
            index = found.atomic_numbers.index(z)
            rows[:, column] = [row[index] for row in found.atomic_energies]
    return rows


def _with_old(
    source: MACE,
    heads: Sequence[str],
    elements: Sequence[int],
    energies: FloatArray,
    kept: Sequence[str],
) -> FloatArray:
    """Put the old model's E0, of its first head if need be, where heads keep them."""
    old = old_energies(source, elements)
    first = old[source.config.heads[0]]
    rows = energies.copy()
    for i, head in enumerate(heads):
        if head in kept:
            rows[i] = [old.get(head, first)[z] for z in elements]
    return rows


class _Unexplained:
    """Training structures whose energy is what the old interaction leaves unexplained."""

    def __init__(self, dataset: Dataset, energies: FloatArray) -> None:
        self.dataset, self.energies = dataset, energies

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Arrays:
        energy = np.array(self.energies[index], dtype=np.float64)
        return {**self.dataset[index], "energy": energy, "group": np.zeros(0, dtype=np.uint8)}


def _refit(
    source: MACE, data: StructureData, found: Statistics, elements: Sequence[int]
) -> tuple[FloatArray, list[str]]:
    """Fit E0 to the energies that the old model's interaction does not explain."""
    known = set(source.config.atomic_numbers)
    if not set(found.atomic_numbers) <= known:
        return _energies(found, elements), ["E0: of the data, which have elements that are new"]
    order = np.random.default_rng(0).permutation(len(data.train))[:REFIT_STRUCTURES]
    some = Subset(data.train, np.sort(order))
    potential = Potential(source, head=source.config.heads[0])
    with torch.no_grad():
        potential.model.get_buffer("atomic_energies").zero_()
    samples = [{**some[i], "head": np.array(0, dtype=np.int32)} for i in range(len(some))]
    interaction = [float(r["energy"]) for r in potential.evaluate(samples, compute=("energy",))]
    energies = np.array([float(some[i]["energy"]) for i in range(len(some))])
    left = _Unexplained(some, energies - np.array(interaction))
    try:
        refitted = statistics(left, heads=data.heads, e0="least_squares")
    except DataError:
        # Some head has no data of its own: it keeps the old E0, see _with_old.
        heads = {int(some[i]["head"]) for i in range(len(some))}
        given = dict.fromkeys(found.atomic_numbers, 0.0)
        choice = {
            name: "least_squares" if i in heads else given for i, name in enumerate(data.heads)
        }
        refitted = statistics(left, heads=data.heads, e0=choice)  # type: ignore[arg-type]
    spread = replace(found, atomic_energies=refitted.atomic_energies)
    if refitted.atomic_numbers != found.atomic_numbers:
        spread = replace(spread, atomic_numbers=refitted.atomic_numbers)
    return _energies(spread, elements), [
        f"E0: fitted to what the old interaction leaves unexplained in {len(some)} structures"
    ]
