"""The chemical component dictionary as an index, and the atoms that a structure lacks."""

import gzip
import pickle
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.readers.proteins import components
from bevatron.data.readers.proteins.components import Components, expected_atoms, open_components
from bevatron.data.readers.proteins.structures import parse_structure, read_structure
from bevatron.errors import DataError

ALANINE = """data_ALA
_chem_comp.id ALA
_chem_comp.name ALANINE
_chem_comp.type 'L-peptide linking'
_chem_comp.one_letter_code A
_chem_comp.mon_nstd_parent_comp_id ?
_chem_comp.pdbx_release_status REL
loop_ _chem_comp_atom.comp_id _chem_comp_atom.atom_id _chem_comp_atom.type_symbol
_chem_comp_atom.charge _chem_comp_atom.pdbx_leaving_atom_flag
_chem_comp_atom.pdbx_aromatic_flag _chem_comp_atom.pdbx_model_Cartn_x_ideal
_chem_comp_atom.pdbx_model_Cartn_y_ideal _chem_comp_atom.pdbx_model_Cartn_z_ideal
ALA N N 0 N N 1 2 3
ALA CA C 0 N N ? ? ?
ALA OXT O -1 Y N 4 5 6
ALA HA H 0 N Y 7 8 9
loop_ _chem_comp_bond.comp_id _chem_comp_bond.atom_id_1 _chem_comp_bond.atom_id_2
_chem_comp_bond.value_order _chem_comp_bond.pdbx_aromatic_flag
ALA CA N DOUB N
ALA CA HA SING Y
ALA N OXT DELO N
"""
MAGNESIUM = """data_MG
_chem_comp.id MG
_chem_comp.name 'MAGNESIUM ION'
_chem_comp.type non-polymer
_chem_comp.mon_nstd_parent_comp_id ALA,GLY
_chem_comp_atom.comp_id MG
_chem_comp_atom.atom_id MG
_chem_comp_atom.type_symbol MG
_chem_comp_atom.charge 2
"""


@pytest.fixture
def source(tmp_path):
    file = tmp_path / "components.cif.gz"
    file.write_bytes(gzip.compress((ALANINE + MAGNESIUM).encode()))
    return file


def test_a_component_has_its_atoms_bonds_and_coordinates(source):
    components = open_components(source)
    assert (list(components), "ALA" in components, "XXX" in components) == (
        ["ALA", "MG"],
        True,
        False,
    )
    alanine = components["ALA"]
    assert (alanine.name, alanine.type, alanine.letter) == ("ALANINE", "L-PEPTIDE LINKING", "A")
    assert alanine.atoms.tolist() == ["N", "CA", "OXT", "HA"]
    assert alanine.elements.tolist() == [7, 6, 8, 1]
    assert alanine.charges.tolist() == [0, 0, -1, 0]
    assert alanine.leaving.tolist() == [False, False, True, False]
    assert alanine.aromatic.tolist() == [False, False, False, True]
    assert alanine.ideal[2].tolist() == [4, 5, 6]
    assert np.isnan(alanine.ideal[1]).all()
    assert np.isnan(alanine.model).all()
    assert alanine.bonds.tolist() == [[1, 0], [1, 3], [0, 2]]
    assert alanine.orders.tolist() == [2, 1, 0]
    assert alanine.aromatic_bonds.tolist() == [False, True, False]
    magnesium = components["MG"]
    assert (magnesium.charges.tolist(), magnesium.bonds.shape) == ([2], (0, 2))
    assert magnesium.parent == ""  # it lists two


def test_the_index_is_kept_until_the_dictionary_changes(source):
    place = open_components(source).path
    made = place.stat().st_mtime_ns
    assert open_components(source).path.stat().st_mtime_ns == made
    source.write_bytes(gzip.compress(MAGNESIUM.encode()))
    assert list(open_components(source)) == ["MG"]


def test_that_a_large_dictionary_is_indexed_is_said_once(source, monkeypatch, capsys):
    open_components(source)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(components, "LARGE", source.stat().st_size - 1)
    place = open_components(source).path
    place.unlink()
    open_components(source)
    said = f"{source}: its components are indexed, once, into {place}\n"
    assert capsys.readouterr().err == said
    open_components(source)
    assert capsys.readouterr().err == ""


def test_a_damaged_index_is_made_anew(source):
    place = open_components(source).path
    place.write_bytes(place.read_bytes()[:300])
    with pytest.raises(DataError, match="remove it to rebuild it"):
        Components(place)
    assert list(open_components(source)) == ["ALA", "MG"]


def test_the_index_of_a_dictionary_in_a_read_only_folder_is_the_users_own(
    source, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("os.access", lambda *_: False)
    first = open_components(source)
    assert first.path.parent == tmp_path / "cache" / "bevatron" / "components"
    assert list(first) == ["ALA", "MG"]
    made = first.path.stat().st_mtime_ns
    assert open_components(source).path.stat().st_mtime_ns == made
    source.write_bytes(gzip.compress(MAGNESIUM.encode()))
    assert list(open_components(source)) == ["MG"]
    assert [path.name for path in source.parent.glob("*.arrow")] == []


def test_an_unknown_component_is_named(source):
    with pytest.raises(DataError, match="the dictionary of 2 components has no 'ZZZ'"):
        open_components(source)["ZZZ"]


def test_another_process_gets_the_same_components(source):
    components = open_components(source)
    assert list(pickle.loads(pickle.dumps(components))) == ["ALA", "MG"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("data_x\n_a.b 1\n", r"holds no component \(_chem_comp.id\)"),
        (ALANINE + ALANINE.replace("data_ALA", "data_B"), "lists the component 'ALA' twice"),
        (ALANINE.replace("ALA CA HA SING", "ALA CA HX SING"), "a bond to 'HX', which is none"),
        (ALANINE.replace("4 5 6", "4 5x 6"), "could not convert string to float: '5x'"),
        (ALANINE[:-10], "is not valid mmCIF"),
    ],
)
def test_a_damaged_dictionary_is_one_sentence_and_leaves_no_index(tmp_path, text, said):
    file = tmp_path / "c.cif"
    file.write_text(text)
    with pytest.raises(DataError, match=said) as caught:
        open_components(file)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]


@given(st.lists(st.sampled_from(["C1", "N2", "O5'", 'H"1']), min_size=1, unique=True))
def test_what_is_written_is_read(tmp_path_factory, names):
    quoted = [f'"{name}"' if "'" in name else f"'{name}'" for name in names]
    text = "data_Q\n_chem_comp.id Q\nloop_\n_chem_comp_atom.comp_id\n_chem_comp_atom.atom_id\n"
    text += "_chem_comp_atom.type_symbol\n" + "\n".join(f"Q {q} {q[1]}" for q in quoted) + "\n"
    file = tmp_path_factory.mktemp("ccd") / "c.cif"
    file.write_text(text)
    found = open_components(file)["Q"]
    assert found.atoms.tolist() == names


def test_a_dictionary_is_read_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr("bevatron.data.readers.proteins.components_index._PIECE", 700)
    monkeypatch.setattr("bevatron.data.compressed._BLOCK", 256)
    file = tmp_path / "c.cif"
    codes = [f"A{i}" for i in range(50)]
    file.write_text("".join(ALANINE.replace("ALA", code) for code in codes))
    components = open_components(file)
    assert list(components) == codes
    assert all(components[code].bonds.tolist() == [[1, 0], [1, 3], [0, 2]] for code in codes)


def test_missing_atoms_are_expected(source):
    columns = "group_PDB type_symbol label_atom_id label_comp_id label_asym_id label_entity_id"
    columns += " label_seq_id Cartn_x Cartn_y Cartn_z auth_seq_id"
    text = "data_x\nloop_ " + " ".join(f"_atom_site.{c}" for c in columns.split())
    text += "\nATOM C CA ALA A 1 1 0 0 0 1\nATOM N N ALA A 1 2 1 0 0 2\n"
    expected = expected_atoms(parse_structure(text.encode(), "a.cif"), open_components(source))
    assert expected.name.tolist() == ["N", "CA", "N", "CA", "OXT"]
    assert expected.residue.tolist() == [0, 0, 1, 1, 1]
    assert expected.atom.tolist() == [-1, 0, 1, -1, -1]
    assert expected.observed.tolist() == [False, True, True, False, False]


@pytest.mark.shared
@pytest.mark.parametrize("name", ["1fix", "1pfe", "7bqu"])
def test_expected_atoms_of_an_assembly_are_those_of_protenix(shared, tmp_path, name):
    golden = np.load(shared / f"golden/alphafold3/features_{name}.npz")
    data = shared / "data/complexes"
    components = open_components(data / "ccd_subset.cif.gz", tmp_path / "ccd.arrow")
    assert len(components) == 168
    entry = read_structure(data / f"mmcif/{name}.cif.gz").assembly()
    dry = entry.take_chains(np.flatnonzero(entry.chains.kind != "water"))
    expected = expected_atoms(dry, components)
    # The order of chains is free: Protenix has all copies of a chain together.
    ours = list(zip(dry.residues.component[expected.residue], expected.name, strict=True))
    theirs = list(zip(golden["res_name"], golden["atom_name"], strict=True))
    assert sorted(map(str, ours)) == sorted(map(str, theirs))
    assert expected.observed.sum() == golden["label_coordinate_mask"].sum()
    if name != "1pfe":
        assert (expected.element == golden["ref_element_index"] + 1).all()


def test_the_dictionary_of_biotite_is_read(tmp_path):
    pytest.importorskip("biotite")
    components = open_components("biotite", tmp_path / "ccd.arrow")
    assert len(components) > 40_000
    assert components["MSE"].parent == "MET"
    assert components["HEM"].bonds.shape[1] == 2


def test_gemmi_and_biotite_are_imported_only_when_used():
    code = (
        "import sys, bevatron.data.readers.proteins.components,"
        " bevatron.data.readers.proteins.structures;"
        "sys.exit(bool({'gemmi', 'biotite'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_flipped_bytes_of_the_index_are_named_when_read(shared, tmp_path):
    path = tmp_path / "ccd.cif.gz"
    path.write_bytes((shared / "data/complexes/ccd_subset.cif.gz").read_bytes())
    whole = open_components(path)
    content = whole.path.read_bytes()
    rng = np.random.default_rng(1)
    for place in rng.integers(len(content), size=12).tolist():
        damaged = bytearray(content)
        damaged[place] ^= 1 << int(rng.integers(8))
        (tmp_path / "damaged").write_bytes(damaged)
        with pytest.raises(DataError, match="damaged"):
            read_all(tmp_path / "damaged")


def read_all(path):
    components = Components(path)
    return [components[code] for code in components]
