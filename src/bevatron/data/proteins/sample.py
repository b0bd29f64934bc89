"""A sample of AlphaFold3: a crop of an entry with drawn rows, templates and reference poses.

It depends only on the entry, the seed and the data looked up by sequence and component.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.alignments import Alignments, sequence_key
from bevatron.data.proteins.chain_index import released_day
from bevatron.data.proteins.crop import CropSizes, crop_entry
from bevatron.data.proteins.cropped import Crop, copies_of, crop_of, indices_of, permutations_of
from bevatron.data.proteins.featurize import describe
from bevatron.data.proteins.poses import Poses
from bevatron.data.proteins.rows import RowStack, sample_rows, stack_rows
from bevatron.data.proteins.templates import Templates, sample_templates
from bevatron.data.readers.proteins.alphabet import GAP, Polymer, sequence_classes
from bevatron.typing import Array, Arrays, IntArray

_TOKEN_FIELDS = ("restype", "residue_index", "asym_id", "entity_id", "sym_id", "molecule_type")
UNKNOWN_ELEMENT = 127
"""Class of an atom whose element is unknown; no element has the number 128."""

_POLYMERS: dict[str, Polymer] = {"protein": "protein", "rna": "rna", "dna": "dna"}


class TemplateSource(Protocol):
    """Templates by sequence; `bevatron.data.proteins.template_store.StoredTemplates` is one."""

    def find(self, key: bytes, released: int) -> Arrays | None:
        """Return the templates of a sequence for a chain released on a day."""


@dataclass(frozen=True)
class Sources:
    """Data that samples look up.

    Attributes
    ----------
    poses : reference poses of all components
    alignments : by sequence; None leaves every chain its own sequence alone
    templates : by `sequence_key`; None leaves every chain without
    """

    poses: Poses
    alignments: Alignments | None = None
    templates: TemplateSource | None = None


@dataclass(frozen=True)
class SampleSizes:
    """Maximum sizes of a sample.

    Attributes
    ----------
    crop : tokens, atoms and kinds of crops
    rows : rows of the alignment
    best_templates : show the best templates, as in predictions, not a random number of random ones
    """

    crop: CropSizes = field(default_factory=CropSizes)
    rows: int = 1024
    best_templates: bool = False


def sample(
    entry: Arrays, seed: int, sources: Sources, sizes: SampleSizes, chains: Sequence[int] = ()
) -> dict[str, Array]:
    """Draw a sample of an entry.

    Raises StoreError if the part read of an alignment is damaged; DataError if a component has no
    poses.

    Parameters
    ----------
    entry : with `ENTRY_FIELDS`
    seed : of crop, rows, templates and poses, each with its own stream
    chains : ``asym_id`` of the chain or interface for which the entry was drawn; see `crop_entry`

    Returns
    -------
    dict
        Of tokens, [N] int64: ``restype``, ``residue_index``, ``token_index`` (in the entry),
        ``asym_id``, ``entity_id``, ``sym_id``, ``molecule_type``; bool ``token_mask``. Of atoms,
        [A]: ``ref_pos`` float32 [A, 3] Å, ``ref_mask`` bool, ``ref_charge`` float32,
        ``ref_element`` (`element_class`), ``ref_atom_name_chars`` [A, 4], ``ref_space_uid`` and
        ``atom_to_token`` int64, ``atom_mask`` bool, ``position`` float32 [A, 3] Å, ``resolved``
        bool. ``resolution`` float32, Å, and ``seed`` int64, from which the model's random numbers
        follow. And those of `indices_of`, `permutations_of`, `copies_of`, `sample_rows`,
        `sample_templates`.
    """
    streams = [
        np.random.Generator(np.random.PCG64(s)) for s in np.random.SeedSequence(seed).spawn(4)
    ]
    of_crop, of_rows, of_templates, of_poses = streams
    crop = crop_of(entry, crop_entry(entry, sizes.crop, of_crop, chains))
    found = {"seed": np.array(seed, dtype=np.int64)} | _tokens(entry, crop) | _atoms(entry, crop)
    found |= indices_of(entry, crop) | permutations_of(entry, crop) | copies_of(entry, crop)
    residue = np.asarray(entry["ref_space_uid"])[crop.atoms]
    atom = np.asarray(entry["pose_atom"])[crop.atoms]
    found["ref_pos"], found["ref_mask"] = sources.poses.draw(
        np.asarray(entry["component"]), residue, atom, of_poses
    )
    lookup = _look_up(entry, sources)
    chain = found["asym_id"] - 1
    column = np.asarray(entry["column"])[crop.tokens].astype(np.int64)
    query = np.where(column >= 0, found["restype"], GAP).astype(np.int8)
    found |= sample_rows(lookup.stack, lookup.alignment[chain], column, query, sizes.rows, of_rows)
    return found | sample_templates(
        lookup.templates, lookup.sequence[chain], column, of_templates, best=sizes.best_templates
    )


def _tokens(entry: Arrays, crop: Crop) -> dict[str, Array]:
    kept = {name: np.asarray(entry[name])[crop.tokens].astype(np.int64) for name in _TOKEN_FIELDS}
    return {
        **kept,
        "token_index": crop.tokens,
        "token_mask": np.ones(len(crop.tokens), dtype=np.bool_),
        "resolution": np.array(entry["resolution"], dtype=np.float32),
    }


def _atoms(entry: Arrays, crop: Crop) -> dict[str, Array]:
    def of(name: str, dtype: npt.DTypeLike) -> Array:
        return np.asarray(entry[name])[crop.atoms].astype(dtype)

    return {
        "ref_charge": of("ref_charge", np.float32),
        "ref_element": element_class(np.asarray(entry["ref_element"])[crop.atoms]),
        "ref_atom_name_chars": of("ref_atom_name_chars", np.int64),
        "atom_to_token": crop.atom_to_token,
        "atom_mask": np.ones(len(crop.atoms), dtype=np.bool_),
        "position": of("position", np.float32),
        "resolved": of("resolved", np.bool_),
    }


def element_class(number: Array) -> IntArray:
    """Return the class of atomic numbers, one of 128: 0 is hydrogen, the last one is unknown.

    The same as in Protenix, whose weights fit.

    Examples
    --------
    >>> element_class(np.array([1, 6, 0], dtype=np.uint8)).tolist()
    [0, 5, 127]
    """
    before = np.asarray(number, dtype=np.int64) - 1
    return np.where(before >= 0, before, UNKNOWN_ELEMENT)


@dataclass(frozen=True)
class _LookUp:
    """Values per sequence of an entry; [C] is -1 where a chain has none."""

    stack: RowStack
    alignment: IntArray
    templates: list[Templates | None]
    sequence: IntArray


def _look_up(entry: Arrays, sources: Sources) -> _LookUp:
    """Find alignments and templates of the distinct sequences of an entry."""
    words = describe(entry)
    chains, released = words["chains"], released_day(words)
    sequence, alignment = (np.full(len(chains), -1, dtype=np.int64) for _ in range(2))
    known: dict[tuple[str, str], int] = {}
    places: dict[int, int] = {}
    templates: list[Templates | None] = []
    for number, chain in enumerate(chains):
        kind = _POLYMERS.get(chain["kind"])
        if kind is None:
            continue
        key = (kind, chain["sequence"])
        if key not in known:
            classes = sequence_classes(*key)
            known[key] = len(templates)
            templates.append(_templates(classes, released, sources))
            place = None if sources.alignments is None else sources.alignments.find(classes)
            if place is not None:
                places[known[key]] = place
        sequence[number] = known[key]
    order = list(places)
    for number, one in enumerate(sequence.tolist()):
        if one in places:
            alignment[number] = order.index(one)
    stack = stack_rows(
        [sources.alignments[p] for p in places.values()] if sources.alignments else []
    )
    return _LookUp(stack, alignment, templates, sequence)


def _templates(classes: npt.NDArray[np.int8], released: int, sources: Sources) -> Templates | None:
    if sources.templates is None:
        return None
    found = sources.templates.find(sequence_key(classes), released)
    return None if found is None else Templates.of(found, len(classes))
