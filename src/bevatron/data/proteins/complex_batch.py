"""The batch of AlphaFold3: a crop of a complex with its alignment rows, templates and targets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from bevatron.data.padding.shape import Axis, BatchShape, PaddingRule, Ragged, RaggedFields, Rows
from bevatron.data.proteins.batch import ProteinBatch, one_sample, rule
from bevatron.data.readers.proteins.alphabet import GAP
from bevatron.typing import Arrays, IntArray

NO_PAIR = -1
"""Value of padding rows of pairs."""

_TOKEN_FIELDS = (
    "restype", "residue_index", "token_index", "asym_id", "entity_id", "sym_id", "molecule_type",
    "token_mask", "profile", "deletion_mean", "centre_atom", "representative_atom", "frame_atoms",
    "has_frame", "molecule",
)  # fmt: skip
_ATOM_FIELDS = (
    "ref_pos", "ref_charge", "ref_mask", "ref_element", "ref_atom_name_chars", "ref_space_uid",
    "atom_to_token", "atom_mask", "position", "resolved",
)  # fmt: skip
_TEMPLATE_FIELDS = (
    "template_restype", "template_pseudo_beta", "template_pseudo_beta_mask", "template_backbone",
    "template_backbone_mask",
)  # fmt: skip
_ALIGNMENT_FIELDS = ("msa", "deletion", "msa_mask")
_PAIR_FIELDS = ("token_bonds", "polymer_ligand_bonds")
_MOLECULE_FIELDS = ("molecule_entity", "molecule_copies", "molecule_copy")
_COPY_FIELDS = ("copy_position", "copy_resolved")


@dataclass(frozen=True)
class ComplexBatch(ProteinBatch):
    """A crop of N tokens and A atoms, S rows of an alignment, T templates, M molecules.

    Names are those of AlphaFold3's supplement, table 5. A molecule is a chain, or several that are
    bonded to each other; molecules of one entity are copies of each other.

    Attributes
    ----------
    restype : [N] int64, class of `bevatron.data.readers.proteins.alphabet`
    residue_index, token_index, asym_id, entity_id, sym_id : [N] int64
    molecule_type : [N] int64, 0 protein, 1 RNA, 2 DNA, 3 ligand
    token_mask : [N] bool
    ref_pos : [A, 3] Å, reference pose of each residue or ligand in a place of its own
    ref_charge : [A] formal charge
    ref_mask : [A] bool, whether there is a reference position
    ref_element : [A] int64, atomic number less 1, 127 if unknown
    ref_atom_name_chars : [A, 4] int64, characters of the atom's name less 32
    ref_space_uid : [A] int64, which pose
    atom_to_token : [A] int64, ascending
    atom_mask : [A] bool
    profile : [N, 32], share of each class in the whole alignment
    deletion_mean : [N], mean number of deletions
    msa : [S, N] int8; deletion : [S, N] uint8; msa_mask : [S, N] bool
    template_restype : [T, N] int8; template_pseudo_beta : [T, N, 3] Å
    template_backbone : [T, N, 3, 3] Å, atoms N, CA, C
    template_pseudo_beta_mask, template_backbone_mask : [T, N] bool
    token_bonds : [E, 2] int64, bonded tokens; `NO_PAIR` in padding
    position : [A, 3] Å, zero where not resolved; resolved : [A] bool
    centre_atom, representative_atom : [N] int64; frame_atoms : [N, 3] int64; has_frame : [N] bool
    polymer_ligand_bonds : [P, 2] int64, atoms; `NO_PAIR` in padding
    resolution : [] Å, NaN if unknown
    molecule : [N] int64, of each token
    molecule_entity : [M] int64, equal for copies of each other
    molecule_copies : [M] int64, copies in the whole assembly; 0 in padding
    molecule_copy : [M] int64, which of them the molecule is
    copy_position : [K, A, 3] Å, of each atom the position in copy k of its entity
    copy_resolved : [K, A] bool
    permutation_ptr : [U + 1] int64, of each residue where its entries in permutation_atoms begin
    permutation_atoms : int64, of a residue of n atoms [permutations, n]: places in the residue that
        its atoms may be taken from, row after row, the identity first; none if there is no other
    """

    restype: Tensor
    residue_index: Tensor
    token_index: Tensor
    asym_id: Tensor
    entity_id: Tensor
    sym_id: Tensor
    molecule_type: Tensor
    token_mask: Tensor
    ref_pos: Tensor
    ref_charge: Tensor
    ref_mask: Tensor
    ref_element: Tensor
    ref_atom_name_chars: Tensor
    ref_space_uid: Tensor
    atom_to_token: Tensor
    atom_mask: Tensor
    profile: Tensor
    deletion_mean: Tensor
    msa: Tensor
    deletion: Tensor
    msa_mask: Tensor
    template_restype: Tensor
    template_pseudo_beta: Tensor
    template_pseudo_beta_mask: Tensor
    template_backbone: Tensor
    template_backbone_mask: Tensor
    token_bonds: Tensor
    position: Tensor
    resolved: Tensor
    centre_atom: Tensor
    representative_atom: Tensor
    frame_atoms: Tensor
    has_frame: Tensor
    polymer_ligand_bonds: Tensor
    resolution: Tensor
    molecule: Tensor
    molecule_entity: Tensor
    molecule_copies: Tensor
    molecule_copy: Tensor
    copy_position: Tensor
    copy_resolved: Tensor
    permutation_ptr: Tensor
    permutation_atoms: Tensor

    padding: ClassVar[PaddingRule] = rule(
        Axis("tokens", 32, fine_from=1024), Axis("atoms", 256, fine_from=8192), Axis("rows", 64),
        Axis("templates", 1, headroom=0.0), Axis("token_bonds", 512, counts_work=False),
        Axis("polymer_ligand_bonds", 64, counts_work=False),
        Axis("molecules", 32, counts_work=False), Axis("copies", 16, counts_work=False),
        Axis("residues", 1024, counts_work=False),
        Axis("permutation_atoms", 8192, counts_work=False),
    )  # fmt: skip
    ragged: ClassVar[RaggedFields] = {
        **{name: Ragged("tokens") for name in _TOKEN_FIELDS},
        **{name: Ragged("atoms") for name in _ATOM_FIELDS},
        **{name: (Ragged("rows"), Ragged("tokens", 1)) for name in _ALIGNMENT_FIELDS},
        **{name: (Ragged("templates"), Ragged("tokens", 1)) for name in _TEMPLATE_FIELDS},
        **{name: Ragged(name) for name in (*_PAIR_FIELDS, "permutation_atoms")},
        **{name: Ragged("molecules") for name in _MOLECULE_FIELDS},
        **{name: (Ragged("copies"), Ragged("atoms", 1)) for name in _COPY_FIELDS},
        "permutation_ptr": Ragged("residues", extra=1),
        **dict.fromkeys(("seed", "weight", "resolution"), ()),
    }

    def padding_rows(self, shape: BatchShape) -> Mapping[str, Rows]:
        """Return what follows the real rows of each field; 0 and False if left out.

        Padding atoms belong to the last token, real or padding, so that atoms stay sorted.
        """
        return {
            "atom_to_token": shape.tokens - 1,
            "template_restype": GAP,
            "permutation_ptr": self.permutation_atoms.shape[0],
            **dict.fromkeys(_PAIR_FIELDS, NO_PAIR),
        }


def collate_complex(
    samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]
) -> ComplexBatch:
    """Make the batch of one sample."""
    tensors, positions = one_sample(samples, indices, weights)
    return ComplexBatch(**tensors, indices=positions)
