"""Statistics of a data set that a MACE needs before training: elements, E0, scale, shift.

One pass over the data, in bounded memory. From a store whole shards are read as flat arrays;
any other data set is read sample by sample.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from bevatron.errors import DataError
from bevatron.models.mace.atomic_energies import AtomicEnergies
from bevatron.typing import Arrays, BoolArray, FloatArray, IntArray

ISOLATED_GROUP = "IsolatedAtom"
"""Group (config_type) of single atoms whose energies are E0, as mace names them."""

E0Choice = Literal["auto", "least_squares", "isolated"] | Mapping[int, float] | AtomicEnergies
"""Source of E0: isolated atoms, least squares, the first of these that works, or given values."""

BLOCK = 2048
"""Samples per block if a data set has no flat columns."""


class Samples(Protocol):
    """Samples by index; `bevatron.data.dataset.Dataset` is one."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Arrays: ...


@dataclass(frozen=True)
class Statistics:
    """Result of `statistics`.

    Attributes
    ----------
    atomic_numbers : elements that occur, ascending
    avg_num_neighbors : mean number of neighbours over the atoms that have any; 1 if none has
    e0 : E0 of each head, with their origin
    force_rms : root mean square of the force components per head, eV/Å; 1 without forces
    mean_shift : mean of (energy - sum of E0) / atoms per head, eV
    num_structures, num_atoms, num_edges : counts
    isolated : samples that are isolated atoms with an energy (of the group `ISOLATED_GROUP`)
    isolated_energies : mean energy of these samples by element, per head, eV
    """

    atomic_numbers: tuple[int, ...]
    avg_num_neighbors: float
    e0: tuple[AtomicEnergies, ...]
    force_rms: tuple[float, ...]
    mean_shift: tuple[float, ...]
    num_structures: int
    num_atoms: int
    num_edges: int
    isolated: tuple[int, ...] = ()
    isolated_energies: tuple[Mapping[int, float], ...] = ()

    @property
    def atomic_energies(self) -> tuple[tuple[float, ...], ...]:
        """E0 in eV, one row per head, in the order of `atomic_numbers`."""
        return tuple(tuple(e0.values[z] for z in self.atomic_numbers) for e0 in self.e0)


def statistics(
    dataset: Samples,
    indices: Sequence[int] | IntArray | None = None,
    *,
    heads: Sequence[str] = ("default",),
    e0: E0Choice | Mapping[str, E0Choice] = "auto",
    elements: Sequence[int] | None = None,
) -> Statistics:
    """Compute the statistics of the training data.

    Raises DataError if there are no samples, a head has no energies at all, or E0 of an element is
    missing.

    Parameters
    ----------
    dataset : samples with neighbours (`bevatron.data.samples.STRUCTURE_FIELDS`)
    indices : the samples to use; all by default
    heads : names of the heads; a sample's head is an index into them
    e0
        Energies of isolated atoms: ``auto`` (isolated atoms in the data if every element has one,
        else least squares), one of both, or element -> eV, also as `AtomicEnergies` with an origin
        for the log; or one of these for each head by name.
    elements : the model's elements if it has more than the data
    """
    sums = _Sums(len(heads))
    for block in _blocks(dataset, indices):
        sums.add(block)
    if not sums.num_structures:
        raise DataError("the training data hold no structures")
    present = [int(z) for z in np.flatnonzero(sums.element_counts)]
    numbers = tuple(sorted({*present, *(int(z) for z in elements or ())}))
    found = []
    for head, name in enumerate(heads):
        choices: Any = e0
        by_head = isinstance(e0, Mapping) and any(isinstance(key, str) for key in e0)
        choice = choices.get(name, "auto") if by_head else e0
        found.append(_atomic_energies(sums, head, name, numbers, choice))
    columns = np.array(numbers, dtype=np.int64)
    return Statistics(
        atomic_numbers=numbers,
        avg_num_neighbors=sums.num_edges / sums.atoms_with_edges if sums.atoms_with_edges else 1.0,
        e0=tuple(found),
        force_rms=tuple(sums.force_rms(head) for head in range(len(heads))),
        mean_shift=tuple(
            sums.mean_shift(head, columns, np.array([e0.values[z] for z in numbers]))
            for head, e0 in enumerate(found)
        ),
        num_structures=sums.num_structures,
        num_atoms=int(sums.element_counts.sum()),
        num_edges=sums.num_edges,
        isolated=tuple(sums.isolated_indices),
        isolated_energies=tuple(map(_means, sums.isolated)),
    )


@dataclass(frozen=True)
class _Block:
    """Columns of many samples at once: flat arrays and the offset of each sample."""

    indices: IntArray
    atomic_numbers: IntArray
    atom_ptr: IntArray
    receivers: IntArray
    edge_ptr: IntArray
    forces: FloatArray
    force_ptr: IntArray
    energy: FloatArray
    head: IntArray
    group: bytes
    group_ptr: IntArray


class _Sums:
    """Running sums over samples."""

    def __init__(self, num_heads: int) -> None:
        self.num_structures = 0
        self.num_edges = 0
        self.atoms_with_edges = 0
        self.element_counts = np.zeros(119, dtype=np.int64)
        self.isolated: list[dict[int, list[float]]] = [{} for _ in range(num_heads)]
        self.isolated_indices: list[int] = []
        # Compositions and energies of a head as the triangular factor of a QR decomposition, which
        # holds the least-squares problem of any number of structures in 120 x 120 numbers.
        self._factor = [np.zeros((0, 120)) for _ in range(num_heads)]
        self._per_atom = np.zeros((num_heads, 120))
        self.num_energies = np.zeros(num_heads, dtype=np.int64)
        self._force_squares = np.zeros(num_heads)
        self._num_forces = np.zeros(num_heads, dtype=np.int64)

    def add(self, block: _Block) -> None:
        """Add many samples."""
        wrong = np.flatnonzero((block.head < 0) | (block.head >= len(self.isolated)))
        if len(wrong):
            raise DataError(
                f"sample {block.indices[wrong[0]]}: its head is {block.head[wrong[0]]}, but there "
                f"are {len(self.isolated)} heads"
            )
        num_atoms = np.diff(block.atom_ptr)
        self.num_structures += len(num_atoms)
        self.num_edges += len(block.receivers)
        self.atoms_with_edges += _count_receivers(block.receivers, block.edge_ptr)
        self._add_forces(block)
        owner = np.repeat(np.arange(len(num_atoms)), num_atoms)
        flat = np.bincount(owner * 120 + block.atomic_numbers, minlength=120 * len(num_atoms))
        rows = flat.reshape(-1, 120).astype(np.float64)
        self.element_counts += rows[:, :119].sum(axis=0).astype(np.int64)
        rows[:, 119] = block.energy
        labelled = ~np.isnan(block.energy)
        alone = self._add_isolated(block, labelled & (num_atoms == 1))
        for head in range(len(self.isolated)):
            chosen = (block.head == head) & labelled & ~alone & (num_atoms > 0)
            self.num_energies[head] += int(chosen.sum())
            self._per_atom[head] += (rows[chosen] / num_atoms[chosen, None]).sum(axis=0)
            stacked = np.concatenate([self._factor[head], rows[chosen]])
            self._factor[head] = np.asarray(np.linalg.qr(stacked, mode="r"))

    def _add_forces(self, block: _Block) -> None:
        """Add the squares of force components by head."""
        counts = np.diff(block.force_ptr)
        head = np.repeat(block.head, counts)
        squares = np.einsum("ni,ni->n", block.forces, block.forces)
        num_heads = len(self.isolated)
        self._force_squares += np.bincount(head, weights=squares, minlength=num_heads)
        self._num_forces += 3 * np.bincount(head, minlength=num_heads)

    def _add_isolated(self, block: _Block, single: BoolArray) -> BoolArray:
        """Record the energies of isolated atoms; return their indices."""
        alone = np.zeros(len(single), dtype=bool)
        for row in np.flatnonzero(single):
            name = block.group[block.group_ptr[row] : block.group_ptr[row + 1]]
            if name.decode(errors="replace") == ISOLATED_GROUP:
                alone[row] = True
                z = int(block.atomic_numbers[block.atom_ptr[row]])
                energies = self.isolated[block.head[row]].setdefault(z, [])
                energies.append(float(block.energy[row]))
                self.isolated_indices.append(int(block.indices[row]))
        return alone

    def system(self, head: int, columns: IntArray) -> tuple[FloatArray, FloatArray]:
        """Return matrix and right-hand side whose least squares solution is E0 of ``columns``."""
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


def _count_receivers(receivers: IntArray, edge_ptr: IntArray) -> int:
    """Count atoms with edges; edges are sorted by receiver within a sample."""
    if not len(receivers):
        return 0
    begins = np.zeros(len(receivers), dtype=bool)
    begins[1:] = receivers[1:] != receivers[:-1]
    begins[edge_ptr[:-1][np.diff(edge_ptr) > 0]] = True
    return int(begins.sum())


def _means(isolated: Mapping[int, list[float]]) -> dict[int, float]:
    return {z: float(np.mean(energies)) for z, energies in isolated.items()}


def _atomic_energies(
    sums: _Sums, head: int, name: str, numbers: tuple[int, ...], choice: Any
) -> AtomicEnergies:
    """Find E0 of every element for one head."""
    if isinstance(choice, Mapping):
        choice = AtomicEnergies(choice)
    if isinstance(choice, AtomicEnergies):
        missing = [z for z in numbers if z not in choice.values]
        if missing:
            raise DataError(
                f"head '{name}': E0 is given but not for the elements {missing} of the data"
            )
        return AtomicEnergies({z: float(choice.values[z]) for z in numbers}, choice.origin)
    isolated = _means(sums.isolated[head])
    missing = [z for z in numbers if z not in isolated]
    if choice == "isolated" and missing:
        raise DataError(
            f"head '{name}': no isolated atom (group {ISOLATED_GROUP}) with an energy for the "
            f"elements {missing}; use e0 'least_squares' or give them"
        )
    if choice == "isolated" or (choice == "auto" and not missing):
        return AtomicEnergies({z: isolated[z] for z in numbers}, "from isolated atoms")
    if choice not in {"auto", "least_squares"}:
        raise DataError(f"e0: expected auto, least_squares, isolated or energies, got {choice!r}")
    if not sums.num_energies[head]:
        raise DataError(f"head '{name}': no structure has an energy, so E0 cannot be fitted")
    return _least_squares(sums, head, numbers)


def _least_squares(sums: _Sums, head: int, numbers: tuple[int, ...]) -> AtomicEnergies:
    """Fit total energies by a sum over atoms; of many solutions the one of least norm."""
    matrix, energies = sums.system(head, np.array(numbers, dtype=np.int64))
    solution, _, rank, _ = np.linalg.lstsq(matrix, energies, rcond=1e-10)
    origin = f"least squares over {int(sums.num_energies[head]):,} structures"
    if rank < len(numbers):
        origin += (
            f"; their compositions determine only {int(rank)} of {len(numbers)} energies: the "
            "minimum-norm solution has the right sums but not the right single energies, so other "
            "compositions are shifted unless E0 are given"
        )
    return AtomicEnergies(dict(zip(numbers, map(float, solution), strict=True)), origin)


def _blocks(dataset: Any, indices: Sequence[int] | IntArray | None) -> Iterator[_Block]:
    """Read a data set in blocks, from flat columns if it has them."""
    if indices is None and hasattr(dataset, "flat"):
        yield from _flat_blocks(dataset)
        return
    chosen = np.arange(len(dataset)) if indices is None else np.asarray(indices, dtype=np.int64)
    for start in range(0, len(chosen), BLOCK):
        part = chosen[start : start + BLOCK]
        yield _joined(part, [dataset[int(index)] for index in part])


def _flat_blocks(dataset: Any) -> Iterator[_Block]:
    """Read whole shards of a store."""
    start = 0
    for columns in zip(*(dataset.flat(name) for name in (*_RAGGED, *_SINGLE)), strict=True):
        energy, head = (values for values, _ in columns[len(_RAGGED) :])
        yield _block(np.arange(start, start + len(energy)), columns[: len(_RAGGED)], energy, head)
        start += len(energy)


def _joined(indices: IntArray, samples: Sequence[Arrays]) -> _Block:
    columns = [
        (
            np.concatenate([sample[name] for sample in samples]),
            np.cumsum([0, *(len(sample[name]) for sample in samples)], dtype=np.int64),
        )
        for name in _RAGGED
    ]
    energy, head = (np.array([sample[name].item() for sample in samples]) for name in _SINGLE)
    return _block(indices, columns, energy, head)


_RAGGED, _SINGLE = ("atomic_numbers", "edges", "forces", "group"), ("energy", "head")


def _block(indices: IntArray, columns: Sequence[Any], energy: Any, head: Any) -> _Block:
    (numbers, atom_ptr), (edges, edge_ptr), (forces, force_ptr), (group, group_ptr) = columns
    return _Block(
        *(indices, numbers.astype(np.int64), atom_ptr),
        *(edges[:, 1].astype(np.int64), edge_ptr, forces, force_ptr, energy),
        *(head.astype(np.int64), group.astype(np.uint8).tobytes(), group_ptr),
    )
