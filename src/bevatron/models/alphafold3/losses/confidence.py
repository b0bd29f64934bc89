"""Losses of the distogram and of the confidences: which bin the truth lies in.

The targets compare the coordinates of a mini-rollout with the truth and carry no gradient. R is the
number of rollouts of a structure, N of tokens, A of atoms. Every function returns one number per
structure: the mean over its pairs or atoms, then over rollouts. Where processes share a sample,
logits of pairs are own rows I, and all sums are added up.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.models.alphafold3.losses.atoms import gather_atoms
from bevatron.models.alphafold3.losses.smooth_lddt import RADIUS_NUCLEIC, RADIUS_OTHER, THRESHOLDS
from bevatron.models.common.folding.metrics import DISTOGRAM_EDGES
from bevatron.parallel.axial import all_together, own

ERROR_EDGES = (0.5, 31.5, 63)
"""First, last and number of the edges between the bins of predicted aligned and distance errors, Å:
64 of 0.5 Å, the last without an end."""

LDDT_EDGES = (0.02, 0.98, 49)
"""Of the predicted lDDT: 50 bins from 0 to 1."""


def bin_of(value: Tensor, edges: tuple[float, float, int]) -> Int[Tensor, "*shape"]:
    """Return the index of a value's bin; a value on an edge belongs to the bin below."""
    first, last, count = edges
    inner = torch.linspace(first, last, count, dtype=value.dtype, device=value.device)
    return torch.bucketize(value, inner)


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    flat = F.cross_entropy(logits.flatten(0, -2), target.flatten(), reduction="none")
    return flat.reshape(target.shape)


def _pair_mean(
    logits: Float[Tensor, "*batch I N 64"],
    target: Int[Tensor, "*batch I N"],
    rows: Bool[Tensor, "*#batch N"],
    columns: Bool[Tensor, "*#batch N"],
) -> Float[Tensor, "*batch"]:
    """Mean of the cross-entropy over pairs whose row and column count, 0 if none does."""
    counts = own(rows, -1)[..., :, None] & columns[..., None, :]
    total = all_together((_cross_entropy(logits, target) * counts).sum((-1, -2)))
    return total / ((rows.sum(-1) * columns.sum(-1)).to(total.dtype) + 1e-6)


def distogram_loss(
    logits: Float[Tensor, "*batch I N 64"],
    truth: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    representative_atom: Int[Tensor, "*batch N"],
    token_mask: Bool[Tensor, "*batch N"],
) -> Float[Tensor, "*batch"]:
    """Compute the cross-entropy of distances between representative atoms (section 4.4)."""
    points = gather_atoms(truth[..., None, :, :], representative_atom)[..., 0, :, :]
    known = resolved.take_along_dim(representative_atom, -1) & token_mask
    target = bin_of(_distances(own(points, -2), points), DISTOGRAM_EDGES)
    return _pair_mean(logits, target, known, known)


def pde_loss(
    logits: Float[Tensor, "*batch R I N 64"],
    rollout: Float[Tensor, "*batch R A 3"],
    truth: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    representative_atom: Int[Tensor, "*batch N"],
    token_mask: Bool[Tensor, "*batch N"],
) -> Float[Tensor, "*batch"]:
    """Compute the cross-entropy of errors of distances between representative atoms (eq. 12)."""
    x = gather_atoms(rollout, representative_atom)
    true = gather_atoms(truth[..., None, :, :], representative_atom)
    known = resolved.take_along_dim(representative_atom, -1) & token_mask
    error = _distances(own(x, -2), x) - _distances(own(true, -2), true)
    known = known[..., None, :]
    return _pair_mean(logits, bin_of(error.abs(), ERROR_EDGES), known, known).mean(-1)


def in_frames(
    points: Float[Tensor, "*batch N 3"], frames: Float[Tensor, "*batch F 3 3"]
) -> Float[Tensor, "*batch F N 3"]:
    """Express points in frames of three atoms a, b, c: Algorithm 29.

    The origin is b; the first axis halves the angle a-b-c, the second lies in the plane with them.
    """
    a, b, c = frames.unbind(-2)
    to_a, to_c = F.normalize(a - b, dim=-1, eps=1e-8), F.normalize(c - b, dim=-1, eps=1e-8)
    first = F.normalize(to_a + to_c, dim=-1, eps=1e-8)
    second = F.normalize(to_c - to_a, dim=-1, eps=1e-8)
    axes = (first, second, torch.linalg.cross(first, second, dim=-1))
    step = points[..., None, :, :] - b[..., :, None, :]
    return torch.stack([(step * axis[..., :, None, :]).sum(-1) for axis in axes], -1)


def alignment_error(
    rollout: Float[Tensor, "*batch R A 3"],
    truth: Float[Tensor, "*batch A 3"],
    frame_atoms: Int[Tensor, "*batch N 3"],
    centre_atom: Int[Tensor, "*batch N"],
) -> Float[Tensor, "*batch R I N"]:
    r"""Compute errors of token j seen from the frame of own token i, Å: Algorithm 30."""
    local = []
    for points in (rollout, truth[..., None, :, :]):
        atoms = gather_atoms(points, own(frame_atoms, -2).clamp(min=0).flatten(-2))
        frames = atoms.unflatten(-2, (-1, 3))
        local.append(in_frames(gather_atoms(points, centre_atom), frames))
    return (local[0] - local[1]).square().sum(-1).sqrt()


def pae_loss(
    logits: Float[Tensor, "*batch R I N 64"],
    rollout: Float[Tensor, "*batch R A 3"],
    truth: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    frame_atoms: Int[Tensor, "*batch N 3"],
    has_frame: Bool[Tensor, "*batch N"],
    centre_atom: Int[Tensor, "*batch N"],
    token_mask: Bool[Tensor, "*batch N"],
) -> Float[Tensor, "*batch"]:
    """Compute the cross-entropy of aligned errors over frames i and tokens j (equation 11).

    A frame counts if the token has one and all three atoms are resolved.
    """
    target = bin_of(alignment_error(rollout, truth, frame_atoms, centre_atom), ERROR_EDGES)
    atoms = frame_atoms.clamp(min=0)
    of_frame = resolved.take_along_dim(atoms.flatten(-2), -1).unflatten(-1, (-1, 3)).all(-1)
    framed = has_frame & token_mask & of_frame
    known = resolved.take_along_dim(centre_atom, -1) & token_mask
    return _pair_mean(logits, target, framed[..., None, :], known[..., None, :]).mean(-1)


def atom_lddt(
    rollout: Float[Tensor, "*batch R A 3"],
    truth: Float[Tensor, "*batch A 3"],
    centre_atom: Int[Tensor, "*batch N"],
    counts: Bool[Tensor, "*batch N"],
    is_nucleic: Bool[Tensor, "*batch N"],
) -> tuple[Float[Tensor, "*batch R A"], Float[Tensor, "*batch 1 A"]]:
    """Compute the lDDT of every atom l to the centres m of tokens: section 4.3.1.

    Parameters
    ----------
    counts, is_nucleic
        Per token: whether its centre is one of the atoms m, and whether pairs to it count up to
        30 Å (nucleic acids) or 15 Å.

    Returns
    -------
    preserved, considered
        Per atom: the share of the thresholds met, summed over m, and the number of atoms m.
    """
    # Every process counts the centres of its own tokens.
    centre_atom, counts, is_nucleic = (own(x, -1) for x in (centre_atom, counts, is_nucleic))
    true = truth[..., None, :, :]
    true_distance = _distances(true, gather_atoms(true, centre_atom))
    radius = torch.where(is_nucleic, RADIUS_NUCLEIC, RADIUS_OTHER).to(truth.dtype)
    atoms = torch.arange(truth.shape[-2], device=truth.device)
    other = atoms[:, None] != centre_atom[..., None, :]
    considered = (counts[..., None, :] & other)[..., None, :, :]
    considered = considered & (true_distance < radius[..., None, None, :])
    error = (_distances(rollout, gather_atoms(rollout, centre_atom)) - true_distance).abs()
    preserved = torch.zeros_like(error)
    for threshold in THRESHOLDS:
        preserved += error < threshold
    met, number = (preserved * considered).sum(-1) / 4, considered.sum(-1).to(error.dtype)
    return all_together(met), all_together(number)


def plddt_loss(
    logits: Float[Tensor, "*batch R A 50"],
    rollout: Float[Tensor, "*batch R A 3"],
    truth: Float[Tensor, "*batch A 3"],
    resolved: Bool[Tensor, "*batch A"],
    centre_atom: Int[Tensor, "*batch N"],
    is_residue: Bool[Tensor, "*batch N"],
    is_nucleic: Bool[Tensor, "*batch N"],
) -> Float[Tensor, "*batch"]:
    """Compute the cross-entropy of the lDDT of every resolved atom (section 4.3.1).

    Parameters
    ----------
    is_residue
        Whether a token is a standard residue of a polymer: to their centres lDDT is measured.
    """
    counts = is_residue & resolved.take_along_dim(centre_atom, -1)
    preserved, considered = atom_lddt(rollout, truth, centre_atom, counts, is_nucleic)
    target = bin_of(preserved / (considered + 1e-6), LDDT_EDGES)
    entropy = _cross_entropy(logits, target)
    # Exactly the mean, or 0 for a structure without resolved atoms.
    atoms = resolved[..., None, :]
    return ((entropy * atoms).sum(-1) / atoms.sum(-1).clamp(min=1)).mean(-1)


def resolved_loss(
    logits: Float[Tensor, "*batch R A 2"],
    resolved: Bool[Tensor, "*batch A"],
    atom_mask: Bool[Tensor, "*batch A"],
) -> Float[Tensor, "*batch"]:
    """Compute the cross-entropy of whether an atom is resolved, over all atoms (section 4.3.3)."""
    atoms = atom_mask[..., None, :]
    target = resolved[..., None, :].long().expand(logits.shape[:-1])
    entropy = _cross_entropy(logits, target)
    return ((entropy * atoms).sum(-1) / atoms.sum(-1).clamp(min=1)).mean(-1)


def _distances(
    x: Float[Tensor, "*batch n 3"], y: Float[Tensor, "*batch m 3"]
) -> Float[Tensor, "*batch n m"]:
    """Distances from differences, because a matmul would round them."""
    return (x[..., :, None, :] - y[..., None, :, :]).square().sum(-1).sqrt()
