"""Windows of atoms: 32 queries that follow one another, and the 128 keys around them.

Window b has the queries 32 b .. 32 b + 31 and the keys 32 b - 48 .. 32 b + 79 (AlphaFold3,
algorithm 7). Neighbouring windows share 96 of their keys: `keys_of` gives them as a view in which
the same rows appear four times.

Legend: A atoms, W windows, Q = 32 queries and K = 128 keys of a window, C channels.
"""

import torch.nn.functional as F
from jaxtyping import Shaped
from torch import Tensor

QUERIES, KEYS = 32, 128
KEYS_BEFORE = (KEYS - QUERIES) // 2


def num_windows(num_atoms: int) -> int:
    """Return the number of windows that hold all atoms.

    Examples
    --------
    >>> num_windows(65)
    3
    """
    return -(-num_atoms // QUERIES)


def queries_of(x: Shaped[Tensor, "*batch A C"]) -> Shaped[Tensor, "*batch W Q C"]:
    """Cut rows into windows; slots past the last atom are zero. A view if A fills all windows."""
    A = x.shape[-2]
    W = num_windows(A)
    filled = x if A == W * QUERIES else F.pad(x, (0, 0, 0, W * QUERIES - A))
    windows: Tensor = filled.unflatten(-2, (W, QUERIES))
    return windows


def keys_of(x: Shaped[Tensor, "*batch A C"]) -> Shaped[Tensor, "*batch W K C"]:
    """Return the rows around each window; slots without an atom are zero.

    This is a view of one padded copy: rows that windows share are in memory once.
    """
    A = x.shape[-2]
    behind = num_windows(A) * QUERIES - A + KEYS - QUERIES - KEYS_BEFORE
    return F.pad(x, (0, 0, KEYS_BEFORE, behind)).unfold(-2, KEYS, QUERIES).transpose(-1, -2)
