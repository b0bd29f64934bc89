"""The commands for structures and potentials: typed arguments, each calls one function."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from bevatron.data.readers.labels import LabelOptions
from bevatron.output import Result, counted, say
from bevatron.recipes.arguments import (
    Capacity,
    Device,
    Dtype,
    Files,
    Labels,
    Model,
    NewStore,
    Out,
    PrepareOptions,
    Preparing,
    Source,
    TableFile,
    positional,
)


@dataclass(frozen=True)
class PotentialOptions:
    """Options of running a potential.

    Attributes
    ----------
    head
        Readout for all structures; by default the one that a structure names, or else the default
        head of the model.
    """

    head: str | None = None
    device: Device = "auto"
    dtype: Dtype = "float64"


Potential = Annotated[PotentialOptions, tyro.conf.arg(name="")]


def prepare(
    files: Files,
    out: NewStore,
    cutoff: float | None = None,
    labels: Labels = LabelOptions(),  # noqa: B008  frozen
    options: Preparing = PrepareOptions(),  # noqa: B008  frozen
) -> None:
    """Check labels and find neighbours once, in parallel, into a store.

    Start it again after a kill and it resumes. Processes started by srun or mpirun share the work.

    Parameters
    ----------
    files : extended XYZ (also .gz), anything that ASE reads, ASE databases, .aselmdb
    cutoff : neighbour cutoff in Å, that of the model to be trained
    labels : names of the labels in the files

    Examples
    --------
    bevatron prepare water.extxyz.gz --out water-store --cutoff 5.0
    bevatron prepare mace data/ --out store --labels.energy-key my_energy
    """
    from bevatron.recipes.mace.stores import prepare_files

    say(*prepare_files(files, out, cutoff, labels, **vars(options)))


def evaluate(
    model: Model,
    files: Files,
    labels: Labels = LabelOptions(),  # noqa: B008  frozen
    potential: Potential = PotentialOptions(),
    capacity: Capacity = 1024,
    out: TableFile = None,
) -> Result:
    """Print the errors of a potential on labelled structures: total, by group, file and element.

    Parameters
    ----------
    files : files of structures or prepared stores
    labels : names of the labels in the files

    Examples
    --------
    bevatron evaluate runs/water test.extxyz
    bevatron evaluate runs/water test.extxyz --json | jq .total.forces_rmse
    """
    from bevatron.recipes.mace.evaluate import evaluate_files, print_tables

    found = evaluate_files(
        model, files, labels=labels, capacity=capacity, out=out, **vars(potential)
    )
    return Result(found.errors(), lambda: print_tables(found))


def predict(
    model: Model,
    source: Source,
    out: Out,
    committee: tuple[Path, ...] = (),
    prefix: str = "predicted_",
    potential: Potential = PotentialOptions(),
    capacity: Capacity = 1024,
) -> Result:
    """Write energies, forces and stress of structures, next to what the file already holds.

    Parameters
    ----------
    source : structures in any format that ASE reads
    out : extended XYZ to write
    committee : more models: the mean and the standard deviation of all are written
    prefix : prefix of the names of the results

    Examples
    --------
    bevatron predict runs/water new.extxyz predicted.extxyz
    bevatron predict runs/water new.extxyz out.extxyz --committee runs/b
    """
    from bevatron.recipes.mace.predict import predict_file

    models = [model, *committee]
    done = predict_file(models, source, out, prefix=prefix, capacity=capacity, **vars(potential))
    values = {"structures": done, "out": out}
    return Result(values, lambda: say(f"{counted(done, 'structure')} in {out}"))


def relax(
    model: Model,
    source: Source,
    out: Out,
    fmax: float = 0.05,
    steps: int = 500,
    cell: bool = False,
    potential: Potential = PotentialOptions(),
) -> Result:
    """Relax many structures at once to minima of their energy (FIRE).

    Parameters
    ----------
    source : structures in any format that ASE reads
    out : extended XYZ to write
    fmax : largest force at convergence, eV/Å
    steps : maximum number of steps
    cell : relax the cells too

    Examples
    --------
    bevatron relax runs/water start.extxyz relaxed.extxyz
    bevatron relax runs/water crystals.extxyz relaxed.extxyz --cell --fmax 0.01
    """
    from bevatron.recipes.mace.predict import relax_file

    result = relax_file(model, source, out, fmax, steps, cell, **vars(potential))
    converged, number = int(result.converged.sum()), len(result.structures)
    return Result(
        {"structures": number, "converged": converged, "out": out},
        lambda: say(f"{converged} of {number} converged within {steps} steps; all are in {out}"),
    )


def convert_from_mace_torch(
    file: Source,
    out: Annotated[Path | None, tyro.conf.Positional, positional("[OUT]")] = None,
    trust: bool = False,
    config: Path | None = None,
) -> None:
    """Convert a mace-torch checkpoint to a model folder.

    Parameters
    ----------
    file
        A ``.model`` file, which is a pickle and needs mace-torch and --trust; or a state dict
        (``.pt``, ``.safetensors``) with --config, which need neither. Or the name of a published
        model whose file you have, such as mace-mp-0-small: looked for in $BEVATRON_MODELS
        (~/.cache/bevatron without it) and ~/.cache/mace.
    out
        The model folder; without it one in $BEVATRON_MODELS, which all commands then take by its
        name.
    trust
        Unpickle the file. A pickle can run arbitrary code.
    config : JSON file of mace-torch's configuration, for a state dict

    Examples
    --------
    bevatron convert mace-torch MACE.model runs/foundation --trust
    """
    from bevatron.recipes.mace.convert import from_mace_torch_file
    from bevatron.recipes.named_models import models_folder, published_file

    out = out or models_folder() / file.stem
    file = published_file(file)
    say(from_mace_torch_file(file, out, trust=trust, config=config))


def convert_to_mace_torch(model: Model, out: Out) -> None:
    """Write a run or a model folder as a mace-torch checkpoint.

    Parameters
    ----------
    out
        ``NAME.model``, which needs mace-torch; or ``NAME.pt``, a state dict, with the
        configuration next to it in ``NAME.json``, which does not.

    Examples
    --------
    bevatron convert to-mace-torch runs/water water.model
    """
    from bevatron.recipes.mace.convert import to_mace_torch_file

    say(to_mace_torch_file(model, out))
