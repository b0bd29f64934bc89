"""Random molecules with true encodings, and small models for them."""

import numpy as np

from bevatron.data.samples import UNREACHABLE, collate_molecules, feature_set
from bevatron.models.gpspp import DropoutConfig, GPSPlusPlus, GPSPlusPlusConfig

NO_DROPOUT = DropoutConfig(
    node=0.0, edge=0.0, global_=0.0, encoder=0.0, attention=0.0, graph=0.0, ffn=0.0
)

SMALL = {
    "num_layers": 2,
    "node_width": 16,
    "edge_width": 8,
    "global_width": 4,
    "num_heads": 4,
    "ffn_width": 24,
    "expansion": 2,
    "embedding_width": 8,
    "encoder_width": 4,
    "num_kernels": 6,
    "max_path": 12,
}


def small_model(dtype=None, **changes):
    return GPSPlusPlus(GPSPlusPlusConfig(**{**SMALL, "dropout": NO_DROPOUT, **changes}), dtype)


def random_molecule(random, n, *, set_name="set1", with_3d=True, num_targets=1, broken=False):
    """A random tree with a few rings; two pieces if broken."""
    pairs = {(int(random.integers(max(0, i - 3), i)), i) for i in range(1, n)}
    pairs |= {(i, i + 3) for i in range(n - 3) if random.random() < 0.2}
    if broken:
        pairs = {(i, j) for i, j in pairs if (i < n // 2) == (j < n // 2)}
    chosen = feature_set(set_name)
    adjacency = np.zeros((n, n))
    for i, j in pairs:
        adjacency[i, j] = adjacency[j, i] = 1
    bonds = np.array([edge for i, j in sorted(pairs) for edge in ((i, j), (j, i))], np.int32)
    per_bond = np.stack([random.integers(0, s, len(pairs)) for s in chosen.bond_sizes], 1)
    degree = adjacency.sum(1)
    walk = adjacency / np.maximum(degree, 1)[:, None]
    walks = np.stack([np.diag(np.linalg.matrix_power(walk, k)) for k in range(1, 17)], 1)
    values, vectors = np.linalg.eigh(np.diag(degree) - adjacency)
    padded = np.zeros((n, 7)), np.zeros(7)
    count = min(n - 1, 7)
    padded[0][:, :count], padded[1][:count] = vectors[:, 1 : count + 1], values[1 : count + 1]
    return {
        "atom_features": np.stack([random.integers(0, s, n) for s in chosen.atom_sizes], 1).astype(
            np.int16
        ),
        "bonds": bonds.reshape(-1, 2),
        "bond_features": np.repeat(per_bond, 2, 0).astype(np.int16).reshape(-1, len(chosen.bond)),
        "shortest_paths": paths(adjacency).ravel(),
        "random_walk": walks.astype(np.float32),
        "laplacian_vectors": padded[0].astype(np.float32),
        "laplacian_values": padded[1].astype(np.float32),
        "positions": (3 * random.normal(size=(n if with_3d else 0, 3))).astype(np.float32),
        "targets": random.normal(size=num_targets).astype(np.float32),
    }


def paths(adjacency):
    n = len(adjacency)
    found = np.full((n, n), UNREACHABLE, np.uint8)
    reached = np.eye(n) > 0
    for step in range(n):
        found[reached & (found == UNREACHABLE)] = step
        reached = reached | (reached @ adjacency > 0)
    return found


def random_batch(sizes, seed=0, **options):
    random = np.random.default_rng(seed)
    samples = [random_molecule(random, n, **options) for n in sizes]
    return collate(samples)


def collate(samples):
    return collate_molecules(samples, np.arange(len(samples)), [1.0] * len(samples))
