"""Pools of reference poses in one file, from which a pose of each residue is drawn for a sample."""

import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from bevatron.data.proteins.conformers import NUM_POSES, component_key, make_poses
from bevatron.data.readers.proteins.components import Component, Dictionary
from bevatron.data.store.workers import Advance, run_jobs
from bevatron.errors import DataError
from bevatron.files import atomic_write
from bevatron.typing import Array, BoolArray, FloatArray, IntArray

FORMAT = b"bevatron poses 1"

_PER_PART = 16


@dataclass(frozen=True)
class Poses:
    """Reference poses of P components.

    Attributes
    ----------
    keys : int64 [P]
        `component_key` of each component, ascending.
    num_atoms : int64 [P]
        Heavy atoms.
    start : int64 [P + 1]
        First of the positions; a component has pose after pose.
    positions : float32 [n, 3]
        Å; NaN if unknown.
    """

    keys: IntArray
    num_atoms: IntArray
    start: IntArray
    positions: npt.NDArray[np.float32]

    def of(self, key: int) -> npt.NDArray[np.float32]:
        """Return the poses of a component, [poses, atoms, 3].

        Raises
        ------
        DataError
            If it has none here.
        """
        row = int(self._rows(np.array([key]))[0])
        pool = self.positions[self.start[row] : self.start[row + 1]]
        return pool.reshape(-1, int(self.num_atoms[row]), 3)

    def draw(
        self,
        component: Array,
        residue: Array,
        atom: Array,
        generator: np.random.Generator,
    ) -> tuple[npt.NDArray[np.float32], BoolArray]:
        """Draw a pose of each residue and move it rigidly at random (AlphaFold3, table 5).

        Each residue is centred, rotated uniformly and shifted by a normal number of 1 Å along each
        axis.

        Parameters
        ----------
        component : int64 [U]
            Field ``component`` of an entry.
        residue, atom : int32 [A]
            Fields ``ref_space_uid`` and ``pose_atom``, of all atoms or of those of a crop.

        Returns
        -------
        ref_pos : float32 [A, 3]
            Å; 0 where nothing is known.
        ref_mask : bool [A]
            Whether the position is known.

        Raises
        ------
        DataError
            If a component has no poses here.
        """
        used, place = np.unique(residue, return_inverse=True)
        row = self._rows(component[used])
        size = self.num_atoms[row]
        pools = (self.start[row + 1] - self.start[row]) // np.maximum(size, 1)
        first = self.start[row] + generator.integers(pools) * size
        drawn = self.positions[first[place] + atom]
        known: BoolArray = np.isfinite(drawn).all(axis=1)
        points = np.where(known[:, None], drawn, 0.0).astype(np.float64)
        moved = _moved(points, known, place, len(used), generator)
        return np.where(known[:, None], moved, 0.0).astype(np.float32), known

    def _rows(self, keys: Array) -> IntArray:
        rows = np.searchsorted(self.keys, keys)
        found = np.append(self.keys, -1)[rows] == keys
        if not found.all():
            raise DataError(
                f"the file of reference poses lacks {int((~found).sum()):,} components of the "
                "entry; `prepare_poses` adds them"
            )
        return rows.astype(np.int64)


def make_pools(components: Iterable[Component], number: int = NUM_POSES) -> Poses:
    """Make the pools of some components in memory; see `conformers.make_poses`."""
    return _collected(
        {component_key(component): make_poses(component, number) for component in components}
    )


def prepare_poses(
    path: str | Path, components: Dictionary, codes: Iterable[str], *, workers: int = 0
) -> Poses:
    """Make the pools that a file lacks, add them to it and open it.

    Parameters
    ----------
    path
        The file; it need not exist.
    components
        The dictionary; picklable if there are workers.
    codes
        Components, as `complexes.describe` lists them for each entry.
    workers
        Number of processes; 0 works in this one.

    Raises
    ------
    DataError
        If a component is unknown, the file is damaged or cannot be written.
    """
    path = Path(path)
    known = open_poses(path) if path.exists() else make_pools(())
    had = set(known.keys.tolist())
    wanted = sorted(code for code in set(codes) if component_key(components[code]) not in had)
    if wanted or not path.exists():
        with tempfile.TemporaryDirectory(prefix=f"{path.name}.", dir=path.parent) as folder:
            work = _Parts(components, tuple(wanted), Path(folder))
            run_jobs(work, range(work.number), workers, lambda _: None)
            parts = [known, *(open_poses(work.path(part)) for part in range(work.number))]
            pools = {key: part.of(key) for part in parts for key in part.keys.tolist()}
            write_poses(_collected(pools), path)
    return open_poses(path)


@dataclass(frozen=True)
class _Parts:
    """Writes the pools of some of the components to a file of their own."""

    components: Dictionary
    codes: tuple[str, ...]
    folder: Path

    @property
    def number(self) -> int:
        return -(-len(self.codes) // _PER_PART)

    def path(self, part: int) -> Path:
        return self.folder / f"part-{part}.arrow"

    def __call__(self, part: int, advance: Advance) -> None:
        codes = self.codes[part * _PER_PART : (part + 1) * _PER_PART]
        write_poses(make_pools(self.components[code] for code in codes), self.path(part))
        advance(len(codes))


def _collected(pools: Mapping[int, npt.NDArray[np.float32]]) -> Poses:
    keys = sorted(pools)
    flat = [pools[key].reshape(-1, 3) for key in keys]
    return Poses(
        keys=np.array(keys, dtype=np.int64),
        num_atoms=np.array([pools[key].shape[1] for key in keys], dtype=np.int64),
        start=np.concatenate([[0], np.cumsum([len(part) for part in flat])]).astype(np.int64),
        positions=np.concatenate([np.zeros((0, 3), dtype=np.float32), *flat]),
    )


def write_poses(poses: Poses, path: str | Path) -> None:
    """Write pools to an Arrow file; it appears under its name only when complete.

    Raises
    ------
    DataError
        If it cannot be written.
    """
    table = pa.table(
        {
            "key": pa.array(poses.keys),
            "num_atoms": pa.array(poses.num_atoms),
            "positions": pa.LargeListArray.from_arrays(
                pa.array(poses.start * 3), pa.array(poses.positions.ravel())
            ),
        },
        metadata={b"format": FORMAT},
    )
    with (
        atomic_write(Path(path), DataError) as file,
        pa.ipc.new_file(file, table.schema) as writer,
    ):
        writer.write_table(table)


def open_poses(path: str | Path) -> Poses:
    """Open a file of pools memory-mapped.

    Raises
    ------
    DataError
        If it is no such file, or is damaged.
    """
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(
            f"{path}: is no file of reference poses, or it is damaged ({error})"
        ) from None
    if (table.schema.metadata or {}).get(b"format") != FORMAT:
        raise DataError(f"{path}: is no file of reference poses of this version; write it anew")
    if not table.num_rows:
        return make_pools(())
    lists = table.column("positions").chunk(0)
    return Poses(
        keys=table.column("key").to_numpy(),
        num_atoms=table.column("num_atoms").to_numpy(),
        start=lists.offsets.to_numpy() // 3,
        positions=lists.values.to_numpy().reshape(-1, 3),
    )


def _moved(
    points: FloatArray,
    known: BoolArray,
    place: IntArray,
    groups: int,
    generator: np.random.Generator,
) -> FloatArray:
    """Centre each group of points and move it by a random rotation and shift."""
    count = np.maximum(np.bincount(place, weights=known, minlength=groups), 1)
    centre = np.stack(
        [np.bincount(place, weights=points[:, axis], minlength=groups) for axis in range(3)], axis=1
    )
    rotation = random_rotations(groups, generator)
    shift = generator.standard_normal((groups, 3))
    centred = points - (centre / count[:, None])[place]
    moved: FloatArray = np.einsum("axy,ay->ax", rotation[place], centred) + shift[place]
    return moved


def random_rotations(number: int, generator: np.random.Generator) -> npt.NDArray[np.float64]:
    """Draw rotations uniformly, [number, 3, 3], from unit quaternions."""
    quaternion = generator.standard_normal((number, 4))
    quaternion /= np.linalg.norm(quaternion, axis=1, keepdims=True)
    w, x, y, z = quaternion.T
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return np.array(rows, dtype=np.float64).reshape(3, 3, number).transpose(2, 0, 1).copy()
