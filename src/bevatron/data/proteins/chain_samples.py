"""A training sample of AlphaFold2 from a chain: the random draws of a step.

Supplement, sections 1.2.3 to 1.2.8. A sample is a function of chain,
alignment and seed alone, whatever process makes it. It holds integers and positions; the model's
features are computed from them on the device.
"""

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.clusters_of_rows import (
    GAP,
    MASK,
    NUM_COUNTED,
    AlignmentRows,
    Rows,
    alphafold2_classes,
    cluster_sums,
    nearest_centres,
)
from bevatron.data.proteins.crop import crop_chain
from bevatron.errors import DataError
from bevatron.typing import Array, Arrays, BoolArray, IntArray

REPLACED = 0.15
"""Share of the positions of cluster centres that are drawn for prediction."""
_TO_MASK, _TO_UNIFORM, _TO_PROFILE = 0.7, 0.8, 0.9
"""Of these, 0.7 become the mask, 0.1 any of 20 residues, 0.1 one of the column; 0.1 stay."""
DELETED = 0.3
"""Share of the rows in a block that is deleted."""
_ROWS_AT_ONCE = 2048


@dataclass(frozen=True)
class ChainSizes:
    """Sizes of a sample; smaller chains and alignments are padded to them.

    Attributes
    ----------
    residues : residues of the crop
    msa_rows, extra_rows : cluster centres, and rows of the extra alignment
    templates : maximum number of templates
    best_templates : take the best templates, as in predictions, not a random number of random ones
    clamped : share of the samples whose errors are clamped
    deleted_blocks : blocks of rows deleted from the alignment of a sample
    """

    residues: int = 256
    msa_rows: int = 124
    extra_rows: int = 1024
    templates: int = 4
    best_templates: bool = False
    clamped: float = 0.9
    deleted_blocks: int = 0


def fitted(sizes: ChainSizes, rows: AlignmentRows, templates: object | None = None) -> ChainSizes:
    """Return the sizes without padding; at least one row of each kind stays.

    Without any templates one place for them stays; with them as many as there are for every chain,
    so that the shapes of samples do not depend on them.
    """
    centres = min(sizes.msa_rows, rows.num_rows)
    extra = min(sizes.extra_rows, max(rows.num_rows - centres, 1))
    residues = min(sizes.residues, rows.num_columns)
    places = 1 if templates is None else sizes.templates
    return replace(sizes, residues=residues, msa_rows=centres, extra_rows=extra, templates=places)


class CycleDraw(NamedTuple):
    """Random draws of one recycling iteration.

    Attributes
    ----------
    centres : int64 [S]
        Rows that are centres of clusters, the query first.
    extra : int64 [E]
        Rows of the extra alignment; no centres.
    masked : int8 [S, L]
        Centres after masking, 22 = mask.
    chosen : bool [S, L]
        Positions that are to be predicted.
    kept : int64 [K]
        Rows that were not deleted; clusters have no others.
    """

    centres: IntArray
    extra: IntArray
    masked: Rows
    chosen: BoolArray
    kept: IntArray


def sample_chain(
    entry: Arrays, alignment: AlignmentRows, seed: int, sizes: ChainSizes, cycles: int = 4
) -> dict[str, Array]:
    """Draw a sample; DataError if the alignment is not of the chain's length.

    Parameters
    ----------
    entry : `chains.CHAIN_FIELDS`, and `template_atoms.TEMPLATE_FIELDS` if there are templates
    alignment : rows of the chain's sequence
    seed : non-negative, of 63 bits
    cycles
        Recycling iterations, each with rows of its own; those of a smaller number are the first.

    Returns
    -------
    dict
        C cycles, S centres, E extra rows, T templates, N residues, zero where padded:

        - ``aatype`` int8, ``residue_index`` int32, ``seq_mask`` bool [N], ``all_atom_positions``
          float32 [N, 37, 3] Å, ``all_atom_mask`` bool [N, 37], ``seq_length`` int32, ``resolution``
          and ``use_clamped_fape`` float32;
        - ``msa`` (masked) and ``true_msa`` int8, ``bert_mask`` bool, ``deletions`` uint8
          [C, S, N], ``cluster_counts`` int16 [C, S, N, 22] and ``cluster_deletions`` int32
          [C, S, N] of the rows nearest each centre without itself, ``msa_mask`` bool [S, N];
        - ``extra_msa`` int8, ``extra_deletions`` uint8 [C, E, N], ``extra_msa_mask`` bool [E, N];
        - ``template_aatype`` int8 [T, N], ``template_positions`` float32 [T, N, 4, 3] Å,
          ``template_atom_mask`` bool [T, N, 4] of N, CA, C and CB, ``template_torsions`` float32
          [T, N, 7, 2], ``template_torsions_mask`` bool [T, N, 7], ``template_mask`` bool [T].
    """
    length = len(entry["aatype"])
    if alignment.num_columns != length:
        raise DataError(
            f"an alignment of {alignment.num_columns} columns was given for a chain of {length} "
            "residues"
        )
    of_chain, *of_cycles = [
        np.random.Generator(np.random.PCG64(each))
        for each in np.random.SeedSequence(seed).spawn(1 + cycles)
    ]
    clamped = bool(of_chain.random() < sizes.clamped)
    crop = slice(*crop_chain(length, sizes.residues, of_chain, clamped=clamped))
    sample = residues_of_sample(entry, crop, sizes.residues)
    sample["use_clamped_fape"] = np.array(clamped, dtype=np.float32)
    sample |= draw_templates(entry, crop, of_chain, sizes)
    kept = kept_rows(alignment.num_rows, sizes.deleted_blocks, of_chain)
    draws = [draw_cycle(alignment, kept, rng, sizes) for rng in of_cycles]
    return sample | rows_of_sample(alignment, draws, crop, sizes)


def residues_of_sample(entry: Arrays, crop: slice, size: int) -> dict[str, Array]:
    """Crop the features of residues."""
    names = ("aatype", "residue_index", "all_atom_positions", "all_atom_mask")
    found = {name: padded(entry[name][crop], size) for name in names}
    count = crop.stop - crop.start
    found["seq_mask"] = np.arange(size) < count
    found["seq_length"] = np.array(count, dtype=np.int32)
    found["resolution"] = np.asarray(entry["resolution"], dtype=np.float32)
    return found


def kept_rows(num_rows: int, blocks: int, rng: np.random.Generator) -> IntArray:
    """Delete blocks of neighbouring rows, but not the query (section 1.2.6, algorithm 1).

    Neighbours are similar, so a sample sees fewer families. Blocks have a share of `DELETED` of
    all rows, begin anywhere and may overlap. All cycles of a sample have the same ones, so that
    these have equally many rows.

    Returns
    -------
    int64 [K]
        The other rows, ascending.
    """
    kept = np.ones(num_rows, dtype=np.bool_)
    for start in rng.integers(0, num_rows, blocks).tolist():
        kept[start : start + int(num_rows * DELETED)] = False
    kept[0] = True
    return np.flatnonzero(kept)


def draw_cycle(
    alignment: AlignmentRows, kept: IntArray, rng: np.random.Generator, sizes: ChainSizes
) -> CycleDraw:
    """Draw centres, extra rows and masked positions of one iteration.

    The query is the first centre; the other rows are in random order, first centres, then extra
    ones.

    Parameters
    ----------
    kept : int64 [K]
        Rows that are drawn from, the query first.
    """
    order = kept[np.concatenate([[0], 1 + rng.permutation(len(kept) - 1)])]
    centres = order[: sizes.msa_rows]
    extra = order[len(centres) : len(centres) + sizes.extra_rows]
    rows, _ = alignment.read(centres, np.arange(alignment.num_columns))
    masked, chosen = mask_rows(alphafold2_classes(rows), alignment.profile, rng)
    return CycleDraw(centres, extra, masked, chosen, kept)


def mask_rows(
    rows: Rows, profile: npt.NDArray[np.float32], rng: np.random.Generator
) -> tuple[Rows, BoolArray]:
    """Draw positions to predict and their replacements (section 1.2.7).

    Parameters
    ----------
    rows : int8 [S, L]
        Classes of AlphaFold2.
    profile : float32 [L, 32]
        Share of the alphabet's classes in all rows of the alignment.

    Returns
    -------
    The rows after masking and whether a position is to be predicted, [S, L].
    """
    chosen = rng.random(rows.size, dtype=np.float32) < REPLACED
    place = np.flatnonzero(chosen)
    kind, level = rng.random(len(place)), rng.random(len(place))
    uniform = rng.integers(0, 20, len(place))
    classes = np.concatenate([profile[:, :GAP], profile[:, -1:]], axis=1).astype(np.float64)
    levels = np.cumsum(classes, axis=1)
    levels /= levels[:, -1:]
    masked = rows.reshape(-1).copy()
    masked[place[kind < _TO_MASK]] = MASK
    drawn = (kind >= _TO_MASK) & (kind < _TO_UNIFORM)
    masked[place[drawn]] = uniform[drawn]
    drawn = (kind >= _TO_UNIFORM) & (kind < _TO_PROFILE)
    column = place[drawn] % rows.shape[1]
    masked[place[drawn]] = (levels[column] <= level[drawn, None]).sum(axis=1)
    return masked.reshape(rows.shape), chosen.reshape(rows.shape)


def rows_of_sample(
    alignment: AlignmentRows, draws: list[CycleDraw], crop: slice, sizes: ChainSizes
) -> dict[str, Array]:
    """Crop the drawn rows, and sum up the others by their nearest centre.

    Nearness counts all columns, also those outside the crop.
    """
    centres = [draw.masked for draw in draws]
    outside = len(draws[0].centres) < len(draws[0].kept)
    parts, nearest = [], []
    for rows, deletions in alignment.stream(_ROWS_AT_ONCE):
        classes = alphafold2_classes(rows)
        parts.append((classes[:, crop], deletions[:, crop]))
        if outside:
            nearest.append(nearest_centres(classes, centres))
    rows, deletions = (np.concatenate(part) for part in zip(*parts, strict=True))
    cluster = np.concatenate(nearest, axis=1) if outside else None
    found = []
    for number, draw in enumerate(draws):
        own = None if cluster is None else cluster[number]
        counts = np.zeros((sizes.msa_rows, sizes.residues, NUM_COUNTED), dtype=np.int16)
        sums = np.zeros((sizes.msa_rows, sizes.residues), dtype=np.int32)
        if own is not None:
            members = np.setdiff1d(draw.kept, draw.centres, assume_unique=True)
            here = (slice(len(draw.centres)), slice(rows.shape[1]))
            counts[here], sums[here] = cluster_sums(
                rows[members], deletions[members], own[members], len(draw.centres)
            )
        shape, extra_shape = (sizes.msa_rows, sizes.residues), (sizes.extra_rows, sizes.residues)
        found.append(
            {
                "msa": padded(draw.masked[:, crop], *shape),
                "true_msa": padded(rows[draw.centres], *shape),
                "bert_mask": padded(draw.chosen[:, crop], *shape),
                "deletions": padded(deletions[draw.centres], *shape),
                "cluster_counts": counts,
                "cluster_deletions": sums,
                "extra_msa": padded(rows[draw.extra], *extra_shape),
                "extra_deletions": padded(deletions[draw.extra], *extra_shape),
            }
        )
    sample = {name: np.stack([cycle[name] for cycle in found]) for name in found[0]}
    residue = np.arange(sizes.residues) < crop.stop - crop.start
    sample["msa_mask"] = _mask(len(draws[0].centres), sizes.msa_rows, residue)
    sample["extra_msa_mask"] = _mask(len(draws[0].extra), sizes.extra_rows, residue)
    return sample


def draw_templates(
    entry: Arrays, crop: slice, rng: np.random.Generator, sizes: ChainSizes
) -> dict[str, Array]:
    """Draw templates: the tail of a random order from a random place on, perhaps none.

    Section 1.2.8 does so to make the number of templates even, 0 to 4.
    """
    length = len(entry["aatype"])
    available = len(entry["template_aatype"]) // length if "template_aatype" in entry else 0
    order = rng.permutation(available)
    first = int(rng.integers(0, available + 1))
    if sizes.best_templates:
        order, first = np.arange(available), 0
    return templates_of_sample(entry, order[first : first + sizes.templates], crop, sizes)


def templates_of_sample(
    entry: Arrays, chosen: IntArray, crop: slice, sizes: ChainSizes
) -> dict[str, Array]:
    """Crop templates, in the order given."""
    length, shape = len(entry["aatype"]), (sizes.templates, sizes.residues)
    blank: dict[str, npt.NDArray[Any]] = {
        "template_aatype": np.zeros(shape, dtype=np.int8),
        "template_positions": np.zeros((*shape, 4, 3), dtype=np.float32),
        "template_atom_mask": np.zeros((*shape, 4), dtype=bool),
        "template_torsions": np.zeros((*shape, 7, 2), dtype=np.float32),
        "template_torsions_mask": np.zeros((*shape, 7), dtype=bool),
    }
    for name, array in blank.items() if len(chosen) else ():
        stored = np.asarray(entry[name])
        stored = stored.reshape(-1, length, *stored.shape[1:])
        array[: len(chosen), : crop.stop - crop.start] = stored[chosen, crop]
    blank["template_mask"] = np.arange(sizes.templates) < len(chosen)
    return blank


def padded(array: Array, *sizes: int) -> Array:
    """Append zeros to the first axes."""
    whole = np.zeros((*sizes, *array.shape[len(sizes) :]), dtype=array.dtype)
    whole[tuple(slice(count) for count in array.shape[: len(sizes)])] = array
    return whole


def _mask(rows: int, size: int, residue: BoolArray) -> BoolArray:
    return (np.arange(size) < rows)[:, None] & residue
