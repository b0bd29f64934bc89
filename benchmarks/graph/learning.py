"""Accuracy of graph attention on real graphs over seeds or splits, against PyTorch Geometric.

    python -m benchmarks.graph.learning --data DATA/graphs --runs gat-cora --seeds 10 --out rows
    python -m benchmarks.graph.learning --data DATA/graphs --runs gat-cora --peer --out rows
    python -m benchmarks.graph.learning --collect rows --page benchmarks/results/graph/learning.json

Planetoid (public split): GAT with the recipe of its paper and its authors' program (8 heads of 8,
ELU, dropout 0.6 of inputs, coefficients and projected features, Adam, row-normalised features,
no end but a patience of 100 epochs) and AGNN with that of its own. Tolokers and minesweeper: the
residual stack of heterophilous-graphs, one seed per split, ROC-AUC, 1000 steps at a constant rate.
The test value is taken at the best validation epoch: by the rule of GAT's code (accuracy and
loss) and, in the same training, by the loss alone, the rule of ``bevatron train graph``. The
peer is PyTorch Geometric's layers in the same stack, with the same dropout, optimiser, epochs and
stopping rule. On a GPU an epoch is captured once as a CUDA graph and replayed.
"""

import argparse
import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common.arguments import add_rows
from benchmarks.common.report import add_picture, hardware, spread, versions, write_result
from benchmarks.graph.recipes import RUNS, Recipe
from torch import Tensor, nn
from torch.nn import functional as F

from bevatron.data.samples import GraphBatch, WholeGraph
from bevatron.files import write_text_atomically
from bevatron.models.graph_attention import GraphAttentionConfig, NodeClassifier, NodeTask
from bevatron.models.graph_attention.metrics import counted_classes
from bevatron.train.capture.cuda_graphs import GraphPool, NotCapturableError
from bevatron.train.report.plots.style import PALETTE, new_axes

BETWEEN = 50
"""Epochs between two reads of the metrics, which wait for the device."""
TELL = 200
"""Epochs between two progress messages."""


def load(folder: Path, recipe: Recipe, split: int) -> WholeGraph:
    """Read a graph; features of Planetoid graphs are divided by the sum of their row."""
    with np.load(folder / f"{recipe.graph}.npz") as file:
        raw = {name: file[name] for name in file.files}
    n = int(raw["num_nodes"])
    masks = np.zeros((n, 3), dtype=bool)
    for column, part in enumerate(("train", "val", "test")):
        if f"{part}_masks" in raw:
            masks[:, column] = raw[f"{part}_masks"][split]
        else:
            masks[raw[part], column] = True
    indptr, indices = raw["feat_indptr"], raw["feat_indices"]
    values = raw.get("feat_data", np.ones(len(indices), dtype=np.float32)).astype(np.float32)
    sample: dict[str, Any] = {
        "num_nodes": np.array(n),
        "edges": np.stack([raw["edge_src"], raw["edge_dst"]], axis=1),
        "labels": raw["labels"].astype(np.int64),
        "masks": masks,
    }
    width = int(raw["feat_shape"][1])
    if recipe.heterophilous:
        dense = np.zeros((n, width), dtype=np.float32)
        dense[np.repeat(np.arange(n), np.diff(indptr)), indices] = values
        return WholeGraph({**sample, "features": dense})
    sums = np.add.reduceat(np.append(values, 0.0), indptr[:-1]) * (np.diff(indptr) > 0)
    values = values / np.repeat(np.where(sums == 0, 1, sums), np.diff(indptr)).astype(np.float32)
    return WholeGraph(
        {
            **sample,
            "feature_ptr": indptr.astype(np.int64),
            "feature_columns": indices.astype(np.int32),
            "feature_values": values.astype(np.float32),
            "num_features": np.array(width),
        }
    )


class Peer(nn.Module):
    """The same stack of PyTorch Geometric's layers; self loops are added once, beforehand."""

    def __init__(self, config: GraphAttentionConfig) -> None:
        super().__init__()
        from torch_geometric.nn import AGNNConv, GATConv

        self.config = config
        attention = {"dropout": config.attention_dropout, "add_self_loops": False}
        if config.stack == "residual":
            width, heads = config.hidden, config.heads
            self.embed, self.read_out = (
                nn.Linear(config.inputs, width),
                nn.Linear(width, config.outputs),
            )
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(config.num_layers + 1))
            self.layers = nn.ModuleList(
                GATConv(width, width // heads, heads, **attention) for _ in range(config.num_layers)
            )
            inner = round(width * config.mlp_factor)
            self.mlps = nn.ModuleList(
                nn.Sequential(
                    nn.Linear(width, inner), nn.Dropout(config.dropout), nn.GELU(),
                    nn.Linear(inner, width), nn.Dropout(config.dropout),
                )
                for _ in range(config.num_layers)
            )  # fmt: skip
        elif config.layer == "agnn":
            self.embed = nn.Linear(config.inputs, config.hidden)
            self.read_out = nn.Linear(config.hidden, config.outputs)
            for linear in (self.embed, self.read_out):
                nn.init.xavier_uniform_(linear.weight)
                nn.init.zeros_(linear.bias)
            fixed = [config.first_beta == "fixed" and n == 0 for n in range(config.num_layers)]
            self.layers = nn.ModuleList(
                AGNNConv(requires_grad=not f, add_self_loops=False) for f in fixed
            )
            for layer, is_fixed in zip(self.layers, fixed, strict=True):
                if is_fixed:
                    layer.beta.zero_()
        else:
            width = config.hidden * config.heads
            self.layers = nn.ModuleList(
                [
                    GATConv(config.inputs, config.hidden, config.heads, **attention),
                    GATConv(width, config.outputs, config.out_heads, concat=False, **attention),
                ]
            )
            for layer in self.layers:
                layer.register_propagate_forward_pre_hook(self._drop_values)

    def _drop_values(self, layer: nn.Module, inputs: tuple[Any, Any, dict[str, Any]]) -> Any:
        """Drop projected features after the scores, which PyTorch Geometric's layer does not do."""
        edges, size, given = inputs
        source, receiver = given["x"]
        source = F.dropout(source, self.config.value_dropout, layer.training)
        return edges, size, {**given, "x": (source, receiver)}

    def forward(self, batch: GraphBatch) -> dict[str, Tensor]:
        """Compute logits."""
        config, p = self.config, self.config.dropout
        edges = batch.graph.derived("peer edges", with_loops)
        x = batch.graph.derived("peer features", _dense)
        if config.stack == "residual":
            x = F.gelu(F.dropout(self.embed(x), p, self.training))
            for norm, layer, mlp in zip(self.norms, self.layers, self.mlps, strict=False):
                x = x + mlp(layer(norm(x), edges))
            return {"logits": self.read_out(self.norms[-1](x))}
        x = F.dropout(x, p, self.training)
        if config.layer == "agnn":
            x = F.relu(self.embed(x))
            for layer in self.layers:
                x = layer(x, edges)
            return {"logits": self.read_out(F.dropout(x, p, self.training))}
        x = F.dropout(F.elu(self.layers[0](x, edges)), p, self.training)
        return {"logits": self.layers[1](x, edges)}


def with_loops(graph: Any) -> Tensor:
    """Return a graph's edges and a self loop for every node, [2, edges + nodes]."""
    loop = torch.arange(graph.num_nodes, device=graph.edges.device)
    return torch.cat([graph.edges.long(), torch.stack([loop, loop])], dim=1)


def _dense(graph: Any) -> Tensor:
    return graph.features if isinstance(graph.features, Tensor) else graph.features.dense()


class Training:
    """A model in training on one graph; an epoch is a step and an evaluation of all parts.

    Parameters
    ----------
    model, task, graph, recipe, options : model, its loss, data, schedule and command line

    Attributes
    ----------
    history : [epochs, 4]
        Accuracy and loss in validation, the same in the test, on the device (Planetoid).
    """

    def __init__(
        self,
        model: nn.Module,
        task: NodeTask,
        graph: WholeGraph,
        recipe: Recipe,
        options: argparse.Namespace,
    ) -> None:
        self.model, self.task, self.options = model, task, options
        self.device = torch.device(options.device)
        self.parts = {n: graph.part(n).batch().to(self.device) for n in ("train", "valid", "test")}
        kind = torch.optim.AdamW if recipe.heterophilous else torch.optim.Adam
        self.optimizer = kind(
            [p for p in model.parameters() if p.requires_grad],
            lr=recipe.lr,
            weight_decay=recipe.weight_decay,
            capturable=self.device.type == "cuda",
        )
        self.counts = task.normalisers(self.parts["train"])
        self.history = torch.zeros(recipe.most_epochs, 4, device=self.device)
        self._row = torch.zeros(1, dtype=torch.long, device=self.device)
        self.run = self._step if recipe.heterophilous else self._epoch

    def logits(self) -> dict[str, Tensor]:
        """Evaluate the model without dropout."""
        self.model.eval()
        with self._products():
            return self.task.predict(self.model, self.parts["valid"])

    def begin_again(self, weights: Mapping[str, Tensor]) -> None:
        """Restore given weights and the state before the first epoch."""
        self.model.load_state_dict(weights)
        for state in self.optimizer.state.values():
            for value in state.values():
                value.zero_()
        self._row.zero_()

    def _products(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.options.bf16)

    def _step(self) -> None:
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        with self._products():
            loss = self.task.loss(self.model, self.parts["train"], self.counts).total
        loss.backward()
        self.optimizer.step()

    def _epoch(self) -> None:
        self._step()
        logits = self.logits()["logits"]
        found = [figure for n in ("valid", "test") for figure in judge(logits, self.parts[n])]
        self.history.index_copy_(0, self._row, torch.stack(found)[None])
        self._row += 1


class Epochs:
    """One epoch of all trainings, captured on a GPU as branches of one CUDA graph.

    The kernels of small graphs leave most of a GPU idle, so seeds train concurrently.

    Attributes
    ----------
    captured : whether a CUDA graph is replayed
    """

    def __init__(self, trainings: Sequence[Training], options: argparse.Namespace) -> None:
        self.trainings, self.captured = trainings, False
        self.run = self._one_after_the_other
        device = torch.device(options.device)
        if options.eager or device.type != "cuda":
            return
        before = [
            {name: value.clone() for name, value in one.model.state_dict().items()}
            for one in trainings
        ]
        # What is made once (the matrix in both orders) is there before the branches part.
        self._one_after_the_other()
        torch.cuda.synchronize(device)
        self._streams = [torch.cuda.Stream(device) for _ in trainings]
        try:
            self.run = GraphPool(device).capture(self._side_by_side)
            self.captured = True
        except NotCapturableError as error:
            print(f"not captured: {error}", flush=True)
        for one, weights in zip(trainings, before, strict=True):
            one.begin_again(weights)

    def _one_after_the_other(self) -> None:
        for one in self.trainings:
            one.run()

    def _side_by_side(self) -> None:
        if len(self.trainings) == 1:
            self.trainings[0].run()
            return
        present = torch.cuda.current_stream()
        for one, stream in zip(self.trainings, self._streams, strict=True):
            stream.wait_stream(present)
            with torch.cuda.stream(stream):
                one.run()
        for stream in self._streams:
            present.wait_stream(stream)


def judge(logits: Tensor, batch: GraphBatch) -> tuple[Tensor, Tensor]:
    """Compute accuracy and cross entropy on the labels that count, without waiting."""
    target = counted_classes(batch)
    right = (logits.argmax(1) == target).sum() / (target >= 0).sum()
    return right, F.cross_entropy(logits.float(), target, ignore_index=-1)


def train(trainings: Sequence[Training], recipe: Recipe) -> list[dict[str, float]]:
    """Train to the end; return the test metrics of the epochs that were best in validation."""
    options, stops = trainings[0].options, [Stop(recipe) for _ in trainings]
    epochs = Epochs(trainings, options)
    began, epoch = time.perf_counter(), 0
    while epoch < recipe.most_epochs and not all(stop.over for stop in stops):
        many = 1 if recipe.heterophilous else min(BETWEEN, recipe.most_epochs - epoch)
        for _ in range(many):
            epochs.run()
        for one, stop in zip(trainings, stops, strict=True):
            if not recipe.heterophilous:
                stop.all(one.history[epoch : epoch + many].tolist())
            elif epoch % options.evaluate_every == 0:
                stop(ranked(one, one.task))
        epoch += many
        if epoch % TELL == 0:
            print(epoch, [stop.best for stop in stops], flush=True)
    seconds = (time.perf_counter() - began) / epoch
    return [
        {
            **stop.best,
            **{f"{name} by loss": value for name, value in stop.by_loss.items()},
            "epochs": epoch if recipe.heterophilous else stop.seen,
            "seconds": seconds,
            "together": len(trainings),
            "captured": epochs.captured,
        }
        for stop in stops
    ]


def ranked(training: Training, task: NodeTask) -> dict[str, dict[str, float]]:
    """Compute ROC-AUC and the other metrics of validation and test."""
    outputs, found = training.logits(), {}
    for name in ("valid", "test"):
        metrics = task.metrics()
        metrics.update(training.parts[name], outputs)
        found[name] = metrics.compute()
    return found


class Stop:
    """Keeps the best epoch: ROC-AUC of validation, or GAT's rule on accuracy and loss.

    GAT's rule: an epoch whose validation accuracy and loss are both the best so far is kept; when
    neither has improved for the recipe's number of epochs, training ends.

    Attributes
    ----------
    best, by_loss
        Values of validation and test at the kept epoch, and at the epoch of the lowest loss.
    over, seen : whether training has ended, and the number of epochs
    """

    def __init__(self, recipe: Recipe) -> None:
        self.by_ranking, self.patience = recipe.heterophilous, recipe.patience
        self.best: dict[str, float] = {}
        self.by_loss: dict[str, float] = {}
        self._highest, self._lowest, self._waited = -1.0, float("inf"), 0
        self.seen, self.over = 0, False

    def all(self, rows: Sequence[Sequence[float]]) -> None:
        """Record epochs, the four values of `Training.history`, until training ends."""
        for row in rows:
            if not self.over:
                valid, test = (dict(zip(("accuracy", "loss"), row[k : k + 2], strict=True))
                               for k in (0, 2))  # fmt: skip
                self({"valid": valid, "test": test})

    def __call__(self, found: Mapping[str, Mapping[str, float]]) -> None:
        """Record an epoch; `over` says whether it was the last."""
        self.seen += 1
        valid, test = found["valid"], found["test"]
        if self.by_ranking:
            if valid["roc_auc"] > self._highest:
                self._highest = valid["roc_auc"]
                self.best = {"valid": valid["roc_auc"], "test": test["roc_auc"]}
            return
        accuracy, loss = valid["accuracy"], valid["loss"]
        if loss < self._lowest:
            self.by_loss = {"valid": accuracy, "test": test["accuracy"]}
        if accuracy >= self._highest or loss <= self._lowest:
            if accuracy >= self._highest and loss <= self._lowest:
                self.best = {"valid": accuracy, "test": test["accuracy"]}
            self._highest = max(self._highest, accuracy)
            self._lowest = min(self._lowest, loss)
            self._waited = 0
        else:
            self._waited += 1
        self.over = self._waited >= self.patience


def measure(
    name: str, make: Callable[[GraphAttentionConfig], nn.Module], options: argparse.Namespace
) -> None:
    """Train with every seed; results are written after each."""
    recipe = RUNS[name]
    whose = "bevatron" if make is NodeClassifier else "PyTorch Geometric"
    results: list[dict[str, float]] = []
    cell = {
        "run": name,
        "by": whose,
        "bf16": options.bf16,
        "seeds": results,
        "measured": f"{datetime.now(UTC):%Y-%m-%d}",
        "hardware": hardware(options.device),
        "versions": versions(),
    }
    path = options.out / f"{name}-{make.__name__.lower()}{'-bf16' * options.bf16}.json"
    options.out.mkdir(parents=True, exist_ok=True)
    first, together = options.first_seed, options.together
    for start in range(first, first + options.seeds, together):
        chunk = range(start, min(start + together, first + options.seeds))
        found = train([begin(recipe, seed, make, options) for seed in chunk], recipe)
        for seed, result in zip(chunk, found, strict=True):
            results.append({"seed": seed, **result})
            print(f"{name} {whose}: {results[-1]}", flush=True)
        write_text_atomically(path, json.dumps(cell, indent=1) + "\n")


def begin(
    recipe: Recipe,
    seed: int,
    make: Callable[[GraphAttentionConfig], nn.Module],
    options: argparse.Namespace,
) -> Training:
    """Make a model for a graph with the weights, and the split, of a seed."""
    graph = load(options.data, recipe, seed % 10)
    config = GraphAttentionConfig.preset(recipe.preset)
    if recipe.layers is not None:
        config = dataclasses.replace(config, num_layers=options.layers or recipe.layers)
    config = dataclasses.replace(config, **recipe.changes)
    inputs = graph.batch().graph.num_features
    outputs = 1 if recipe.heterophilous else int(np.asarray(graph["labels"]).max()) + 1
    kind = "yes_no" if recipe.heterophilous else "classes"
    torch.manual_seed(seed)
    model = make(config.with_data(inputs=inputs, outputs=outputs, labels=kind))
    return Training(model.to(options.device), NodeTask(kind, outputs), graph, recipe, options)


def row(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Summarise a run over its seeds: ours in float32 and bfloat16, the peer's."""
    name = cells[0]["run"]
    line: dict[str, Any] = {
        "run": name,
        "metric": "ROC-AUC" if RUNS[name].heterophilous else "accuracy",
        "published": RUNS[name].published,
    }
    for title, cell in _columns(cells).items():
        test = [100 * one["test"] for one in cell["seeds"]]
        line[title] = spread(test, 2)
        line[f"{title} seeds"] = len(test)
        if all("test by loss" in one for one in cell["seeds"]):
            line[f"{title} by loss"] = spread(
                [100 * one["test by loss"] for one in cell["seeds"]], 2
            )
    ours = _columns(cells).get("ours", cells[0])["seeds"]
    line["ours valid"] = spread([100 * one["valid"] for one in ours], 2)
    line["epochs"] = round(np.mean([one["epochs"] for one in ours]))
    line["measured"] = ", ".join(sorted({cell["measured"] for cell in cells}))
    return line


def _columns(cells: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    named = {
        ("ours" if cell["by"] == "bevatron" else "PyG") + (" bf16" if cell["bf16"] else ""): cell
        for cell in cells
    }
    return {title: named[title] for title in ("ours", "ours bf16", "PyG") if title in named}


def trained(folder: Path, page: Path | None) -> dict[str, list[dict[str, Any]]]:
    """Read results: a page's runs, replaced by those of the folder if measured again."""
    known: dict[tuple[str, str, bool], dict[str, Any]] = {}
    if page is not None:
        earlier = json.loads(page.read_text())
        for cell in (cell for cells in earlier["extra"]["cells"] for cell in cells):
            known[cell["run"], cell["by"], cell["bf16"]] = {"measured": earlier["date"], **cell}
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    for path in sorted(folder.glob("*.json")):
        cell = json.loads(path.read_text())
        if "by" in cell and cell["seeds"]:
            known[cell["run"], cell["by"], cell["bf16"]] = {"measured": today, **cell}
    machines = {cell["hardware"] for cell in known.values()}
    if len(machines) != 1:
        raise SystemExit(f"{folder}: expected results of one machine, found {sorted(machines)}")
    by_run: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for (run, _by, _bf16), cell in known.items():
        by_run[run].append(cell)
    return {name: by_run[name] for name in RUNS if name in by_run}


def collect(folder: Path, page: Path | None, out: Path, note: str) -> None:
    ordered = trained(folder, page)
    notes = (
        "Percent, mean ± standard deviation over seeds (of tolokers and minesweeper: over the "
        "published splits) of the test value at the epoch that was best in validation (accuracy "
        "and loss both the best so far, the rule of GAT's program; of ROC-AUC the best); "
        "'ours valid' is the validation's; 'by loss': of the same trainings, where that was "
        "measured, at the epoch of the lowest loss in validation. PyG: the same stack of PyTorch "
        "Geometric's layers, trained alike. Published: GAT (arXiv "
        "1710.10903), AGNN (1803.03735, standard error), heterophilous-graphs (2302.11640)."
    )
    path = write_result(
        "graph/learning",
        [row(cells) for cells in ordered.values()],
        f"{notes} {note}".rstrip(),
        extra={"cells": list(ordered.values())},
        folder=out,
        measured_on=next(iter(ordered.values()))[0],
    )
    add_picture(draw(ordered), path)


def draw(by_run: Mapping[str, Sequence[Mapping[str, Any]]]) -> Any:
    """Plot every seed's test value beside the published one, a line per run."""
    styles = {"ours": ("o", PALETTE[0]), "ours bf16": ("s", PALETTE[1]), "PyG": ("^", PALETTE[2])}
    rules = {"test": ("", True), "test by loss": (", by loss", False)}
    names: dict[str, Any] = {}
    with new_axes(8.4, 0.5 * len(by_run) + 1.9) as (figure, axes):
        ax = axes[0, 0]
        for place, (name, cells) in enumerate(by_run.items()):
            mean, deviation = (float(part) for part in RUNS[name].published.split(" ± "))
            band = [(mean - deviation, 2 * deviation)]
            names["published"] = ax.broken_barh(band, (place - 0.42, 0.84), color="0.85")
            drawn = [
                (title, rule, [100 * one[rule] for one in cell["seeds"]])
                for title, cell in _columns(cells).items()
                for rule in rules
                if all(rule in one for one in cell["seeds"])
            ]
            for number, (title, rule, values) in enumerate(drawn):
                at = place + 0.24 * (number - (len(drawn) - 1) / 2)
                (marker, colour), (words, filled) = styles[title], rules[rule]
                face = colour if filled else "none"
                dots = {"ls": "", "marker": marker, "color": colour, "mfc": face, "ms": 4}
                ax.plot(values, [at] * len(values), alpha=0.5, **dots)
                ax.plot(np.mean(values), at, "|", color=colour, ms=9, mew=2)
                names.setdefault(title + words, ax.plot([], [], **dots)[0])
        ax.set_yticks(range(len(by_run)), list(by_run))
        ax.invert_yaxis()
        ax.set(xlabel="test, %", title="Every seed; of tolokers and minesweeper ROC-AUC")
        figure.legend(names.values(), names.keys(), loc="outside lower center", ncols=len(names))
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--data", type=Path)
    add_rows(parser, "graph-learning-rows")
    parser.add_argument("--page", type=Path, help="JSON to join what is not in the folder from")
    parser.add_argument("--runs", nargs="+", choices=list(RUNS), default=list(RUNS))
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--together", type=int, default=1, help="seeds side by side")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--peer", action="store_true", help="train PyTorch Geometric's instead")
    parser.add_argument("--bf16", action="store_true", help="features and matmuls in bfloat16")
    parser.add_argument("--layers", type=int, help="of the residual stacks")
    parser.add_argument("--evaluate-every", type=int, default=5, help="steps, residual stacks")
    parser.add_argument("--eager", action="store_true", help="do not capture epochs on a GPU")
    options = parser.parse_args()
    if options.collect is not None:
        collect(options.collect, options.page, options.results, options.note)
        return
    if options.data is None:
        parser.error("expected --data FOLDER (or --collect FOLDER)")
    for name in options.runs:
        measure(name, Peer if options.peer else NodeClassifier, options)


if __name__ == "__main__":
    main()
