"""Node classifiers in Python, for `bevatron.load`, `bevatron.evaluate` and `bevatron.predict`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bevatron.recipes.graph.evaluate import evaluate_graphs
from bevatron.recipes.graph.predict import Predictions, load_model, predict_file, predict_graph


@dataclass(frozen=True)
class NodePredictor:
    """A trained node classifier that reads graphs as those that it was trained on.

    Attributes
    ----------
    device, dtype : where and in which precision it runs
    """

    folder: Path
    device: str = "auto"
    dtype: str = "float32"

    def predict(self, graph: Any, **files: Any) -> Predictions:
        """Classify every vertex of a graph; see `predict_graph`."""
        return predict_graph(self.folder, graph, device=self.device, dtype=self.dtype, **files)


def load(model: str | Path, *, device: str = "auto", dtype: str = "float32") -> NodePredictor:
    """Load a node classifier."""
    load_model(model, dtype)  # refused here rather than when it is used
    return NodePredictor(Path(model), device, dtype)


def evaluate(model: str | Path | NodePredictor, sources: Any, **options: Any) -> dict[str, Any]:
    """Compute metrics on a labelled graph, or several; see `evaluate_graphs`."""
    several = isinstance(sources, list | tuple)
    folder, options = _folder(model, options)
    return dict(evaluate_graphs(folder, list(sources) if several else [sources], **options))


def predict(
    model: str | Path | NodePredictor, source: Any, out: str | Path | None = None, **options: Any
) -> Any:
    """Classify every vertex of a file or a graph; see `predict_graph` and `predict_file`."""
    folder, options = _folder(model, options)
    if out is None:
        return predict_graph(folder, source, **options)
    return predict_file(folder, Path(source), Path(out), **options)


def _folder(
    model: str | Path | NodePredictor, options: dict[str, Any]
) -> tuple[Path, dict[str, Any]]:
    if isinstance(model, NodePredictor):
        return model.folder, {"device": model.device, "dtype": model.dtype, **options}
    return Path(model), options
