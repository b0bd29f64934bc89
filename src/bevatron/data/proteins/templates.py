"""Templates of sequences, and the selection for a sample."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from bevatron.data.readers.proteins.alphabet import GAP, LETTERS
from bevatron.typing import Array, Arrays, BoolArray, IntArray

NUM_TEMPLATES = 4
"""Number of templates of a sample; missing ones are gaps, a single one if all are missing."""

_NOT_ALIGNED = 21


@dataclass(frozen=True)
class Templates:
    """The templates of one sequence of L residues, the best first.

    Attributes
    ----------
    restype : int8 [T, L]
        Class of the alphabet; the gap where the template has no residue.
    pseudo_beta : float32 [T, L, 3]
        Å; CB, of glycine CA.
    pseudo_beta_mask : bool [T, L]
    backbone : float32 [T, L, 3, 3]
        Å; N, CA, C.
    backbone_mask : bool [T, L]
        Whether all three are known.
    """

    @classmethod
    def of(cls, stored: Arrays, length: int) -> "Templates":
        """Create them from stored fields, `template_atoms.TEMPLATE_FIELDS`."""
        shape = (len(stored["template_released"]), length)
        aatype = np.asarray(stored["template_aatype"]).reshape(shape)
        position = np.asarray(stored["template_positions"]).reshape(*aatype.shape, 4, 3)
        known = np.asarray(stored["template_atom_mask"], dtype=np.bool_)
        known = known.reshape(*aatype.shape, 4)
        glycine = aatype == LETTERS["protein"]["G"]
        ca, cb = 1, 3
        return cls(
            restype=np.where(aatype == _NOT_ALIGNED, np.int8(GAP), aatype),
            pseudo_beta=np.where(glycine[..., None], position[..., ca, :], position[..., cb, :]),
            pseudo_beta_mask=np.where(glycine, known[..., ca], known[..., cb]),
            backbone=position[..., :cb, :].astype(np.float32),
            backbone_mask=np.all(known[..., :cb], axis=-1),
        )

    restype: npt.NDArray[np.int8]
    pseudo_beta: npt.NDArray[np.float32]
    pseudo_beta_mask: BoolArray
    backbone: npt.NDArray[np.float32]
    backbone_mask: BoolArray


def sample_templates(
    templates: Sequence[Templates | None],
    sequence: IntArray,
    column: IntArray,
    rng: np.random.Generator,
    *,
    best: bool = False,
) -> dict[str, Array]:
    """Draw templates of each sequence: of n a random min(k, 4), k uniform in 0 .. n.

    (Supplement of AlphaFold3, section 2.4.) Copies of a chain have the same.

    Parameters
    ----------
    templates : [Q]
        The templates of each distinct sequence, None without any.
    sequence, column : [N]
        Sequence and residue of each token; -1 for none.
    best : nothing is drawn: the first four are shown

    Returns
    -------
    dict
        ``template_restype`` int8 [T, N], ``template_pseudo_beta`` float32 [T, N, 3],
        ``template_pseudo_beta_mask`` bool [T, N], ``template_backbone`` float32 [T, N, 3, 3] and
        ``template_backbone_mask`` bool [T, N]; T is `NUM_TEMPLATES`, or 1 if no sequence has a
        template: the model takes the mean over T, and empty ones are equal.
    """
    has_any = any(one is not None and len(one.restype) for one in templates)
    shape = (NUM_TEMPLATES if has_any else 1, len(sequence))
    found: dict[str, Array] = {
        "restype": np.full(shape, GAP, dtype=np.int8),
        "pseudo_beta": np.zeros((*shape, 3), dtype=np.float32),
        "pseudo_beta_mask": np.zeros(shape, dtype=np.bool_),
        "backbone": np.zeros((*shape, 3, 3), dtype=np.float32),
        "backbone_mask": np.zeros(shape, dtype=np.bool_),
    }
    for place, one in enumerate(templates):
        number = 0 if one is None else len(one.restype)
        if one is None or not number:
            continue
        chosen = np.arange(min(number, NUM_TEMPLATES))
        if not best:
            chosen = rng.permutation(number)[: min(int(rng.integers(0, number + 1)), len(chosen))]
        tokens = np.flatnonzero(sequence == place)
        if len(chosen) and len(tokens):
            for name, table in found.items():
                table[: len(chosen), tokens] = getattr(one, name)[chosen[:, None], column[tokens]]
    return {f"template_{name}": table for name, table in found.items()}
