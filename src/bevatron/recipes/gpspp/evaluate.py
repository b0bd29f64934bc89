"""Errors of trained GPS++ models on labelled molecules, by file and target."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.readers.molecules import MoleculeOptions, MoleculeReader, open_molecules
from bevatron.data.store.store import MANIFEST, Store
from bevatron.errors import ConfigError, DataError
from bevatron.files import check_writable, write_json_atomically
from bevatron.models.common.ranking import ranking_of_scores
from bevatron.models.gpspp import Target
from bevatron.output import number, print_table
from bevatron.recipes.gpspp.predictor import MoleculePredictions, MoleculePredictor
from bevatron.recipes.gpspp.targets import labels_of
from bevatron.train.report.measures import measure_name
from bevatron.typing import FloatArray

Errors = dict[str, float]

COUNTS = frozenset({"molecules", "without prediction", "outside the training data"})
"""Metrics that are counts."""


def evaluate_files(
    predictor: MoleculePredictor,
    sources: Sequence[Path],
    options: MoleculeOptions | None = None,
    out: Path | None = None,
) -> dict[str, dict[str, Errors]]:
    """Compute errors on labelled molecules; DataError for files without those targets.

    Parameters
    ----------
    predictor : one model, or several whose mean is evaluated
    sources
        Tables, SDF, OGB's folder or prepared stores. Their targets have the names of the model's,
        or ``options.targets`` names them in the model's order.
    options : columns of SMILES and labels

    Returns
    -------
    File -> target -> metric -> value; with several files also ``all``.
    """
    if not sources:
        raise ConfigError("evaluate: expected at least one file of molecules with labels")
    check_writable(out, DataError)
    names = tuple(target.name for target in predictor.targets)
    options = options or MoleculeOptions()
    wanted = replace(options, targets=options.targets or names, unlabelled=False)
    table: dict[str, dict[str, Errors]] = {}
    everything: list[tuple[FloatArray, MoleculePredictions]] = []
    for source in map(Path, sources):
        stored = (source / MANIFEST).is_file()
        molecules: Any = Store.open(source) if stored else open_molecules(source, wanted)
        count = len(molecules.manifest["settings"]["targets"]) if stored else len(wanted.targets)
        if count != len(names):
            raise DataError(f"{source}: has {count} targets, the model {len(names)}")
        labels = labels_of(molecules) if stored else _labels(molecules)
        found = predictor.predict(molecules)
        table[str(source)] = errors_by_target(predictor.targets, [(labels, found)])
        everything.append((labels, found))
    if len(everything) > 1:
        table["all"] = errors_by_target(predictor.targets, everything)
    if out is not None:
        write_json_atomically(out, table, DataError)
    return table


def _labels(reader: MoleculeReader) -> FloatArray:
    rows = [sample["targets"] for sample in reader.read(0, reader.num_samples)]
    return np.stack(rows).astype(np.float64)


def errors_by_target(
    targets: Sequence[Target], parts: Sequence[tuple[FloatArray, MoleculePredictions]]
) -> dict[str, Errors]:
    """Compute the metrics of every target over several sets of labels [n, T] and predictions."""
    found = {}
    outside = np.concatenate([predictions.outside for _, predictions in parts])
    for t, target in enumerate(targets):
        label = np.concatenate([labels[:, t] for labels, _ in parts])
        predicted = np.concatenate([predictions.values[:, t] for _, predictions in parts])
        known = np.isfinite(label) & np.isfinite(predicted)
        lost = int((np.isfinite(label) & ~np.isfinite(predicted)).sum())
        beyond = int((known & outside).sum())
        found[target.name] = {
            **errors(target, label[known], predicted[known]),
            **({"without prediction": float(lost)} if lost else {}),
            **({"outside the training data": float(beyond)} if beyond else {}),
        }
    return found


def errors(target: Target, labels: FloatArray, predicted: FloatArray) -> Errors:
    """Compute MAE, RMSE and R2 of numbers; accuracy, AUROC and AP of classes.

    Examples
    --------
    >>> found = errors(Target("gap"), np.array([1.0, 3.0]), np.array([2.0, 3.0]))
    >>> found["mae"], found["r2"]
    (0.5, 0.5)
    """
    number = {"molecules": float(len(labels))}
    if not len(labels):
        return number
    if target.kind == "regression":
        error = predicted - labels
        spread = np.square(labels - labels.mean()).sum()
        r2 = {"r2": float(1 - np.square(error).sum() / spread)} if spread > 0 else {}
        mae, rmse = float(np.abs(error).mean()), float(np.sqrt(np.square(error).mean()))
        return {**number, "mae": mae, "rmse": rmse, **r2}
    if target.kind == "multiclass":
        return {**number, "accuracy": float((labels == predicted).mean())}
    hits = {**number, "accuracy": float(((predicted > 0.5) == (labels > 0.5)).mean())}
    found = ranking_of_scores(predicted, (labels > 0.5).astype(float))
    return hits if found is None else {**hits, "auroc": found[0], "ap": found[1]}


def print_errors(table: Mapping[str, Mapping[str, Errors]], targets: Sequence[Target]) -> None:
    """Print errors by file and target."""
    units = {target.name: f" ({target.unit})" if target.unit else "" for target in targets}
    every = [metrics for rows in table.values() for metrics in rows.values()]
    names = list(dict.fromkeys(name for metrics in every for name in metrics))
    rows = [
        [source, target + units.get(target, ""), *(_cell(metrics, name) for name in names)]
        for source, found in table.items()
        for target, metrics in found.items()
    ]
    print_table(["file", "target", *map(measure_name, names)], rows)


def _cell(metrics: Errors, name: str) -> str:
    if name not in metrics:
        return ""
    return f"{metrics[name]:,.0f}" if name in COUNTS else number(metrics[name])
