"""The commands for molecules: each calls one function of `recipes`."""

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
    print_rows,
    say,
)

More = Annotated[tuple[Path, ...], tyro.conf.Positional, positional("[RUN ...]")]
Precision = Literal["float32", "float64", "bfloat16"]
Seen = Literal["2d", "3d", "both"]


def evaluate_molecules(
    model: Model,
    files: Files,
    committee: tuple[Path, ...] = (),
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    mode: Seen = "2d",
    device: str = "cpu",
    precision: Precision = "float32",
    capacity: int = 4096,
    workers: int | None = None,
    out: Path | None = None,
) -> None:
    """Print the errors of a model on molecules with labels.

    Parameters
    ----------
    model
        A run or a model folder.
    files
        Tables, SDF, OGB's folder or prepared stores.
    committee
        Further models, with whose mean the labels are compared.
    columns
        Which columns; targets are those of the model unless named, in its order.
    mode
        What is seen of molecules: 2d, 3d where there are positions, or both.
    device
        cpu, cuda, cuda:N, or auto: a GPU if there is one.
    precision
        Of the numbers; bfloat16: of products only.
    capacity
        Atoms of a batch at most.
    workers
        Processes that prepare many molecules; None = all usable cores.
    out
        Also write the table to this JSON file.
    """
    from bevatron.recipes.gpspp.predict import evaluate_files, print_errors
    from bevatron.recipes.gpspp.predictor import MoleculePredictor

    predictor = MoleculePredictor(
        [model, *committee],
        device=device,
        precision=precision,
        mode=mode,
        capacity=capacity,
        workers=workers,
    )
    print_errors(evaluate_files(predictor, files, columns, out), predictor.targets)


def predict_molecules(
    model: Model,
    source: Source,
    out: Out,
    more: More = (),
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    mode: Seen = "2d",
    format: Literal["table", "ogb"] = "table",  # noqa: A002  as in the name of the option
    split: Literal["test-dev", "test-challenge"] = "test-dev",
    prefix: str = "predicted_",
    device: str = "cpu",
    precision: Precision = "float32",
    capacity: int = 4096,
    workers: int | None = None,
) -> None:
    """Write the properties of molecules beside what the file holds already, every row in order.

    Parameters
    ----------
    model
        A run or a model folder.
    source
        Molecules: .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's folder, a prepared store.
    out
        NAME.csv or NAME.parquet to write; with --format ogb a folder or NAME.npz.
    more
        Further models: the mean of all is written, and their spread.
    columns
        Where SMILES and 3D structures are.
    mode
        What is seen of molecules: 2d, 3d where there are positions, or both.
    format
        table, or ogb: what the evaluator of PCQM4Mv2 takes.
    split
        Of OGB's data, which part to predict.
    prefix
        Begins the names of the results.
    device
        cpu, cuda, cuda:N, or auto: a GPU if there is one.
    precision
        Of the numbers; bfloat16: of products only.
    capacity
        Atoms of a batch at most.
    workers
        Processes that prepare many molecules; None = all usable cores.
    """
    from bevatron.recipes.gpspp.predict import predict_file, predict_ogb
    from bevatron.recipes.gpspp.predictor import MoleculePredictor

    predictor = MoleculePredictor(
        [model, *more],
        device=device,
        precision=precision,
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
    flat = f", {done.seen_in_2d} without positions, seen in 2D" if done.seen_in_2d else ""
    say(f"{done.rows} rows are in {out}{without}{flat}")


def embed(
    model: Model,
    source: Source,
    out: Out,
    atoms: bool = False,
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    mode: Seen = "2d",
    device: str = "cpu",
    precision: Precision = "float32",
    capacity: int = 4096,
    workers: int | None = None,
) -> None:
    """Write what a model makes of molecules before it reads out properties, as npz.

    Parameters
    ----------
    model
        A run or a model folder.
    source
        Molecules: .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's folder, a prepared store.
    out
        NAME.npz: graph [n, C], smiles and reason [n].
    atoms
        Also nodes [N, C], and atom_ptr [n + 1], where each molecule's heavy atoms begin.
    columns
        Where SMILES and 3D structures are.
    mode
        What is seen of molecules: 2d, 3d where there are positions, or both.
    device
        cpu, cuda, cuda:N, or auto: a GPU if there is one.
    precision
        Of the numbers; bfloat16: of products only.
    capacity
        Atoms of a batch at most.
    workers
        Processes that prepare many molecules; None = all usable cores.
    """
    from bevatron.recipes.gpspp.predict import embed_file
    from bevatron.recipes.gpspp.predictor import MoleculePredictor

    predictor = MoleculePredictor(
        model, device=device, precision=precision, mode=mode, capacity=capacity, workers=workers
    )
    done = embed_file(predictor, source, out, columns, atoms=atoms)
    say(f"embeddings of {done} rows are in {out}")


def bench_gpspp_ablation(
    data: Files,
    out: Path,
    rows: tuple[str, ...] = (),
    seeds: int = 3,
    first_seed: int = 0,
    preset: str = "gpspp-4",
    minutes: float | None = None,
    epochs: int | None = None,
    molecules: int = 1024,
    train_size: float = 0.0,
    valid_size: float = 0.1,
    lr: float = 4e-4,
    base: Path | None = None,
    device: str = "auto",
    evaluate_every: int = 2,
    jobs: int = 1,
) -> None:
    """Train GPS++ without one part after the other and tell what each is worth.

    Parameters
    ----------
    data
        A file of molecules, or prepared stores, one for each feature set.
    out
        Folder for results; runs that are there already are not run again.
    rows
        Rows, or table3, table4, table6, table7; all by default. The baseline always runs.
    seeds
        Runs of each row.
    first_seed
        The first seed.
    preset
        gpspp-16, gpspp-8, gpspp-4.
    minutes
        Of each run, compilation included.
    epochs
        Of each run.
    molecules
        Of a step, the same for all rows.
    train_size
        Molecules to train on: a share or a number; 0 = all that are not set aside.
    valid_size
        Molecules to validate with.
    lr
        Learning rate; attention without any 3D input has half of it.
    base
        A YAML file of the recipe from which every row differs.
    device
        auto, cpu or cuda.
    evaluate_every
        Epochs between validations.
    jobs
        Runs side by side, over all GPUs; with --minutes each has one for itself.
    """
    from bevatron.recipes.gpspp_ablation import RESULT, Ablation, run_ablation

    ablation = Ablation(
        data=data,
        out=out,
        rows=rows,
        seeds=seeds,
        first_seed=first_seed,
        preset=preset,
        minutes=minutes,
        epochs=epochs,
        molecules=molecules,
        train_size=train_size,
        valid_size=valid_size,
        lr=lr,
        base=base,
        device=device,
        evaluate_every=evaluate_every,
    )
    result = run_ablation(ablation, jobs=jobs, tell=say)
    shown = ("table", "row", "parameters", "seeds", "valid", "valid_std", "change", "train")
    print_rows(
        [
            {
                key: "" if row[key] is None
                else f"{row[key]:.4g}" if isinstance(row[key], float)
                else row[key]
                for key in shown
            }
            for row in result["rows"]
        ]
    )  # fmt: skip
    say(f"{out / RESULT} and {out / 'gpspp_ablation.png'}")
