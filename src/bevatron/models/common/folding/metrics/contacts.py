"""Contacts between residues from a distogram, and the precision of the most probable."""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CONTACT = 8.0
"""Å between representative atoms."""

DISTOGRAM_EDGES = (2.3125, 21.6875, 63)
"""First, last and number of the edges between the 64 bins of AlphaFold2 and AlphaFold3, Å."""


def contact_probability(
    logits: Float[Tensor, "*batch bins"], edges: tuple[float, float, int] = DISTOGRAM_EDGES
) -> Float[Tensor, "*batch"]:
    """Sum the probability of the bins that end below 8 Å.

    Parameters
    ----------
    logits : logits of a distogram
    edges : first, last and number of the edges between its bins, Å
    """
    below = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    below[:-1] = torch.linspace(*edges, device=logits.device) <= CONTACT
    return (logits.double().softmax(-1) * below).sum(-1).to(logits.dtype)


def contact_precision(
    probability: Float[Tensor, "N N"],
    truth: Float[Tensor, "N 3"],
    resolved: Bool[Tensor, "N"],
    residue_index: Int[Tensor, "N"],
    *,
    separation: int = 24,
    pairs_per_residue: float = 1.0,
) -> Float[Tensor, ""]:
    """Compute the precision of the most probable contacts, as in CASP; NaN if there is no pair.

    Parameters
    ----------
    probability : symmetric
    truth : positions of representative atoms, Å
    residue_index : numbers along the chain
    separation : pairs nearer along the chain do not count: 24 for long range, 12 and 6
    pairs_per_residue
        Number of pairs considered: 1 is the top L, 0.2 the top L/5, with L resolved residues.
    """
    apart = (residue_index[:, None] - residue_index).abs() >= separation
    pairs = torch.triu(apart & resolved[:, None] & resolved, diagonal=1)
    rows, columns = pairs.nonzero(as_tuple=True)
    number = min(max(int(pairs_per_residue * int(resolved.sum())), 1), len(rows))
    if not number:
        return truth.new_full((), torch.nan)
    surest = probability[rows, columns].topk(number).indices
    distance = (truth[rows[surest]] - truth[columns[surest]]).square().sum(-1).sqrt()
    return (distance < CONTACT).to(truth.dtype).mean()
