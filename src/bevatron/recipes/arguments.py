"""Types of arguments shared by several commands, with their help."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from bevatron.data.readers.labels import LabelOptions
from bevatron.data.readers.molecule_options import MoleculeOptions


def positional(metavar: str, meaning: str | None = None) -> Any:
    """Name an argument in the usage line, and explain it unless each command does."""
    return tyro.conf.arg(metavar=metavar, help=meaning)


def option(meaning: str) -> Any:
    """Explain an option for all commands that have it."""
    return tyro.conf.arg(help=meaning)


Files = Annotated[tuple[Path, ...], tyro.conf.Positional, positional("FILE ...")]
Model = Annotated[Path, tyro.conf.Positional, positional("MODEL", "A run or a model folder.")]
Source = Annotated[Path, tyro.conf.Positional, positional("SOURCE")]
Out = Annotated[Path, tyro.conf.Positional, positional("OUT")]
RunFolder = Annotated[Path, tyro.conf.Positional, positional("RUN")]
StoreFolder = Annotated[Path, tyro.conf.Positional, positional("STORE", "A prepared store.")]
NewStore = Annotated[Path, option("Folder of the store.")]
TableFile = Annotated[Path | None, option("Also write the table to this JSON file.")]
Device = Annotated[str, option("cpu, cuda, cuda:N, or auto (a GPU if there is one).")]
Dtype = Annotated[Literal["float64", "float32"], option("Precision.")]
Capacity = Annotated[int, option("Maximum number of atoms per batch.")]
Labels = Annotated[LabelOptions, tyro.conf.arg(name="labels")]
Columns = Annotated[MoleculeOptions, tyro.conf.arg(name="columns")]


@dataclass(frozen=True)
class PrepareOptions:
    """Options of writing a store.

    Attributes
    ----------
    samples_per_shard : samples in each shard; chosen from their number by default
    workers : worker processes; all usable cores by default
    overwrite : replace a store of other inputs in this folder
    """

    samples_per_shard: int | None = None
    workers: int | None = None
    overwrite: bool = False


Preparing = Annotated[PrepareOptions, tyro.conf.arg(name="")]
