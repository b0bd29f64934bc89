"""Fine-tuning: a model for new data that starts from the weights of another."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch

from bevatron.data.dataset import Dataset
from bevatron.errors import ConfigError
from bevatron.models.mace import MACE, AtomicEnergies, MaceConfig, Statistics, load_matching
from bevatron.models.mace.atomic_energies import least_change
from bevatron.models.mace.finetune import TransferRow, adapted_config
from bevatron.recipes.mace.data import DataConfig, StructureData
from bevatron.recipes.mace.potential import Potential, head_of_unnamed
from bevatron.typing import Arrays

REFIT_STRUCTURES = 2000
"""Structures whose energies are computed to refit E0, a few more where an element is rare."""

LARGE_CHANGE = 0.1
"""eV; the log warns of a larger change of E0 that the data do not determine."""

REFIT_PER_ELEMENT = 50
"""Fewest structures of each element to refit on, where there are as many."""


@dataclass(frozen=True)
class FinetuneConfig:
    """The parts of the initial model that a run keeps.

    Attributes
    ----------
    head
        The old model's head that a new head starts from; its default head if not given. A head of
        data.heads that has the name of an old one continues that.
    elements
        ``data``: the new model knows the elements of the data; ``all``: those of the old one too
        (always so with `keep_heads`).
    e0
        ``refit``: the old model's, plus the smallest change with which its energies fit the level
        of theory of the new data (if data.e0 gives numbers or ``isolated``, or ``auto`` finds an
        isolated atom of every element, those are used); ``keep``: the old model's; ``data``: as
        data.e0 says. Elements missing from the data keep the old model's.
    keep_heads
        Keep the old heads, with their E0, in addition to those of the data. Data without heads
        train a new head, ``default`` or, if that exists, ``finetuned``; data for an old head, given
        under its name in data.heads, continue to train it.
    new_heads : initial weights of a new head: a ``copy`` of `head`, or ``random``
    frozen
        Names of parameters that are not trained, with wildcards: ``embedding.*``,
        ``interactions.0.*``.
    """

    head: str | None = None
    elements: Literal["data", "all"] = "data"
    e0: Literal["refit", "keep", "data"] = "refit"
    keep_heads: bool = False
    new_heads: Literal["copy", "random"] = "copy"
    frozen: tuple[str, ...] = ()


class FineTuning:
    """Heads, elements and E0 of a model that starts from another.

    Raises ConfigError if the old model has no head of the given name.

    Parameters
    ----------
    source : the model to start from
    data_config : paths of the new data
    data : the new data; the heads of the new model are `StructureData.heads`
    """

    def __init__(
        self, source: MACE, config: FinetuneConfig, data_config: DataConfig, data: StructureData
    ) -> None:
        self.source, self.config, self.data = source, config, data
        named = bool(data_config.heads or data_config.labels.heads or config.keep_heads)
        continued = set(source.config.heads) if named else set()
        self.start = _start_heads(source.config, config.head, data.heads, continued)
        self.kept = set(source.config.heads) if config.keep_heads else set()
        new = [head for head in data.e0 if head not in continued]
        old = source.config.default_head
        self.default_head = next(iter([*new, *(h for h in data.e0 if h == old), *data.e0]))

    @property
    def heads(self) -> str:
        """Say on one line what each head continues or starts from."""
        parts = []
        for head, old in self.start.items():
            role = "continues" if head in self.data.e0 else "has no data"
            parts.append(f"'{head}' {role if head == old else f'starts from {old!r}'}")
        return f"heads: {', '.join(parts)}; '{self.default_head}' is the default"

    def e0_choices(self) -> dict[str, Any]:
        """Return how E0 of each head is found before any are refitted, for `statistics`."""
        choices: dict[str, Any] = {}
        for head in self.data.heads:
            choice = self.data.e0.get(head)
            given = self.config.e0 == "data" or choice not in _FITTED
            if head in self.kept or choice is None or self.config.e0 == "keep" or not given:
                choices[head] = self._old_energies(head)
            else:
                choices[head] = choice
        return choices

    def initialise(
        self, found: Statistics
    ) -> tuple[MACE, tuple[AtomicEnergies, ...], list[TransferRow]]:
        """Make the model to fine-tune.

        Raises CheckpointError if the models have no element in common; ConfigError if the old E0
        are to be kept but the data have further elements.

        Parameters
        ----------
        found : statistics of the training data, with E0 as `e0_choices` says

        Returns
        -------
        The model, E0 of its heads and the origin of every tensor.
        """
        numbers = set(found.atomic_numbers)
        if self.config.e0 == "keep":
            _check_known(self.source, numbers)
        if self.config.elements == "all" or self.config.keep_heads:
            numbers |= set(self.source.config.atomic_numbers)
        elements = tuple(sorted(numbers))
        e0 = [
            self._with_old_elements(head, elements, self._isolated(i, found) or found.e0[i])
            for i, head in enumerate(self.data.heads)
        ]
        target = adapted_config(
            self.source.config,
            atomic_numbers=elements,
            heads=self.data.heads,
            atomic_energies=[[each.values[z] for z in elements] for each in e0],
            start=self.start,
            default_head=self.default_head,
        )
        model = MACE(target, torch.float64)
        rows = load_matching(
            model,
            self.source.state_dict(),
            self.source.config.heads,
            start=self.start,
            keep_energies=True,
            new_heads=self.config.new_heads,
        )
        for i, head in enumerate(self.data.heads):
            if self._is_refitted(head) and not self._isolated(i, found):
                e0[i] = self._refit(model, i, set(found.isolated))
                _set_energies(model, i, e0[i])
        return model, tuple(e0), rows

    def _is_refitted(self, head: str) -> bool:
        asked = self.config.e0 == "refit" and head not in self.kept
        return asked and self.data.e0.get(head) in _FITTED

    def _isolated(self, index: int, found: Statistics) -> AtomicEnergies | None:
        """Return E0 of a head to be refitted whose data have an isolated atom of every element."""
        head, there = self.data.heads[index], found.isolated_energies[index]
        complete = set(found.atomic_numbers) <= set(there)
        if self._is_refitted(head) and self.data.e0[head] == "auto" and complete:
            return AtomicEnergies(there, "from isolated atoms")
        return None

    def _old_energies(self, head: str) -> AtomicEnergies:
        """Return E0 of the old head that a head starts from; 0 for an element without."""
        old, config = self.start[head], self.source.config
        row = self.source.get_buffer("atomic_energies").double()[config.heads.index(old)].tolist()
        values = dict.fromkeys(range(1, 119), 0.0) | dict(
            zip(config.atomic_numbers, row, strict=True)
        )
        origin = f"kept, those of the old model's head '{old}'"
        if isinstance(self.data.e0.get(head), Mapping):
            origin += " (data.e0 is not used)"
        return AtomicEnergies(values, origin)

    def _with_old_elements(
        self, head: str, elements: Sequence[int], e0: AtomicEnergies
    ) -> AtomicEnergies:
        """Fill in the elements that only the old model has."""
        values = {**self._old_energies(head).values, **e0.values}
        return AtomicEnergies({z: values[z] for z in elements}, e0.origin)

    def _refit(self, model: MACE, index: int, isolated: Collection[int]) -> AtomicEnergies:
        """Add the part of the energy errors that E0 explains to E0 of a head."""
        head = self.data.heads[index]
        elements = model.config.atomic_numbers
        old = dict(zip(elements, model.config.atomic_energies[index], strict=True))
        samples = _labelled(self.data.train, index, isolated)
        if not samples:
            origin = f"{self._old_energies(head).origin}: the data have no energies to refit them"
            return AtomicEnergies(old, origin)
        potential = Potential(model, "cpu", head=head)
        energies = [float(r["energy"]) for r in potential.evaluate(samples, compute=("energy",))]
        residuals = np.array([float(sample["energy"]) for sample in samples]) - energies
        counts = np.stack([np.bincount(s["atomic_numbers"], minlength=119) for s in samples])
        present = np.flatnonzero(counts.any(axis=0))
        known = np.isin(present, self.source.config.atomic_numbers)
        change = least_change(counts[:, present].astype(np.float64), residuals, known)
        changes = dict(zip(present.tolist(), change.values.tolist(), strict=True))
        largest = max(changes, key=lambda z: abs(changes[z]))
        origin = (
            f"those of the old model's head '{self.start[head]}' plus the smallest change that "
            f"explains its errors on {len(samples)} structures, at most "
            f"{abs(changes[largest]):.3g} eV ({_symbols([largest])}); {change.rank} of "
            f"{len(present)} elements determined"
        )
        if change.rank < len(present):
            origin += f", {_symbols(present[~change.separate].tolist())} only in combinations"
        if change.rank < len(present) and abs(changes[largest]) > LARGE_CHANGE:
            origin += ": energies of other compositions shift too, unless data.e0 gives values"
        values = {z: energy + changes.get(z, 0.0) for z, energy in old.items()}
        return AtomicEnergies(values, origin)


_FITTED = ("auto", "least_squares")
"""Values of data.e0 for which E0 may be refitted; others fix it."""


def _start_heads(
    source: MaceConfig, asked: str | None, heads: Sequence[str], continued: Collection[str]
) -> dict[str, str]:
    """Choose the old head that each head starts from."""
    if asked is not None and asked not in source.heads:
        raise ConfigError(
            f"finetune.head: the model to start from has no '{asked}' (it has "
            f"{', '.join(source.heads)})"
        )
    if all(head in continued for head in heads):
        return {head: head for head in heads}
    base = asked or head_of_unnamed(source, "finetune.head")
    return {head: head if head in continued else base for head in heads}


def _check_known(source: MACE, numbers: Collection[int]) -> None:
    unknown = sorted(set(numbers) - set(source.config.atomic_numbers))
    if unknown:
        raise ConfigError(
            f"finetune.e0: 'keep' has no energy for the elements {unknown}, which the model to "
            "start from does not know; use 'refit' or 'data'"
        )


def _set_energies(model: MACE, index: int, e0: AtomicEnergies) -> None:
    rows = [list(row) for row in model.config.atomic_energies]
    rows[index] = [e0.values[z] for z in model.config.atomic_numbers]
    model.config = replace(model.config, atomic_energies=tuple(map(tuple, rows)))
    model.get_buffer("atomic_energies").copy_(torch.tensor(rows, dtype=torch.float64))


def _labelled(train: Dataset, head: int, isolated: Collection[int]) -> list[Arrays]:
    """Read random structures of a head that have an energy, some with each element."""
    samples: list[Arrays] = []
    seen = np.zeros(119, dtype=np.int64)
    for index in np.random.default_rng(0).permutation(len(train)).tolist():
        if index in isolated:
            continue
        sample = train[index]
        if int(sample["head"]) != head or np.isnan(sample["energy"]):
            continue
        elements = np.unique(sample["atomic_numbers"])
        if len(samples) < REFIT_STRUCTURES or (seen[elements] < REFIT_PER_ELEMENT).any():
            seen[elements] += 1
            samples.append(sample)
    return samples


def _symbols(atomic_numbers: Sequence[int]) -> str:
    from ase.data import chemical_symbols

    return ", ".join(chemical_symbols[z] for z in atomic_numbers)


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
