"""Predicted confidences: pLDDT, PAE, pTM, ipTM, ranking of samples."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.models.common.folding.metrics.superposed import tm_distance

MAX_ERROR = 32.0
"""Å; upper end of the last bin of the aligned error."""

CLASH = 1.1
"""Å between atoms of different polymers."""

CLASHING_ATOMS = 100
CLASHING_SHARE = 0.5
"""Two chains clash above this number of close pairs, or this fraction of the smaller's atoms."""

SHORTEST_FOR_TM = 19
"""Tokens; shorter chains are scored as if they had this many."""


def expected_lddt(logits: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch"]:
    """Compute pLDDT, 0 to 100: the mean of the bins' centres."""
    return 100 * _expectation(logits, 1.0)


def expected_error(logits: Float[Tensor, "*batch bins"]) -> Float[Tensor, "*batch"]:
    """Compute the predicted aligned or distance error, Å: the mean of the bins' centres."""
    return _expectation(logits, MAX_ERROR)


def _expectation(logits: Tensor, end: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return (logits.softmax(-1) * _centres(logits, end)).sum(-1)


def _centres(logits: Tensor, end: float) -> Tensor:
    number = logits.shape[-1]
    return (torch.arange(number, dtype=logits.dtype, device=logits.device) + 0.5) * (end / number)


def ptm(
    logits: Float[Tensor, "N N bins"], has_frame: Bool[Tensor, "N"], counts: Bool[Tensor, "N"]
) -> Float[Tensor, ""]:
    r"""Compute pTM: the TM-score expected from the predicted aligned errors.

    :math:`\max_i \frac1N \sum_j E[(1 + (e_{ij}/d_0(N))^2)^{-1}]` over tokens i with a frame:
    equation 17 of the AlphaFold3 supplement. 0 if no token has one.

    Parameters
    ----------
    logits : logits of the aligned error of token j in the frame of token i
    has_frame : whether a token has a frame
    counts : the N tokens to consider: all that are not padding, or those of one chain
    """
    return _best_frame(logits, has_frame & counts, counts[None, :] & counts[:, None], counts)


def iptm(
    logits: Float[Tensor, "N N bins"],
    has_frame: Bool[Tensor, "N"],
    counts: Bool[Tensor, "N"],
    chain: Int[Tensor, "N"],
) -> Float[Tensor, ""]:
    """Compute ipTM: `ptm` with the mean over tokens j of other chains than that of i.

    Equation 18. ``counts`` with the tokens of two chains gives the ipTM of that interface. 0 for a
    single chain.
    """
    pairs = counts[None, :] & counts[:, None] & (chain[:, None] != chain)
    return _best_frame(logits, has_frame & counts, pairs, counts)


def _best_frame(logits: Tensor, frames: Tensor, pairs: Tensor, counts: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    d0 = tm_distance(max(int(counts.sum()), SHORTEST_FOR_TM))
    near = 1 / (1 + (_centres(logits, MAX_ERROR) / d0).square())
    expected = (logits.softmax(-1) * near).sum(-1)
    number = pairs.sum(-1)
    of_frame = (expected * pairs).sum(-1) / number.clamp(min=1)
    return torch.where(frames & (number > 0), of_frame, 0.0).amax()


def has_clash(
    positions: Float[Tensor, "A 3"], chain: Int[Tensor, "A"], is_polymer: Bool[Tensor, "A"]
) -> bool:
    """Whether two polymers run through each other: section 5.9.2 of the AlphaFold3 supplement.

    That is, if more than 100 pairs of their atoms, or of more than half the atoms of the smaller
    one, are closer than 1.1 Å.
    """
    chains = chain[is_polymer].unique().tolist()
    atoms = [positions[is_polymer & (chain == number)] for number in chains]
    for i, first in enumerate(atoms):
        for second in atoms[:i]:
            distance = torch.cdist(first, second, compute_mode="donot_use_mm_for_euclid_dist")
            clashes = int((distance < CLASH).sum())
            smaller = min(len(first), len(second))
            if clashes > CLASHING_ATOMS or clashes > CLASHING_SHARE * smaller:
                return True
    return False


def ranking_score(
    ptm: float, iptm: float | None, *, disordered: float = 0.0, clash: bool = False
) -> float:
    r"""Score a sample among others: :math:`0.8\,ipTM + 0.2\,pTM + 0.5\,disordered - 100\,clash`.

    Equation 19 of the AlphaFold3 supplement; a single chain, which has no ipTM, has its pTM.

    Parameters
    ----------
    ptm, iptm : scores of the whole complex; ipTM is None for a single chain
    disordered : fraction of its protein residues that are exposed like disordered ones
    clash : see `has_clash`
    """
    folded = ptm if iptm is None else 0.8 * iptm + 0.2 * ptm
    return folded + 0.5 * disordered - 100.0 * clash
