"""What batches of concatenated samples share: counts, and copies in another type."""

import numpy as np
import torch

from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import collate_structures, unlabelled_structure


def two_structures():
    rng = np.random.default_rng(0)
    samples = [
        add_neighbours(unlabelled_structure(np.full(n, 8), rng.uniform(0, 2, (n, 3))), 3.0)
        | {"energy": np.array(-10_000.000_1)}
        for n in (3, 1)
    ]
    return collate_structures(samples, np.array([7, 9]), [1.0, 1.0])


def test_counts_come_from_what_was_concatenated():
    batch = two_structures()
    assert (batch.num_graphs, batch.num_atoms) == (2, 4)
    assert batch.num_edges == batch.edges.shape[1] > 0
    assert batch.sizes == {"graphs": 2, "atoms": 4, "edges": batch.num_edges}
    assert batch.sample_indices.tolist() == [7, 9]


def test_energies_stay_in_float64_when_all_else_becomes_float32():
    batch = two_structures()
    moved = batch.to("cpu", torch.float32)
    assert moved.positions.dtype == moved.forces.dtype == torch.float32
    assert moved.energy.dtype == torch.float64
    assert moved.energy.tolist() == [-10_000.000_1] * 2
    assert moved.edges.dtype == torch.int64
    assert batch.positions.dtype == torch.float64, "the batch itself has not changed"
