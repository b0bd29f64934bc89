"""Train a graph attention network on one graph that is partitioned over processes.

    torchrun --nproc-per-node 8 examples/distributed_graph.py --edges graph.npz --vertices 2000000
    torchrun --nproc-per-node 2 examples/distributed_graph.py --kronecker 4096 100000

Each rank reads the edges in pieces and keeps its block and the features of its own vertices; all
train the same parameters. The plan, with the bytes that it will send, is printed first. Features
and labels are random here: pass your own with `graph.scatter`, or pick them by `graph.vertices`.
"""

import argparse

import torch
from torch.nn import functional as F

from bevatron.data.graphs import GraphOptions, read_in_pieces
from bevatron.data.graphs.generators import Kronecker
from bevatron.models.graph_attention import GraphAttentionConfig, NodeClassifier
from bevatron.parallel.graph_partition import DistributedGraph, count_traffic
from bevatron.parallel.mesh import open_mesh

FEATURES, CLASSES = 32, 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--edges", help="npz, text or an OGB folder")
    parser.add_argument("--vertices", type=int, help="of --edges; counted if not given")
    parser.add_argument("--kronecker", nargs=2, type=int, default=(4096, 100_000))
    parser.add_argument("--scheme", default="auto")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    source = Kronecker(*args.kronecker)
    if args.edges:
        source = read_in_pieces(
            args.edges, GraphOptions(num_nodes=args.vertices, self_loops="add", duplicates="merge")
        )
    config = GraphAttentionConfig(layer="gat", heads=4, hidden=16, norm="layer", dropout=0.0)
    config = config.with_data(inputs=FEATURES, outputs=CLASSES)

    with open_mesh() as mesh:
        graph = DistributedGraph.build(
            source, mesh, scheme=args.scheme, heads=config.heads, channels=config.hidden
        )
        lines = graph.explain()
        if mesh.is_main:
            print("\n".join(lines))
        torch.manual_seed(0)  # the same parameters on every rank
        stack = NodeClassifier(config).stack.to(mesh.device)
        optimiser = torch.optim.Adam(stack.parameters(), lr=0.01)
        vertices = graph.vertices.double()[:, None]
        features = torch.sin(vertices * torch.arange(1, FEATURES + 1, device=mesh.device))
        labels = graph.vertices % CLASSES
        for step in range(args.steps):
            with count_traffic() as traffic:
                optimiser.zero_grad()
                logits = stack(graph, features.float())
                loss = F.cross_entropy(logits, labels, reduction="sum") / graph.num_vertices
                loss.backward()
                graph.sum_gradients(stack.parameters())
                optimiser.step()
            total = float(graph.sum(loss))
            if mesh.is_main:
                print(f"step {step}: loss {total:.4f}, {traffic.total / 1e6:.2f} MB sent")


if __name__ == "__main__":
    main()
