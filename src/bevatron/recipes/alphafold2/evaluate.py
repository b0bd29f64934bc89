"""How near predicted chains are to known ones."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bevatron.data.proteins.chain_batch import collate_chain
from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.errors import ConfigError
from bevatron.files import write_json_atomically
from bevatron.output import print_table
from bevatron.recipes.alphafold2.data import ChainDataset, chain_table
from bevatron.recipes.alphafold2.predictor import EXTRA_ROWS, ROWS, ChainPredictor
from bevatron.recipes.alphafold2.run import CYCLES
from bevatron.recipes.alphafold2.stores import open_chains, prepared


def evaluate_stores(
    model: str | Path | ChainPredictor,
    files: Sequence[Path],
    *,
    device: str = "auto",
    most: int | None = None,
    out: Path | None = None,
) -> dict[str, Any]:
    """Predict the chains of stores, whole, and compare them with the known structures.

    Parameters
    ----------
    model
        A run, a model folder, or what was loaded of one.
    files
        Stores of chains, or folders of structures and alignments, which are prepared into one that
        goes afterwards.
    device
        cpu, cuda, cuda:N or auto; for a model that is not loaded yet.
    most
        Chains of each store at most; None for all.
    out
        JSON file for the table.

    Returns
    -------
    ``mean``: measure -> mean, see `bevatron.models.alphafold2.metrics.ChainMetrics`; ``chains``:
    the measures of each, with ``name``.

    Raises
    ------
    ConfigError, StoreError, DataError
        If nothing is given, or what is given is neither chains nor structures.
    """
    if not files:
        raise ConfigError("evaluate: expected at least one store of chains or folder")
    predictor = model if isinstance(model, ChainPredictor) else ChainPredictor(model, device)
    with TemporaryDirectory(prefix="bevatron-") as scratch:
        values = _evaluated(predictor, prepared(files, Path(scratch) / "prepared"), most)
    if out is not None:
        write_json_atomically(out, values)
    return values


def _evaluated(
    predictor: ChainPredictor, stores: Sequence[Path], most: int | None
) -> dict[str, Any]:
    task, total, rows = predictor.task, predictor.task.metrics(), []
    for path in stores:
        table = chain_table(open_chains(path))
        chosen = np.flatnonzero(table.usable)[:most]
        sizes = ChainSizes(int(table.length.max(initial=1)), ROWS, EXTRA_ROWS, best_templates=True)
        data = ChainDataset(path, table.units[chosen], table.length[chosen], sizes, CYCLES)
        for index in range(len(data)):
            one = collate_chain([data[index]], np.array([index]), [1.0]).to(predictor.device)
            found, each = task.predict(predictor.model, one), task.metrics()
            for metrics in (each, total):
                metrics.update(one, found)
            rows.append({"name": data.describe(index), **each.compute()})
    return {"mean": total.compute(), "chains": rows}


def print_table_of(values: dict[str, Any]) -> None:
    """Print the means."""
    rows = [[name, f"{value:.4g}"] for name, value in values["mean"].items()]
    print_table(["measure", "mean"], rows, f"{len(values['chains'])} chains")
