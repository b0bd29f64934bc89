"""Potentials in Python, for `bevatron.load`, `bevatron.evaluate` and `bevatron.predict`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bevatron.errors import ConfigError
from bevatron.recipes.mace.calculator import BevatronCalculator
from bevatron.recipes.mace.evaluate import evaluate_files
from bevatron.recipes.mace.predict import predict_file, predict_structures

Models = str | Path | BevatronCalculator | Sequence[str | Path]


def load(
    model: str | Path | Sequence[str | Path],
    *,
    device: str = "auto",
    dtype: str = "float64",
    head: str | None = None,
    skin: float = 0.5,
    capture: bool | None = None,
) -> BevatronCalculator:
    """Load a potential, or a committee, as an ASE calculator; see `BevatronCalculator`."""
    return BevatronCalculator(model, device, dtype, head=head, skin=skin, capture=capture)


def evaluate(model: Models, sources: Any, **options: Any) -> dict[str, Any]:
    """Compute errors on files of labelled structures or stores; see `evaluate_files`."""
    paths = [sources] if isinstance(sources, str | Path) else list(sources)
    if not all(isinstance(path, str | Path) for path in paths):
        raise ConfigError("evaluate: expected files or stores of labelled structures, not Atoms")
    models, options = _models(model, options)
    if len(models) > 1:
        raise ConfigError("evaluate: takes one potential, not a committee")
    return evaluate_files(models[0], paths, **options).errors()


def predict(model: Models, source: Any, out: str | Path | None = None, **options: Any) -> Any:
    """Predict a file or structures of ASE; see `predict_file` and `predict_structures`."""
    models, options = _models(model, options)
    if out is None:
        return predict_structures(models, source, **options)
    return predict_file(models, source, out, **options)


def _models(model: Models, options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Return paths or models, and the options with those of a calculator as defaults."""
    if not isinstance(model, BevatronCalculator):
        return ([model] if isinstance(model, str | Path) else list(model)), options
    first = model.potentials[0]
    own = {
        "device": str(first.device),
        "dtype": str(first.dtype).removeprefix("torch."),
        "head": first.chosen_head,
    }
    return [potential.model for potential in model.potentials], {**own, **options}
