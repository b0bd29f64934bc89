"""Training on small graphs, against PyTorch Geometric: an epoch of Cora, a batch of molecules.

    python -m benchmarks.graph.small --data DATA/graphs

Cora: a stack of two GAT layers (8 heads of 8, dropout 0.6 of features and coefficients, Adam); an
epoch is an optimiser's step on the whole graph and an inference. Molecules: 4096 graphs of 9 to 29
atoms side by side as one, three layers without dropout, labels on all atoms; "new graph": the
structure is prepared within the step, as in training on batches that are all different.
Both sides have the same weights. Before timing, logits and gradients must agree without dropout.
"eager" is launched step by step, "captured" replays a CUDA graph of the step; "trainer" is a run of
`bevatron.train` with all it writes and reads, captured or launched: wall time of an epoch, the
difference of a long and a short run.
"""

import argparse
import functools
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common import report, timing
from benchmarks.common.arguments import add_out
from benchmarks.graph.learning import with_loops
from torch import Tensor, nn
from torch.nn import functional as F

from bevatron.data.samples import Graph
from bevatron.models.graph_attention import GraphAttentionConfig, NodeClassifier
from bevatron.models.graph_attention.convert import from_gat_conv
from bevatron.models.graph_attention.model import graph_features, graph_matrix
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.train.loop import fit

NOTES = (
    "fp32, medians of ten, ms. Epoch of Cora: a step of Adam and an inference. Molecules: a step; "
    "'new graph' prepares the structure (self loops; for bevatron also both orders of the edges) "
    "in every step. 'trainer': wall time of an epoch of a run (Cora's with validation, molecules' "
    "without), from two runs of different length; PyG has no trainer, its column is the eager call."
)
SHORT, LONG = 20, 140
"""Epochs of the trainer's two runs."""


class Peer(nn.Module):
    """A stack of PyTorch Geometric's GATConv with ELU between."""

    def __init__(self, config: GraphAttentionConfig) -> None:
        super().__init__()
        from torch_geometric.nn import GATConv

        width, layers = config.inputs, []
        for number in range(config.num_layers):
            last = number == config.num_layers - 1
            outputs, heads = (config.outputs, 1) if last else (config.hidden, config.heads)
            layers.append(
                GATConv(
                    *(width, outputs, heads),
                    concat=not last,
                    dropout=config.attention_dropout,
                    add_self_loops=False,
                )
            )
            width = outputs * heads
        self.layers, self.p = nn.ModuleList(layers), config.dropout

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        """Compute logits."""
        for number, layer in enumerate(self.layers):
            x = layer(F.dropout(x, self.p, self.training), edges)
            x = F.elu(x) if number < len(self.layers) - 1 else x
        return x


class Contest:
    """Both models with the same weights on the same graph."""

    def __init__(self, config: GraphAttentionConfig, graph: Graph, labels: Tensor) -> None:
        torch.manual_seed(0)
        self.config, self.graph, self.labels = config, graph, labels
        self.peer = Peer(config).to(labels.device)
        self.ours = NodeClassifier(config).to(labels.device)
        for number, layer in enumerate(self.peer.layers):
            last = number == config.num_layers - 1
            self.ours.stack.layers[number] = from_gat_conv(
                layer.state_dict(),
                combine="mean" if last else "concat",
                attention_dropout=config.attention_dropout,
            ).to(labels.device)
        features = graph.features
        self.dense = features if isinstance(features, Tensor) else features.dense()
        self.loops = with_loops(graph)

    def ours_logits(self, graph: Graph) -> Tensor:
        """Compute logits with bevatron."""
        return self.ours.stack(graph_matrix(graph, self_loops=True), graph_features(graph))

    def peer_logits(self, graph: Graph) -> Tensor:
        """Compute logits with PyTorch Geometric."""
        return self.peer(self.dense, self.loops if graph is self.graph else with_loops(graph))

    def check(self) -> float:
        """Compare logits and gradients of biases without dropout."""
        found = []
        for model, logits in ((self.ours, self.ours_logits), (self.peer, self.peer_logits)):
            model.eval()
            out = logits(self.graph)
            loss = F.cross_entropy(out, self.labels, ignore_index=-1)
            layers = self.ours.stack.layers if model is self.ours else self.peer.layers
            biases = [layer.bias for layer in layers]
            found.append([out.detach(), *torch.autograd.grad(loss, biases)])
        errors = [
            float((a.flatten() - b.flatten()).norm() / b.norm())
            for a, b in zip(*found, strict=True)
        ]
        if not max(errors) < 1e-4:
            raise SystemExit(f"the two differ: {errors}")
        return max(errors)

    def step(self, mine: bool, fresh: bool, inference: bool) -> Callable[[], None]:
        """Return a step of training, and an inference if wanted, as a call."""
        model = self.ours if mine else self.peer
        logits = self.ours_logits if mine else self.peer_logits
        optimizer = torch.optim.Adam(
            model.parameters(), lr=5e-3, weight_decay=5e-4, fused=True, capturable=True
        )

        def run() -> None:
            graph = self.graph
            if fresh:
                graph = Graph(graph.edges, graph.num_nodes, graph.features)
            optimizer.zero_grad(set_to_none=True)
            model.train()
            out = logits(graph)
            F.cross_entropy(out, self.labels, ignore_index=-1).backward()
            optimizer.step()
            if inference:
                model.eval()
                with torch.no_grad():
                    logits(graph)

        return run


def cora(folder: Path, device: str) -> Contest:
    """Read Cora with rows of features divided by their sums."""
    from benchmarks.graph.learning import load
    from benchmarks.graph.recipes import RUNS

    batch = load(folder, RUNS["gat-cora"], 0).part("train").batch().to(device)
    config = GraphAttentionConfig(heads=8, hidden=8, dropout=0.6, attention_dropout=0.6)
    config = config.with_data(inputs=batch.graph.num_features, outputs=7)
    return Contest(config, batch.graph, torch.where(batch.mask, batch.labels, -1))


def molecules(count: int, device: str) -> Contest:
    """Make molecules: chains of atoms with branches and a ring for every eight atoms."""
    random = np.random.default_rng(0)
    sizes = random.integers(9, 30, count)
    start = np.repeat(np.cumsum(sizes) - sizes, sizes)
    place = np.arange(sizes.sum()) - start
    back = np.minimum(1 + (random.random(len(place)) < 0.3), place)
    bond = np.stack([np.arange(len(place)), np.arange(len(place)) - back])[:, place > 0]
    ring = np.arange(len(place))[place % 8 == 7]
    bond = np.concatenate([bond, np.stack([ring, ring - 5])], axis=1)
    edges = torch.from_numpy(np.concatenate([bond, bond[::-1]], axis=1).astype(np.int32))
    n = len(place)
    features = torch.from_numpy(random.standard_normal((n, 9)).astype(np.float32))
    labels = torch.from_numpy(random.integers(0, 5, n))
    graph = Graph(edges.to(device), n, features.to(device))
    config = GraphAttentionConfig(
        num_layers=3, hidden=16, heads=8, dropout=0.0, attention_dropout=0.0
    )
    return Contest(config.with_data(inputs=9, outputs=5), graph, labels.to(device))


def compare(
    name: str, contest: Contest, *, inference: bool, fresh: bool
) -> list[dict[str, object]]:
    """Time both, eager and captured."""
    error = contest.check()
    rows = []
    for mode in ("eager", "captured", *(["eager, new graph"] if fresh else [])):
        row: dict[str, object] = {
            "work": name,
            "nodes": contest.graph.num_nodes,
            "edges": contest.graph.num_edges,
            "mode": mode,
        }
        for who, mine in (("bevatron", True), ("PyG", False)):
            call = contest.step(mine, mode.endswith("new graph"), inference)
            row[f"{who} ms"] = timing.median_ms(
                timing.captured(call) if mode == "captured" else call, 10
            )
        row["PyG / bevatron"] = row["PyG ms"] / row["bevatron ms"]
        row["error"] = f"{error:.0e}"
        print(row, flush=True)
        rows.append(row)
    return rows


def trainer(name: str, values: dict[str, Any], peer: float) -> list[dict[str, object]]:
    """Time an epoch of the trainer, captured and launched one by one."""
    rows = []
    for mode, captured in (("trainer, captured", None), ("trainer, launched", False)):
        spent = []
        for epochs in (SHORT, SHORT, LONG):
            with tempfile.TemporaryDirectory() as folder:
                train = {"epochs": epochs, "patience": None, "cuda_graphs": captured}
                given = {**values, "output": f"{folder}/run", "report": False}
                given["train"] = {**values.get("train", {}), **train}
                run = build(GraphRun.from_values(given))
                begin = time.perf_counter()
                fit(run)
                torch.cuda.synchronize()
                spent.append(time.perf_counter() - begin)
        row: dict[str, object] = {"work": name, "mode": mode}
        row["bevatron ms"] = 1e3 * (spent[2] - spent[1]) / (LONG - SHORT)
        row |= {"PyG ms": peer, "PyG / bevatron": peer / row["bevatron ms"]}
        print(row, flush=True)
        rows.append(row)
    return rows


def save_molecules(contest: Contest, folder: str) -> dict[str, Any]:
    """Write the molecules as one graph; return the values of a run on it."""
    graph, count = contest.graph, contest.graph.num_nodes
    sender, receiver = graph.edges.cpu().numpy()
    np.savez(
        f"{folder}/molecules.npz",
        edge_src=sender,
        edge_dst=receiver,
        num_nodes=np.array(count),
        x=contest.dense.cpu().numpy(),
        y=contest.labels.cpu().numpy(),
        train=np.arange(count - 2),
        val=np.array([count - 2]),
        test=np.array([count - 1]),
    )
    model = {"num_layers": 3, "hidden": 16, "heads": 8, "dropout": 0.0, "attention_dropout": 0.0}
    return {
        "data": {"train": [f"{folder}/molecules.npz"]},
        "model": model,
        "train": {"evaluate_every": 10**6},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    add_out(parser)
    args = parser.parse_args()
    write = functools.partial(report.write_result, device="cuda", folder=args.out)
    rows = compare("Cora, epoch", cora(args.data, "cuda"), inference=True, fresh=False)
    made = molecules(4096, "cuda")
    rows += compare("4096 molecules, step", made, inference=False, fresh=True)
    write("graph/small", rows, NOTES)
    eager = {row["work"]: row["PyG ms"] for row in reversed(rows) if row["mode"] == "eager"}
    values = {"preset": "gat-cora", "data": {"train": [str(args.data / "cora.npz")]}}
    rows += trainer("Cora, epoch", values, eager["Cora, epoch"])
    with tempfile.TemporaryDirectory() as folder:
        values = save_molecules(made, folder)
        rows += trainer("4096 molecules, step", values, eager["4096 molecules, step"])
    write("graph/small", rows, NOTES)


if __name__ == "__main__":
    main()
