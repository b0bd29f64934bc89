"""Graph attention: from one large graph or several to a trained node classifier and its uses."""

from pathlib import Path
from typing import TYPE_CHECKING

from bevatron.recipes.system import System

if TYPE_CHECKING:
    from bevatron.recipes.graph.run import GraphRun, build

__all__ = ["SYSTEM", "GraphRun", "build"]


def recognises(path: Path) -> bool:
    """Whether a file holds a graph by its name."""
    return path.suffix in {".npz", ".mtx"}


SYSTEM = System(
    name="graph",
    package=__name__,
    kind="graph_attention",
    summary="node classification by attention (GAT, AGNN, VA) on large graphs",
    samples="graphs",
    config="run:GraphRun",
    build="run:build",
    commands={"evaluate": "commands:evaluate", "predict": "commands:predict"},
    usage=(
        ("train graph --data FILE --output RUN", "train on one graph, on one GPU or many"),
        ("predict RUN FILE OUT", "class and probabilities of every vertex"),
    ),
    recognises=":recognises",
    starter="starter.yaml",
    api="api",
    demo="demo:run_demo",
)

__getattr__ = SYSTEM.exported
