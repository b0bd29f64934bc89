"""The commands for molecules: typed arguments, each calls one function."""

from pathlib import Path
from typing import Annotated, Literal

import tyro

from bevatron.data.readers.molecules.base import MoleculeOptions
from bevatron.recipes.arguments import (
    Columns,
    Files,
    Model,
    Out,
    Source,
    positional,
    say,
)

More = Annotated[tuple[Path, ...], tyro.conf.Positional, positional("[RUN ...]")]
Dtype = Literal["float32", "float64", "bfloat16"]
Mode = Literal["2d", "3d", "both"]


def recognises(path: Path) -> bool:
    """Whether a path looks like molecules: a table, an SDF or OGB's folder."""
    from bevatron.data.readers.molecules.reader import is_molecule_file

    return is_molecule_file(path)


def prepare(
    files: Files,
    out: Path,
    feature_set: str = "set1",
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Compute the features of molecules once, in parallel, into a store.

    If it is killed, start it again and it continues. Processes started by srun or mpirun share the
    work.

    Parameters
    ----------
    files
        .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's PCQM4Mv2 folder.
    out
        Folder of the store.
    feature_set
        set1, set2, set3, original, ying21 or ying21_periodic.
    columns
        Columns of SMILES and targets, and where 3D structures are.
    samples_per_shard
        None = chosen by size.
    workers
        Processes; None = all usable cores.
    overwrite
        Replace a store of other inputs in this folder.
    """
    from bevatron.recipes.gpspp.stores import prepare_files

    say(
        *prepare_files(
            files,
            out,
            feature_set,
            columns,
            samples_per_shard=samples_per_shard,
            workers=workers,
            overwrite=overwrite,
        )
    )


def evaluate(
    model: Model,
    files: Files,
    committee: tuple[Path, ...] = (),
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    mode: Mode = "2d",
    device: str = "cpu",
    dtype: Dtype = "float32",
    capacity: int = 4096,
    workers: int | None = None,
    out: Path | None = None,
) -> None:
    """Print the errors of a model on labelled molecules.

    Parameters
    ----------
    model
        A run or a model folder.
    files
        Tables, SDF, OGB's folder or prepared stores.
    committee
        More models: the mean of all is compared with the labels.
    columns
        Columns of SMILES and labels; targets are the model's unless named, in its order.
    mode
        Inputs of the model: 2d, 3d where there are positions, or both.
    device
        cpu, cuda, cuda:N, or auto (a GPU if there is one).
    dtype
        Precision; bfloat16: of matmuls only, all else in float32.
    capacity
        Maximum number of atoms per batch.
    workers
        Processes that compute features; None = all usable cores.
    out
        Also write the table to this JSON file.
    """
    from bevatron.recipes.gpspp.evaluate import evaluate_files, print_errors
    from bevatron.recipes.gpspp.predictor import MoleculePredictor

    predictor = MoleculePredictor(
        [model, *committee],
        device=device,
        precision=dtype,
        mode=mode,
        capacity=capacity,
        workers=workers,
    )
    print_errors(evaluate_files(predictor, files, columns, out), predictor.targets)


def predict(
    model: Model,
    source: Source,
    out: Out,
    more: More = (),
    committee: tuple[Path, ...] = (),
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    mode: Mode = "2d",
    format: Literal["table", "ogb"] = "table",  # noqa: A002  as in the name of the option
    split: Literal["test-dev", "test-challenge"] = "test-dev",
    prefix: str = "predicted_",
    device: str = "cpu",
    dtype: Dtype = "float32",
    capacity: int = 4096,
    workers: int | None = None,
) -> None:
    """Write properties of molecules next to what the file already holds, every row in order.

    Parameters
    ----------
    model
        A run or a model folder.
    source
        Molecules: .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's folder, a prepared store.
    out
        NAME.csv or NAME.parquet to write; with --format ogb a folder or NAME.npz.
    more
        More models: the mean and the standard deviation of all are written.
    committee
        The same as an option.
    columns
        Where SMILES and 3D structures are.
    mode
        Inputs of the model: 2d, 3d where there are positions, or both.
    format
        table, or ogb: the format of PCQM4Mv2's evaluator.
    split
        Part of OGB's data to predict.
    prefix
        Prefix of the names of the results.
    device
        cpu, cuda, cuda:N, or auto (a GPU if there is one).
    dtype
        Precision; bfloat16: of matmuls only, all else in float32.
    capacity
        Maximum number of atoms per batch.
    workers
        Processes that compute features; None = all usable cores.
    """
    from bevatron.recipes.gpspp.predict import predict_file, predict_ogb
    from bevatron.recipes.gpspp.predictor import MoleculePredictor

    predictor = MoleculePredictor(
        [model, *more, *committee],
        device=device,
        precision=dtype,
        mode=mode,
        capacity=capacity,
        workers=workers,
    )
    if format == "ogb":
        path, absent = predict_ogb(predictor, source, out, split, columns)
        say(f"{path}: y_pred of {split}" + (f", {absent} filled with the mean" if absent else ""))
        return
    done = predict_file(predictor, source, out, columns, prefix)
    without = f", {done.without} without a prediction (see 'reason')" if done.without else ""
    flat = f", {done.seen_in_2d} without positions, treated as 2D" if done.seen_in_2d else ""
    say(f"{done.rows} rows are in {out}{without}{flat}")


def embed(
    model: Model,
    source: Source,
    out: Out,
    atoms: bool = False,
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    mode: Mode = "2d",
    device: str = "cpu",
    dtype: Dtype = "float32",
    capacity: int = 4096,
    workers: int | None = None,
) -> None:
    """Write the embeddings of molecules, from which a model reads out properties, as npz.

    Parameters
    ----------
    model
        A run or a model folder.
    source
        Molecules: .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's folder, a prepared store.
    out
        NAME.npz: graph [n, C], smiles and reason [n].
    atoms
        Also nodes [N, C] of the heavy atoms, and their offsets atom_ptr [n + 1].
    columns
        Where SMILES and 3D structures are.
    mode
        Inputs of the model: 2d, 3d where there are positions, or both.
    device
        cpu, cuda, cuda:N, or auto (a GPU if there is one).
    dtype
        Precision; bfloat16: of matmuls only, all else in float32.
    capacity
        Maximum number of atoms per batch.
    workers
        Processes that compute features; None = all usable cores.
    """
    from bevatron.recipes.gpspp.embed import embed_file
    from bevatron.recipes.gpspp.predictor import MoleculePredictor

    predictor = MoleculePredictor(
        model, device=device, precision=dtype, mode=mode, capacity=capacity, workers=workers
    )
    done = embed_file(predictor, source, out, columns, atoms=atoms)
    say(f"embeddings of {done} rows are in {out}")
