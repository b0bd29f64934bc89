"""Templates of a sequence: the atoms of hits at the residues that they are aligned to.

Supplement of AlphaFold2, section 1.2.3. Only the inputs of models are stored: residue types, the
atoms N, CA, C and CB, and torsions.
"""

import datetime as dt
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from bevatron.data.proteins.chain_index import UNKNOWN_DAY, day_number
from bevatron.data.proteins.chains import atoms37
from bevatron.data.proteins.clusters_of_rows import GAP
from bevatron.data.proteins.constants import ATOM37, CB
from bevatron.data.proteins.template_hits import EMBARGO, usable_hits
from bevatron.data.proteins.torsions import torsions
from bevatron.data.readers.proteins.alphabet import sequence_classes
from bevatron.data.readers.proteins.hits import TemplateHits
from bevatron.data.readers.proteins.structure import Structure
from bevatron.data.samples import Field
from bevatron.typing import Arrays, BoolArray, IntArray

TEMPLATE_FIELDS: tuple[Field, ...] = (
    Field("template_aatype", "int8", (), True, "[T L] residue type, 21 where not aligned"),
    Field("template_positions", "float32", (4, 3), True, "[T L, 4, 3] Å: N, CA, C, CB"),
    Field("template_atom_mask", "bool", (4,), True, "[T L, 4] which of them are known"),
    Field("template_torsions", "float32", (7, 2), True, "[T L, 7, 2] (sine, cosine)"),
    Field("template_torsions_mask", "bool", (7,), True, "[T L, 7] which of them are known"),
    Field("template_released", "int32", (), True, "[T] days since 1970-01-01; -1 if unknown"),
)
"""Fields of T templates of a chain of L residues in a store, template after template."""


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
    structures: Callable[[str], Structure | None],
    released: Sequence[dt.date | None] = (None,),
) -> Arrays:
    """Return the best templates of a chain that are allowed, `MAX_TEMPLATES` for each date.

    `template_hits.usable_hits` has the rules.

    Parameters
    ----------
    sequence : sequence of the chain
    hits : hits of this sequence, the best first
    structures : opens an entry by its code in lower case; None if there is none
    released
        When chains of this sequence were released; None allows templates of any date, also of an
        unknown one.

    Returns
    -------
    Arrays
        With `TEMPLATE_FIELDS`; no rows if there is no template.
    """
    until = [None if day is None else day - EMBARGO for day in released]
    found, days = [], []
    for structure, chain, pairs in usable_hits(sequence, hits, structures, until=until):
        found.append(place_template(structure, chain, pairs, len(sequence)))
        days.append(day_number(structure.released))
    return stored_templates(found, len(sequence), days)


def place_template(structure: Structure, chain: int, pairs: IntArray, length: int) -> Template:
    """Put the atoms of a chain at the residues that they are aligned to.

    Parameters
    ----------
    pairs : [pairs, 2]
        Aligned residues of the chain that the template is for, and of the template.
    length : residues of the former
    """
    found = Template(
        np.full(length, GAP, dtype=np.int8),
        np.zeros((length, len(ATOM37), 3), dtype=np.float32),
        np.zeros((length, len(ATOM37)), dtype=bool),
    )
    classes = sequence_classes("protein", structure.sequence(chain))
    positions, mask = atoms37(structure, chain)
    # 16-bit inputs hold coordinates near zero best.
    centre = positions[mask].mean(axis=0) if mask.any() else np.zeros(3, dtype=np.float32)
    positions = np.where(mask[..., None], positions - centre, np.float32(0.0))
    query, target = pairs.T
    found.aatype[query] = classes[target]
    found.positions[query] = positions[target]
    found.mask[query] = mask[target]
    return found


def stored_templates(
    templates: Sequence[Template], length: int, released: Sequence[int] | None = None
) -> Arrays:
    """Compute the stored features of templates of a chain of ``length`` residues.

    ``released`` are their days, see `day_number`; None if they may be used at any time.
    """
    days = [UNKNOWN_DAY] * len(templates) if released is None else released
    shape = (len(templates), length)
    aatype = np.array([template.aatype for template in templates], dtype=np.int8).reshape(shape)
    positions = np.array([template.positions for template in templates], dtype=np.float32)
    mask = np.array([template.mask for template in templates], dtype=bool)
    positions, mask = positions.reshape(*shape, 37, 3), mask.reshape(*shape, 37)
    angles = torsions(
        torch.from_numpy(positions), torch.from_numpy(mask).float(), torch.from_numpy(aatype).long()
    )
    rows = len(templates) * length
    return {
        "template_aatype": aatype.reshape(rows),
        "template_positions": positions[..., : CB + 1, :].reshape(rows, 4, 3),
        "template_atom_mask": mask[..., : CB + 1].reshape(rows, 4),
        "template_torsions": angles.sin_cos.numpy().reshape(rows, 7, 2),
        "template_torsions_mask": angles.mask.numpy().reshape(rows, 7) > 0,
        "template_released": np.array(days, dtype=np.int32),
    }
