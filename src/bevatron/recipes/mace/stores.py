"""Stores of structures: files prepared once, stores checked for the model's cutoff."""

import math
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bevatron.config import to_dict
from bevatron.data.neighbours import add_neighbours
from bevatron.data.readers import LabelOptions, open_reader
from bevatron.data.readers.paths import given_files
from bevatron.data.samples import STRUCTURE_FIELDS
from bevatron.data.store.prepare import prepare
from bevatron.data.store.store import MANIFEST, PREPARATION, Store
from bevatron.data.summary.structures import summarise_structures
from bevatron.errors import ConfigError, DataError
from bevatron.models.mace import MaceConfig
from bevatron.output import counted
from bevatron.recipes.mace.suspects import suspects


def open_store(path: Path) -> Store:
    """Open a store of structures; DataError if it holds anything else."""
    store = Store.open(path)
    if "cutoff" not in store.manifest["settings"]:
        raise DataError(
            f"{path}: not a store of structures; make one with `bevatron prepare FILE... --cutoff "
            f"{MaceConfig.r_max:g} --out STORE`"
        )
    return store


def open_structures(
    paths: Sequence[str | Path],
    cutoff: float,
    labels: LabelOptions,
    prepared: Path,
    workers: int | None = None,
    overwrite: bool = False,
) -> list[Store]:
    """Open stores and prepare files.

    Raises DataError if a store is none of structures or was prepared with another cutoff, or a file
    cannot be trained on.

    Parameters
    ----------
    paths : stores and files of structures; the files become one store in ``prepared``
    cutoff : neighbour cutoff, Å
    labels : names of the labels in the files
    prepared : folder of the prepared store; an existing one is used if its inputs are the same
    workers : processes; None = all usable cores
    overwrite : replace a store of other files or settings there
    """
    stores, files = [], []
    for path in map(Path, paths):
        if not any((path / name).exists() for name in (MANIFEST, PREPARATION)):
            files.append(path)
            continue
        stores.append(open_store(path))
        found = stores[-1].manifest["settings"]["cutoff"]
        if found != cutoff:
            raise DataError(
                f"{path}: prepared with a cutoff of {found} Å, the model needs {cutoff} Å; "
                f"prepare it again with a cutoff of {cutoff:g}, or train a new model with "
                f"model.r_max: {found}"
            )
    if files:
        own = prepare_structures(
            files, prepared, cutoff, labels, workers=workers, overwrite=overwrite
        )
        stores.append(own)
    return stores


def prepare_structures(
    files: Sequence[str | Path],
    out: Path,
    cutoff: float,
    labels: LabelOptions | None = None,
    *,
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> Store:
    """Check the labels of structures and find their neighbours once, in parallel, into a store.

    Raises ConfigError for a cutoff that is not a positive length; DataError or StoreError if a file
    holds what must not be trained on, or ``out`` holds something else.

    Parameters
    ----------
    files : what the readers of structures read
    cutoff : Å
        Cutoff of the neighbour lists.
    labels : names of the labels in the files
    samples_per_shard, workers, overwrite : as in `bevatron.data.store.prepare.prepare`
    """
    if not 0 < cutoff < math.inf:
        raise ConfigError(f"cutoff: expected a length above 0 Å, got {cutoff}")
    reader = open_reader([Path(file) for file in files], labels or LabelOptions())
    return prepare(
        reader,
        partial(add_neighbours, cutoff=cutoff),
        out,
        STRUCTURE_FIELDS,
        {"cutoff": cutoff, "labels": to_dict(labels or LabelOptions())},
        samples_per_shard=samples_per_shard,
        workers=workers,
        summarise=summarise_structures,
        overwrite=overwrite,
    )


def prepare_files(
    files: Sequence[Path],
    out: Path,
    cutoff: float | None,
    labels: LabelOptions | None = None,
    **options: Any,
) -> list[str]:
    """Prepare structures as ``bevatron prepare`` does; options are those of `prepare_structures`.

    Raises DataError if a file does not exist, ConfigError if none is given or no cutoff.

    Returns
    -------
    Lines for the user: what was found, and how to train on it.
    """
    if not files:
        raise ConfigError("prepare: expected at least one file of structures or molecules")
    given_files(files)  # a missing file is told before a missing cutoff
    if cutoff is None:
        raise ConfigError(
            "--cutoff: structures need the cutoff of their neighbours in Å, that of the model to "
            f"be trained (model.r_max, {MaceConfig.r_max:g} unless a preset says otherwise)"
        )
    store = prepare_structures(files, out, cutoff, labels, **options)
    quoted = shlex.quote(str(out))
    return [
        *store.manifest["report"],
        *suspects(store),
        f"{counted(len(store), 'structure')} in {out}",
        f"train with: bevatron train mace --data {quoted} --model.r-max {cutoff:g} --output RUN",
    ]
