"""Balanced batches in any DataLoader: PyTorch Geometric's, or torch's if PyG is missing.

    python examples/pyg_sampler.py                      one process
    torchrun --nproc-per-node 2 examples/pyg_sampler.py each rank its share of every step

The sampler needs the sizes of the graphs, not the graphs. Batches have about the same number of
nodes whatever the graphs' sizes, at most ``MAX_NODES``; every epoch draws new batches.
"""

import numpy as np
import torch

from bevatron.data import BalancedBatchSampler
from bevatron.data.packing import CostModel

MAX_NODES, MAX_EDGES = 256, 4000


def make_graphs(count: int) -> list[dict[str, torch.Tensor]]:
    """Make rings of 3 to 60 nodes with random features."""
    random = np.random.default_rng(0)
    graphs = []
    for num_nodes in random.integers(3, 61, count):
        ring = torch.arange(int(num_nodes))
        edges = torch.stack([ring, ring.roll(-1)])
        graphs.append({"x": torch.randn(int(num_nodes), 8), "edge_index": edges})
    return graphs


def collate(graphs: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Concatenate graphs, as PyG's Batch does."""
    sizes = torch.tensor([len(graph["x"]) for graph in graphs])
    first = torch.cumsum(sizes, 0) - sizes
    edges = [graph["edge_index"] + n for graph, n in zip(graphs, first, strict=True)]
    return {
        "x": torch.cat([graph["x"] for graph in graphs]),
        "edge_index": torch.cat(edges, dim=1),
        "batch": torch.repeat_interleave(torch.arange(len(graphs)), sizes),
    }


def make_loader(graphs: list[dict[str, torch.Tensor]], sampler: BalancedBatchSampler):
    """Hand the sampler to PyG's DataLoader if PyG is installed, else to torch's."""
    try:
        from torch_geometric.data import Data
        from torch_geometric.loader import DataLoader
    except ModuleNotFoundError:
        from torch.utils.data import DataLoader

        return DataLoader(graphs, batch_sampler=sampler, collate_fn=collate)
    return DataLoader([Data(**graph) for graph in graphs], batch_sampler=sampler)


def main() -> None:
    """Run two epochs and print what the batches hold."""
    graphs = make_graphs(500)
    nodes = np.array([len(graph["x"]) for graph in graphs])
    edges = np.array([graph["edge_index"].shape[1] for graph in graphs])
    sampler = BalancedBatchSampler(
        np.stack([nodes, edges], axis=1),
        [MAX_NODES, MAX_EDGES],
        balance=CostModel(nodes=1.0, edges=0.1)(nodes, edges),
        seed=1,
    )
    loader = make_loader(graphs, sampler)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        sizes = []
        for step, batch in enumerate(loader):
            batch = batch if isinstance(batch, dict) else batch.to_dict()  # noqa: PLW2901
            # A batch of repeats (fewer batches than ranks) weighs zero: scale its loss by this.
            weight = sampler.weights(step).mean()
            sizes.append((len(batch["x"]), int(batch["batch"].max()) + 1, weight))
        seen = sum(count for _, count, weight in sizes if weight)
        print(
            f"epoch {epoch}: {len(sizes)} batches of {min(sizes)[0]} to {max(sizes)[0]} nodes, "
            f"fill {sampler.plan.fill:.3f}, {seen} samples seen"
        )


if __name__ == "__main__":
    main()
