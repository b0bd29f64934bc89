"""Padded shapes of batches of atoms: structures and molecules.

Padding edges join padding atoms, and padding atoms belong to padding graphs, so a shape has room
for at least one more atom and one more graph than any batch it is for.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bevatron.data.padding.shape import Axis, BatchShape, PaddingRule, round_up
from bevatron.typing import IntArray

MAX_NEIGHBOURS = 128
"""Upper bound of padding edges per padding atom, where possible: a kernel that loops over the edges
of an atom would be held up by an atom with thousands."""
MAX_PADDING_MOLECULE = 16
"""Upper bound of atoms of a padding molecule: kernels are tuned for molecules of this size."""

# From where steps are fine, inference is bound by edges and atoms, not by launches.
EDGES, ATOMS = Axis("edges", 128), Axis("atoms", 16, spare=1, fine_from=2048)
GRAPHS = Axis("graphs", 8, spare=1, headroom=4.0, counts_work=False)
PAIRS = Axis("pairs", 128, counts_work=False)


@dataclass(frozen=True)
class AtomPadding(PaddingRule):
    """Shapes of structures: (edges, atoms, graphs)."""

    axes: tuple[Axis, ...] = (EDGES, ATOMS, GRAPHS)
    samples: str = "graphs"

    def crowded(self, shape: BatchShape, size: Sequence[int]) -> bool:
        """Whether few padding atoms would carry all padding edges."""
        edges, atoms = size[:2]
        return shape.edges - edges > MAX_NEIGHBOURS * (shape.atoms - atoms)

    def covering(self, sizes: IntArray, headroom: float) -> BatchShape:
        """Return the shape that holds all batches, none of them crowded in it."""
        edges = round_up(sizes[:, 0].max() * (1.0 + headroom), EDGES.multiple)
        spare = 1 + -(-(edges - sizes[:, 0]) // MAX_NEIGHBOURS)
        most = int(sizes[:, 1].max())
        atoms = max(int((sizes[:, 1] + spare).max()), most + 1 + int(most * headroom))
        graphs = int(sizes[:, 2].max() * (1.0 + GRAPHS.headroom * headroom)) + 1
        return BatchShape(
            edges=edges,
            atoms=round_up(atoms, ATOMS.multiple),
            graphs=round_up(graphs, GRAPHS.multiple),
        )

    def rounded(self, size: Sequence[int]) -> BatchShape:
        """Round a batch's size up to a shape that depends on nothing else.

        Edges and atoms are rounded to four steps per doubling, many to sixteen, so that structures
        whose edges come and go as they move share a shape.

        Examples
        --------
        >>> str(AtomPadding().rounded((119_372, 3072, 12)))
        '122880 edges, 3200 atoms, 16 graphs'
        >>> AtomPadding().rounded((119_001, 3072, 12)) == AtomPadding().rounded((122_500, 3072, 15))
        True
        """
        edges, atoms, graphs = size[:3]
        most_edges = EDGES.rounded(edges)
        spare = 1 + -(-(most_edges - edges) // MAX_NEIGHBOURS)
        return BatchShape(
            edges=most_edges,
            atoms=ATOMS.rounded(atoms + spare),
            graphs=max(GRAPHS.multiple, 1 << graphs.bit_length()),
        )


@dataclass(frozen=True)
class MoleculePadding(AtomPadding):
    """Shapes of molecules: (edges, atoms, graphs, pairs), pairs being the sum of squared atoms.

    Padding atoms form padding molecules of even size, which have pairs too.
    """

    axes: tuple[Axis, ...] = (EDGES, ATOMS, GRAPHS, PAIRS)

    def holds(self, shape: BatchShape, size: Sequence[int]) -> bool:
        """Whether a batch fits, with the pairs of its padding molecules."""
        _, atoms, graphs, pairs = size
        if not super().holds(shape, size):
            return False
        return pairs + squares_of_even(shape.atoms - atoms, shape.graphs - graphs) <= shape.pairs

    def covering(self, sizes: IntArray, headroom: float) -> BatchShape:
        """Return the shape that holds all batches, its padding molecules of common size."""
        bare = super().covering(sizes, headroom)
        return self._with_pairs(bare, sizes, int(sizes[:, 3].max() * (1.0 + headroom)))

    def rounded(self, size: Sequence[int]) -> BatchShape:
        """Round a batch's size up; edges come in twos, as `AtomPadding.rounded` has them."""
        bare = super().rounded(size)
        found = self._with_pairs(bare, np.array([size], dtype=np.int64), 0)
        return BatchShape(**{**dict(found.lengths), "pairs": PAIRS.rounded(found.pairs)})

    def _with_pairs(self, shape: BatchShape, sizes: IntArray, least: int) -> BatchShape:
        """Add graphs until padding molecules are small, and room for the pairs of all batches."""
        fewest = int((sizes[:, 2] + -(-(shape.atoms - sizes[:, 1]) // MAX_PADDING_MOLECULE)).max())
        graphs = round_up(max(shape.graphs, fewest), GRAPHS.multiple)
        padded = [
            pairs + squares_of_even(shape.atoms - num_atoms, graphs - num_graphs)
            for _, num_atoms, num_graphs, pairs in sizes.tolist()
        ]
        return BatchShape(
            edges=shape.edges,
            atoms=shape.atoms,
            graphs=graphs,
            pairs=round_up(max(least, *padded), PAIRS.multiple),
        )


def squares_of_even(atoms: int, graphs: int) -> int:
    """Sum of n^2 if atoms are spread evenly over a number of graphs.

    Examples
    --------
    >>> squares_of_even(5, 2)
    13
    """
    size, larger = divmod(atoms, graphs)
    return larger * (size + 1) ** 2 + (graphs - larger) * size**2
