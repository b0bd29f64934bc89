"""Errors of a trained potential on labelled structures: total, by group, file and head."""

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bevatron.data.dataset import Concatenated, Dataset
from bevatron.data.readers import LabelOptions
from bevatron.data.samples import StructureBatch
from bevatron.data.store.store import Store
from bevatron.errors import ConfigError, DataError
from bevatron.files import check_writable, write_json_atomically
from bevatron.models.common.metrics import ErrorSums, group_errors
from bevatron.models.mace import MaceConfig, MaceTask, per_structure_errors
from bevatron.output import number, print_table
from bevatron.recipes.devices import announce
from bevatron.recipes.finite import check_finite
from bevatron.recipes.mace.data import batch_sizes
from bevatron.recipes.mace.potential import Potential, head_of_unnamed, trained_model
from bevatron.recipes.mace.stores import open_structures
from bevatron.train.evaluate import predict
from bevatron.train.settings import BatchConfig
from bevatron.typing import Arrays, FloatArray, IntArray

log = logging.getLogger("bevatron.inference")

Errors = dict[str, float]
"""Metric -> value, such as ``forces_rmse`` in eV/Å; energies in eV, stress in eV/Å^3."""


@dataclass(frozen=True)
class Predictions:
    """Labels and predictions; NaN where there is no label.

    Attributes
    ----------
    num_atoms, num_edges : [S]
    energy, predicted_energy : [S] eV
    forces, predicted_forces : [A, 3] eV/Å, all atoms one after another
    atomic_numbers : [A]
    stress, predicted_stress : [S, 3, 3] eV/Å^3
    group, file, head : names, one for each structure
    """

    num_atoms: IntArray
    num_edges: IntArray
    energy: FloatArray
    predicted_energy: FloatArray
    forces: FloatArray
    predicted_forces: FloatArray
    atomic_numbers: IntArray
    stress: FloatArray
    predicted_stress: FloatArray
    group: list[str]
    file: list[str]
    head: list[str]


@dataclass(frozen=True)
class Evaluation:
    """Errors of a potential.

    Attributes
    ----------
    tables
        ``group``, ``file``, ``head``, ``element`` -> name -> errors; only where there are several.
    """

    total: Errors
    tables: Mapping[str, Mapping[str, Errors]]
    predictions: Predictions

    def errors(self) -> dict[str, Any]:
        """Return the errors: ``total``, and each of `tables`."""
        return {"total": self.total, **self.tables}


def evaluate_files(
    model: torch.nn.Module | Path | str,
    paths: Sequence[Path | str],
    *,
    labels: LabelOptions | None = None,
    head: str | None = None,
    device: str = "auto",
    dtype: str = "float64",
    capacity: int = 1024,
    out: Path | None = None,
) -> Evaluation:
    """Evaluate a model, a model folder or a run on files or stores of labelled structures.

    Raises DataError for structures without labels, or with elements that the model does not know.

    Parameters
    ----------
    paths : files of structures or prepared stores
    labels : names of the labels in the files
    head
        Readout for all structures; by default the one that each structure names, and the model's
        default head for those that name none.
    device, dtype : where and in which precision to compute
    capacity : maximum number of atoms per batch
    out : JSON file for the tables
    """
    if not paths:
        raise ConfigError("evaluate: expected at least one file or store of labelled structures")
    check_writable(out, DataError)
    module = model if isinstance(model, torch.nn.Module) else trained_model(model)
    config: Any = module.config
    unnamed = head_of_unnamed(config, "--head") if head is None else head
    potential = Potential(module, device, dtype, unnamed)
    announce(potential.device, potential.dtype)
    labels = labels or LabelOptions()
    if head is None and len(potential.heads) > 1 and not labels.heads:
        # Structures without a name belong to the first.
        labels = replace(labels, heads=tuple(dict.fromkeys((unnamed, *potential.heads))))
    with tempfile.TemporaryDirectory(prefix="bevatron-") as scratch:
        stores = open_structures(paths, potential.cutoff, labels, Path(scratch) / "store")
        _warn_of_unused(stores)
        dataset = Concatenated(stores, [_head_indices(s, config, head) for s in stores])
        evaluation = evaluate_dataset(potential, dataset, capacity)
    if out is not None:
        write_json_atomically(out, evaluation.errors(), DataError)
    return evaluation


def evaluate_dataset(potential: Potential, dataset: Dataset, capacity: int = 1024) -> Evaluation:
    """Evaluate a potential on prepared structures."""
    names = _names(dataset)
    if not set(np.unique(names["atomic_numbers"]).tolist()) <= set(potential.atomic_numbers):
        for index, sample in _samples(dataset):
            potential.check_elements(sample["atomic_numbers"], dataset.describe(index))
    heads = potential.heads
    task = MaceTask(heads=heads)
    batches = predict(
        task,
        potential.model,
        dataset,
        batch_sizes(dataset),
        batch=BatchConfig(capacity=capacity),
        device=potential.device,
        dtype=potential.dtype,
    )
    rows: dict[str, list[torch.Tensor]] = {}
    parts: dict[str, list[np.ndarray]] = {}
    head_index: list[int] = []
    for batch, outputs in batches:
        _check_finite(batch, outputs, dataset)
        for name, values in per_structure_errors(batch, outputs).items():
            rows.setdefault(name, []).append(values.cpu())
        head_index += batch.head.tolist()
        missing_stress = outputs["energy"].new_full((batch.num_graphs, 3, 3), torch.nan)
        for name, value in {
            "num_atoms": batch.graph_ptr.diff(),
            "energy": torch.where(batch.has_energy, batch.energy, torch.nan),
            "predicted_energy": outputs["energy"],
            "forces": torch.where(batch.has_forces[batch.graph, None], batch.forces, torch.nan),
            "predicted_forces": outputs["forces"],
            "stress": torch.where(batch.has_stress[:, None, None], batch.stress, torch.nan),
            "predicted_stress": outputs.get("stress", missing_stress),
        }.items():
            wide = value.double() if value.is_floating_point() else value
            parts.setdefault(name, []).append(wide.cpu().numpy())
    arrays: dict[str, Any] = {name: np.concatenate(values) for name, values in parts.items()}
    predictions = Predictions(
        num_edges=dataset.lengths("edges"), head=[heads[i] for i in head_index], **names, **arrays
    )
    joined = {name: torch.cat(values) for name, values in rows.items()}
    return summarise(joined, predictions, name_head=len(heads) > 1)


def _check_finite(
    batch: StructureBatch, outputs: Mapping[str, torch.Tensor], dataset: Dataset
) -> None:
    names = [name for name in ("energy", "forces", "stress") if name in outputs]
    if all(bool(outputs[name].isfinite().all()) for name in names):
        return
    first = batch.graph_ptr.tolist()
    for g, index in enumerate(batch.sample_indices):
        rows = {"forces": slice(first[g], first[g + 1])}
        own = {name: outputs[name][rows.get(name, slice(g, g + 1))].cpu().numpy() for name in names}
        check_finite(own, lambda index=index: dataset.describe(int(index)))  # type: ignore[misc]


def summarise(
    rows: Mapping[str, torch.Tensor], predictions: Predictions, *, name_head: bool = False
) -> Evaluation:
    """Build tables of the errors of single structures (rows of `error_rows` by quantity).

    ``name_head`` adds a table by head even if all structures used the same one: users may not
    expect which, if the structures name none.
    """
    total = ErrorSums(list(rows))
    total.add(rows)
    tables: dict[str, Mapping[str, Errors]] = {}
    for kind in ("group", "file", "head"):
        labels = getattr(predictions, kind)
        groups = list(dict.fromkeys(labels))
        if len(groups) > 1 or (kind == "head" and name_head):
            index = np.array([groups.index(label) for label in labels], dtype=np.int64)
            tables[kind] = group_errors(rows, groups, index)
    elements = element_errors(predictions)
    if len(elements) > 1:
        tables["element"] = elements
    return Evaluation(total=total.compute(), tables=tables, predictions=predictions)


def print_tables(evaluation: Evaluation, width: int | None = None) -> None:
    """Print the errors in meV, meV/Å and meV/Å³; ``width`` as in `bevatron.output.print_table`."""
    for kind, rows in {"": {"all": evaluation.total}, **evaluation.tables}.items():
        names, cells = error_table(rows)
        headers = [kind, *("\n".join(SHOWN[name]) for name in names)]
        lines = [
            [label, *("" if value is None else number(value) for value in values)]
            for label, values in cells.items()
        ]
        print_table(headers, lines, f"by {kind}" if kind else "", width)


SHOWN = {
    "energy_per_atom_mae": ("energy MAE", "meV/atom"),
    "energy_per_atom_rmse": ("energy RMSE", "meV/atom"),
    "forces_mae": ("force MAE", "meV/Å"),
    "forces_rmse": ("force RMSE", "meV/Å"),
    "stress_mae": ("stress MAE", "meV/Å³"),
    "stress_rmse": ("stress RMSE", "meV/Å³"),
}
"""Metrics in tables -> quantity, unit after multiplication by 1000."""


def error_table(rows: Mapping[str, Errors]) -> tuple[list[str], dict[str, list[float | None]]]:
    """Return the metrics of `SHOWN` that occur, and their values in the units there by row."""
    names = [name for name in SHOWN if any(name in errors for errors in rows.values())]
    return names, {
        label: [1e3 * errors[name] if name in errors else None for name in names]
        for label, errors in rows.items()
    }


def element_errors(predictions: Predictions) -> dict[str, Errors]:
    """Compute the errors of the forces on the atoms of each element."""
    from ase.data import chemical_symbols

    error = predictions.predicted_forces - predictions.forces
    table: dict[str, Errors] = {}
    for z in np.unique(predictions.atomic_numbers):
        own = error[predictions.atomic_numbers == z]
        own = own[~np.isnan(own).any(axis=1)]
        if len(own):
            table[chemical_symbols[z]] = {
                "forces_mae": float(np.abs(own).mean()),
                "forces_rmse": float(np.sqrt(np.square(own).mean())),
            }
    return table


def _names(dataset: Dataset) -> dict[str, Any]:
    """Read elements, groups and files, which batches do not contain."""
    numbers, groups, files = [], [], []
    for index, sample in _samples(dataset):
        numbers.append(np.asarray(sample["atomic_numbers"], dtype=np.int64))
        groups.append(bytes(sample["group"]).decode() or "(no group)")
        files.append(dataset.describe(index).rpartition(", frame")[0] or "(unknown)")
    if not numbers:
        raise DataError("there are no structures to evaluate")
    return {"atomic_numbers": np.concatenate(numbers), "group": groups, "file": files}


def _head_indices(store: Store, config: MaceConfig, head: str | None) -> list[int]:
    """Return the model's head for each head that a store was prepared with."""
    names = list(store.manifest["settings"].get("labels", {}).get("heads") or ())
    if head is not None or config.num_heads == 1:
        return [config.head_index(head)] * max(len(names), 1)
    unknown = [name for name in names if name not in config.heads]
    if unknown or not (names or config.default_head):
        found = f"the heads {', '.join(names)}" if names else "no heads"
        raise ConfigError(
            f"{store.path}: was prepared with {found}, the model has {', '.join(config.heads)}; "
            'choose one with `head="NAME"`, or give the files themselves'
        )
    return [config.head_index(name) for name in names or (None,)]


def _warn_of_unused(stores: Sequence[Store]) -> None:
    for store in stores:
        for line in store.manifest.get("report", ()):
            if line.startswith("warning: "):
                log.warning("%s", line.removeprefix("warning: "))


def _samples(dataset: Dataset) -> Iterator[tuple[int, Arrays]]:
    for index in range(len(dataset)):
        yield index, dataset[index]
