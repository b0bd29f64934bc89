"""Stores of molecules, and the lists of rejected rows."""

import json
import shlex
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.readers.molecules import MoleculeOptions, MoleculeReader, open_molecules
from bevatron.data.samples import FEATURES_VERSION, molecule_fields
from bevatron.data.store.prepare import prepare
from bevatron.data.store.store import MANIFEST, PREPARATION, Store
from bevatron.data.summary.molecules import summarise_molecules
from bevatron.errors import ConfigError, DataError
from bevatron.models.gpspp.features import Featurizer
from bevatron.output import counted, say
from bevatron.recipes.rejects import list_rejects, rejects_file

KIND = "molecules"
"""Kind of these stores in their settings."""


def prepare_molecules(
    source: MoleculeReader | Sequence[str | Path],
    out: Path,
    feature_set_name: str = "set1",
    options: MoleculeOptions | None = None,
    *,
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    features_version: int | None = None,
) -> Store:
    """Compute the features of molecules once, in parallel, into a store.

    Rows that cannot be used, and those whose 3D structure was left out, are listed in
    ``NAME-rejects.csv`` next to the store, which is removed if there are none. Raises DataError or
    StoreError if a file cannot be read or ``out`` holds something else.

    Parameters
    ----------
    source : files of molecules, or a reader such as `molecules_in_memory` makes
    feature_set_name : see `MoleculeDataConfig.feature_set`
    options : which columns; only with files
    samples_per_shard, workers, overwrite, progress : as in `bevatron.data.store.prepare.prepare`
    features_version
        See `bevatron.data.samples.FEATURES_VERSION`; by default that of the store that ``out``
        already holds, else the newest.
    """
    reader = source if isinstance(source, MoleculeReader) else open_molecules(list(source), options)
    version = _version_in(Path(out)) if features_version is None else features_version
    settings = {
        "kind": KIND,
        "feature_set": feature_set_name,
        "targets": list(reader.targets),
        "unit": "row",
    }
    store = prepare(
        reader,
        Featurizer(feature_set_name, version),
        out,
        molecule_fields(feature_set_name, len(reader.targets)),
        settings | ({} if version == 1 else {"features_version": version}),
        samples_per_shard=samples_per_shard,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
        summarise=summarise_molecules,
    )
    list_rejects(store, ("source", "smiles", "reason"), rejects(store))
    return store


def prepare_files(
    files: Sequence[Path],
    out: Path,
    feature_set: str = "set1",
    columns: MoleculeOptions | None = None,
    **options: Any,
) -> list[str]:
    """Prepare molecules as ``bevatron prepare`` does; options are those of `prepare_molecules`.

    Raises ConfigError if there is no file; DataError if no row is a molecule.

    Returns
    -------
    Lines for the user: what was found, and how to train on it.
    """
    if not files:
        raise ConfigError("prepare: expected at least one file of molecules")
    store = prepare_molecules(files, out, feature_set, columns, **options)
    version = features_version_of(store)
    old = (
        f"{out}: was begun with version {version} of the features, in which eigenvectors depend on "
        "how a molecule is written, and is kept so; give another folder for the newest"
    )
    lines = [*store.manifest["report"], *summary_lines(store)]
    summary = store.manifest["summary"]
    if summary["unusable"] == summary["molecules"]:
        say(*lines)  # why; otherwise the caller prints them
        raise DataError(
            f"{out}: holds no molecule: {counted(summary['unusable'], 'row')} left out, listed "
            f"with the reasons in {rejects_file(store)}"
        )
    return [
        *lines,
        *([old] if version < FEATURES_VERSION else []),
        f"train with: bevatron train gpspp --data {shlex.quote(str(out))} --output RUN",
    ]


def rejects(store: Store) -> list[tuple[str, str, str]]:
    """List (origin, SMILES, reason) of rows that were rejected, wholly or in part."""
    found = []
    for row in np.flatnonzero(store.lengths("reason")):
        sample = store[int(row)]
        texts = (sample[name].tobytes().decode() for name in ("smiles", "reason"))
        found.append((store.describe(int(row)), *texts))
    return found  # type: ignore[return-value]


def summary_lines(store: Store) -> list[str]:
    """Summarise a store of molecules in a few lines."""
    found = store.manifest["summary"]
    usable = found["molecules"] - found["unusable"]
    lines = [f"molecules: {usable:,} of {counted(found['molecules'], 'row')}"]
    lines[0] += (
        f", {found['with_3d']} with a 3D structure, {found['disconnected']} of several parts, "
        f"{found['single_atoms']} of one atom"
    )
    for reason, count in sorted(found.get("reasons", {}).items(), key=lambda each: -each[1]):
        lines.append(f"  {counted(count, 'row')}: {reason}")
    if found.get("reasons"):
        lines.append(f"  they are listed in {rejects_file(store)}")
    for number, name in enumerate(store.manifest["settings"]["targets"]):
        known = found["targets"][str(number)]
        mean = known["sum"] / known["known"] if known["known"] else float("nan")
        lines.append(
            f"target '{name}': {counted(known['known'], 'label')}, mean {mean:.4g}, "
            f"{found['molecules'] - known['known']} missing"
        )
    return lines


def features_version_of(store: Store) -> int:
    """Return the version of a store's features."""
    return int(store.manifest["settings"].get("features_version", 1))


def _version_in(folder: Path) -> int:
    """Return the version of the store that a folder holds, finished or not; else the newest."""
    for name in (MANIFEST, PREPARATION):
        with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
            values = json.loads((folder / name).read_text(encoding="utf-8"))
            settings = values["settings"] if name == MANIFEST else values["inputs"]["settings"]
            return int(settings.get("features_version", 1))
    return FEATURES_VERSION


def check_molecules(store: Store, wanted: str, version: int | None = None) -> Store:
    """Return a store if it is one of molecules with that feature set, of that version if given.

    Raises DataError if it is not.
    """
    settings = store.manifest["settings"]
    if settings.get("kind") != KIND:
        raise DataError(f"{store.path}: not a store of molecules; prepare it from SMILES")
    if settings["feature_set"] != wanted:
        raise DataError(
            f"{store.path}: prepared with the feature set '{settings['feature_set']}', the model "
            f"needs '{wanted}'; prepare it again or set data.feature_set"
        )
    own = features_version_of(store)
    if version is not None and own != version:
        advice = "prepare the molecules again" if own < version else "give the molecules' own file"
        raise DataError(
            f"{store.path}: has version {own} of the features, the model or the other data have "
            f"version {version}; {advice}"
        )
    return store
