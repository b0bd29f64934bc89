"""Small graphs whose classes can be learned, as files."""

import numpy as np


def planted(seed=0, num_nodes=90, classes=3, width=12):
    """Vertices of a class are joined among each other and have similar features."""
    rng = np.random.default_rng(seed)
    labels = rng.permutation(np.arange(num_nodes) % classes)
    pairs = np.argwhere(
        rng.random((num_nodes, num_nodes)) < 0.02 + 0.2 * np.equal.outer(labels, labels)
    )
    pairs = pairs[pairs[:, 0] < pairs[:, 1]]
    both = np.concatenate([pairs, pairs[:, ::-1]])
    x = rng.random((num_nodes, width)) < 0.1 + 0.5 * (np.arange(width) % classes == labels[:, None])
    order = rng.permutation(num_nodes)
    third = num_nodes // 3
    return {
        "edge_src": both[:, 0], "edge_dst": both[:, 1], "num_nodes": np.array(num_nodes),
        "x": x.astype(np.float32), "y": labels, "train": order[:third],
        "val": order[third : 2 * third], "test": order[2 * third :],
    }  # fmt: skip


def write(path, **changes):
    """Write such a graph."""
    seed = changes.pop("seed", 0)
    values = {**planted(seed), **changes}
    np.savez(path, **{name: value for name, value in values.items() if value is not None})
    return path
