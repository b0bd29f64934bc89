"""Torsion angles of residues from the positions of their atoms."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bevatron.data.proteins.atoms14 import gather_atoms, of_residues
from bevatron.data.proteins.constants import CA, UNKNOWN, C, N, O
from bevatron.maths.rigid import Rigid, apply_inverse, orthonormal_axes

_EPS = 1e-8


class Torsions(NamedTuple):
    """Torsions of residues: pre-omega, phi, psi, chi 1 to 4.

    Attributes
    ----------
    sin_cos : [..., 7, 2], (sine, cosine); (0, 0) or meaningless where the mask is 0
    alternative : [..., 7, 2], the same after half a turn of the chi that exchanges two names
    mask : [..., 7], 1 where all four atoms are known
    """

    sin_cos: Float[Tensor, "*residues 7 2"]
    alternative: Float[Tensor, "*residues 7 2"]
    mask: Float[Tensor, "*residues 7"]


def torsions(
    position: Float[Tensor, "*residues 37 3"],
    resolved: Float[Tensor, "*residues 37"],
    aatype: Int[Tensor, "*residues"],
) -> Torsions:
    """Compute the torsions of each residue of chains.

    Pre-omega and phi take the residue before as the one bonded to. AlphaFold2's supplement, table 2
    and section 1.2.4 (names of interchangeable atoms).

    Parameters
    ----------
    position : [..., N, 37, 3] Å
    resolved : [..., N, 37], 1 where a position is known
    aatype : [..., N]; types above 20, the gap of templates, have no chi
    """
    known_type = aatype.clamp(max=UNKNOWN)
    before, before_resolved = _shifted(position, -3), _shifted(resolved, -2)
    slots = of_residues("CHI_ATOMS", known_type)
    flat = slots.flatten(-2)
    chi = gather_atoms(position, flat).unflatten(-2, (4, 4))
    chi_resolved = gather_atoms(resolved, flat).unflatten(-1, (4, 4))
    atoms = torch.stack(
        [
            torch.cat([before[..., CA : C + 1, :], position[..., N : CA + 1, :]], dim=-2),
            torch.cat([before[..., C : C + 1, :], position[..., N : C + 1, :]], dim=-2),
            torch.cat([position[..., N : C + 1, :], position[..., O : O + 1, :]], dim=-2),
        ],
        dim=-3,
    )
    backbone = resolved[..., N : C + 1]
    mask = torch.stack(
        [
            before_resolved[..., CA : C + 1].prod(-1) * backbone[..., :2].prod(-1),
            before_resolved[..., C] * backbone.prod(-1),
            backbone.prod(-1) * resolved[..., O],
        ],
        dim=-1,
    )
    sin_cos = dihedral(torch.cat([atoms, chi], dim=-3))
    # Psi is that of O, which lies opposite the next residue's N.
    psi, others = sin_cos[..., 2:3, :], sin_cos[..., 3:, :]
    sin_cos = torch.cat([sin_cos[..., :2, :], -psi, others], dim=-2)
    chi_mask = of_residues("CHI_MASK", known_type) * chi_resolved.prod(-1)
    return Torsions(sin_cos, exchanged(sin_cos, known_type), torch.cat([mask, chi_mask], dim=-1))


def exchanged(
    sin_cos: Float[Tensor, "*residues 7 2"], aatype: Int[Tensor, "*residues"]
) -> Float[Tensor, "*residues 7 2"]:
    """Return torsions after half a turn of the chi that exchanges two names."""
    turn = 1 - 2 * of_residues("CHI_PI_PERIODIC", aatype.clamp(max=UNKNOWN)).to(sin_cos.dtype)
    return torch.cat([sin_cos[..., :3, :], sin_cos[..., 3:, :] * turn[..., None]], dim=-2)


def dihedral(atoms: Float[Tensor, "*angles 4 3"]) -> Float[Tensor, "*angles 2"]:
    """Sine and cosine of the torsion about the second bond of four atoms."""
    first, second, third, fourth = atoms.unbind(-2)
    axes = orthonormal_axes(third - second, first - third, _EPS)
    _, y, z = apply_inverse(Rigid(axes, third), fourth).unbind(-1)
    sin_cos = torch.stack([z, y], dim=-1)
    return sin_cos / torch.sqrt(sin_cos.square().sum(-1, keepdim=True) + _EPS)


def _shifted(values: Tensor, dim: int) -> Tensor:
    """Values of the residue before, zero at the first."""
    first = torch.zeros_like(values.narrow(dim, 0, 1))
    return torch.cat([first, values.narrow(dim, 0, values.shape[dim] - 1)], dim=dim)
