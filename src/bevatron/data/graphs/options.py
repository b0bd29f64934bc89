"""Options for reading a graph; by default it is left unchanged."""

from dataclasses import dataclass, replace
from typing import Literal, Self

from bevatron.errors import ConfigError


@dataclass(frozen=True)
class EdgePolicy:
    """Treatment of repeated edges, missing reverse edges and self loops, in this order.

    Attributes
    ----------
    self_loops
        ``keep`` those of the file, ``add`` one to every vertex that has none (with weight 1, as
        attention of a vertex to itself needs), ``remove`` them, or ``reset``: remove, then add.
    symmetrise : add the reverse of every edge that has none, with the same weight
    duplicates
        For repeated edges ``refuse`` the file, ``merge`` (keep the first) or ``sum`` the weights
        (1 each without weights).
    """

    self_loops: Literal["keep", "add", "remove", "reset"] = "keep"
    symmetrise: bool = False
    duplicates: Literal["refuse", "merge", "sum"] = "refuse"

    def with_self_loops(self) -> Self:
        """Return this policy for a model that adds self loops where there are none.

        Examples
        --------
        >>> EdgePolicy(self_loops="remove").with_self_loops().self_loops
        'reset'
        """
        return replace(self, self_loops="add" if self.self_loops in {"keep", "add"} else "reset")

    @property
    def removes_loops(self) -> bool:
        """Whether self loops of the file are removed."""
        return self.self_loops in {"remove", "reset"}

    @property
    def adds_loops(self) -> bool:
        """Whether vertices without a self loop get one."""
        return self.self_loops in {"add", "reset"}


@dataclass(frozen=True)
class GraphOptions(EdgePolicy):
    """Options of reading a graph.

    Attributes
    ----------
    self_loops, symmetrise, duplicates : see `EdgePolicy`
    features
        ``rows`` divides each vertex's features by the sum of their absolute values, as usual for
        bags of words; ``keep`` leaves them unchanged.
    renumber
        Renumber vertices 0, 1, ... in the order of their ids in the file; for edge lists with
        gaps.
    num_nodes : number of vertices; by default as given in the file, or the largest id + 1
    split : index of the split, in files that hold several
    random_split
        Fractions of the labelled vertices for training, validation and test, drawn at random; by
        default the splits in the file.
    split_seed : seed of ``random_split``

    Examples
    --------
    >>> GraphOptions(random_split=(0.9, 0.3, 0.0))
    Traceback (most recent call last):
    bevatron.errors.ConfigError: random_split: expected three shares of at most 1 in all, ...
    """

    features: Literal["keep", "rows"] = "keep"
    renumber: bool = False
    num_nodes: int | None = None
    split: int = 0
    random_split: tuple[float, float, float] | None = None
    split_seed: int = 0

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if self.num_nodes is not None and self.num_nodes < 1:
            raise ConfigError(f"num_nodes: expected 1 or more, got {self.num_nodes}")
        if self.num_nodes is not None and self.renumber:
            raise ConfigError("num_nodes: follows from the ids with renumber; leave one out")
        if self.split < 0:
            raise ConfigError(f"split: expected 0 or more, got {self.split}")
        shares = self.random_split
        if shares is not None and (min(shares) < 0 or not 0 < sum(shares) <= 1 + 1e-12):
            raise ConfigError(
                f"random_split: expected three shares of at most 1 in all, got {shares}"
            )
