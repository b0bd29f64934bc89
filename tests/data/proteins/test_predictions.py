"""Entries of prediction inputs: the features of a structure, without its coordinates."""

import json
import pickle
import re

import numpy as np
import pytest

from bevatron.data.proteins.featurize import ENTRY_FIELDS, describe, featurize
from bevatron.data.proteins.poses import make_pools
from bevatron.data.proteins.predictions import featurize_inputs
from bevatron.data.proteins.tokens import DNA, LIGAND, PROTEIN, RNA
from bevatron.data.readers.proteins.inputs import (
    AtomName,
    Complex,
    Entity,
    Modification,
    read_inputs,
)
from bevatron.data.readers.proteins.structures import read_structure
from bevatron.errors import DataError

rdkit = pytest.importorskip("rdkit")
GEOMETRY = {"position", "resolved", "resolution", "description"}


def names(entry):
    return ["".join(chr(c + 32) for c in row).strip() for row in entry["ref_atom_name_chars"]]


def atom_names_of(entry, token):
    first = int(entry["num_atoms"][:token].sum())
    return names(entry)[first : first + int(entry["num_atoms"][token])]


@pytest.mark.shared
def test_the_sequences_of_a_structure_give_its_features(shared, dictionary):
    structure = read_structure(shared / "data/complexes/mmcif/721p.cif.gz")
    expected = featurize(structure, dictionary)
    words = describe(expected)["chains"]
    sequence = words[0]["sequence"]
    given = Complex(
        "ras",
        (
            Entity("protein", ("A", "B"), sequence=sequence),
            Entity("ligand", ("C",), codes=("MG",)),
            Entity("ligand", ("D",), codes=("GNP",)),
            Entity("ligand", ("E",), codes=("MG",)),
            Entity("ligand", ("F",), codes=("GNP",)),
        ),
    )
    found, _ = featurize_inputs(given, dictionary)
    for key in set(expected) - GEOMETRY - {"entity_id", "sym_id", "molecule_entity"}:
        np.testing.assert_array_equal(found[key], expected[key], key)
    assert not found["resolved"].any()
    assert not found["position"].any()
    for field in ENTRY_FIELDS:
        field.check(found[field.name])


def test_a_file_of_inputs_becomes_tokens_of_every_kind(dictionary, tmp_path):
    path = tmp_path / "job.json"
    job = {
        "dialect": "alphafold3",
        "version": 1,
        "name": "mixed",
        "modelSeeds": [1],
        "sequences": [
            {
                "protein": {
                    "id": ["A", "B"],
                    "sequence": "MSK",
                    "modifications": [{"ptmType": "SEP", "ptmPosition": 2}],
                }
            },
            {"rna": {"id": "R", "sequence": "AU"}},
            {"dna": {"id": "D", "sequence": "AN"}},
            {"ligand": {"id": "L", "smiles": "CC(=O)O"}},
            {"ligand": {"id": "G", "ccdCodes": ["NAG", "NAG"]}},
        ],
        "bondedAtomPairs": [[["G", 1, "O4"], ["G", 2, "C1"]]],
    }
    path.write_text(json.dumps(job))
    (given,) = read_inputs(path)
    entry, known = featurize_inputs(given, dictionary)
    serine = 10  # heavy atoms of phosphoserine in a chain
    protein = [PROTEIN] * (2 + serine)
    kinds = [*protein, *protein, RNA, RNA, DNA, DNA, *[LIGAND] * (4 + 15 + 14)]
    assert entry["molecule_type"].tolist() == kinds
    assert entry["restype"][: 2 + serine].tolist() == [12, *[15] * serine, 11]
    assert entry["restype"][-37:].tolist() == [21, 24, 26, 30, *[20] * 33]
    assert entry["column"][: 2 + serine].tolist() == [0, *[1] * serine, 2]
    assert set(entry["column"][-33:]) == {-1}
    assert atom_names_of(entry, 0) == ["N", "CA", "C", "O", "CB", "CG", "SD", "CE"]
    assert "OXT" in atom_names_of(entry, 1 + serine)
    # The bond takes the O1 of the second sugar away, not of the first, which keeps its end.
    counts = np.bincount(entry["ref_space_uid"])
    assert counts[-2:].tolist() == [15, 14]
    assert [chain["label"] for chain in describe(entry)["chains"]] == list("ABRDLG")
    pools = make_pools((known[code] for code in describe(entry)["components"]), 2)
    fields = entry["component"], entry["ref_space_uid"], entry["pose_atom"]
    _, mask = pools.draw(*fields, np.random.default_rng(0))
    assert mask.all()


def test_ligands_of_smiles_can_be_bonded_by_name_or_index(dictionary):
    entities = (Entity("protein", ("A",), sequence="GCG"), Entity("ligand", ("L",), smiles="CCO"))
    for atom in ("C1", "0"):
        bond = (AtomName("A", 2, "SG"), AtomName("L", 1, atom))
        entry, _ = featurize_inputs(Complex("c", entities, (bond,)), dictionary)
        ((first, second),) = entry["polymer_ligand_bonds"].tolist()
        assert (names(entry)[first], names(entry)[second]) == ("SG", "C1")
        assert [1, 3] in entry["token_bonds"].tolist()
        assert [3, 1] in entry["token_bonds"].tolist()
        assert entry["molecule_id"].tolist() == [1, 1]


def test_a_cyclic_peptide_has_no_free_end(dictionary):
    ring = Entity("protein", ("A",), sequence="GGGG", cyclic=True)
    chain = Entity("protein", ("A",), sequence="GGGG")
    closed, open_ = (featurize_inputs(Complex("c", (e,)), dictionary)[0] for e in (ring, chain))
    assert "OXT" in names(open_)
    assert "OXT" not in names(closed)
    assert len(closed["bonds"]) == len(open_["bonds"])
    assert (names(closed)[0], names(closed)[14]) == ("N", "C")
    assert [0, 14] in closed["bonds"].tolist()


def test_own_components_come_first(dictionary):
    text = """data_ABC
_chem_comp.id ABC
_chem_comp.name mine
_chem_comp.type non-polymer
loop_ _chem_comp_atom.comp_id _chem_comp_atom.atom_id _chem_comp_atom.type_symbol
_chem_comp_atom.charge _chem_comp_atom.pdbx_model_Cartn_x_ideal
_chem_comp_atom.pdbx_model_Cartn_y_ideal _chem_comp_atom.pdbx_model_Cartn_z_ideal
ABC C1 C 0 0 0 0
ABC O1 O -1 1.2 0 0
loop_ _chem_comp_bond.comp_id _chem_comp_bond.atom_id_1 _chem_comp_bond.atom_id_2
_chem_comp_bond.value_order
ABC C1 O1 DOUB
"""
    given = Complex("c", (Entity("ligand", ("L",), codes=("ABC",)),), components=text)
    entry, known = featurize_inputs(given, dictionary)
    assert names(entry) == ["C1", "O1"]
    assert entry["ref_charge"].tolist() == [0, -1]
    assert known["ABC"].name == "mine"
    assert known["ALA"].code == "ALA"


def test_a_ligand_of_a_file_has_its_atoms(dictionary, tmp_path):
    from rdkit import Chem
    from rdkit.Chem import rdDistGeom

    molecule = Chem.AddHs(Chem.MolFromSmiles("C[C@H](N)O"))
    rdDistGeom.EmbedMolecule(molecule, randomSeed=1)
    Chem.MolToMolFile(molecule, str(tmp_path / "one.sdf"))
    given = Complex("c", (Entity("ligand", ("L",), file=tmp_path / "one.sdf"),))
    entry, _ = featurize_inputs(given, dictionary)
    assert names(entry) == ["C1", "C2", "N1", "O1"]
    (tmp_path / "one.xyz").write_text("")
    given = Complex("c", (Entity("ligand", ("L",), file=tmp_path / "one.xyz"),))
    with pytest.raises(DataError, match=r"one\.xyz: is not in a known ligand format"):
        featurize_inputs(given, dictionary)


@pytest.mark.parametrize(
    ("entity", "bonds", "message"),
    [
        (Entity("ligand", ("L",), codes=("QQQ",)), (), "no component 'QQQ'"),
        (Entity("ligand", ("L",), smiles="C1"), (), "'C1' is not valid SMILES"),
        (
            Entity("protein", ("L",), sequence="GG", modifications=(Modification(2, "ZZZ"),)),
            (),
            "no component 'ZZZ'",
        ),
        (
            Entity("protein", ("L",), sequence="GG"),
            ((AtomName("L", 1, "SG"), AtomName("L", 2, "N")),),
            (
                "c: a bond names the atom 'SG' of residue 1 in chain L, which is GLY with the "
                "atoms N, CA, C, O"
            ),
        ),
    ],
)
def test_what_is_not_there_is_named(dictionary, entity, bonds, message):
    with pytest.raises(DataError, match=message):
        featurize_inputs(Complex("c", (entity,), bonds), dictionary)


def test_a_ligand_that_cannot_be_is_named_by_file_and_chain(dictionary, tmp_path):
    path = tmp_path / "in.fasta"
    for text, what in (
        (">B|smiles\nC1CC(\n", "'C1CC("),
        (">B|ccd\nQQQ\n", "the dictionary has no"),
    ):
        path.write_text(f">A|protein\nMKV\n{text}")
        with pytest.raises(DataError, match=re.escape(f"{path}, chain B: {what}")):
            featurize_inputs(read_inputs(path)[0], dictionary)


def test_the_dictionary_of_an_input_can_be_sent_to_a_process(dictionary):
    _, known = featurize_inputs(Complex("c", (Entity("protein", ("A",), "GG"),)), dictionary)
    assert pickle.loads(pickle.dumps(known))["GLY"].code == "GLY"
