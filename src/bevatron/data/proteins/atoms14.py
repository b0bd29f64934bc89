"""Atoms of residues in tensors: 37 slots by name, 14 by residue, and from one to the other."""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bevatron.data.proteins import constants
from bevatron.data.proteins.constants import CA, CB, RESIDUES
from bevatron.maths.constants import computed_once


@computed_once
def constant(name: str, device: torch.device) -> Tensor:
    """Return a table of `bevatron.data.proteins.constants` on a device, copied there once."""
    return torch.from_numpy(getattr(constants, name).copy()).to(device)


def of_residues(name: str, aatype: Int[Tensor, "*residues"]) -> Tensor:
    """Look up the row of a constant table for each residue."""
    return constant(name, aatype.device)[aatype]


def gather_atoms(values: Tensor, slots: Int[Tensor, "*residues to_slots"]) -> Tensor:
    """Take atoms of each residue by slot: [..., slots, *value] to [..., to_slots, *value]."""
    trailing = values.dim() - slots.dim()
    index = slots.reshape(*slots.shape, *(1,) * trailing)
    index = index.expand(*slots.shape, *values.shape[slots.dim() :])
    return values.gather(slots.dim() - 1, index)


def atom14_to_atom37(
    atom14: Float[Tensor, "*residues 14 3"], aatype: Int[Tensor, "*residues"]
) -> Float[Tensor, "*residues 37 3"]:
    """Sort atoms of the model into the 37 slots; zero where a residue has no such atom."""
    atoms = gather_atoms(atom14, of_residues("ATOM37_TO_ATOM14", aatype))
    return atoms * of_residues("ATOM37_MASK", aatype)[..., None]


class Atom14(NamedTuple):
    """Reference positions of the atoms of residues, and the same with ambiguous names exchanged.

    Attributes
    ----------
    position, alternative : [..., 14, 3] Å, zero where ``resolved`` is 0
    resolved, alternative_resolved : [..., 14], 1 where a position is known
    """

    position: Float[Tensor, "*residues 14 3"]
    resolved: Float[Tensor, "*residues 14"]
    alternative: Float[Tensor, "*residues 14 3"]
    alternative_resolved: Float[Tensor, "*residues 14"]


def atom37_to_atom14(
    position: Float[Tensor, "*residues 37 3"],
    resolved: Float[Tensor, "*residues 37"],
    aatype: Int[Tensor, "*residues"],
) -> Atom14:
    """Sort reference atoms by residue, under both names where names are interchangeable."""
    slots = of_residues("ATOM14_TO_ATOM37", aatype)
    mask = of_residues("ATOM14_MASK", aatype) * gather_atoms(resolved, slots)
    atoms = mask[..., None] * gather_atoms(position, slots)
    swap = of_residues("ATOM14_SWAP", aatype)
    return Atom14(atoms, mask, gather_atoms(atoms, swap), gather_atoms(mask, swap))


def pseudo_beta(
    position: Float[Tensor, "*residues 37 3"],
    resolved: Float[Tensor, "*residues 37"],
    aatype: Int[Tensor, "*residues"],
) -> tuple[Float[Tensor, "*residues 3"], Float[Tensor, "*residues"]]:
    """Position of CB, or of CA in glycine, and whether it is known."""
    glycine = aatype == RESIDUES.index("GLY")
    return (
        torch.where(glycine[..., None], position[..., CA, :], position[..., CB, :]),
        torch.where(glycine, resolved[..., CA], resolved[..., CB]),
    )
