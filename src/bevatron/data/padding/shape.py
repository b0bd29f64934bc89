"""The sizes that a padded batch has."""

from dataclasses import dataclass
from typing import Protocol


class Sized(Protocol):
    """A batch as far as its sizes go."""

    @property
    def num_edges(self) -> int:
        """Number of directed edges."""

    @property
    def num_atoms(self) -> int:
        """Number of atoms."""

    @property
    def num_graphs(self) -> int:
        """Number of structures or molecules."""


@dataclass(frozen=True, order=True)
class BatchShape:
    """How many edges, atoms and graphs a padded batch has.

    Attributes
    ----------
    edges, atoms, graphs
        Graphs are structures or molecules.
    pairs
        Pairs of atoms of one molecule, sum of n^2; 0 for structures, which have no such arrays.
    """

    edges: int
    atoms: int
    graphs: int
    pairs: int = 0

    def fits(self, batch: Sized) -> bool:
        """Whether a batch can be padded to this shape.

        One graph and one atom are always padding.
        """
        pairs = getattr(batch, "num_pairs", 0)
        return self.holds((batch.num_edges, batch.num_atoms, batch.num_graphs, pairs))

    def holds(self, size: tuple[int, ...]) -> bool:
        """Whether (edges, atoms, graphs[, pairs]) can be padded to this shape."""
        edges, atoms, graphs, *pairs = size
        if edges > self.edges or atoms >= self.atoms or graphs >= self.graphs:
            return False
        if not self.pairs:
            return True
        spare = squares_of_even(self.atoms - atoms, self.graphs - graphs)
        return sum(pairs) + spare <= self.pairs

    def __str__(self) -> str:
        if self.pairs:
            return (
                f"{self.atoms} atoms, {self.edges} edges, {self.graphs} molecules, "
                f"{self.pairs} pairs"
            )
        return f"{self.atoms} atoms, {self.edges} edges, {self.graphs} structures"


def squares_of_even(atoms: int, graphs: int) -> int:
    """Sum of n^2 if atoms are spread evenly over so many graphs.

    Examples
    --------
    >>> squares_of_even(5, 2)
    13
    """
    size, larger = divmod(atoms, graphs)
    return larger * (size + 1) ** 2 + (graphs - larger) * size**2
