"""The batch of AlphaFold2: a crop of a chain with rows for every cycle, templates and targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bevatron.data.padding.shape import Axis, PaddingRule, Ragged, RaggedFields
from bevatron.data.proteins.batch import ProteinBatch, one_sample, rule
from bevatron.typing import Arrays, IntArray

_RESIDUE_FIELDS = ("aatype", "residue_index", "seq_mask", "all_atom_positions", "all_atom_mask")
_CENTRE_FIELDS = (
    "msa", "true_msa", "bert_mask", "deletions", "cluster_counts", "cluster_deletions",
)  # fmt: skip
_EXTRA_FIELDS = ("extra_msa", "extra_deletions")
_TEMPLATE_FIELDS = (
    "template_aatype", "template_positions", "template_atom_mask", "template_torsions",
    "template_torsions_mask",
)  # fmt: skip
_WHOLE_FIELDS = ("seed", "weight", "seq_length", "resolution", "use_clamped_fape", "template_mask")


@dataclass(frozen=True)
class ChainBatch(ProteinBatch):
    """A crop of N residues, C cycles of S cluster centres and E extra rows, T templates.

    What the model and its losses take is computed from it by `bevatron.models.alphafold2.inputs`.

    Attributes
    ----------
    aatype : [N] int8, residue type; residue_index : [N] int32; seq_mask : [N] bool
    all_atom_positions : [N, 37, 3] Å; all_atom_mask : [N, 37] bool, whether a position is known
    seq_length : [] int32, residues that are not padding
    resolution : [] Å, NaN if unknown
    use_clamped_fape : [], 1 where errors are clamped, else 0
    msa, true_msa : [C, S, N] int8, centres with and without masked positions
    bert_mask : [C, S, N] bool, positions to predict
    deletions : [C, S, N] uint8, of the centres
    cluster_counts : [C, S, N, 22] int16, classes of the rows of a cluster without its centre
    cluster_deletions : [C, S, N] int32, sums over these rows
    msa_mask : [S, N] bool
    extra_msa : [C, E, N] int8; extra_deletions : [C, E, N] uint8; extra_msa_mask : [E, N] bool
    template_aatype : [T, N] int8, 21 where nothing is aligned
    template_positions : [T, N, 4, 3] Å, N, CA, C, CB; template_atom_mask : [T, N, 4] bool
    template_torsions : [T, N, 7, 2]; template_torsions_mask : [T, N, 7] bool
    template_mask : [T] bool
    """

    aatype: Tensor
    residue_index: Tensor
    seq_mask: Tensor
    all_atom_positions: Tensor
    all_atom_mask: Tensor
    seq_length: Tensor
    resolution: Tensor
    use_clamped_fape: Tensor
    msa: Tensor
    true_msa: Tensor
    bert_mask: Tensor
    deletions: Tensor
    cluster_counts: Tensor
    cluster_deletions: Tensor
    msa_mask: Tensor
    extra_msa: Tensor
    extra_deletions: Tensor
    extra_msa_mask: Tensor
    template_aatype: Tensor
    template_positions: Tensor
    template_atom_mask: Tensor
    template_torsions: Tensor
    template_torsions_mask: Tensor
    template_mask: Tensor

    padding: ClassVar[PaddingRule] = rule(
        Axis("tokens", 8, fine_from=1024), Axis("rows", 4, fine_from=112), Axis("extra_rows", 8)
    )
    ragged: ClassVar[RaggedFields] = {
        **{name: Ragged("tokens") for name in _RESIDUE_FIELDS},
        **{name: (Ragged("rows", 1), Ragged("tokens", 2)) for name in _CENTRE_FIELDS},
        **{name: (Ragged("extra_rows", 1), Ragged("tokens", 2)) for name in _EXTRA_FIELDS},
        "msa_mask": (Ragged("rows"), Ragged("tokens", 1)),
        "extra_msa_mask": (Ragged("extra_rows"), Ragged("tokens", 1)),
        **{name: (Ragged("tokens", 1),) for name in _TEMPLATE_FIELDS},
        **dict.fromkeys(_WHOLE_FIELDS, ()),
    }


def collate_chain(
    samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]
) -> ChainBatch:
    """Make the batch of one sample of `chain_samples.sample_chain`."""
    tensors, positions = one_sample(samples, indices, weights)
    return ChainBatch(**tensors, indices=positions)
