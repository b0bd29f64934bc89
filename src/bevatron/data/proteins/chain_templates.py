"""Templates of a chain: which hits may be used, and their atoms at the residues of the chain.

Supplement of AlphaFold2, section 1.2.3. Of a template only what the model sees is stored: residue
types, the atoms N, CA, C and CB, and torsions.
"""

import datetime as dt
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bevatron.data.proteins.chains import atoms37
from bevatron.data.proteins.clusters_of_rows import GAP
from bevatron.data.proteins.constants import ATOM37, CB, UNKNOWN
from bevatron.data.proteins.torsions import torsions
from bevatron.data.readers.proteins.alphabet import LETTERS
from bevatron.data.readers.proteins.hits import TemplateHits
from bevatron.data.readers.proteins.structure import Structure
from bevatron.data.samples import Field
from bevatron.typing import Arrays, BoolArray

TEMPLATE_FIELDS: tuple[Field, ...] = (
    Field("template_aatype", "int8", (), True, "[T L] residue type, 21 where not aligned"),
    Field("template_positions", "float32", (4, 3), True, "[T L, 4, 3] Å: N, CA, C, CB"),
    Field("template_atom_mask", "bool", (4,), True, "[T L, 4] which of them are known"),
    Field("template_torsions", "float32", (7, 2), True, "[T L, 7, 2] (sine, cosine)"),
    Field("template_torsions_mask", "bool", (7,), True, "[T L, 7] which of them are known"),
)
"""Fields of T templates of a chain of L residues in a store, template after template."""

MOST = 20
"""Templates that are kept of a chain; a sample draws up to four of them."""
EMBARGO = dt.timedelta(days=60)
"""A template was released at least this long before the chain."""
_MIN_ALIGNED, _MAX_COPY, _MIN_LENGTH, _MIN_ATOMS = 0.1, 0.95, 10, 5


class Template(NamedTuple):
    """A template at the residues of the chain.

    Attributes
    ----------
    aatype : int8 [L]
        21 where nothing is aligned.
    positions : float32 [L, 37, 3]
        Å, around the mean of the template's atoms.
    mask : bool [L, 37]
    """

    aatype: npt.NDArray[np.int8]
    positions: npt.NDArray[np.float32]
    mask: BoolArray


def chain_templates(
    sequence: str,
    hits: TemplateHits,
    open_structure: Callable[[str], Structure | None],
    released: dt.date | None,
    dates: Mapping[str, dt.date],
) -> Arrays:
    """Return the first 20 templates of a chain that may be used and are found.

    Parameters
    ----------
    sequence
        Of the chain.
    hits
        Best first.
    open_structure
        Returns the structure of a PDB code in lower case, None if there is none.
    released
        When the chain was released; None allows templates of any date.
    dates
        Release dates by PDB code in lower case; those missing are the structures' own.

    Returns
    -------
    Arrays
        With `TEMPLATE_FIELDS`; no rows if there is no template.
    """
    latest = None if released is None else released - EMBARGO
    found: list[Template] = []
    for hit in range(len(hits)):
        if len(found) == MOST:
            break
        date = dates.get(hits.entries[hit])
        own = hits.sequences[hit]
        if (own and not _fits(sequence, own, hits, hit)) or (date and latest and date > latest):
            continue
        structure = open_structure(hits.entries[hit])
        if structure is None or not _old_enough(date or structure.released, latest):
            continue
        part = find_target(hits, hit, structure)
        if part is None or not _fits(sequence, part.sequence, hits, hit):
            continue
        template = place_template(hits, hit, structure, part, len(sequence))
        if template is not None:
            found.append(template)
    return stored_templates(found, len(sequence))


def _fits(sequence: str, own: str, hits: TemplateHits, hit: int) -> bool:
    """Whether enough is aligned and the template is no copy of the chain itself."""
    copy = own in sequence and len(own) > _MAX_COPY * len(sequence)
    aligned = len(hits.pairs_of(hit)) > _MIN_ALIGNED * len(sequence)
    return aligned and len(own) >= _MIN_LENGTH and not copy


def _old_enough(date: dt.date | None, latest: dt.date | None) -> bool:
    """Whether a template may be used; one of unknown date might give the answer away."""
    return latest is None or (date is not None and date <= latest)


class Target(NamedTuple):
    """The aligned part of a template: its chain, first residue in it, and sequence."""

    chain: int
    first: int
    sequence: str


def find_target(hits: TemplateHits, hit: int, structure: Structure) -> Target | None:
    """Find the aligned part of a hit in its structure; None if it is not there.

    A hit with a sequence is found by that: in the chain of its name, else in any, X standing for
    any residue. One without is found by name and positions.
    """
    proteins = np.flatnonzero(structure.chains.kind == "protein").tolist()
    proteins.sort(key=lambda chain: structure.chains.author[chain] != hits.chains[hit])
    sequences = [structure.sequence(chain) for chain in proteins]
    own = hits.sequences[hit]
    if not own:
        first, past = hits.target_ranges[hit].tolist()
        named = proteins and structure.chains.author[proteins[0]] == hits.chains[hit]
        if not named or past > len(sequences[0]):
            return None
        return Target(proteins[0], first, sequences[0][first:past])
    loose = re.compile("".join("." if x == "X" else f"[{re.escape(x)}X]" for x in own))
    for pattern in (re.compile(re.escape(own)), loose):
        for chain, sequence in zip(proteins, sequences, strict=True):
            match = pattern.search(sequence)
            if match:
                return Target(chain, match.start(), own)
    return None


def place_template(
    hits: TemplateHits, hit: int, structure: Structure, part: Target, length: int
) -> Template | None:
    """Put the atoms of a hit at the residues of the chain that they are aligned to.

    Parameters
    ----------
    part
        Where the hit is in the structure.
    length
        Residues of the chain that the hit is for.

    Returns
    -------
    None if fewer than five atoms are known.
    """
    query, target = hits.pairs_of(hit).T
    inside = target - hits.target_ranges[hit, 0]
    positions, mask = atoms37(structure, part.chain)
    if not mask.any():
        return None
    positions = np.where(mask[..., None], positions - positions[mask].mean(axis=0), 0.0)
    found = Template(
        np.full(length, GAP, dtype=np.int8),
        np.zeros((length, len(ATOM37), 3), dtype=np.float32),
        np.zeros((length, len(ATOM37)), dtype=bool),
    )
    letters = [part.sequence[i] for i in inside.tolist()]
    found.aatype[query] = [LETTERS["protein"].get(letter, UNKNOWN) for letter in letters]
    found.positions[query] = positions[inside + part.first]
    found.mask[query] = mask[inside + part.first]
    return found if found.mask.sum() >= _MIN_ATOMS else None


def stored_templates(templates: Sequence[Template], length: int) -> Arrays:
    """Compute what is stored of templates of a chain of ``length`` residues."""
    shape = (len(templates), length)
    aatype = np.array([template.aatype for template in templates], dtype=np.int8).reshape(shape)
    positions = np.array([template.positions for template in templates], dtype=np.float32)
    mask = np.array([template.mask for template in templates], dtype=bool)
    positions, mask = positions.reshape(*shape, 37, 3), mask.reshape(*shape, 37)
    angles = torsions(
        torch.from_numpy(positions),
        torch.from_numpy(mask).float(),
        torch.from_numpy(aatype).long(),
    )
    rows = len(templates) * length
    return {
        "template_aatype": aatype.reshape(rows),
        "template_positions": positions[..., : CB + 1, :].reshape(rows, 4, 3),
        "template_atom_mask": mask[..., : CB + 1].reshape(rows, 4),
        "template_torsions": angles.sin_cos.numpy().reshape(rows, 7, 2),
        "template_torsions_mask": angles.mask.numpy().reshape(rows, 7) > 0,
    }
