"""`bevatron prepare`: which kind of data files hold decides what is computed from them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from bevatron.data.readers import LabelOptions
from bevatron.data.readers.molecules import MoleculeOptions
from bevatron.data.readers.molecules.reader import is_molecule_file
from bevatron.data.store.store import Store
from bevatron.errors import ConfigError

Kind = Literal["structures", "molecules"]

RECOGNISED: Mapping[Kind, Callable[[Path], bool]] = {"molecules": is_molecule_file}
"""By kind of data, whether a path looks like it; what no kind claims are structures."""


def kind_of(files: Sequence[Path]) -> Kind:
    """Say what files hold, from their names.

    Raises
    ------
    ConfigError
        If they are of several kinds.
    """
    kinds: dict[Kind, Path] = {}
    for file in files:
        kind: Kind = next((k for k, looks in RECOGNISED.items() if looks(file)), "structures")
        kinds.setdefault(kind, file)
    if len(kinds) > 1:
        listed = " and ".join(f"{kind} ({file})" for kind, file in kinds.items())
        raise ConfigError(f"files of {listed} do not go into one store; prepare them apart")
    return next(iter(kinds), "structures")


def prepare_files(
    files: Sequence[Path],
    out: Path,
    kind: Kind | Literal["auto"] = "auto",
    *,
    cutoff: float | None = None,
    labels: LabelOptions | None = None,
    feature_set: str = "set1",
    columns: MoleculeOptions | None = None,
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> tuple[Store, list[str]]:
    """Prepare files of any kind into a store.

    Parameters
    ----------
    files
        All of one kind.
    out
        Folder of the store.
    kind
        What they hold; ``auto`` goes by their names.
    cutoff, labels
        Of structures.
    feature_set, columns
        Of molecules.
    samples_per_shard, workers, overwrite
        As in `bevatron.data.store.prepare.prepare`.

    Returns
    -------
    store, lines
        Lines that say what was found.

    Raises
    ------
    ConfigError
        If the files are of several kinds, or structures come without a cutoff.
    DataError, StoreError
        If a file must not be trained on or ``out`` holds something else.
    """
    if not files:
        raise ConfigError("prepare: expected at least one file of structures or molecules")
    if (kind_of(files) if kind == "auto" else kind) == "molecules":
        from bevatron.recipes.gpspp.stores import prepare_molecules, summary_lines

        store = prepare_molecules(
            files,
            out,
            feature_set,
            columns,
            samples_per_shard=samples_per_shard,
            workers=workers,
            overwrite=overwrite,
        )
        lines = [*store.manifest["report"], *summary_lines(store)]
        return store, [*lines, f"train with: bevatron train gpspp --data {out} --output RUN"]
    from bevatron.models.mace import MaceConfig
    from bevatron.recipes.mace.data import prepare_structures

    if cutoff is None:
        raise ConfigError(
            "--cutoff: structures need the cutoff of their neighbours in Å, that of the model to "
            f"be trained (model.r_max, {MaceConfig.r_max:g} unless a preset says otherwise)"
        )
    store = prepare_structures(
        files,
        out,
        cutoff,
        labels,
        samples_per_shard=samples_per_shard,
        workers=workers,
        overwrite=overwrite,
    )
    use = f"bevatron train mace --data {out} --model.r-max {cutoff:g} --output RUN"
    lines = [f"{len(store)} structures are in {out}", f"train with: {use}"]
    return store, [*store.manifest["report"], *lines]
