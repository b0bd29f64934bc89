"""Chains of structures as AlphaFold2's raw features, and what is computed from them."""

import numpy as np
import pytest
import torch

from bevatron.data.proteins.chain_geometry import reference_geometry, residue_tables
from bevatron.data.proteins.chains import CHAIN_FIELDS, chain_entry
from bevatron.data.readers.proteins import read_structure
from bevatron.data.readers.proteins.structures import parse_structure
from bevatron.errors import DataError

CHAINS = ["1ckb_A", "1d66_A"]


def entry(shared, chain):
    code, author = chain.split("_")
    structure = read_structure(shared / f"data/proteins/mmcif/{code}.cif.gz")
    proteins = structure.chains.kind == "protein"
    return chain_entry(
        structure, int(np.flatnonzero(proteins & (structure.chains.author == author))[0])
    )


@pytest.mark.parametrize("chain", CHAINS)
def test_a_chain_has_the_residues_and_atoms_of_the_reference(shared, chain):
    stored = np.load(shared / f"golden/alphafold2/features_raw_{chain}.npz")
    found = entry(shared, chain)
    for field in CHAIN_FIELDS:
        field.check(found[field.name])
    assert np.array_equal(found["aatype"], stored["aatype"].argmax(-1))
    assert np.array_equal(found["residue_index"], stored["residue_index"])
    assert np.array_equal(found["all_atom_mask"], stored["all_atom_mask"])
    assert np.array_equal(found["all_atom_positions"], stored["all_atom_positions"])
    assert found["resolution"] == stored["resolution"][0]


def test_the_places_of_a_chain_without_a_sequence_leave_room_for_missing_residues():
    row = "ATOM  {0:5d}  CA  GLY A{0:>4}    {1:8.3f}   0.000   0.000  1.00 12.50           C\n"
    text = "".join(row.format(number, 3.8 * number) for number in (4, 5, 9))
    found = chain_entry(parse_structure(text.encode(), "a.pdb"), 0)
    assert found["residue_index"].tolist() == [0, 1, 5]


@pytest.mark.parametrize("chain", CHAINS)
def test_the_geometry_of_a_chain_is_that_of_the_reference(shared, chain):
    stored = np.load(shared / f"golden/alphafold2/features_nonensembled_{chain}.npz")
    raw = entry(shared, chain)
    aatype = torch.from_numpy(raw["aatype"]).long()
    found = reference_geometry(
        torch.from_numpy(raw["all_atom_positions"]),
        torch.from_numpy(raw["all_atom_mask"]).float(),
        aatype,
    )
    mask = {"rigidgroups_gt_frames": "rigidgroups_gt_exists"}
    mask["rigidgroups_alt_gt_frames"] = "rigidgroups_gt_exists"
    mask |= {"backbone_rigid_tensor": "backbone_rigid_mask", "chi_angles_sin_cos": "chi_mask"}
    for name, value in {**found, **residue_tables(aatype)}.items():
        expected = torch.from_numpy(stored[name])
        known = torch.from_numpy(stored[mask[name]]) if name in mask else torch.ones(())
        known = known.reshape((*known.shape, *(1,) * (expected.dim() - known.dim())))
        torch.testing.assert_close(
            value * known, expected * known, atol=2e-5, rtol=0, check_dtype=False
        )


def test_a_chain_that_is_not_a_protein_is_refused(shared):
    structure = read_structure(shared / "data/proteins/mmcif/1d66.cif.gz")
    structure.chains.kind[0] = "rna"
    with pytest.raises(DataError, match="is rna; expected protein"):
        chain_entry(structure, 0)


def test_selenium_is_sulphur_and_arginine_is_named_by_distance(shared):
    structure = read_structure(shared / "data/proteins/mmcif/1ckb.cif.gz")
    chain = int(np.flatnonzero(structure.chains.kind == "protein")[0])
    residue = structure.atoms.residue
    arginine = int(np.flatnonzero(structure.residues.component == "ARG")[0])
    of = {str(n): i for i, n in enumerate(structure.atoms.name) if residue[i] == arginine}
    before = chain_entry(structure, chain)["all_atom_positions"]
    structure.atoms.position[[of["NH1"], of["NH2"]]] = structure.atoms.position[
        [of["NH2"], of["NH1"]]
    ]
    assert np.array_equal(chain_entry(structure, chain)["all_atom_positions"], before)
    structure.atoms.name[of["CG"]] = "SE"
    assert not chain_entry(structure, chain)["all_atom_mask"][arginine, [5, 18]].any()
    structure.residues.component[arginine] = "MSE"
    assert chain_entry(structure, chain)["all_atom_mask"][arginine, 18]
