"""Reference geometry of a chain for the losses of AlphaFold2, on any device."""

from jaxtyping import Float, Int
from torch import Tensor

from bevatron.data.proteins.atoms14 import atom37_to_atom14, of_residues, pseudo_beta
from bevatron.data.proteins.rigid_groups import group_frames
from bevatron.data.proteins.torsions import torsions
from bevatron.maths.rigid import matrix_of_rigid


def residue_tables(aatype: Int[Tensor, "*batch N"]) -> dict[str, Tensor]:
    """Look up which atoms residues have, under the names of OpenFold's features."""
    return {
        "atom14_atom_exists": of_residues("ATOM14_MASK", aatype).float(),
        "atom37_atom_exists": of_residues("ATOM37_MASK", aatype).float(),
    }


def reference_geometry(
    position: Float[Tensor, "*batch N 37 3"],
    resolved: Float[Tensor, "*batch N 37"],
    aatype: Int[Tensor, "*batch N"],
) -> dict[str, Tensor]:
    """Compute the reference values of the losses, under the names of OpenFold's features.

    Parameters
    ----------
    position : Å
    resolved : 1 where a position is known
    """
    atoms = atom37_to_atom14(position, resolved, aatype)
    groups = group_frames(position, resolved, aatype)
    angles = torsions(position, resolved, aatype)
    beta, beta_known = pseudo_beta(position, resolved, aatype)
    frames = matrix_of_rigid(groups.frames)
    return {
        "atom14_gt_positions": atoms.position,
        "atom14_gt_exists": atoms.resolved,
        "atom14_alt_gt_positions": atoms.alternative,
        "atom14_alt_gt_exists": atoms.alternative_resolved,
        "atom14_atom_is_ambiguous": of_residues("ATOM14_AMBIGUOUS", aatype).to(position.dtype),
        "rigidgroups_gt_frames": frames,
        "rigidgroups_alt_gt_frames": matrix_of_rigid(groups.alternative),
        "rigidgroups_gt_exists": groups.resolved,
        "backbone_rigid_tensor": frames[..., 0, :, :],
        "backbone_rigid_mask": groups.resolved[..., 0],
        "chi_angles_sin_cos": angles.sin_cos[..., 3:, :],
        "chi_mask": angles.mask[..., 3:],
        "pseudo_beta": beta,
        "pseudo_beta_mask": beta_known,
    }
