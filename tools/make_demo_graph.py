"""Makes demo_data/communities.npz: a random graph whose classes can be learned.

A planted partition: vertices of one class are joined more often, and share words of a noisy bag.
Run without arguments; the result is the same every time.
"""

from pathlib import Path

import numpy as np
import scipy.sparse

OUT = Path(__file__).resolve().parents[1] / "src/bevatron/recipes/demo_data/communities.npz"
VERTICES, CLASSES, WORDS, SEED = 1500, 5, 80, 20
INSIDE, OUTSIDE = 6.0, 3.0
"""Neighbours of a vertex on average, of its own class and of others."""


def main() -> None:
    rng = np.random.default_rng(SEED)
    labels = rng.permutation(np.arange(VERTICES) % CLASSES)
    same = labels[:, None] == labels
    share = np.where(same, INSIDE / (VERTICES / CLASSES), OUTSIDE / VERTICES)
    upper = np.triu(rng.random((VERTICES, VERTICES)) < share, k=1)
    row, col = np.nonzero(upper | upper.T)
    own = np.arange(WORDS) % CLASSES == labels[:, None]
    words = scipy.sparse.csr_matrix(rng.random((VERTICES, WORDS)) < np.where(own, 0.13, 0.07))
    order = rng.permutation(VERTICES)
    train = np.concatenate([order[labels[order] == c][:20] for c in range(CLASSES)])
    rest = order[~np.isin(order, train)]
    np.savez_compressed(
        OUT,
        edge_src=col.astype(np.int16),
        edge_dst=row.astype(np.int16),
        num_nodes=np.array(VERTICES),
        labels=labels.astype(np.int8),
        feat_indptr=words.indptr.astype(np.int32),
        feat_indices=words.indices.astype(np.int8),
        feat_shape=np.array(words.shape),
        train=np.sort(train),
        val=np.sort(rest[:300]),
        test=np.sort(rest[300:]),
    )


if __name__ == "__main__":
    main()
