"""The made-up complex of the reference losses as a batch, and the model's outputs for it."""

import numpy as np
import torch


def reference(shared, name):
    return np.load(shared / "golden" / "alphafold3" / f"{name}.npz")


def tensor(values):
    found = torch.from_numpy(np.asarray(values))
    return found.double() if found.is_floating_point() else found


def where(mask):
    return torch.from_numpy(np.flatnonzero(mask))


def loss_batch(g):
    """The batch of the contract from the masks of the reference file."""
    token = tensor(g["in__atom_to_token_idx"]).long()
    kind = g["in__is_rna"] + 2 * g["in__is_dna"] + 3 * g["in__is_ligand"]
    centre = where(g["in__pae_rep_atom_mask"])
    rows, columns = np.nonzero(np.triu(g["in__bond_mask"]))
    tokens = len(centre)
    return {
        "position": tensor(g["in__true_coordinate"]),
        "resolved": tensor(g["in__coordinate_mask"]) > 0,
        "atom_mask": torch.ones(len(token), dtype=torch.bool),
        "atom_to_token": token,
        "molecule_type": torch.from_numpy(kind).long()[centre],
        "token_mask": torch.ones(tokens, dtype=torch.bool),
        "centre_atom": centre,
        "representative_atom": where(g["in__distogram_rep_atom_mask"]),
        "frame_atoms": tensor(g["in__frame_atom_index"]).long(),
        "has_frame": tensor(g["in__has_frame"]) > 0,
        "polymer_ligand_bonds": torch.from_numpy(np.stack([rows, columns], -1)).long(),
        "resolution": torch.tensor(2.0, dtype=torch.float64),
        "weight": torch.tensor(1.0, dtype=torch.float64),
    }


def loss_outputs(g):
    names = ("distogram", "pae", "pde", "plddt", "resolved")
    outputs = {name: tensor(g[f"pred__{name}"]).requires_grad_() for name in names}
    outputs["denoised"] = tensor(g["pred__coordinate"]).requires_grad_()
    outputs["rollout"] = tensor(g["pred__coordinate"])
    outputs["sigma"] = tensor(g["in__noise_level"])
    return outputs
