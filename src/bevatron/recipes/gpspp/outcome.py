"""Files that a run writes next to its model: the split of its molecules, and test predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv

from bevatron.data.dataset import Concatenated, Dataset, Subset
from bevatron.errors import DataError
from bevatron.files import atomic_write
from bevatron.models.gpspp import Mode
from bevatron.recipes.gpspp.data import MoleculeData
from bevatron.recipes.gpspp.finetune import trained_model
from bevatron.recipes.run_config import WriteReport
from bevatron.train.report.training import History
from bevatron.train.run import FitResult
from bevatron.typing import IntArray

SPLIT_FILE = "split.csv"
TEST_FILE = "test_predictions.csv"


@dataclass(frozen=True)
class WriteOutcome:
    """Writes split.csv (file, row, split), test_predictions.csv and the report of a finished run.

    Attributes
    ----------
    data : the run's data sets; predictions are written of the test set, if there is one
    modes : in which the run was validated; tests are predicted in the first
    report : writes the report, None for no report
    """

    data: MoleculeData
    modes: Sequence[Mode]
    report: WriteReport | None

    def __call__(self, result: FitResult, folder: Path) -> str | None:
        """Write all files; return a line for the log if the report could not be written."""
        data = self.data
        parts = {"train": data.train, "valid": data.valid, "test": data.test}
        tables = [
            pa.table({**_origins(part), "split": pa.array([role] * len(part))})
            for role, part in parts.items()
            if part is not None
        ]
        _write(folder / SPLIT_FILE, pa.concat_tables(tables))
        if data.test is not None:
            _write(folder / TEST_FILE, _test_predictions(folder, data.test, self.modes[0]))
        return None if self.report is None else self.report(result, folder)


def _test_predictions(folder: Path, test: Dataset, mode: Mode) -> Any:
    from bevatron.recipes.gpspp.report import evaluate_molecules

    device = History.of_run(folder).device
    model = trained_model(folder).to(device)
    found = evaluate_molecules(model, test, (mode,), device)
    smiles = [test[i]["smiles"].tobytes().decode() for i in range(len(test))]
    columns = {**_origins(test), "smiles": pa.array(smiles)}
    for t, target in enumerate(model.config.targets):
        label, predicted = (
            pa.array(values[:, t].astype(np.float32), from_pandas=True)
            for values in (found.labels, found.predictions)
        )
        columns |= {target.name: label, f"predicted_{target.name}": predicted}
    return pa.table(columns)


def _origins(dataset: Dataset) -> dict[str, Any]:
    names, places = _places(dataset)
    files = pa.DictionaryArray.from_arrays(pa.array(places[:, 0]), pa.array(names, pa.string()))
    return {"file": files.cast(pa.string()), "row": pa.array(places[:, 1])}


def _places(dataset: Dataset) -> tuple[list[str], IntArray]:
    """Return names of files, and (file, row) of every molecule, [n, 2]."""
    if isinstance(dataset, Subset):
        names, places = _places(dataset.dataset)
        return names, places[dataset.indices]
    if isinstance(dataset, Concatenated):
        names, parts = [], []
        for part in dataset.datasets:
            own, places = _places(part)
            parts.append(places + np.array([len(names), 0]))
            names += own
        return names, np.concatenate(parts)
    flat = [np.asarray(rows, dtype=np.int64) for rows, _ in dataset.flat("source")]  # type: ignore[attr-defined]
    return list(dataset.manifest["sources"]), np.concatenate(flat)  # type: ignore[attr-defined]


def _write(path: Path, table: Any) -> None:
    with atomic_write(path, DataError) as file:
        pa.csv.write_csv(table, file, pa.csv.WriteOptions(quoting_style="needed"))
