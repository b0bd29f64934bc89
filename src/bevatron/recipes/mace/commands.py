"""The commands but for training and benchmarks: each calls one function of `recipes`."""

from pathlib import Path
from typing import Literal

from bevatron.data.readers.labels import LabelOptions
from bevatron.data.readers.molecules.base import MoleculeOptions
from bevatron.recipes.arguments import Columns, Files, Labels, Model, Out, Source, StoreFolder, say


def prepare(
    files: Files,
    out: Path,
    cutoff: float | None = None,
    kind: Literal["auto", "structures", "molecules"] = "auto",
    labels: Labels = LabelOptions(),  # noqa: B008  frozen
    feature_set: str = "set1",
    columns: Columns = MoleculeOptions(),  # noqa: B008  frozen
    samples_per_shard: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> None:
    """Check labels and compute features once, in parallel, into a store.

    Killed at any moment and started again it continues. Started by srun or mpirun on many nodes
    the processes share the work.

    Parameters
    ----------
    files
        Structures: extended XYZ (also .gz), anything ASE reads, ASE databases, .aselmdb.
        Molecules: .csv, .tsv, .smi (also .gz), .parquet, .sdf, OGB's PCQM4Mv2 folder.
    out
        Folder of the store.
    cutoff
        Structures: of the neighbours, Å; that of the model to be trained.
    kind
        What the files hold; by default their names tell.
    labels
        Structures: under which names the labels are found.
    feature_set
        Molecules: set1, set2, set3, original, ying21 or ying21_periodic.
    columns
        Molecules: columns of SMILES and targets, and where 3D structures are.
    samples_per_shard
        None chooses.
    workers
        Processes; None = all usable cores.
    overwrite
        Replace a store of other inputs in this folder.
    """
    from bevatron.recipes.preparing import prepare_files

    _, lines = prepare_files(
        files,
        out,
        kind,
        cutoff=cutoff,
        labels=labels,
        feature_set=feature_set,
        columns=columns,
        samples_per_shard=samples_per_shard,
        workers=workers,
        overwrite=overwrite,
    )
    say(*lines)


def evaluate(
    model: Model,
    files: Files,
    labels: Labels = LabelOptions(),  # noqa: B008
    head: str | None = None,
    device: str = "cpu",
    dtype: Literal["float64", "float32"] = "float64",
    capacity: int = 1024,
    out: Path | None = None,
) -> None:
    """Print the errors of a model on labelled structures, in all and per group, file and element.

    Parameters
    ----------
    model
        A run or a model folder.
    files
        Files of structures or prepared stores.
    labels
        Under which names the labels are found.
    head
        Read-out for all structures; by default the one that each structure names.
    device
        cpu, cuda, cuda:N, or auto: a GPU if there is one.
    dtype
        Precision.
    capacity
        Atoms of a batch at most.
    out
        Also write the tables to this JSON file.
    """
    from bevatron.recipes.mace.evaluate import evaluate_files, print_tables

    print_tables(
        evaluate_files(
            model,
            files,
            labels=labels,
            head=head,
            device=device,
            dtype=dtype,
            capacity=capacity,
            out=out,
        )
    )


def predict(
    model: Model,
    source: Source,
    out: Out,
    committee: tuple[Path, ...] = (),
    prefix: str = "predicted_",
    head: str | None = None,
    device: str = "cpu",
    dtype: Literal["float64", "float32"] = "float64",
    capacity: int = 1024,
) -> None:
    """Write energies, forces and stress of structures beside what the file holds already.

    A model of molecules or of graphs takes other options: `bevatron predict RUN --help` shows them.

    Parameters
    ----------
    model
        A run or a model folder.
    source
        Structures, anything that ASE reads.
    out
        Extended XYZ to write.
    committee
        Further models: their mean is written, and the spread.
    prefix
        Begins the names of the results.
    head
        Read-out of a model with several.
    device
        cpu, cuda, cuda:N, or auto: a GPU if there is one.
    dtype
        Precision.
    capacity
        Atoms of a batch at most.
    """
    from bevatron.recipes.mace.predict import predict_file

    done = predict_file(
        [model, *committee],
        source,
        out,
        prefix=prefix,
        head=head,
        device=device,
        dtype=dtype,
        capacity=capacity,
    )
    say(f"{done} structures are in {out}")


def relax(
    model: Model,
    source: Source,
    out: Out,
    fmax: float = 0.05,
    steps: int = 500,
    cell: bool = False,
    head: str | None = None,
    device: str = "cpu",
    dtype: Literal["float64", "float32"] = "float64",
) -> None:
    """Relax many structures at once to minima of their energy (FIRE).

    Parameters
    ----------
    model
        A run or a model folder.
    source
        Structures, anything that ASE reads.
    out
        Extended XYZ to write.
    fmax
        Converged once no atom feels more, eV/Å.
    steps
        At most.
    cell
        Relax the cells too.
    head
        Read-out of a model with several.
    device
        cpu, cuda, cuda:N, or auto: a GPU if there is one.
    dtype
        Precision.
    """
    from bevatron.recipes.mace.predict import relax_file

    result = relax_file(
        model, source, out, fmax, steps, cell, head=head, device=device, dtype=dtype
    )
    say(f"{int(result.converged.sum())} of {len(result.structures)} converged; they are in {out}")


def convert_from_mace_torch(
    file: Source, out: Out, trust: bool = False, config: Path | None = None
) -> None:
    """Make a model folder of a mace-torch checkpoint.

    Parameters
    ----------
    file
        A ``.model`` file, which is a pickle and needs mace-torch and --trust; or a state dict
        (``.pt``, ``.safetensors``) with --config, which need neither.
    out
        The model folder.
    trust
        Unpickle the file. A pickle can run any code that is in it.
    config
        JSON file of mace-torch's configuration, for a state dict.
    """
    from bevatron.recipes.mace.convert import from_mace_torch_file

    say(from_mace_torch_file(file, out, trust=trust, config=config))


def convert_to_mace_torch(model: Model, out: Out) -> None:
    """Write a run or a model folder as a mace-torch checkpoint.

    Parameters
    ----------
    model
        A run or a model folder.
    out
        ``NAME.model``, which needs mace-torch; or ``NAME.pt``, a state dict, with the
        configuration beside it in ``NAME.json``, which does not.
    """
    from bevatron.recipes.mace.convert import to_mace_torch_file

    say(to_mace_torch_file(model, out))


def inspect(
    store: StoreFolder,
    out: Path | None = None,
    plan: bool = False,
    capacity: int | None = None,
    ranks: int = 8,
) -> None:
    """Print and draw what is in a store.

    Parameters
    ----------
    store
        A prepared store.
    out
        Folder for figures and inspect.html; STORE-inspect by default.
    plan
        Also show how fixed-count batches, Algorithm 1 and balanced batches fill the ranks.
    capacity
        Atoms of a batch at most, for --plan.
    ranks
        Processes that share an epoch, for --plan.
    """
    from bevatron.recipes.inspect import PlanOptions, inspect_store

    options = PlanOptions(capacity=capacity, ranks=ranks) if plan else None
    say(f"figures: {inspect_store(store, out, options)}")


def env() -> None:
    """Print versions, devices, and what runs here or why it does not."""
    from bevatron.recipes.environment import describe_environment

    for title, rows in describe_environment():
        width = max((len(name) for name, _ in rows), default=0)
        say(title, *(f"  {name:<{width}}  {value}" for name, value in rows))


def demo(out: Out = Path("demo-run")) -> int:
    """Train a small potential, a model of molecules and one of a graph on bundled data.

    They are evaluated, their reports are drawn, and the potential runs molecular dynamics.

    Parameters
    ----------
    out
        Folder for everything that it makes.
    """
    from bevatron.recipes.mace.calculator import BevatronCalculator
    from bevatron.recipes.mace.demo import run_demo

    return run_demo(out, BevatronCalculator)
