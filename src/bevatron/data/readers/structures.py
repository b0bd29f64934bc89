"""One reader for many files of structures; every label is checked."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from bevatron.config import fingerprint
from bevatron.data.readers.base import FileReader, RawFrame, Survey
from bevatron.data.readers.checks import check_structure
from bevatron.data.readers.elements import SYMBOLS
from bevatron.data.readers.label_values import Labels, extract_labels
from bevatron.data.readers.labels import LabelKeys, LabelOptions, Quantity, find_keys
from bevatron.data.readers.paths import locate
from bevatron.errors import DataError
from bevatron.typing import Arrays

_FORMAT = 1
"""Increased when files give other samples than before, so that stale stores are not used."""


class StructureReader:
    """Samples with `bevatron.data.samples.RAW_STRUCTURE_FIELDS`, from files in the order given.

    Opening it decides which names hold the labels and refuses files without; reading it checks
    every frame. Frames are counted from 0. Raises DataError if a file has no energy, its labels are
    all zero or the name to use is ambiguous.

    Parameters
    ----------
    files : readers of single files
    options : how labels are found
    """

    def __init__(self, files: Sequence[FileReader], options: LabelOptions) -> None:
        self._files = list(files)
        self._options = options
        self._starts = np.cumsum([0, *(file.num_frames for file in self._files)])
        self._keys = [find_keys(file.name, file.survey, options) for file in self._files]
        self._notes: list[str] = []
        self._refuse_unused_options()
        if not options.allow_unlabelled:
            self._check_zeros()

    @property
    def sources(self) -> list[str]:
        """Names of the files, as given."""
        return [file.name for file in self._files]

    @property
    def num_samples(self) -> int:
        """Number of frames of all files."""
        return int(self._starts[-1])

    @property
    def options(self) -> LabelOptions:
        """Options of finding labels."""
        return self._options

    @property
    def fingerprint(self) -> str:
        """Hash of the files' names without folders, their contents and the options."""
        files = [
            (file.name.replace("\\", "/").split("/")[-1], file.content) for file in self._files
        ]
        return fingerprint({"format": _FORMAT, "files": files, "options": self._options}, 32)

    def describe(self, index: int) -> str:
        """Return the origin of a sample: ``train.xyz, frame 12``."""
        file, frame = locate(self._starts, index)
        return f"{self._files[file].name}, frame {frame}"

    def read(self, start: int, stop: int) -> Iterator[Arrays]:
        """Yield samples ``start`` to ``stop - 1``, in order.

        Raises DataError for a frame that must not be trained on, naming it and what was found.
        """
        if not 0 <= start <= stop <= self.num_samples:
            raise IndexError(f"samples {start} to {stop} of {self.num_samples}")
        for number, file in enumerate(self._files):
            base = int(self._starts[number])
            first, past = max(start - base, 0), min(stop - base, file.num_frames)
            if first >= past:
                continue
            keys = self._keys[number]
            frames = file.frames(first, past, keys.columns)
            for index, frame in enumerate(frames, start=first):
                labels = self._checked(file, index, frame, keys)
                yield _sample(frame, labels, number, index)

    def report(self) -> list[str]:
        """Report for every file the frames with each label, its names, and the elements."""
        lines = [
            _report_file(file, keys) for file, keys in zip(self._files, self._keys, strict=True)
        ]
        classes = [line for file in self._files for line in _report_classes(file, self._options)]
        return lines + self._notes + classes

    def _checked(self, file: FileReader, index: int, frame: RawFrame, keys: LabelKeys) -> Labels:
        try:
            check_structure(frame)
            return extract_labels(frame, keys, self._options)
        except DataError as error:
            raise DataError(f"{file.name}, frame {index}: {error}") from None

    def _refuse_unused_options(self) -> None:
        """Refuse a key that no file has: nothing would be trained on it."""
        if self._options.allow_unlabelled:
            return
        quantities: tuple[Quantity, ...] = ("forces", "stress", "virials")
        for quantity in quantities:
            key = self._options.given(quantity)
            signatures = [s for file in self._files for s in file.survey.counts]
            if key and not any(key in s.info or key in s.arrays for s in signatures):
                there = sorted({name for s in signatures for name in s.info + s.arrays})
                raise DataError(
                    f"{self._files[0].name}: no frame of any file has the {quantity} '{key}' (the "
                    f"names found are {', '.join(map(repr, there))}); correct {quantity}_key"
                )

    def _check_zeros(self) -> None:
        """Refuse labels that are all exactly zero: placeholders, not results."""
        for file, keys in zip(self._files, self._keys, strict=True):
            if self._options.allow_zero_labels:
                continue
            for quantity in ("energy", "stress", "virials"):
                name = keys.names.get(quantity)
                several = file.survey.num_several > 0 or quantity != "energy"
                if name and several and _all_zero(name, quantity, file.survey):
                    raise DataError(
                        f"{file.name}: the {quantity} '{name}' is zero in every frame; set "
                        f"{quantity}_key to the right name (or '' to ignore it), or "
                        "allow_zero_labels if that is right"
                    )
        zero = [
            (file, keys.names["forces"])
            for file, keys in zip(self._files, self._keys, strict=True)
            if self._forces_are_zero(file, keys)
        ]
        labelled = sum(_has_forces(f, k) for f, k in zip(self._files, self._keys, strict=True))
        if zero and len(zero) == labelled and not self._options.allow_zero_labels:
            raise DataError(
                f"{zero[0][0].name}: the forces '{zero[0][1]}' are zero on every atom of every "
                "frame; set forces_key to the right name (or '' to ignore it), or "
                "allow_zero_labels if that is right"
            )
        self._notes += [
            f"{file.name}: note: the forces '{name}' are zero on every atom" for file, name in zero
        ]

    def _forces_are_zero(self, file: FileReader, keys: LabelKeys) -> bool:
        """Whether all forces of more than one atom are zero; stops at the first that is not."""
        if not _has_forces(file, keys):
            return False
        for index, frame in enumerate(file.frames(0, file.num_frames, keys.columns)):
            forces = self._checked(file, index, frame, keys).forces
            if (forces != 0).any():
                return False
        return True


def _has_forces(file: FileReader, keys: LabelKeys) -> bool:
    name = keys.names.get("forces")
    there = any(name in s.arrays or name in s.info for s in file.survey.counts)
    return there and file.survey.num_several > 0


def _all_zero(name: str, quantity: str, survey: Survey) -> bool:
    needs_axes = quantity != "energy"
    there = any(name in s.info and (s.periodic or not needs_axes) for s in survey.counts)
    return there and name not in survey.nonzero


def _sample(frame: RawFrame, labels: Labels, file: int, index: int) -> dict[str, Any]:
    return {
        "atomic_numbers": np.ascontiguousarray(frame.numbers, dtype=np.int32),
        "positions": np.ascontiguousarray(frame.positions, dtype=np.float64),
        "cell": np.array(frame.cell, dtype=np.float64),
        "pbc": np.array(frame.pbc, dtype=np.bool_),
        "energy": np.array(labels.energy, dtype=np.float64),
        "forces": labels.forces,
        "stress": labels.stress,
        "weights": labels.weights,
        "head": np.array(labels.head, dtype=np.int32),
        "source": np.array([file, index], dtype=np.int64),
        "group": np.frombuffer(labels.group.encode(), dtype=np.uint8),
    }


def _report_file(file: FileReader, keys: LabelKeys) -> str:
    survey = file.survey
    parts = [
        _report_label("energy", ("energy",), keys, survey),
        _report_label("forces", ("forces",), keys, survey),
        _report_label("stress", ("stress", "virials"), keys, survey),
    ]
    unused = [name for names in keys.unused.values() for name in names]
    if unused:
        parts.append(f"not used: {', '.join(unused)}")
    symbols = [SYMBOLS[z] for z in sorted(survey.elements) if 0 < z < len(SYMBOLS)]
    parts.append(f"elements: {' '.join(symbols)}")
    frames = f"{file.num_frames:,} frame{'s' if file.num_frames != 1 else ''}"
    sampled = "" if survey.complete else f" ({survey.num_frames:,} of them surveyed)"
    return f"{file.name}: {frames}{sampled}; {'; '.join(parts)}"


def _report_classes(file: FileReader, options: LabelOptions) -> list[str]:
    """Report heads and groups of a file that are not used, and missing heads."""
    lines = []
    used = {options.group_key, *([options.head_key] if options.heads else ())}
    hints = {
        "head": "all structures belong to one head; set labels.heads to separate them",
        "group": f"groups are read from '{options.group_key}'; set labels.group_key='group' to "
        "read it",
    }
    for name, texts in sorted(file.survey.texts.items()):
        if name not in used:
            first = [f"{text!r} in {count:,}" for text, count in texts.most_common(4)]
            more = [f"{len(texts) - 4} more"] if len(texts) > 4 else []
            found = f"'{name}' ({', '.join(first + more)} frames) is not used: {hints[name]}"
            several = len(texts) > 1 or texts.total() < file.survey.num_frames
            lines.append(
                f"warning: {file.name}: {found}" if several else f"{file.name}: note: {found}"
            )
    named = sum(n for s, n in file.survey.counts.items() if options.head_key in s.info)
    if options.heads and named < file.survey.num_frames:
        lines.append(
            f"{file.name}: note: {file.survey.num_frames - named:,} of "
            f"{file.survey.num_frames:,} frames have no '{options.head_key}' and belong to "
            f"'{options.heads[0]}'"
        )
    return lines


def _report_label(
    label: str, quantities: tuple[Quantity, ...], keys: LabelKeys, survey: Survey
) -> str:
    names = [keys.names[q] for q in quantities if q in keys.names]
    counts: Counter[str] = Counter()
    left_out = 0
    for signature, count in survey.counts.items():
        name = next((n for n in names if n in signature.info or n in signature.arrays), None)
        if name is None:
            continue
        if label == "stress" and not signature.periodic:
            left_out += count
        else:
            counts[name] += count
    total = sum(counts.values())
    if not total:
        found = "none"
    elif total == survey.num_frames:
        found = f"all from {', '.join(counts)}"
    else:
        found = f"{total:,} of {survey.num_frames:,} from {', '.join(counts)}"
    extra = f" (left out in {left_out:,} without periodic axes)" if left_out else ""
    return f"{label}: {found}{extra}"
