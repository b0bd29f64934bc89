"""Pools of reference poses in one file, from which a pose of each residue is drawn for a sample."""

import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from bevatron.data.proteins.conformers import NUM_POSES, component_key, make_poses
from bevatron.data.ragged import pointer
from bevatron.data.readers.proteins.components import Component, Dictionary
from bevatron.data.store.prepare import rank_and_world
from bevatron.data.store.progress import progress as show_progress
from bevatron.data.store.workers import Advance, run_jobs
from bevatron.errors import DataError
from bevatron.files import atomic_write, explained, remove_folder
from bevatron.typing import Array, BoolArray, FloatArray, IntArray, WordArray

FORMAT = b"bevatron poses 2"
"""Version of the format and of how poses are made; files of others are rebuilt."""

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
    checksums : uint64 [P]
        Checksum of each pool with its key, verified when the pool is first used.
    """

    keys: IntArray
    num_atoms: IntArray
    start: IntArray
    positions: npt.NDArray[np.float32]
    checksums: WordArray
    name: str = "in memory"
    _verified: set[int] = field(default_factory=set)

    def of(self, key: int) -> npt.NDArray[np.float32]:
        """Return the poses of a component, [poses, atoms, 3]; DataError if it has none here."""
        row = int(self._rows(np.array([key]))[0])
        pool = self.positions[self.start[row] : self.start[row + 1]]
        return pool.reshape(-1, int(self.num_atoms[row]), 3)

    def draw(
        self, component: Array, residue: Array, atom: Array, generator: np.random.Generator
    ) -> tuple[npt.NDArray[np.float32], BoolArray]:
        """Draw a pose of each residue and move it rigidly at random (AlphaFold3, table 5).

        Each residue is centred, rotated uniformly and shifted by a normal number of 1 Å along each
        axis. Raises DataError if a component has no poses here.

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
                f"the file of reference conformers lacks {int((~found).sum()):,} components of the "
                "entry; `prepare_poses` adds them"
            )
        for row in np.unique(rows).tolist():
            if row not in self._verified:
                self._verify(row)
        return rows.astype(np.int64)

    def _verify(self, row: int) -> None:
        pool = self.positions[self.start[row] : self.start[row + 1]]
        if _checksum(int(self.keys[row]), int(self.num_atoms[row]), pool) != self.checksums[row]:
            raise DataError(
                f"{self.name}: the conformers of component {row} are damaged, their checksum does "
                "not match; delete that file and run prepare again, which rebuilds it"
            )
        self._verified.add(row)


def _checksum(key: int, num_atoms: int, pool: npt.NDArray[np.float32]) -> int:
    return xxh3_64_intdigest(struct.pack("<2q", key, num_atoms) + pool.tobytes())


def make_pools(components: Iterable[Component], number: int = NUM_POSES) -> Poses:
    """Make the pools of some components in memory; see `conformers.make_poses`."""
    return collected(
        {component_key(component): make_poses(component, number) for component in components}
    )


def prepare_poses(
    path: str | Path,
    components: Dictionary,
    codes: Iterable[str],
    *,
    workers: int = 0,
    progress: bool | None = None,
) -> Poses:
    """Add the missing pools to a file and open it.

    Until all are made they are in parts next to the file, so a kill loses only the parts in
    progress; each rank begins with a different part. Raises DataError if a component is unknown or
    the file cannot be written.

    Parameters
    ----------
    path
        The file; it need not exist. One that is damaged or of another version is rebuilt.
    components : the dictionary; picklable if there are workers
    codes : components, as `featurize.describe` lists them for each entry
    workers : number of processes; 0 works in this one
    progress : whether to show progress; None shows it on rank 0 only
    """
    path = Path(path)
    known, folder = _known(path), path.with_name(f"{path.name}.parts")
    had = set(known.keys.tolist())
    keys = {code: component_key(components[code]) for code in sorted(set(codes))}
    wanted = tuple(code for code, key in keys.items() if key not in had)
    if wanted or known.name != str(path):
        with explained(folder, DataError):
            folder.mkdir(exist_ok=True)
        work = _Parts(components, wanted, tuple(keys[code] for code in wanted), folder)
        rank, world = rank_and_world()
        jobs = [*range(work.number)]
        first = rank * work.number // world
        try:
            shown = rank == 0 if progress is None else progress
            with show_progress(
                "conformers", len(wanted), unit="components", enabled=shown
            ) as advance:
                run_jobs(work, jobs[first:] + jobs[:first], workers, advance)
            parts = [known, *(open_poses(work.path(part)) for part in jobs)]
            pools = {key: part.of(key) for part in parts for key in part.keys.tolist()}
            write_poses(collected(pools), path)
        except DataError:
            # Another rank may have finished and removed the parts.
            if not set(keys.values()) <= set(_known(path).keys.tolist()):
                raise
    if folder.exists():
        with suppress(OSError):
            remove_folder(folder)
    return open_poses(path)


def _known(path: Path) -> Poses:
    """Open the pools of an earlier call; none if there are none of this version."""
    try:
        return open_poses(path)
    except DataError:
        return make_pools(())


@dataclass(frozen=True)
class _Parts:
    """Writes the pools of some of the components to a file of their own."""

    components: Dictionary
    codes: tuple[str, ...]
    keys: tuple[int, ...]
    folder: Path

    @property
    def number(self) -> int:
        return -(-len(self.codes) // _PER_PART)

    def path(self, part: int) -> Path:
        """Name a part after its components alone."""
        keys = np.array(self.keys[part * _PER_PART : (part + 1) * _PER_PART], dtype=np.int64)
        return self.folder / f"{xxh3_64_hexdigest(keys.tobytes())}.arrow"

    def __call__(self, part: int, advance: Advance) -> None:
        codes = self.codes[part * _PER_PART : (part + 1) * _PER_PART]
        if len(_known(self.path(part)).keys):
            advance(len(codes))
            return

        def asked() -> Iterator[Component]:
            for code in codes:
                yield self.components[code]
                advance(1)

        write_poses(make_pools(asked()), self.path(part))


def collected(pools: Mapping[int, npt.NDArray[np.float32]]) -> Poses:
    """Join pools, [poses, atoms, 3], by the key of their component."""
    keys = sorted(pools)
    flat = [pools[key].reshape(-1, 3) for key in keys]
    sizes = [pools[key].shape[1] for key in keys]
    sums = [_checksum(*each) for each in zip(keys, sizes, flat, strict=True)]
    return Poses(
        keys=np.array(keys, dtype=np.int64),
        num_atoms=np.array(sizes, dtype=np.int64),
        start=pointer([len(part) for part in flat]),
        positions=np.concatenate([np.zeros((0, 3), dtype=np.float32), *flat]),
        checksums=np.array(sums, dtype=np.uint64),
    )


def write_poses(poses: Poses, path: str | Path) -> None:
    """Write pools to an Arrow file; it appears under its name only when complete.

    Raises DataError if it cannot be written.
    """
    table = pa.table(
        {
            "key": pa.array(poses.keys),
            "num_atoms": pa.array(poses.num_atoms),
            "positions": pa.LargeListArray.from_arrays(
                pa.array(poses.start * 3), pa.array(poses.positions.ravel())
            ),
            "checksum": pa.array(poses.checksums),
        },
        metadata={b"format": FORMAT},
    )
    with atomic_write(Path(path), DataError) as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table)


def open_poses(path: str | Path) -> Poses:
    """Open a file of pools memory-mapped; DataError if it is not one, or is damaged."""
    try:
        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
    except (OSError, pa.ArrowException) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise DataError(
            f"{path}: is not a file of reference conformers, or it is damaged ({reason}); delete "
            "it and run prepare again, which rebuilds it"
        ) from None
    if (table.schema.metadata or {}).get(b"format") != FORMAT:
        raise DataError(
            f"{path}: is not a file of reference conformers of this version; prepare again"
        )
    if not table.num_rows:
        return replace(make_pools(()), name=str(path))
    lists = table.column("positions").chunk(0)
    return Poses(
        keys=table.column("key").to_numpy(),
        num_atoms=table.column("num_atoms").to_numpy(),
        start=lists.offsets.to_numpy() // 3,
        positions=lists.values.to_numpy().reshape(-1, 3),
        checksums=table.column("checksum").to_numpy(),
        name=str(path),
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


def random_rotations(number: int, generator: np.random.Generator) -> FloatArray:
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
