"""Shared by all commands: types of arguments, and printing."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from bevatron.data.readers.labels import LabelOptions
from bevatron.data.readers.molecule_options import MoleculeOptions
from bevatron.output import say


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


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print rows of equal keys as a table."""
    if not rows:
        return
    cells = [list(rows[0])] + [[str(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    for line in cells:
        say("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
