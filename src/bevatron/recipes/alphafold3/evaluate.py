"""Accuracy of predicted complexes: measures of each and their means."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bevatron.data.readers.proteins.components import INSTALLED
from bevatron.data.store.progress import progress
from bevatron.errors import ConfigError, DataError
from bevatron.files import SCRATCH, check_writable, write_json_atomically
from bevatron.models.alphafold3.predict import check_numbers, ranked
from bevatron.output import print_table
from bevatron.recipes.alphafold3.data import ComplexDataset
from bevatron.recipes.alphafold3.inputs import whole_sizes
from bevatron.recipes.alphafold3.measures import measure
from bevatron.recipes.alphafold3.predictor import ComplexPredictor
from bevatron.recipes.alphafold3.stores import open_complexes, prepared
from bevatron.recipes.devices import fitting
from bevatron.recipes.forward_progress import forward_progress
from bevatron.train.report.measures import measure_name

SEED = 0
"""Seed of the random numbers of an evaluation."""

_ORDER = ("distogram", "contact", "lddt", "rmsd", "dockq", "pocket", "plddt", "ptm", "")
"""How names of measures begin, in the order of the table, whatever the first complex has."""


def evaluate_stores(
    model: str | Path | ComplexPredictor,
    files: Sequence[Path],
    *,
    samples: int = 1,
    steps: int = 200,
    device: str = "auto",
    most: int | None = None,
    components: str = INSTALLED,
    out: Path | None = None,
) -> dict[str, Any]:
    """Predict the complexes of stores and compare the best ranked structure with the known one.

    Raises ConfigError, StoreError or DataError if nothing is given, or what is given is neither
    complexes nor structures.

    Parameters
    ----------
    model : a run, a model folder, or what was loaded of one
    files
        Stores of complexes, or folders of structures and alignments, which are prepared into one
        that is removed afterwards; nothing is cropped.
    samples, steps : structures of each complex, and steps of the sampling
    device : cpu, cuda, cuda:N or auto; for a model that is not loaded yet
    most : complexes of each store at most; None for all
    components : the chemical component dictionary for what is prepared: a file, or ``biotite``

    Returns
    -------
    ``mean``: measure -> {``value``, ``structures``: of how many}; ``complexes``: the measures of
    each, see `bevatron.recipes.alphafold3.measures.measure`, with ``name`` and ``store``.
    """
    if not files:
        raise ConfigError("evaluate: expected at least one store of complexes or folder")
    check_numbers(samples=samples, steps=steps, **({} if most is None else {"most": most}))
    check_writable(out, DataError)
    rows = []
    with TemporaryDirectory(SCRATCH, "bevatron-") as scratch:
        stores = prepared(files, Path(scratch) / "prepared", components)
        datasets = [_whole(store, most) for store in stores]
        given = ", ".join(str(file) for file in files if file not in stores)
        if not isinstance(model, ComplexPredictor):
            model = ComplexPredictor(model, device)
        for dataset in datasets:
            store = str(dataset.path) if dataset.path in files else given
            with progress("evaluate", len(dataset), unit="complexes") as advance:
                for index in range(len(dataset)):
                    sample = dataset.sample(index, SEED)
                    name = Path(dataset.describe(index)).name
                    size = f"{name}, {len(sample['restype']):,} tokens"
                    stages = model.stages(samples, steps)
                    with fitting(size, model.device), forward_progress(size, stages):
                        best = ranked(model.predict(sample, samples, steps))[0]
                    rows.append({"name": name, "store": store, **measure(sample, best)})
                    advance(1)
    table = {"mean": means(rows), "complexes": rows}
    if out is not None:
        write_json_atomically(out, table, DataError)
    return table


def _whole(path: Path, most: int | None) -> ComplexDataset:
    entries = np.flatnonzero(open_complexes(path).lengths("restype"))[:most]
    if not len(entries):
        raise DataError(f"{path}: holds no complex that can be used")
    units = np.stack([entries, 0 * entries, 0 * entries], axis=1)
    return ComplexDataset(path, units, whole_sizes())


def means(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Average every measure over the complexes that have it.

    Examples
    --------
    >>> means([{"name": "a", "lddt": 0.5}, {"name": "b", "lddt": 1.0, "dockq": 0.2}])["lddt"]
    {'value': 0.75, 'structures': 2}
    """
    names = dict.fromkeys(
        name for row in rows for name, value in row.items() if isinstance(value, float)
    )
    ordered = sorted(names, key=lambda name: [name.startswith(each) for each in _ORDER].index(True))
    found = {name: [row[name] for row in rows if name in row] for name in ordered}
    return {
        name: {"value": float(np.mean(values)), "structures": len(values)}
        for name, values in found.items()
    }


def print_table_of(table: dict[str, Any]) -> None:
    """Print the means and the number of structures."""
    rows = [
        [measure_name(name), f"{each['value']:.4g}", str(each["structures"])]
        for name, each in table["mean"].items()
    ]
    print_table(("measure", "mean", "structures"), rows)
