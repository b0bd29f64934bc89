"""Complexes to be predicted as samples: entry, reference poses and the alignments of the input."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from bevatron.data.proteins.alignment_files import AlignmentReader
from bevatron.data.proteins.alignments import Alignments, prepare_alignments
from bevatron.data.proteins.complexes import describe
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.poses import make_pools
from bevatron.data.proteins.predictions import featurize_inputs
from bevatron.data.proteins.sample import SampleSizes, Sources, sample, sequence_classes
from bevatron.data.readers.proteins.alphabet import Polymer
from bevatron.data.readers.proteins.components import Dictionary
from bevatron.data.readers.proteins.inputs import Complex, Entity
from bevatron.errors import DataError
from bevatron.typing import Arrays

ROWS = 16_384
"""Rows of the alignments at most, as published models take for predictions."""

EVERYTHING = 2**31
"""Tokens and atoms of a sample that is not cropped."""

_ALIGNED: dict[str, Polymer] = {"protein": "protein", "rna": "rna"}


@dataclass(frozen=True)
class Prepared:
    """A complex whose samples can be drawn.

    Attributes
    ----------
    entry
        See `bevatron.data.proteins.complexes.ENTRY_FIELDS`.
    components
        The dictionary with the complex's own components.
    sources
        Poses and alignments.
    """

    entry: Arrays
    components: Dictionary
    sources: Sources

    def sample(self, seed: int) -> Arrays:
        """Draw the rows and poses of a seed; nothing is cropped."""
        return sample(self.entry, seed, self.sources, whole_sizes())


def whole_sizes(rows: int = ROWS) -> SampleSizes:
    """Return sizes that crop nothing."""
    return SampleSizes(CropSizes(tokens=EVERYTHING, atoms=EVERYTHING), rows)


@contextmanager
def prepared_input(given: Complex, components: Dictionary) -> Iterator[Prepared]:
    """Prepare a complex; its alignments are read while the context lasts.

    Raises
    ------
    DataError
        If a component is unknown, or an alignment is not of its chain.
    """
    entry, known = featurize_inputs(given, components)
    poses = make_pools(known[code] for code in describe(entry)["components"])
    with TemporaryDirectory() as folder:
        yield Prepared(entry, known, Sources(poses, _alignments(given, Path(folder))))


def _alignments(given: Complex, folder: Path) -> Alignments | None:
    """Open the alignments that the entities name; paired rows are found by their species."""
    files: dict[str, list[Path]] = {"protein": [], "rna": []}
    for number, entity in enumerate(given.entities):
        if entity.kind in files:
            files[entity.kind] += _files(entity, folder / str(number))
    if not any(files.values()):
        return None
    reader = AlignmentReader(files["protein"], files["rna"])
    found = prepare_alignments(reader, folder / "alignments", workers=0)
    for entity in given.entities:
        kind = _ALIGNED.get(entity.kind)
        if kind is None or not (entity.paired or entity.unpaired):
            continue
        if found.find(sequence_classes(kind, entity.sequence)) is None:
            raise DataError(
                f"{given.name}: the alignment of chain {entity.chains[0]} begins with another "
                "sequence than that of the chain"
            )
    return found


def _files(entity: Entity, folder: Path) -> list[Path]:
    """Return the alignments of an entity as files."""
    found = []
    for name, source in (("paired", entity.paired), ("unpaired", entity.unpaired)):
        if isinstance(source, Path):
            found.append(source)
        elif source:
            folder.mkdir(exist_ok=True)
            path = folder / f"{name}.a3m"
            path.write_text(source, encoding="utf-8")
            found.append(path)
    return found
