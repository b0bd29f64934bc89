"""Molecules in Python, for `bevatron.load`, `bevatron.evaluate` and `bevatron.predict`."""

from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from bevatron.data.readers.molecule_options import MoleculeOptions
from bevatron.errors import ConfigError, require
from bevatron.recipes.gpspp.evaluate import evaluate_files
from bevatron.recipes.gpspp.predict import open_source, predict_file
from bevatron.recipes.gpspp.predictor import MoleculePredictor

Models = str | Path | MoleculePredictor | Sequence[str | Path]


def load(
    model: str | Path | Sequence[str | Path], *, dtype: Any = "float32", **options: Any
) -> MoleculePredictor:
    """Load a model, or an ensemble; see `MoleculePredictor`."""
    return MoleculePredictor(model, precision=dtype, **options)


def evaluate(
    model: Models,
    sources: Any,
    *,
    columns: MoleculeOptions | None = None,
    out: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Compute errors on files of labelled molecules or stores; see `evaluate_files`."""
    paths = [sources] if isinstance(sources, str | Path) else list(sources)
    predictor = _predictor(model, options)
    return dict(evaluate_files(predictor, [Path(path) for path in paths], columns, out))


def predict(
    model: Models,
    source: Any,
    out: str | Path | None = None,
    *,
    columns: MoleculeOptions | None = None,
    prefix: str = "predicted_",
    **options: Any,
) -> Any:
    """Predict a file; a SMILES; or SMILES and molecules of RDKit, in a list."""
    predictor = _predictor(model, options)
    if out is not None:
        return predict_file(predictor, Path(source), Path(out), columns, prefix)
    if isinstance(source, str) and not Path(source).exists() and _is_smiles(source):
        source = [source]
    given = open_source(Path(source), columns) if isinstance(source, str | Path) else source
    return predictor.predict(given)


def _is_smiles(text: str) -> bool:
    chem = require("rdkit.Chem", "molecules")
    with require("rdkit.rdBase", "molecules").BlockLogs():
        return chem.MolFromSmiles(text) is not None


def _predictor(model: Models, options: dict[str, Any]) -> MoleculePredictor:
    if not isinstance(model, MoleculePredictor):
        return load(model, **options)
    for name in options.keys() - {"dtype", *signature(MoleculePredictor).parameters}:
        raise TypeError(f"unexpected keyword argument '{name}'")
    if options:
        raise ConfigError(f"{', '.join(options)}: is an option of bevatron.load for a loaded model")
    return model
