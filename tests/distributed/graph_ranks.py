"""What the ranks of the tests of distributed graphs do, and how they are started."""

import json
from pathlib import Path

import pytest
import torch
from forks import end_of, fork
from torch.nn import functional as F

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.dot_attention import dot_attention
from bevatron.kernels.graph.graph_attention import graph_attention
from bevatron.parallel.graph_partition import DistributedGraph, EdgeList
from bevatron.parallel.mesh import Mesh, open_mesh

STEPS = 20
FEATURES, CLASSES = 5, 6


def run_ranks(world: int, work, folder: Path, timeout: float = 100.0) -> list:
    """Call ``work(mesh)`` in forked processes and return what each returned, as JSON gives it."""
    codes, output = fork_ranks(world, work, folder, timeout)
    assert codes == [0] * world, output
    return [json.loads((folder / f"found{rank}").read_text()) for rank in range(world)]


def fork_ranks(
    world: int, work, folder: Path, timeout: float = 100.0
) -> tuple[list[int | None], str]:
    if torch.cuda.is_available():
        pytest.skip("torch with CUDA cannot go on after a fork")

    def run(rank: int) -> None:
        with open_mesh("cpu", timeout_seconds=60) as mesh:
            (folder / f"found{rank}").write_text(json.dumps(work(mesh)))

    outputs = [folder / f"output{rank}" for rank in range(world)]
    codes = end_of(fork(world, run, outputs.__getitem__), timeout)
    return codes, "".join(output.read_text() for output in outputs)


def graph_edges(kind: str) -> tuple[EdgeList, torch.Tensor, torch.Tensor]:
    """A small directed graph with an empty row, an unused column and a hub."""
    generator = torch.Generator().manual_seed(3)
    n = {"plain": 37, "tiny": 3, "weighted": 23}[kind]
    wanted = torch.rand(n, n, generator=generator) < 0.15
    wanted[0], wanted[:, 1], wanted[-1], wanted[:, -1] = True, False, False, False
    row, col = wanted.nonzero(as_tuple=True)
    values = torch.rand(len(row), generator=generator, dtype=torch.float64) + 0.5
    values = values if kind == "weighted" else None
    return EdgeList(row, col, n, values), row, col


class Stack(torch.nn.Module):
    """Two layers of one kind of attention between projections."""

    def __init__(self, kind: str, width: int = 6, heads: int = 2) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.kind, self.heads = kind, heads

        def weight(*shape):
            values = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return torch.nn.Parameter(0.5 * values)

        self.first, self.second = weight(FEATURES, width), weight(width, width)
        self.last, self.scale = weight(width, CLASSES), torch.nn.Parameter(weight(heads).exp())
        self.scores = weight(2, 2, heads, width // heads)

    def forward(self, x, attend_gat, attend_dot):
        for layer, matrix in enumerate((self.first, self.second)):
            h = (x @ matrix).unflatten(1, (self.heads, -1))
            if self.kind.startswith("gat"):
                scores = [(h * self.scores[layer, side]).sum(-1) for side in range(2)]
                dropout = 0.3 if self.kind == "gat dropout" else 0.0
                h = attend_gat(h, *scores, 0.2, dropout, seed=layer)
            elif self.kind == "va":
                h = attend_dot(h, scale=0.05)
            elif self.kind == "va softmax":
                h = attend_dot(h, softmax=True, scale=self.scale)
            elif self.kind == "agnn":
                h = attend_dot(h, normalize=True)
            else:
                h = attend_dot(h, normalize=True, softmax=True, scale=self.scale)
            x = torch.tanh(h.flatten(1)) + 0.1 * (x @ matrix)
        return x @ self.last


def task(n: int):
    generator = torch.Generator().manual_seed(2)
    features = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
    labels = torch.randint(CLASSES, (n,), generator=generator)
    return features, labels


def train(kind, n, features, labels, attend_gat, attend_dot, total, reduce, *, heads=2, steps):
    """Train by gradient descent; return the losses."""
    model, losses = Stack(kind, heads=heads), []
    optimiser = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.5)
    for _ in range(steps):
        optimiser.zero_grad()
        out = model(features, attend_gat, attend_dot)
        loss = F.cross_entropy(out, labels, reduction="sum") / n
        loss.backward()
        reduce(list(model.parameters()))
        optimiser.step()
        losses.append(float(total(loss.detach())))
    return losses


def whole_losses(kind: str, graph: str, *, heads: int = 2) -> list[float]:
    """One process with the fused operators' references."""
    source, row, col = graph_edges(graph)
    n = source.num_vertices
    csr = Csr.from_coo(row, col, (n, n), source.values)

    def gat(*args, **kwargs):
        return graph_attention(csr, *args, **kwargs)

    def dot(*args, **kwargs):
        return dot_attention(csr, *args, **kwargs)

    def nothing(parameters):
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    return train(kind, n, *task(n), gat, dot, lambda x: x, nothing, heads=heads, steps=STEPS)


def cut_losses(mesh: Mesh, kind: str, graph: str, scheme: str, *, heads=2, steps=STEPS, **options):
    """The same over the ranks."""
    source, _, _ = graph_edges(graph)
    n = source.num_vertices
    cut = DistributedGraph.build(source, mesh, scheme=scheme, **options)
    rows = [cut.scatter(values) for values in task(n)]
    return train(
        kind,
        n,
        *rows,
        cut.graph_attention,
        cut.dot_attention,
        cut.sum,
        cut.sum_gradients,
        heads=heads,
        steps=steps,
    )
