"""Statistics of a data set that a MACE needs before training: elements, E0, scale, shift.

One pass over the data, in bounded memory. From a store whole shards are read as flat arrays;
any other data set is read sample by sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np

from bevatron.errors import DataError
from bevatron.typing import Arrays, FloatArray, IntArray

ISOLATED_GROUP = "IsolatedAtom"
"""Group (config_type) of single atoms whose energies are E0, as mace names them."""

E0Choice = Literal["auto", "least_squares", "isolated"] | Mapping[int, float]
"""How E0 is found: from isolated atoms, by least squares, the first that works, or given."""


class Dataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Arrays: ...


@dataclass(frozen=True)
class Statistics:
    """What `statistics` finds.

    Attributes
    ----------
    atomic_numbers
        Elements that occur, ascending.
    avg_num_neighbors
        Mean number of neighbours over the atoms that have any; 1 if none has.
    atomic_energies
        E0 in eV, one row per head.
    force_rms
        Root mean square of the force components per head, eV/Å; 1 without forces.
    mean_shift
        Mean of (energy - sum of E0) / atoms per head, eV.
    num_structures, num_atoms, num_edges
        Counts.
    isolated
        Samples that are isolated atoms with an energy (of the group `ISOLATED_GROUP`).
    notes
        Lines for the log: how E0 was found and what it cannot tell.
    """

    atomic_numbers: tuple[int, ...]
    avg_num_neighbors: float
    atomic_energies: tuple[tuple[float, ...], ...]
    force_rms: tuple[float, ...]
    mean_shift: tuple[float, ...]
    num_structures: int
    num_atoms: int
    num_edges: int
    isolated: tuple[int, ...] = ()
    notes: tuple[str, ...] = field(default=())


def statistics(
    dataset: Dataset,
    indices: Sequence[int] | IntArray | None = None,
    *,
    heads: Sequence[str] = ("default",),
    e0: E0Choice | Mapping[str, E0Choice] = "auto",
    elements: Sequence[int] | None = None,
) -> Statistics:
    """Compute what depends on the training data.

    Parameters
    ----------
    dataset
        Samples with neighbours (`bevatron.data.samples.STRUCTURE_FIELDS`).
    indices
        The samples to use; all by default.
    heads
        Names of the heads; a sample's head is an index into them.
    e0
        Energies of isolated atoms: ``auto`` (isolated atoms in the data if every element has one,
        else least squares), one of both, or element -> eV; or one of these for each head by name.
    elements
        The model's elements if they are more than the data hold.

    Raises
    ------
    DataError
        If there are no samples, a head has no energies at all, or E0 of an element is missing.
    """
    sums = _Sums(len(heads))
    for sample_index, sample in _samples(dataset, indices):
        sums.add(sample_index, sample)
    if not sums.num_structures:
        raise DataError("the training data hold no structures")
    present = [int(z) for z in np.flatnonzero(sums.element_counts)]
    numbers = tuple(sorted({*present, *(int(z) for z in elements or ())}))
    rows, notes = [], []
    for head, name in enumerate(heads):
        choices: Any = e0
        by_head = isinstance(e0, Mapping) and any(isinstance(key, str) for key in e0)
        choice = choices.get(name, "auto") if by_head else e0
        row, lines = _atomic_energies(sums, head, name, numbers, choice)
        rows.append(row)
        notes += lines
    columns = np.array(numbers, dtype=np.int64)
    return Statistics(
        atomic_numbers=numbers,
        avg_num_neighbors=sums.num_edges / sums.atoms_with_edges if sums.atoms_with_edges else 1.0,
        atomic_energies=tuple(tuple(float(value) for value in row) for row in rows),
        force_rms=tuple(sums.force_rms(head) for head in range(len(heads))),
        mean_shift=tuple(
            sums.mean_shift(head, columns, np.array(row)) for head, row in enumerate(rows)
        ),
        num_structures=sums.num_structures,
        num_atoms=int(sums.element_counts.sum()),
        num_edges=sums.num_edges,
        isolated=tuple(sums.isolated_indices),
        notes=tuple(notes),
    )


class _Sums:
    """Running sums over samples."""

    block = 4096

    def __init__(self, num_heads: int) -> None:
        self.num_structures = 0
        self.num_edges = 0
        self.atoms_with_edges = 0
        self.element_counts = np.zeros(119, dtype=np.int64)
        self.isolated: list[dict[int, list[float]]] = [{} for _ in range(num_heads)]
        self.isolated_indices: list[int] = []
        # Compositions and energies of a head as the triangular factor of a QR decomposition: the
        # least squares problem of any number of structures in 120 x 120 numbers.
        self._factor = [np.zeros((0, 120)) for _ in range(num_heads)]
        self._pending: list[list[FloatArray]] = [[] for _ in range(num_heads)]
        self._per_atom = np.zeros((num_heads, 120))
        self.num_energies = np.zeros(num_heads, dtype=np.int64)
        self._force_squares = np.zeros(num_heads)
        self._num_forces = np.zeros(num_heads, dtype=np.int64)

    def add(self, index: int, sample: Arrays) -> None:
        """Add one sample."""
        numbers = sample["atomic_numbers"]
        head = int(sample["head"])
        if not 0 <= head < len(self.isolated):
            raise DataError(f"sample {index}: head {head} of {len(self.isolated)} heads")
        composition = np.bincount(numbers, minlength=119)
        receivers = sample["edges"][:, 1]
        self.num_structures += 1
        self.element_counts += composition
        self.num_edges += len(receivers)
        # Edges are sorted by receiver.
        self.atoms_with_edges += int(np.count_nonzero(np.diff(receivers))) + (len(receivers) > 0)
        if len(sample["forces"]) == len(numbers):
            forces = np.asarray(sample["forces"], dtype=np.float64)
            self._force_squares[head] += float(np.vdot(forces, forces))
            self._num_forces[head] += forces.size
        energy = float(sample["energy"])
        if np.isnan(energy):
            return
        if len(numbers) == 1 and bytes(sample["group"]).decode() == ISOLATED_GROUP:
            self.isolated[head].setdefault(int(numbers[0]), []).append(energy)
            self.isolated_indices.append(index)
            return
        row = np.append(composition, energy).astype(np.float64)
        self.num_energies[head] += 1
        self._per_atom[head] += row / len(numbers)
        self._pending[head].append(row)
        if len(self._pending[head]) == self.block:
            self._reduce(head)

    def _reduce(self, head: int) -> None:
        if self._pending[head]:
            stacked = np.concatenate([self._factor[head], np.stack(self._pending[head])])
            self._factor[head] = np.asarray(np.linalg.qr(stacked, mode="r"))
            self._pending[head] = []

    def system(self, head: int, columns: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return matrix and right-hand side whose least squares solution is E0 of ``columns``."""
        self._reduce(head)
        return self._factor[head][:, columns], self._factor[head][:, 119]

    def force_rms(self, head: int) -> float:
        """Root mean square force component; 1 without forces."""
        squares, count = self._force_squares[head], self._num_forces[head]
        return float(np.sqrt(squares / count)) if count and squares > 0 else 1.0

    def mean_shift(self, head: int, columns: IntArray, e0: FloatArray) -> float:
        """Mean over structures of (energy - sum of E0) / atoms."""
        if not self.num_energies[head]:
            return 0.0
        mean = self._per_atom[head] / self.num_energies[head]
        return float(mean[119] - mean[columns] @ e0)


def _atomic_energies(
    sums: _Sums, head: int, name: str, numbers: tuple[int, ...], choice: Any
) -> tuple[list[float], list[str]]:
    """Find E0 of every element for one head, and say how."""
    if isinstance(choice, Mapping):
        given = {int(z): float(energy) for z, energy in choice.items()}
        missing = [z for z in numbers if z not in given]
        if missing:
            raise DataError(
                f"head '{name}': E0 is given but not for the elements {missing} of the data"
            )
        return [given[z] for z in numbers], [f"E0 of head '{name}': given"]
    isolated = {z: float(np.mean(energies)) for z, energies in sums.isolated[head].items()}
    missing = [z for z in numbers if z not in isolated]
    if choice == "isolated" and missing:
        raise DataError(
            f"head '{name}': no isolated atom (group {ISOLATED_GROUP}) with an energy for the "
            f"elements {missing}; use e0 'least_squares' or give them"
        )
    if choice == "isolated" or (choice == "auto" and not missing):
        return [isolated[z] for z in numbers], [f"E0 of head '{name}': from isolated atoms"]
    if choice not in {"auto", "least_squares"}:
        raise DataError(f"e0: expected auto, least_squares, isolated or energies, got {choice!r}")
    if not sums.num_energies[head]:
        raise DataError(f"head '{name}': no structure has an energy, so E0 cannot be fitted")
    return _least_squares(sums, head, name, numbers)


def _least_squares(
    sums: _Sums, head: int, name: str, numbers: tuple[int, ...]
) -> tuple[list[float], list[str]]:
    """Fit total energies by a sum over atoms; of many solutions the one of least norm."""
    matrix, energies = sums.system(head, np.array(numbers, dtype=np.int64))
    solution, _, rank, _ = np.linalg.lstsq(matrix, energies, rcond=1e-10)
    notes = [f"E0 of head '{name}': least squares over {int(sums.num_energies[head])} structures"]
    if rank < len(numbers):
        notes.append(
            f"E0 of head '{name}': the compositions fix only {int(rank)} of {len(numbers)} "
            "energies; the solution of least norm is used, right in sum but not element by element"
        )
    return [float(value) for value in solution], notes


def _samples(
    dataset: Dataset, indices: Sequence[int] | IntArray | None
) -> Iterator[tuple[int, Arrays]]:
    """Yield samples by number."""
    for index in range(len(dataset)) if indices is None else indices:
        yield int(index), dataset[int(index)]
