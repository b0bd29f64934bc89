"""Accuracy of predicted chains: measures of each and their means."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from torch import Tensor

from bevatron.data.proteins.chain_batch import ChainBatch, collate_chain
from bevatron.data.store.progress import progress
from bevatron.errors import ConfigError, DataError
from bevatron.files import SCRATCH, check_writable, make_writable, write_json_atomically
from bevatron.models.alphafold2.config import whole_chains
from bevatron.models.alphafold2.task import CYCLES
from bevatron.output import counted, print_table
from bevatron.recipes.alphafold2.data import ChainDataset, chain_table
from bevatron.recipes.alphafold2.predictor import ChainPredictor
from bevatron.recipes.alphafold2.stores import open_chains, prepared
from bevatron.recipes.devices import fitting
from bevatron.recipes.forward_progress import forward_progress
from bevatron.train.report.measures import measure_name


def evaluate_stores(
    model: str | Path | ChainPredictor,
    files: Sequence[Path],
    *,
    device: str = "auto",
    most: int | None = None,
    out: Path | None = None,
    pictures: Path | None = None,
) -> dict[str, Any]:
    """Predict the chains of stores, whole, and compare them with the known structures.

    Raises ConfigError, StoreError or DataError if nothing is given, or what is given is neither
    chains nor structures.

    Parameters
    ----------
    model : a run, a model folder, or what was loaded of one
    files
        Stores of chains, or folders of structures and alignments, which are prepared into a
        temporary store.
    device : cpu, cuda, cuda:N or auto; for a model that is not loaded yet
    most : chains of each store at most; None for all
    pictures : folder for one picture of each chain: lDDT by residue, and both structures superposed

    Returns
    -------
    ``mean``: measure -> mean, see `bevatron.models.alphafold2.metrics.ChainMetrics`; ``chains``:
    the measures of each, with ``name``.
    """
    if not files:
        raise ConfigError("evaluate: expected at least one store of chains or folder")
    if most is not None and most < 1:
        raise ConfigError(f"most: expected 1 or more, got {most}")
    check_writable(out, DataError)
    if pictures is not None:
        make_writable(pictures, DataError)
    predictor = model if isinstance(model, ChainPredictor) else ChainPredictor(model, device)
    with TemporaryDirectory(SCRATCH, "bevatron-") as scratch:
        stores = prepared(files, Path(scratch) / "prepared")
        values = _evaluated(predictor, stores, most, pictures)
    if out is not None:
        write_json_atomically(out, values, DataError)
    return values


def _evaluated(
    predictor: ChainPredictor, stores: Sequence[Path], most: int | None, pictures: Path | None
) -> dict[str, Any]:
    task, total, rows = predictor.task, predictor.task.metrics(), []
    for path in stores:
        table = chain_table(open_chains(path))
        chosen = np.flatnonzero(table.usable)[:most]
        sizes = whole_chains(int(table.length.max(initial=1)))
        data = ChainDataset(path, table.units[chosen], table.length[chosen], sizes, CYCLES)
        with progress("evaluate", len(data), unit="chains") as advance:
            for index in range(len(data)):
                one = collate_chain([data[index]], np.array([index]), [1.0]).to(predictor.device)
                name = data.describe(index)
                with fitting(name, predictor.device), forward_progress(name, predictor.stages):
                    found, each = task.predict(predictor.model, one), task.metrics()
                for metrics in (each, total):
                    metrics.update(one, found)
                rows.append({"name": name, **each.compute()})
                if pictures is not None:
                    _draw(name, one, found, pictures)
                advance(1)
    return {"mean": total.compute(), "chains": rows}


def _draw(name: str, batch: ChainBatch, found: Mapping[str, Tensor], folder: Path) -> None:
    from bevatron.recipes.alphafold2.pictures import picture_of
    from bevatron.train.report.plots import save

    title = Path(name).name
    save(picture_of(title, batch, found), folder / f"{re.sub(r'[^A-Za-z0-9.]+', '-', title)}.png")


def print_table_of(values: dict[str, Any]) -> None:
    """Print the means."""
    rows = [[measure_name(name), f"{value:.4g}"] for name, value in values["mean"].items()]
    print_table(["measure", "mean"], rows, counted(len(values["chains"]), "chain"))
