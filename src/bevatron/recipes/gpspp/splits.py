"""Splits of molecules into training, validation and test sets."""

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np

from bevatron.data.dataset import ROLES, Dataset, column, split
from bevatron.errors import ConfigError, MissingPackageError
from bevatron.models.gpspp.features import canonical, scaffold
from bevatron.typing import BoolArray, IntArray

SplitKind = Literal["auto", "random", "scaffold", "given"]


def usable_rows(dataset: Dataset, role: str) -> IntArray:
    """Return rows that are molecules and, except for prediction, have a label."""
    fine: BoolArray = np.asarray(dataset.lengths("atom_features") > 0)
    if role != "test":
        fine &= np.isfinite(column(dataset, "targets")).any(axis=1)
    return np.flatnonzero(fine)


def divide(
    train: Dataset,
    usable: IntArray,
    wanted: Mapping[str, float],
    kind: SplitKind,
    seed: int,
    train_size: float,
    report: list[str],
) -> dict[str, IntArray]:
    """Choose the rows of ``train`` for each set; validation and test only where ``wanted``."""
    given = column(train, "split")
    if kind == "auto":
        kind = "given" if (given >= 0).any() else "random"
    if kind == "given":
        if not (given[usable] == 0).any():
            raise ConfigError(
                "data.split: 'given', but the files assign no molecule to train; they need a "
                "column 'split' or a split file"
            )
        rows = np.flatnonzero(train.lengths("atom_features") > 0)
        chosen = {"train": usable[given[usable] == 0]}
        chosen |= {
            role: (rows if role == "test" else usable)[
                given[rows if role == "test" else usable] == ROLES.index(role)
            ]
            for role in wanted
        }
        report.append("split as given in the files")
        return chosen
    counts = _counts(len(usable), train_size, wanted)
    if kind == "scaffold":
        order = _by_scaffold(train, usable, seed)
        report.append("split by scaffold: no scaffold is in two sets")
        return _cut_groups(usable, order, counts)
    shares = [count / len(usable) for count in counts.values()]
    parts = split(len(usable), shares, seed) if len(usable) else []
    report.append(f"split at random (seed {seed})")
    return {role: usable[part] for role, part in zip(counts, parts, strict=False)}


def _counts(num: int, train_size: float, wanted: Mapping[str, float]) -> dict[str, int]:
    def number(size: float) -> int:
        return int(size) if size >= 1 else round(size * num)

    aside = {role: number(size) for role, size in wanted.items()}
    rest = num - sum(aside.values())
    counts = {"train": number(train_size) if train_size else rest, **aside}
    if rest < max(counts["train"], 1):
        raise ConfigError(
            f"data.train_size, data.valid_size and data.test_size: {sum(counts.values())} "
            f"molecules are requested, there are {num} with labels"
        )
    return counts


def _by_scaffold(train: Dataset, usable: IntArray, seed: int) -> list[IntArray]:
    """Group molecules by scaffold, the largest group first, equal ones in random order."""
    groups: dict[str, list[int]] = {}
    for place, row in enumerate(usable):
        name = scaffold(train[int(row)]["smiles"].tobytes().decode())
        groups.setdefault(name, []).append(place)
    shuffled = np.random.default_rng(seed).permutation(len(groups))
    members = [np.array(group) for group in groups.values()]
    return [members[i] for i in sorted(shuffled, key=lambda i: -len(members[i]))]


def _cut_groups(
    usable: IntArray, groups: Sequence[IntArray], counts: Mapping[str, int]
) -> dict[str, IntArray]:
    """Fill the sets in turn with whole groups; groups that fit in none are trained on."""
    room = dict(counts)
    chosen: dict[str, list[IntArray]] = {role: [] for role in counts}
    for group in groups:
        role = next((name for name in room if len(group) <= room[name]), "train")
        chosen[role].append(group)
        room[role] -= len(group)
    empty = np.zeros(0, dtype=np.int64)
    return {
        role: np.sort(usable[np.concatenate([empty, *parts])]) for role, parts in chosen.items()
    }


def warn_of_duplicates(datasets: Mapping[str, Dataset]) -> list[str]:
    """Warn of molecules in two sets: errors on them are too small."""
    keys = {role: column(data, "key") for role, data in datasets.items()}
    lines = []
    for role in ("valid", "test"):
        if role not in keys:
            continue
        shared = np.intersect1d(keys["train"], keys[role])
        if not len(shared):
            continue
        try:
            names = {
                part: {
                    canonical(datasets[part][int(row)]["smiles"].tobytes().decode()): int(row)
                    for row in np.flatnonzero(np.isin(keys[part], shared))
                }
                for part in ("train", role)
            }
        except MissingPackageError as error:
            lines.append(
                f"warning: up to {len(shared)} molecules of {role} may be in train too, which "
                f"is not checked: {error}"
            )
            continue
        twice = sorted(names["train"].keys() & names[role].keys())
        if twice:
            first = datasets[role].describe(names[role][twice[0]])
            lines.append(
                f"warning: {len(twice)} molecules of {role} are in train too (the first: "
                f"{twice[0]}, {first})"
            )
    return lines
