"""Fine-tuning: a model for new data that starts from the weights of another."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch

from bevatron.data.dataset import Dataset, Subset
from bevatron.errors import ConfigError
from bevatron.models.mace import MACE, Statistics, load_matching, statistics
from bevatron.models.mace.finetune import TransferRow, adapted_config
from bevatron.recipes.mace.data import StructureData
from bevatron.recipes.mace.potential import Potential
from bevatron.typing import Arrays, FloatArray

REFIT_STRUCTURES = 2000
"""Structures whose interaction energies are computed to refit E0."""


@dataclass(frozen=True)
class FinetuneConfig:
    """What a run takes over from the model it starts from.

    Attributes
    ----------
    elements
        ``data``: the new model knows the elements of the data; ``all``: those of the old one too
        (always so with `keep_heads`).
    e0
        ``refit``: least squares of the energies that the old model's interaction does not explain,
        so that its energies fit the new data's level of theory from the first step (where data.e0
        gives numbers or ``isolated``, those are taken); ``keep``: the old model's; ``data``: as
        data.e0 says. Elements that the data do not have keep the old model's.
    keep_heads
        Keep the old heads, with their E0, in addition to those of the data. Data without heads
        train a new head, ``default`` or, if that exists, ``finetuned``; data for an old head, given
        under its name in data.heads, continue to train it.
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
    The model, and lines for the log: the origin of every tensor.

    Raises
    ------
    CheckpointError
        If the models have no element in common.
    ConfigError
        If the old E0 are to be kept but the data have further elements.
    """
    numbers = set(found.atomic_numbers)
    if config.elements == "all" or config.keep_heads:
        numbers |= set(source.config.atomic_numbers)
    elements = tuple(sorted(numbers))
    kept = set(source.config.heads if config.keep_heads else ())
    if config.e0 == "keep":
        _check_known(source, numbers)
        kept = set(data.heads)
    energies = _energies(source, found, data.heads, elements, kept)
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
    notes = []
    if config.e0 == "refit":
        open_heads = [h for h in data.e0 if h not in kept and data.e0[h] in _FITTED]
        notes = [_refit(model, data, found, head) for head in open_heads]
    return model, [*notes, *transfer_table(rows)]


_FITTED = ("auto", "least_squares")
"""Values of data.e0 with which E0 may be refitted; otherwise it is given."""


def _check_known(source: MACE, numbers: Collection[int]) -> None:
    unknown = sorted(set(numbers) - set(source.config.atomic_numbers))
    if unknown:
        raise ConfigError(
            f"finetune.e0: 'keep' has no energy for the elements {unknown}, which the model to "
            "start from does not know; use 'refit' or 'data'"
        )


def transfer_table(rows: Sequence[TransferRow]) -> list[str]:
    """Return the origin of every tensor as lines of a table."""
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


def _energies(
    source: MACE,
    found: Statistics,
    heads: Sequence[str],
    elements: Sequence[int],
    kept: Collection[str],
) -> FloatArray:
    """Put together E0 [heads, elements], eV: the data's, or the old model's where they have none.

    A head that the old model has not takes the old ones from its first.
    """
    old = old_energies(source, elements)
    rows = np.array([[old.get(h, old[source.config.heads[0]])[z] for z in elements] for h in heads])
    for i, head in enumerate(heads):
        if head not in kept:
            for z, energy in zip(found.atomic_numbers, found.atomic_energies[i], strict=True):
                rows[i, elements.index(z)] = energy
    return rows


class _Unexplained:
    """Structures labelled with the energy that a model's interaction does not explain."""

    def __init__(self, dataset: Dataset, energies: FloatArray) -> None:
        self.dataset, self.energies = dataset, energies

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Arrays:
        energy = np.array(self.energies[index], dtype=np.float64)
        return {
            **self.dataset[index],
            "energy": energy,
            "head": np.array(0, dtype=np.int32),
            "group": np.zeros(0, dtype=np.uint8),
        }


@torch.no_grad()
def _refit(model: MACE, data: StructureData, found: Statistics, head: str) -> str:
    """Fit E0 of a head to the energies that the interaction does not explain, in place."""
    index = data.heads.index(head)
    isolated = set(found.isolated)
    own = []
    for i in range(len(data.train)):
        sample = data.train[i]
        if i not in isolated and int(sample["head"]) == index and not np.isnan(sample["energy"]):
            own.append(i)
    if not own:
        return f"E0 of head '{head}': as in the data, which have no energies to fit them to"
    if len(own) > REFIT_STRUCTURES:
        chosen = np.random.default_rng(0).choice(own, REFIT_STRUCTURES, replace=False)
        own = sorted(chosen.tolist())
    some = Subset(data.train, np.array(own, dtype=np.int64))
    energies = model.get_buffer("atomic_energies")
    potential = Potential(model, "cpu", head=head)
    potential.model.get_buffer("atomic_energies").zero_()
    samples = [some[i] for i in range(len(some))]
    interaction = [float(r["energy"]) for r in potential.evaluate(samples, compute=("energy",))]
    labels = np.array([float(sample["energy"]) for sample in samples])
    refitted = statistics(_Unexplained(some, labels - np.array(interaction)), e0="least_squares")
    for z, energy in zip(refitted.atomic_numbers, refitted.atomic_energies[0], strict=True):
        energies[index, model.config.atomic_numbers.index(z)] = energy
    rows = tuple(tuple(row) for row in energies.tolist())
    model.config = replace(model.config, atomic_energies=rows)
    return (
        f"E0 of head '{head}': fitted to what the old interaction leaves unexplained in "
        f"{len(some)} structures"
    )
