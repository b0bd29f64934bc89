"""Chains in Python, for `bevatron.load`, `bevatron.evaluate` and `bevatron.predict`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bevatron.errors import ConfigError
from bevatron.recipes.alphafold2.evaluate import evaluate_stores
from bevatron.recipes.alphafold2.predict import predict_files
from bevatron.recipes.alphafold2.predictor import ChainPredictor

Model = str | Path | ChainPredictor


def load(model: str | Path, *, device: str = "auto") -> ChainPredictor:
    """Load a model; see `ChainPredictor`."""
    return ChainPredictor(model, device)


def evaluate(
    model: Model, sources: str | Path | Sequence[str | Path], **options: Any
) -> dict[str, Any]:
    """Compare predictions with known structures; see `evaluate_stores`."""
    paths = [sources] if isinstance(sources, str | Path) else list(sources)
    return evaluate_stores(model, [Path(path) for path in paths], **options)


def predict(
    model: Model, source: str | Path, out: str | Path | None = None, **options: Any
) -> dict[str, Any]:
    """Predict the chains of a file into a folder; see `predict_files`."""
    if out is None:
        raise ConfigError("predict: expected a folder for the structures of AlphaFold2")
    return predict_files(model, Path(source), Path(out), **options)
