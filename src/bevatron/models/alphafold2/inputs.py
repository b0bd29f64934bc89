"""Input features, computed from a sample's integers and positions on the model's device.

Supplement of AlphaFold2, section 1.2.9 and table 1. Names and shapes are those of OpenFold's
features, for one recycling iteration.
"""

from collections.abc import Mapping
from math import pi

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Integer
from torch import Tensor

from bevatron.data.proteins.atoms14 import pseudo_beta
from bevatron.data.proteins.chain_geometry import reference_geometry, residue_tables
from bevatron.data.proteins.torsions import exchanged
from bevatron.models.alphafold2.features import MSA_CLASSES


def model_inputs(sample: Mapping[str, Tensor], cycle: int) -> dict[str, Tensor]:
    """Compute the features of one recycling iteration.

    Parameters
    ----------
    sample
        As `bevatron.data.proteins.chain_samples.sample_chain` returns it, with any leading axes.
    cycle : number of the iteration, from 0
    """
    aatype = sample["aatype"].long()
    residue_mask = sample["seq_mask"]
    found = {
        "aatype": aatype,
        "residue_index": sample["residue_index"].long(),
        "seq_mask": residue_mask.float(),
        "target_feat": target_features(aatype, residue_mask),
    }
    return found | _rows(sample, cycle) | _templates(sample)


def reference_inputs(sample: Mapping[str, Tensor], cycle: int) -> dict[str, Tensor]:
    """Compute what the losses compare predictions with, for the last iteration."""
    aatype, known = sample["aatype"].long(), sample["all_atom_mask"].float()
    positions = sample["all_atom_positions"]
    real = sample["seq_mask"].float()
    # A padded residue looks like alanine.
    tables = {name: table * real[..., None] for name, table in residue_tables(aatype).items()}
    return {
        "aatype": aatype,
        "residue_index": sample["residue_index"].long(),
        "seq_mask": real,
        "all_atom_positions": positions,
        "all_atom_mask": known,
        "seq_length": sample["seq_length"].long(),
        "resolution": sample["resolution"],
        "use_clamped_fape": sample["use_clamped_fape"],
        "true_msa": sample["true_msa"].select(-3, cycle).long(),
        "bert_mask": sample["bert_mask"].select(-3, cycle).float(),
        **tables,
        **reference_geometry(positions, known, aatype),
    }


def target_features(
    aatype: Int[Tensor, "*batch N"], mask: Bool[Tensor, "*batch N"]
) -> Float[Tensor, "*batch N 22"]:
    """One-hot residue types (21) after a channel for breaks between domains, which chains lack."""
    types = F.one_hot(aatype, 21).float() * mask[..., None]
    return F.pad(types, (1, 0))


def msa_features(
    msa: Integer[Tensor, "*batch S N"],
    deletions: Integer[Tensor, "*batch S N"],
    counts: Integer[Tensor, "*batch S N 22"],
    deletion_sums: Integer[Tensor, "*batch S N"],
    mask: Bool[Tensor, "*batch S N"],
) -> Float[Tensor, "*batch S N 49"]:
    r"""Features of cluster centres and clusters.

    Channels: one-hot class (23), whether there is a deletion, :math:`\tfrac{2}{\pi}
    \arctan(d/3)` of the deletions d, the profile of the cluster (23), the same function of the mean
    deletions of the cluster. A cluster holds its centre.

    Parameters
    ----------
    counts, deletion_sums : those of the rows of each cluster without its centre
    """
    classes = F.one_hot(msa.long(), MSA_CLASSES).float()
    others = counts.float()
    members = 1 + 1e-6 + others.sum(-1)
    profile = (F.pad(others, (0, 1)) + classes) / members[..., None]
    mean = (deletion_sums.float() + deletions.float()) / members
    parts = [
        classes,
        (deletions > 0).float()[..., None],
        deletion_value(deletions.float())[..., None],
        profile,
        deletion_value(mean)[..., None],
    ]
    return torch.cat(parts, dim=-1) * mask[..., None]


def deletion_value(deletions: Float[Tensor, "*cells"]) -> Float[Tensor, "*cells"]:
    """Map numbers of deletions to 0 ... 1."""
    return torch.atan(deletions / 3.0) * (2.0 / pi)


def _rows(sample: Mapping[str, Tensor], cycle: int) -> dict[str, Tensor]:
    of_cycle = {
        name: sample[name].select(-3, cycle)
        for name in ("msa", "deletions", "cluster_deletions", "extra_msa", "extra_deletions")
    }
    mask = sample["msa_mask"]
    extra_deletions = of_cycle["extra_deletions"].float()
    return {
        "msa_feat": msa_features(
            of_cycle["msa"],
            of_cycle["deletions"],
            sample["cluster_counts"].select(-4, cycle),
            of_cycle["cluster_deletions"],
            mask,
        ),
        "msa_mask": mask.float(),
        "extra_msa": of_cycle["extra_msa"].long(),
        "extra_has_deletion": extra_deletions.clamp(max=1),
        "extra_deletion_value": deletion_value(extra_deletions),
        "extra_msa_mask": sample["extra_msa_mask"].float(),
    }


def _templates(sample: Mapping[str, Tensor]) -> dict[str, Tensor]:
    aatype = sample["template_aatype"].long()
    # A sample has the first four of the 37 slots: N, CA, C and CB.
    positions = F.pad(sample["template_positions"], (0, 0, 0, 33))
    atoms = F.pad(sample["template_atom_mask"].float(), (0, 33))
    beta, beta_known = pseudo_beta(positions, atoms, aatype)
    torsions = sample["template_torsions"]
    return {
        "template_aatype": aatype,
        "template_all_atom_positions": positions,
        "template_all_atom_mask": atoms,
        "template_pseudo_beta": beta,
        "template_pseudo_beta_mask": beta_known,
        "template_torsion_angles_sin_cos": torsions,
        "template_alt_torsion_angles_sin_cos": exchanged(torsions, aatype),
        "template_torsion_angles_mask": sample["template_torsions_mask"].float(),
        "template_mask": sample["template_mask"].float(),
    }
