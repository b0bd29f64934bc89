"""Complexes to be predicted as samples: entry, reference poses and the alignments of the input."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.featurize import describe
from bevatron.data.proteins.poses import make_pools
from bevatron.data.proteins.predictions import featurize_inputs
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.readers.proteins.components import Dictionary
from bevatron.data.readers.proteins.inputs import Complex
from bevatron.recipes.proteins.inputs import known_of
from bevatron.typing import Arrays

ROWS = 16_384
"""Maximum number of alignment rows, as published models take for predictions."""

EVERYTHING = 2**31
"""Tokens and atoms of a sample that is not cropped."""


@dataclass(frozen=True)
class Prepared:
    """A complex whose samples can be drawn.

    Attributes
    ----------
    entry : see `bevatron.data.proteins.featurize.ENTRY_FIELDS`
    components : the dictionary with the complex's own components
    sources : poses, alignments and templates
    """

    entry: Arrays
    components: Dictionary
    sources: Sources

    def sample(self, seed: int) -> Arrays:
        """Draw the rows and poses of a seed; nothing is cropped."""
        return sample(self.entry, seed, self.sources, whole_sizes())


def whole_sizes(rows: int = ROWS) -> SampleSizes:
    """Return sizes that crop nothing."""
    return SampleSizes(CropSizes(tokens=EVERYTHING, atoms=EVERYTHING), rows, best_templates=True)


@contextmanager
def prepared_input(
    given: Complex, components: Dictionary, searches: Sequence[Path] = ()
) -> Iterator[Prepared]:
    """Prepare a complex; its alignments are read while the context lasts.

    Raises DataError if a component is unknown, an alignment is not of its chain, or a file is
    damaged.

    Parameters
    ----------
    given, searches : see `bevatron.recipes.proteins.inputs.known_of`
    """
    entry, known_components = featurize_inputs(given, components)
    poses = make_pools(known_components[code] for code in describe(entry)["components"])
    with known_of(given, searches) as known:
        yield Prepared(entry, known_components, Sources(poses, *known))
