"""Neighbour lists that are reused while atoms move little (Verlet's skin).

A list built with cutoff + skin holds every pair that can come within the cutoff before some atom
has moved by more than skin / 2. Until then the pairs within the cutoff are picked out of it, so
that the edges equal those of a new list, in the same order.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from bevatron.data.neighbours import Int32Array, neighbour_list
from bevatron.errors import ConfigError
from bevatron.typing import BoolArray, FloatArray


class VerletList:
    """The edges of one structure that moves, such as in molecular dynamics.

    Parameters
    ----------
    cutoff : Å
    skin : Å
        0 rebuilds the list for every change.

    Attributes
    ----------
    num_builds : number of times the list was built

    Examples
    --------
    >>> verlet = VerletList(cutoff=3.0, skin=0.5)
    >>> r = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 3.1]])
    >>> [len(verlet.edges(r + [[0, 0, 0], [0, 0, dz]])[0]) for dz in (0.0, -0.2, 0.2, 0.4)]
    [0, 2, 0, 0]
    >>> verlet.num_builds
    2
    """

    def __init__(self, cutoff: float, skin: float = 0.5) -> None:
        if not skin >= 0:
            raise ConfigError(f"skin: expected a length of 0 Å or more, got {skin}")
        self.cutoff, self.skin = float(cutoff), float(skin)
        self.num_builds = 0
        self._positions: FloatArray | None = None
        self._frame: tuple[bytes, bytes] | None = None
        self._edges = np.zeros((0, 2), np.int32)
        self._shifts = np.zeros((0, 3), np.int32)

    def edges(
        self,
        positions: npt.ArrayLike,
        cell: npt.ArrayLike | None = None,
        pbc: npt.ArrayLike | Sequence[bool] = False,
    ) -> tuple[Int32Array, Int32Array]:
        """Return the edges within the cutoff, as `neighbour_list` does.

        Another number of atoms, another cell or other periodic axes rebuild the list; so does an
        atom that was wrapped into the cell.

        Parameters
        ----------
        positions : [N, 3] Å
        cell : [3, 3] Å
        pbc : [3]

        Returns
        -------
        edges : [E, 2] int32
        shifts : [E, 3] int32
        """
        r = np.ascontiguousarray(positions, dtype=np.float64).reshape(-1, 3)
        box = np.zeros((3, 3)) if cell is None else np.array(cell, dtype=np.float64)
        periodic = np.ascontiguousarray(np.broadcast_to(np.asarray(pbc, dtype=bool), (3,)))
        if not self._still_valid(r, box, periodic):
            self._positions = None
            self._edges, self._shifts = neighbour_list(r, box, periodic, self.cutoff + self.skin)
            self._positions, self._frame = r.copy(), (box.tobytes(), periodic.tobytes())
            self.num_builds += 1
        senders, receivers = self._edges[:, 0], self._edges[:, 1]
        vectors = r[receivers] - r[senders] + self._shifts @ box
        near = np.einsum("ei,ei->e", vectors, vectors) < self.cutoff**2
        return self._edges[near], self._shifts[near]

    def _still_valid(
        self,
        r: FloatArray,
        box: FloatArray,
        periodic: BoolArray,
    ) -> bool:
        if self._positions is None or self._positions.shape != r.shape:
            return False
        if self._frame != (box.tobytes(), periodic.tobytes()):
            return False
        moved = np.einsum("ni,ni->n", r - self._positions, r - self._positions)
        # NaN compares false, so neighbour_list sees a structure that blew up.
        return bool((moved <= (self.skin / 2) ** 2).all())
