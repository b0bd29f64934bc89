"""Chains that AlphaFold3 is not trained on are left out and counted."""

import contextlib
import dataclasses

import numpy as np
import pytest

from bevatron.data.proteins.filters import check_structure, filter_chains
from bevatron.data.readers.proteins import read_structure
from bevatron.errors import DataError

ATOMS = "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id "
ATOMS += "label_entity_id label_seq_id Cartn_x Cartn_y Cartn_z auth_seq_id auth_asym_id"


def protein(start, residues=("GLY",) * 5, step=3.8, offset=0.0):
    """CA atoms in a row, and whether they are a polymer."""
    place = [(start + step * i, offset, 0.0) for i in range(len(residues))]
    return True, [(code, "C", "CA", at) for code, at in zip(residues, place, strict=True)]


def ligand(code, at, element="S"):
    return False, [(code, element, element, at)]


@pytest.fixture
def structure(tmp_path):
    """Function from chains to a structure."""

    def made(*chains, method="X-RAY DIFFRACTION", links=()):
        lines = [f"data_MADE\n_exptl.entry_id MADE\n_exptl.method '{method}'", "loop_"]
        lines += ["_entity.id", "_entity.type"]
        lines += [f"{i} {'polymer' if p else 'non-polymer'}" for i, (p, _) in enumerate(chains, 1)]
        polymers = [(i, rows) for i, (p, rows) in enumerate(chains, 1) if p]
        lines += ["loop_", "_entity_poly.entity_id", "_entity_poly.type"]
        lines += [f"{i} 'polypeptide(L)'" for i, _ in polymers]
        lines += ["loop_"] + [f"_entity_poly_seq.{tag}" for tag in ("entity_id", "num", "mon_id")]
        lines += [f"{i} {n} {row[0]}" for i, rows in polymers for n, row in enumerate(rows, 1)]
        if links:
            tags = "id conn_type_id ptnr1_label_asym_id ptnr1_label_comp_id ptnr1_label_seq_id "
            tags += "ptnr1_label_atom_id ptnr2_label_asym_id ptnr2_label_comp_id "
            tags += "ptnr2_label_seq_id ptnr2_label_atom_id ptnr2_auth_seq_id"
            lines += ["loop_"] + [f"_struct_conn.{tag}" for tag in tags.split()] + list(links)
        lines += ["loop_"] + [f"_atom_site.{tag}" for tag in ATOMS.split()]
        for i, (polymer, rows) in enumerate(chains, 1):
            for n, (code, element, atom, at) in enumerate(rows, 1):
                number, x = (n if polymer else "."), " ".join(map(str, at))
                name = "ABCDEFG"[i - 1]
                lines.append(
                    f"ATOM {n} {element} {atom} . {code} {name} {i} {number} {x} {n} {name}"
                )
        path = tmp_path / "made.cif"
        path.write_text("\n".join(lines) + "\n")
        return read_structure(path)

    return made


def removed(structure):
    rest, counts = filter_chains(structure)
    assert len(structure.chains.label) - len(rest.chains.label) == counts.sum()
    return sorted(set(structure.chains.label) - set(rest.chains.label)), counts.tolist()


def test_crystallization_aids_go_where_a_crystal_was_grown(structure):
    chains = protein(0), ligand("SO4", (0, 20, 0)), ligand("HEM", (0, 30, 0))
    assert removed(structure(*chains)) == (["B"], [1, 0, 0, 0, 0])
    assert removed(structure(*chains, method="ELECTRON MICROSCOPY")) == ([], [0, 0, 0, 0, 0])


def test_polymers_of_unknown_residues_alone_go(structure):
    chains = protein(0, ("UNK",) * 4), protein(0, ("UNK", *["GLY"] * 3), offset=40)
    assert removed(structure(*chains)) == (["A"], [0, 1, 0, 0, 0])


def test_polymers_of_fewer_than_four_observed_residues_go(structure):
    chains = (
        protein(0, ("GLY",) * 3),
        protein(0, ("GLY",) * 4, offset=40),
        ligand("HEM", (0, 20, 0)),
    )
    assert removed(structure(*chains)) == (["A"], [0, 0, 1, 0, 0])


def test_structures_that_alphafold3_is_not_trained_on_are_refused_with_a_reason(structure):
    fine = structure(protein(0), protein(0, offset=40))
    for resolution in (None, 9.0):
        check_structure(dataclasses.replace(fine, resolution=resolution))
    with pytest.raises(DataError, match=r"resolution of 9\.5 Å, above 9 Å; --keep-all"):
        check_structure(dataclasses.replace(fine, resolution=9.5))
    for number, refused in ((300, False), (301, True)):
        chains = dataclasses.replace(fine.chains, kind=np.full(number, "dna"))
        with (
            pytest.raises(DataError, match="301 polymers, above 300; --keep-all")
            if refused
            else (contextlib.nullcontext())
        ):
            check_structure(dataclasses.replace(fine, chains=chains))


def test_a_protein_whose_neighbours_are_far_apart_goes(structure):
    chains = protein(0, step=10.5), protein(0, step=9.5, offset=40)
    assert removed(structure(*chains)) == (["A"], [0, 0, 0, 1, 0])


def test_of_clashing_chains_the_one_with_the_larger_share_goes(structure):
    long, short = protein(0, ("GLY",) * 10), protein(0, ("ALA",) * 4, offset=1.0)
    assert removed(structure(long, short)) == (["B"], [0, 0, 0, 0, 1])
    assert removed(structure(short, long)) == (["A"], [0, 0, 0, 0, 1])
    # Three of ten atoms are no clash.
    assert removed(structure(long, protein(3.8 * 7, ("ALA",) * 10, offset=1.0)))[1] == [0] * 5
    apart = protein(0, ("ALA",) * 4, offset=1.8)
    assert removed(structure(long, apart)) == ([], [0, 0, 0, 0, 0])
    # Equal shares and sizes: the later one.
    assert removed(structure(short, protein(0, ("ALA",) * 4))) == (["B"], [0, 0, 0, 0, 1])


def test_chains_that_a_bond_joins_do_not_clash(structure):
    chains = protein(0), ligand("HEM", (0, 1.2, 0), "C")
    assert removed(structure(*chains))[0] == ["B"]
    bond = "1 covale A GLY 1 CA B HEM . C 1"
    assert removed(structure(*chains, links=[bond]))[0] == []


def test_hydrogens_do_not_clash(structure):
    assert removed(structure(protein(0), ligand("HEM", (0, 1.2, 0), "H")))[0] == []


def test_nothing_to_leave_out_is_the_structure_itself(structure):
    whole = structure(protein(0), protein(0, offset=30))
    assert filter_chains(whole)[0] is whole
    assert np.array_equal(filter_chains(whole)[1], [0, 0, 0, 0, 0])
