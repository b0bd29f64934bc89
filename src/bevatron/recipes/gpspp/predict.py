"""Predictions for molecules in files: a table with every row in order, or OGB's format."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from bevatron.data.readers.molecules import (
    MoleculeOptions,
    MoleculeReader,
    molecules_in_memory,
    open_molecules,
)
from bevatron.data.readers.molecules.ogb import OgbFolder
from bevatron.data.readers.molecules.structures import SdfFile
from bevatron.data.readers.molecules.tables import TableFile
from bevatron.data.store.store import MANIFEST, Store
from bevatron.errors import ConfigError, DataError
from bevatron.files import atomic_write, write_csv_atomically
from bevatron.recipes.gpspp.predictor import MoleculePredictions, MoleculePredictor
from bevatron.typing import FloatArray

Split = Literal["test-dev", "test-challenge"]

OGB_SIZES = {"test-dev": 147_037, "test-challenge": 147_432}
"""Numbers of molecules in the splits of PCQM4Mv2 that OGB's evaluator takes."""


@dataclass(frozen=True)
class Written:
    """Counts of a file of predictions.

    Attributes
    ----------
    rows : number of rows, equal to that of the input
    without : rows without a prediction
    seen_in_2d : rows seen in 2D although 3D was requested
    outside : rows outside the data that a model was trained on
    renamed : new columns whose names the input has already, and what they are called instead
    """

    rows: int
    without: int
    seen_in_2d: int
    outside: int
    renamed: Mapping[str, str]


def predict_file(
    predictor: MoleculePredictor,
    source: Path,
    out: Path,
    options: MoleculeOptions | None = None,
    prefix: str = "predicted_",
) -> Written:
    """Predict every row of a file and write all of them, in order, as CSV or Parquet.

    The columns of a table, the titles (as ``name``) and data items of an SDF are kept. Added are
    PREFIX + target, with several models ``..._std`` for their spread, ``..._p0``, ``..._p1`` ...
    for the classes of a multiclass target, and ``reason`` where there is no prediction or doubt
    about it. Where the file has such a column already, the new one is called ``..._2``. Raises
    DataError if the file cannot be read or ``out`` cannot be written.

    Parameters
    ----------
    source : a table of SMILES, an SDF, OGB's folder or a prepared store
    out : ``.csv`` or ``.parquet``
    options : where the SMILES and 3D structures are
    prefix : prefix of the names of the results, so that labels in the input are kept
    """
    if out.suffix not in {".csv", ".parquet"}:
        raise DataError(f"{out}: expected a name that ends in .csv or .parquet")
    molecules = open_source(source, options)
    found = predictor.predict(molecules)
    columns = _given(molecules, found)
    names = {}
    for name, column in columns_of(found, prefix).items():
        names[name] = free_name(name, columns)
        columns[names[name]] = column
    table = pa.table(columns)
    if out.suffix == ".csv":
        texts = [column.cast(pa.string()).fill_null("").to_pylist() for column in table.columns]
        write_csv_atomically(out, [table.column_names, *zip(*texts, strict=True)], DataError)
    else:
        with atomic_write(out, DataError) as file:
            pa.parquet.write_table(table, file)
    asked = predictor.mode != "2d"
    without = int(np.isnan(found.values).all(axis=1).sum())
    flat = int((~found.seen_3d).sum()) - without if asked else 0
    renamed = {name: new for name, new in names.items() if name != new}
    return Written(len(found), without, flat, int(found.outside.sum()), renamed)


def free_name(name: str, taken: Collection[str]) -> str:
    """Return a name for a new column: the one wanted, or with the first free number.

    Examples
    --------
    >>> free_name("reason", ["smiles"]), free_name("reason", ["reason", "reason_2"])
    ('reason', 'reason_3')
    """
    numbered = (f"{name}_{number}" for number in range(2, len(taken) + 3))
    return next(each for each in (name, *numbered) if each not in taken)


def open_source(source: Path, options: MoleculeOptions | None = None) -> MoleculeReader | Store:
    """Open molecules to predict: a store as it is, files without targets."""
    if (source / MANIFEST).is_file():
        return Store.open(source)
    unlabelled = replace(options or MoleculeOptions(), targets=(), unlabelled=True)
    return open_molecules(source, unlabelled)


def columns_of(found: MoleculePredictions, prefix: str = "predicted_") -> dict[str, Any]:
    """Return predictions as columns by name."""
    columns: dict[str, Any] = {}
    for t, target in enumerate(found.targets):
        name = target.name if target.name.startswith(prefix) else f"{prefix}{target.name}"
        values = found.values[:, t]
        absent = np.isnan(values)
        if target.kind == "multiclass":
            whole = np.where(absent, 0, values).astype(np.int64)
            columns[name] = pa.array(whole, mask=absent)
            for c in range(target.num_classes):
                columns[f"{name}_p{c}"] = _floats(found.probabilities[target.name][:, c])
        else:
            columns[name] = _floats(values)
        if found.spread is not None:
            columns[f"{name}_std"] = _floats(found.spread[:, t])
    columns["reason"] = pa.array(found.reason, pa.string())
    return columns


def _floats(values: FloatArray) -> Any:
    # The digits of float32; more would only be noise.
    return pa.array(values.astype(np.float32), mask=np.isnan(values))


def _given(molecules: MoleculeReader | Store, found: MoleculePredictions) -> dict[str, Any]:
    """Return the columns of the input: of a table; of an SDF titles and data items; SMILES."""
    smiles = {"smiles": pa.array(found.smiles, pa.string())}
    if isinstance(molecules, MoleculeReader) and len(molecules.files) == 1:
        file = molecules.files[0]
        if isinstance(file, TableFile):
            table = file.everything()
            return {name: table[name] for name in table.column_names}
        if isinstance(file, SdfFile):
            items = file.everything()
            titles = items.pop("")
            title = "name" if "name" not in items else free_name("title", items)
            named = {title: titles} if any(titles) else {}
            texts = {name: pa.array(column, pa.string()) for name, column in
                     [*named.items(), *items.items()]}  # fmt: skip
            return smiles | texts
    return smiles


def predict_ogb(
    predictor: MoleculePredictor,
    source: Path,
    out: Path,
    split: Split = "test-dev",
    options: MoleculeOptions | None = None,
) -> tuple[Path, int]:
    """Write predictions as OGB's evaluator of PCQM4Mv2 takes them.

    A compressed npz with ``y_pred``, float32 [n], in the order of the split. Molecules without a
    prediction get the mean of the labels that the model was trained on. Raises ConfigError for
    models of several targets or of classes; DataError if the number of molecules is not that of the
    split.

    Parameters
    ----------
    predictor : models of one numeric target
    source : OGB's folder, whose split is predicted; or a file of just that split, in order
    out : a folder, in which the file gets OGB's name; or a name that ends in .npz
    split : test-dev or test-challenge
    options : where the SMILES are

    Returns
    -------
    The file, and how many molecules had no prediction.
    """
    if len(predictor.targets) != 1 or predictor.targets[0].kind != "regression":
        raise ConfigError(
            "format: OGB's evaluator takes one number per molecule, the model predicts "
            f"{', '.join(target.name for target in predictor.targets)}"
        )
    target = predictor.targets[0]
    if split not in OGB_SIZES:
        raise ConfigError(f"split: expected one of {', '.join(OGB_SIZES)}, got '{split}'")
    molecules = open_source(source, options)
    if isinstance(molecules, MoleculeReader) and isinstance(molecules.files[0], OgbFolder):
        molecules = _part(molecules.files[0], split)
    number = len(molecules) if isinstance(molecules, Store) else molecules.num_samples
    if number != OGB_SIZES[split]:
        raise DataError(
            f"{source}: {number} molecules for '{split}', which has {OGB_SIZES[split]}; give "
            "OGB's folder, or a file of just that split"
        )
    found = predictor.predict(molecules)
    values = found.values[:, 0]
    absent = np.isnan(values)
    predicted = np.where(absent, target.mean, values).astype(np.float32)
    path = out if out.suffix == ".npz" else out / f"y_pred_pcqm4m-v2_{split}.npz"
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path, DataError) as file:
        np.savez_compressed(file, y_pred=predicted)
    return path, int(absent.sum())


def _part(folder: OgbFolder, split: str) -> MoleculeReader:
    """Return the molecules of one split, in the order of OGB's split file."""
    parts = folder.parts or {}
    if split not in parts:
        raise DataError(f"{folder.name}: its split file has no '{split}'")
    smiles = folder.everything()[folder.column]
    return molecules_in_memory([smiles[int(row)].as_py() or "" for row in parts[split]])
