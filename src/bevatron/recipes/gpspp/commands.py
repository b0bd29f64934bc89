"""The commands for molecules: typed arguments, each calls one function."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from bevatron.data.readers.molecule_options import MoleculeOptions
from bevatron.output import Result, counted, say
from bevatron.recipes.arguments import (
    Capacity,
    Columns,
    Device,
    Files,
    Model,
    NewStore,
    Out,
    PrepareOptions,
    Preparing,
    Source,
    TableFile,
    positional,
)

if TYPE_CHECKING:
    from bevatron.recipes.gpspp.predictor import MoleculePredictor

More = Annotated[tuple[Path, ...], tyro.conf.Positional, positional("[RUN ...]")]


def recognises(path: Path) -> bool:
    """Whether a path looks like molecules: a table, an SDF or OGB's folder."""
    from bevatron.data.readers.molecules.reader import is_molecule_file

    return is_molecule_file(path)


def prepare(
    files: Files,
    out: NewStore,
    feature_set: str = "set1",
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    options: Preparing = PrepareOptions(),  # noqa: B008  frozen
) -> None:
    """Compute the features of molecules once, in parallel, into a store.

    Start it again after a kill and it resumes. Processes started by srun or mpirun share the work.

    Parameters
    ----------
    files : .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's PCQM4Mv2 folder
    feature_set : set1, set2, set3, original, ying21 or ying21_periodic
    columns : columns of SMILES and targets, and where 3D structures are

    Examples
    --------
    bevatron prepare molecules.csv --out store
    bevatron prepare gpspp molecules.sdf --out store --columns.targets gap
    """
    from bevatron.recipes.gpspp.stores import prepare_files

    say(*prepare_files(files, out, feature_set, columns, **vars(options)))


@dataclass(frozen=True)
class ModelOptions:
    """Options of running a model.

    Attributes
    ----------
    mode : inputs of the model: 2d, 3d where there are positions, or both
    dtype : precision; bfloat16 is used in matmuls only
    workers : processes that compute features; all usable cores by default
    """

    mode: Literal["2d", "3d", "both"] = "2d"
    device: Device = "auto"
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    capacity: Capacity = 4096
    workers: int | None = None

    def predictor(self, *models: Path) -> "MoleculePredictor":
        """Load the models."""
        from bevatron.recipes.gpspp.predictor import MoleculePredictor

        given = {"precision" if name == "dtype" else name: v for name, v in vars(self).items()}
        return MoleculePredictor(models, **given)


Options = Annotated[ModelOptions, tyro.conf.arg(name="")]


def evaluate(
    model: Model,
    files: Files,
    committee: tuple[Path, ...] = (),
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    options: Options = ModelOptions(),
    out: TableFile = None,
) -> Result:
    """Print the errors of a model on labelled molecules.

    Parameters
    ----------
    files : tables, SDF, OGB's folder or prepared stores
    committee : more models: the mean of all is compared with the labels
    columns : columns of SMILES and labels; targets are the model's unless named, in its order

    Examples
    --------
    bevatron evaluate runs/gap test.csv
    bevatron evaluate runs/gap test.csv --columns.targets my_gap --json
    """
    from bevatron.recipes.gpspp.evaluate import evaluate_files, print_errors

    predictor = options.predictor(model, *committee)
    table = evaluate_files(predictor, files, columns, out)
    return Result(table, lambda: print_errors(table, predictor.targets))


def predict(
    model: Model,
    source: Source,
    out: Out,
    more: More = (),
    committee: tuple[Path, ...] = (),
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    format: Literal["table", "ogb"] = "table",  # noqa: A002  as in the name of the option
    split: Literal["test-dev", "test-challenge"] = "test-dev",
    prefix: str = "predicted_",
    options: Options = ModelOptions(),
) -> Result:
    """Write properties of molecules next to what the file already holds, every row in order.

    Parameters
    ----------
    source : molecules: .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's folder, a prepared store
    out : NAME.csv or NAME.parquet to write; with --format ogb a folder or NAME.npz
    more : more models: the mean and the standard deviation of all are written
    committee : more models, as an option
    columns : where SMILES and 3D structures are
    format : ``table``, or ``ogb``, the format of PCQM4Mv2's evaluator
    split : part of OGB's data to predict
    prefix : prefix of the names of the results

    Examples
    --------
    bevatron predict runs/gap new.csv predicted.csv
    bevatron predict runs/gap new.csv predicted.csv runs/seed1 runs/seed2
    """
    from bevatron.recipes.gpspp.predict import predict_file, predict_ogb

    predictor = options.predictor(model, *more, *committee)
    if format == "ogb":
        path, absent = predict_ogb(predictor, source, out, split, columns)
        filled = f", {absent} filled with the mean" if absent else ""
        return Result(
            {"out": path, "filled": absent}, lambda: say(f"{path}: y_pred of {split}{filled}")
        )
    done = predict_file(predictor, source, out, columns, prefix)
    see = f"(see '{done.renamed.get('reason', 'reason')}')"
    without = f", {done.without} without a prediction {see}" if done.without else ""
    outside = f", {done.outside} outside the training data {see}" if done.outside else ""
    flat = f", {done.seen_in_2d} without positions, treated as 2D" if done.seen_in_2d else ""

    def show() -> None:
        for name, new in done.renamed.items():
            say(f"{source} has a column '{name}' already, the new one is called '{new}'")
        say(f"{counted(done.rows, 'row')} in {out}{without}{outside}{flat}")

    return Result({"out": out, **vars(done)}, show)


def embed(
    model: Model,
    source: Source,
    out: Out,
    atoms: bool = False,
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    options: Options = ModelOptions(),
) -> Result:
    """Write the embeddings of molecules, from which a model reads out properties, as npz.

    Parameters
    ----------
    source : molecules: .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's folder, a prepared store
    out : NAME.npz: graph [n, C], smiles and reason [n]
    atoms : also nodes [N, C] of the heavy atoms, and their offsets atom_ptr [n + 1]
    columns : where SMILES and 3D structures are

    Examples
    --------
    bevatron embed runs/gap new.csv embeddings.npz --atoms
    """
    from bevatron.recipes.gpspp.embed import embed_file

    predictor = options.predictor(model)
    done = embed_file(predictor, source, out, columns, atoms=atoms)
    return Result(
        {"rows": done, "out": out}, lambda: say(f"embeddings of {counted(done, 'row')} in {out}")
    )
