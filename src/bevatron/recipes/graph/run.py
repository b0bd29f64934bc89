"""The recipe ``graph``: attention (GAT, AGNN, VA) on one graph or several, node classification."""

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from bevatron.config import merged, to_dict
from bevatron.data.dataset import ROLES
from bevatron.errors import ConfigError
from bevatron.files import write_text_atomically
from bevatron.kernels import use
from bevatron.models.common.hyper_parameters import preset_values
from bevatron.models.graph_attention import GraphAttentionConfig, NodeClassifier, NodeTask
from bevatron.models.graph_attention.config import PRESETS as MODEL_PRESETS
from bevatron.parallel.mesh import Mesh, ranks_from_environment
from bevatron.recipes.graph import SYSTEM
from bevatron.recipes.graph.data import (
    GraphData,
    GraphDataConfig,
    describe_vertices,
    graph_sizes,
    load_graphs,
)
from bevatron.recipes.graph.partition import PartedGraph, PartSet, Scheme, open_graph
from bevatron.recipes.graph.split import TrainedSplit
from bevatron.recipes.run_config import RunConfig, SaveModel, WriteReport
from bevatron.train.precision import dtype_of
from bevatron.train.run import FitResult, Run, SamplesApart, SamplesTogether
from bevatron.train.settings import (
    BatchConfig,
    CheckpointConfig,
    OptimConfig,
    ScheduleConfig,
    Settings,
    TrainConfig,
)

if TYPE_CHECKING:
    from bevatron.recipes.graph.report import Measured

REPORT = "bevatron.recipes.graph.report"
READ_FILE = "graph_options.json"
"""Next to a model's weights: how graphs for it are read."""

_BAG_OF_WORDS: dict[str, Any] = {"data": {"read": {"features": "rows"}}}
_FULL_BATCH: dict[str, Any] = {
    "optim": {
        "algorithm": "adam", "lr": 0.005, "weight_decay": 5e-4, "clip": None, "ema": None,
    },
    "schedule": {"kind": "constant"},
    "train": {"epochs": 1000, "patience": 100, "dtype": "float32"},
    "checkpoint": {"every_epochs": None, "every_minutes": 5.0, "keep": 1},
}  # fmt: skip
_AGNN: dict[str, Any] = {"optim": {"lr": 0.01}}
PRESETS: dict[str, tuple[dict[str, Any], ...]] = {
    "gat-cora": (_BAG_OF_WORDS,),
    "gat-citeseer": (_BAG_OF_WORDS,),
    "gat-pubmed": (_BAG_OF_WORDS, {"optim": {"lr": 0.01, "weight_decay": 1e-3}}),
    "agnn-cora": (_BAG_OF_WORDS, _AGNN),
    "agnn-citeseer": (_BAG_OF_WORDS, _AGNN),
    "agnn-pubmed": (_BAG_OF_WORDS, _AGNN),
    "gat-heterophilous": (
        {"data": {"questions": "yes_no"}},
        {"optim": {"lr": 3e-5, "weight_decay": 0.0}, "train": {"monitor": "-roc_auc"}},
    ),
    "gcn-heterophilous": (
        {"data": {"questions": "yes_no"}},
        {"optim": {"lr": 3e-5, "weight_decay": 0.0}, "train": {"monitor": "-roc_auc"}},
    ),
}
"""Published recipes by name: changes to the settings for one graph in every step.

The learning rate of the heterophilous presets, 3e-5, is that of the published program as far as
known; no run of ours has confirmed the published figures with it. Compare a few with
``--optim.lr`` before relying on it.
"""


@dataclass(frozen=True, kw_only=True)
class GraphRun(RunConfig):
    """Configuration of a training run on graphs.

    Attributes
    ----------
    output : the run's folder
    preset
        Published hyper-parameters by name: gat-cora, gat-citeseer, gat-pubmed, agnn-cora,
        agnn-citeseer, agnn-pubmed, gat-heterophilous, gcn-heterophilous. Other keys override it;
        None = GAT with Cora's sizes, features and projections as they are.
    data : files, labels, splits
    model : hyper-parameters
    optim, schedule, batch, loader, checkpoint, train, kernels
        See `bevatron.recipes.run_config.RunConfig`. One graph is one batch; for several graphs,
        ``batch.capacity`` counts nodes.
    partition
        How one graph is partitioned over the processes of torchrun: ``2d`` blocks of the matrix
        (GAT, AGNN and VA), ``feature`` (each has all edges and a part of the heads' features; GAT),
        ``rows`` (all layers), or the one that communicates least (``auto``).
    report : write report.html and the figures at the end
    """

    recipe: ClassVar[str] = SYSTEM.name

    output: Path = Path("runs/graph")
    data: GraphDataConfig = field(default_factory=GraphDataConfig)
    model: GraphAttentionConfig = field(default_factory=GraphAttentionConfig)
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(**_FULL_BATCH["optim"]))
    schedule: ScheduleConfig = field(default_factory=lambda: ScheduleConfig(kind="constant"))
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(capacity=16384))
    checkpoint: CheckpointConfig = field(
        default_factory=lambda: CheckpointConfig(**_FULL_BATCH["checkpoint"])
    )
    train: TrainConfig = field(default_factory=lambda: TrainConfig(**_FULL_BATCH["train"]))
    partition: Scheme = "auto"

    @classmethod
    def preset_values(cls, name: str | None) -> dict[str, Any]:
        """Return the changes of a published recipe."""
        if name is None:
            return {}
        chosen: dict[str, Any] = {"model": preset_values(MODEL_PRESETS, name)}
        for changes in PRESETS[name]:
            chosen = merged(chosen, changes)
        return chosen

    @property
    def settings(self) -> Settings:
        """The trainer's settings; one graph is one batch, which is collated once."""
        batch, loader = self.batch, self.loader
        if not self.data.inductive:
            batch = dataclasses.replace(
                batch, algorithm="fixed_count", size=1, capacity={"graphs": 1}
            )
            loader = dataclasses.replace(loader, workers=0)
        elif isinstance(batch.capacity, int):
            batch = dataclasses.replace(batch, capacity={"nodes": batch.capacity})
        elif batch.capacity == "auto":
            raise ConfigError("batch.capacity: 'auto' is for structures; give a number of nodes")
        return dataclasses.replace(super().settings, batch=batch, loader=loader)


def build(config: GraphRun, *, resume: bool = False) -> Run:
    """Build a complete run: graphs read and checked, model, task.

    Raises BevatronError for data that must not be trained on and settings that contradict each
    other.
    """
    use(config.kernels)
    ranks = ranks_from_environment(os.environ)[1]
    settings = config.settings
    apart = ranks == 1 or config.data.inductive
    data = load_graphs(config.data) if apart else load_parts(config)
    torch.manual_seed(config.train.seed)
    complete = _complete(config, data)
    model = NodeClassifier(complete).to(dtype_of(config.train.dtype))
    reporter = _Reporter(model, data, settings, cut=not apart)
    return Run(
        model=model,
        task=NodeTask(data.questions, data.outputs),
        train=data.train,
        sizes=graph_sizes(data.train),
        valid=data.valid,
        valid_sizes=None if data.valid is None else graph_sizes(data.valid),
        folder=config.output,
        settings=settings,
        config={"recipe": config.recipe, **to_dict(config)},
        identity={
            "model": to_dict(complete),
            "data": {"graphs": len(data.train), "fingerprint": data.fingerprint},
        },
        monitor="loss",
        resume=resume,
        save_model=_SaveModel(complete, config.data, data.split),
        size_names={"nodes": "vertices"},
        shown_metrics=("loss", "accuracy" if data.questions == "classes" else "roc_auc"),
        before_end=reporter.measure_together if config.report else None,
        on_end=reporter.write if config.report else None,
        notes=data.report,
        generators=data.generators,
        sharing=SamplesApart() if apart else SamplesTogether(),
    )


def load_parts(config: GraphRun) -> GraphData:
    """Build data sets partitioned over the processes, see `bevatron.recipes.graph.partition`.

    Raises BevatronError for data that must not be trained on, or models that do not run on several
    processes.
    """
    if len(config.data.train) != 1:
        raise ConfigError('data.train: expected a graph to train on (`data="FILE"`)')
    edges, vertices = open_graph(
        config.data.train[0],
        config.data.read,
        self_loops=config.model.self_loops,
        features=config.data.features,
        labels=config.data.labels,
        splits=config.data.splits,
    )
    found = describe_vertices(vertices, config.data)
    graph = PartedGraph(
        *(edges, vertices, _complete(config, found), config.partition),
        *(config.train.device, config.train.seed),
    )
    sets = {role: PartSet(graph, role) for role in ROLES if vertices.mask(role).any()}
    return dataclasses.replace(
        found,
        train=sets["train"],
        valid=sets.get("valid"),
        test=sets.get("test"),
        generators={"attention_dropout": graph.generator},
    )


def _complete(config: GraphRun, data: GraphData) -> GraphAttentionConfig:
    return config.model.with_data(inputs=data.inputs, outputs=data.outputs, labels=data.questions)


@dataclass
class _Reporter:
    """Evaluates the final model, on all processes if they share one graph, and reports."""

    model: NodeClassifier
    data: GraphData
    settings: Settings
    cut: bool
    measured: "dict[str, Measured] | None" = None

    def measure_together(self, mesh: Mesh) -> None:
        from bevatron.recipes.graph.report import measure

        if self.cut:
            self.measured = measure(self.model, self.data, self.settings, mesh)

    def write(self, result: FitResult, folder: Path) -> str | None:
        report = WriteReport(REPORT, self.model, self.measured, self.data, self.settings)
        return report(result, folder)


class _SaveModel(SaveModel):
    """Writes a model folder that also records how its graphs are read and were split."""

    def __init__(
        self, config: GraphAttentionConfig, data: GraphDataConfig, split: TrainedSplit
    ) -> None:
        super().__init__(SYSTEM.kind, config)
        self.split = split
        kept = ("self_loops", "symmetrise", "duplicates", "features", "renumber")
        self.read = {key: value for key, value in to_dict(data.read).items() if key in kept}

    def __call__(self, folder: Path, state: Mapping[str, Tensor]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.read, indent=1) + "\n"
        write_text_atomically(folder / READ_FILE, text, ConfigError)
        self.split.save(folder)
        super().__call__(folder, state)
