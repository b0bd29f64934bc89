"""Every other format that ASE reads: trajectories, outputs of electronic-structure codes.

Frames are read one after the other and never kept. Nothing is unpickled unless the options say
that the file is trusted.
"""

import os
import pickle
import warnings
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.compressed import DAMAGED
from bevatron.data.readers.base import FileState, RawFrame, Survey, content_hash
from bevatron.data.readers.label_values import numbers
from bevatron.errors import DataError, TrustError

_PICKLE_SUFFIXES = {".pckl", ".pkl", ".pickle"}
_SEEKABLE = {"traj"}


class AseFile:
    """One file in a format that ASE recognises.

    Raises DataError if ASE does not know the format or cannot read the file to its end; TrustError
    if the file is a pickle and not trusted.

    Parameters
    ----------
    watched : names, in lower case, whose values the survey compares with zero
    trust : whether a pickle may be unpickled
    """

    def __init__(self, path: Path, watched: frozenset[str], trust: bool) -> None:
        self.name = str(path)
        self._state = FileState.of(path)
        self._place: tuple[int, int, Iterator[Any]] | None = None
        self._pickled = is_pickle(path)
        if self._pickled and not trust:
            raise TrustError(
                f"{self.name}: is a pickle, which can run any code when it is read; convert it to "
                "extended XYZ, or pass `trust=True` if you made it yourself"
            )
        self._format = "pickle" if self._pickled else format_of(path)
        self.survey = Survey()
        for index, frame in enumerate(self._from(0)):
            survey_frame(self.survey, index, frame, watched)
        self.num_frames = self.survey.num_frames
        if self.num_frames == 0:
            raise DataError(f"{self.name}: holds no frames")
        self.content = content_hash(path)

    def __getstate__(self) -> dict[str, Any]:
        """Drop the position in the file; it is found again after unpickling."""
        return {**self.__dict__, "_place": None}

    def frames(self, start: int, stop: int, columns: Collection[str]) -> Iterator[RawFrame]:  # noqa: ARG002  all are read
        """Yield frames ``start`` to ``stop - 1``.

        A process that asks for ranges in ascending order reads the file once.
        """
        place, self._place = self._place, None
        if place is None or place[0] != os.getpid() or place[1] > start:
            self._state.refuse_change()
            seekable = self._format in _SEEKABLE
            place = (os.getpid(), start if seekable else 0, self._from(start if seekable else 0))
        _, position, iterator = place
        for index in range(position, stop):
            try:
                frame = next(iterator)
            except StopIteration:
                raise DataError(f"{self.name}: ends before frame {index}") from None
            if index >= start:
                yield frame
        self._place = (os.getpid(), stop, iterator)

    def _from(self, start: int) -> Iterator[RawFrame]:
        index = start
        try:
            for atoms in self._atoms(start):
                yield frame_from_atoms(atoms)
                index += 1
        except DataError as error:
            raise DataError(f"{self.name}, frame {index}: {error}") from None
        except Exception as error:  # noqa: BLE001  ASE's parsers raise anything
            raise DataError(
                f"{self.name}, frame {index}: ASE cannot read it as '{self._format}' "
                f"({type(error).__name__}: {error})"
            ) from None

    def _atoms(self, start: int) -> Iterator[Any]:
        if self._pickled:
            yield from _unpickle(self._state.path)[start:]
            return
        import ase.io

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from ase.io.iread(self._state.path, index=slice(start, None), format=self._format)


def is_pickle(path: Path) -> bool:
    """Whether reading a file means unpickling it; DataError if it cannot be opened."""
    try:
        with path.open("rb") as file:
            head = file.read(16)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from None
    by_content = head[:1] == b"\x80" and len(head) > 1 and head[1] <= pickle.HIGHEST_PROTOCOL
    return by_content or head.startswith(b"PickleTrajectory") or path.suffix in _PICKLE_SUFFIXES


def _unpickle(path: Path) -> list[Any]:
    from ase import Atoms

    with path.open("rb") as file:
        content = pickle.load(file)  # noqa: S301  only files that the user trusts
    frames = [content] if isinstance(content, Atoms) else content
    if not isinstance(frames, list | tuple) or not all(isinstance(a, Atoms) for a in frames):
        raise DataError(
            f"the pickle holds {type(content).__name__}, not ASE Atoms or a list of them"
        )
    return list(frames)


def format_of(path: Path) -> str:
    """Return ASE's name of a file's format; DataError if ASE cannot read it."""
    from ase.io.formats import UnknownFileTypeError, filetype, ioformats

    try:
        name: str = filetype(str(path))
    except DAMAGED as error:
        raise DataError(f"{path}: cannot be read to the end ({error})") from None
    except (UnknownFileTypeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is in no format that ASE recognises ({error})") from None
    if name not in ioformats or not ioformats[name].can_read:
        raise DataError(f"{path}: is in no format that ASE reads")
    return name


def frame_from_atoms(atoms: Any) -> RawFrame:
    """Convert an ``ase.Atoms``; results of its calculator go under their plain names."""
    info = {str(key): value for key, value in atoms.info.items()}
    arrays = {k: v for k, v in atoms.arrays.items() if k not in {"numbers", "positions"}}
    results = getattr(atoms.calc, "results", None) or {}
    for name, value in results.items():
        if value is not None:
            per_atom = np.ndim(value) > 1 and len(value) == len(atoms) and name != "stress"
            (arrays if per_atom else info).setdefault(name, value)
    return RawFrame(
        numbers=atoms.numbers.astype(np.int32),
        positions=np.array(atoms.positions, dtype=np.float64),
        cell=np.array(atoms.cell.array, dtype=np.float64),
        pbc=np.array(atoms.pbc, dtype=bool),
        info=info,
        arrays=arrays,
    )


def survey_frame(survey: Survey, index: int, frame: RawFrame, watched: frozenset[str]) -> None:
    """Add one frame to a survey."""
    survey.note(index, frame.signature, len(frame.numbers), frame.info)
    survey.elements |= {int(z) for z in np.unique(frame.numbers)}
    for name, value in frame.info.items():
        if name.lower() in watched and name not in survey.nonzero:
            try:
                differs = bool((numbers(value) != 0).any())
            except (ValueError, TypeError):
                differs = True
            if differs:
                survey.nonzero.add(name)
