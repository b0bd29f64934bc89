"""Shared by all commands: types of arguments, and printing."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bevatron.data.readers.labels import LabelOptions
from bevatron.data.readers.molecule_options import MoleculeOptions


def positional(metavar: str) -> Any:
    """Name an argument in the usage line."""
    return tyro.conf.arg(metavar=metavar)


Files = Annotated[tuple[Path, ...], tyro.conf.Positional, positional("FILE ...")]
Model = Annotated[Path, tyro.conf.Positional, positional("MODEL")]
Source = Annotated[Path, tyro.conf.Positional, positional("SOURCE")]
Out = Annotated[Path, tyro.conf.Positional, positional("OUT")]
RunFolder = Annotated[Path, tyro.conf.Positional, positional("RUN")]
StoreFolder = Annotated[Path, tyro.conf.Positional, positional("STORE")]
Labels = Annotated[LabelOptions, tyro.conf.arg(name="labels")]
Columns = Annotated[MoleculeOptions, tyro.conf.arg(name="columns")]


@dataclass(frozen=True)
class PrepareOptions:
    """How a store is written.

    Attributes
    ----------
    samples_per_shard
        Samples in each shard; chosen from their number by default.
    workers
        Worker processes; all usable cores by default.
    overwrite
        Replace a store of other inputs in this folder.
    """

    samples_per_shard: int | None = None
    workers: int | None = None
    overwrite: bool = False


Preparing = Annotated[PrepareOptions, tyro.conf.arg(name="")]
