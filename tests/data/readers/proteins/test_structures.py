"""mmCIF and PDB files as flat arrays."""

import gzip
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.readers.proteins.structure import UNKNOWN_NUMBER
from bevatron.data.readers.proteins.structures import parse_structure, read_structure
from bevatron.errors import DataError

HEAD = """data_1ABC
_entry.id 1ABC
loop_ _exptl.method 'X-RAY DIFFRACTION' 'NEUTRON DIFFRACTION'
_refine.ls_d_res_high 1.85
_pdbx_database_status.recvd_initial_deposition_date 1998-01-02
loop_ _pdbx_audit_revision_history.ordinal _pdbx_audit_revision_history.revision_date
1 1998-04-08 2 2011-07-13
loop_ _entity.id _entity.type
1 polymer 2 non-polymer 3 water 4 non-polymer 5 branched
_entity_poly.entity_id 1
_entity_poly.type polypeptide(L)
loop_ _entity_poly_seq.entity_id _entity_poly_seq.num _entity_poly_seq.mon_id
1 1 GLY 1 2 MSE 1 3 SER 1 4 SER 1 5 QQQ
loop_ _struct_asym.id _struct_asym.entity_id
A 1 B 2 C 4 D 5 E 3
loop_ _pdbx_poly_seq_scheme.asym_id _pdbx_poly_seq_scheme.seq_id
_pdbx_poly_seq_scheme.mon_id _pdbx_poly_seq_scheme.pdb_seq_num _pdbx_poly_seq_scheme.pdb_ins_code
A 1 GLY 9 . A 2 MSE 10 . A 3 SER 10 A A 4 SER 11 . A 5 QQQ 12 .
loop_ _chem_comp.id _chem_comp.type _chem_comp.formula
ZN non-polymer 'Zn 2' HEM non-polymer 'C34 H32 Fe N4 O4'
loop_ _struct_conn.id _struct_conn.conn_type_id
_struct_conn.ptnr1_label_asym_id _struct_conn.ptnr1_label_comp_id _struct_conn.ptnr1_label_seq_id
_struct_conn.ptnr1_label_atom_id _struct_conn.ptnr1_symmetry _struct_conn.ptnr1_auth_seq_id
_struct_conn.ptnr2_label_asym_id _struct_conn.ptnr2_label_comp_id _struct_conn.ptnr2_label_seq_id
_struct_conn.ptnr2_label_atom_id _struct_conn.ptnr2_symmetry _struct_conn.ptnr2_auth_seq_id
1 metalc A SER 3 OG 1_555 10 C ZN . ZN 1_555 302
2 metalc A SER 3 OG 1_555 10 C ZN . ZN 2_555 302
3 hydrog A MSE 2 N 1_555 10 A SER 3 OG 1_555 10
4 covale D NAG . O4 1_555 1 D NAG . C1 1_555 2
loop_ _pdbx_struct_assembly_gen.assembly_id _pdbx_struct_assembly_gen.oper_expression
_pdbx_struct_assembly_gen.asym_id_list
1 1,2 A,C 1 1 B 2 (2)(1-2) E
loop_ _pdbx_struct_oper_list.id
_pdbx_struct_oper_list.matrix[1][1] _pdbx_struct_oper_list.matrix[1][2]
_pdbx_struct_oper_list.matrix[1][3] _pdbx_struct_oper_list.vector[1]
_pdbx_struct_oper_list.matrix[2][1] _pdbx_struct_oper_list.matrix[2][2]
_pdbx_struct_oper_list.matrix[2][3] _pdbx_struct_oper_list.vector[2]
_pdbx_struct_oper_list.matrix[3][1] _pdbx_struct_oper_list.matrix[3][2]
_pdbx_struct_oper_list.matrix[3][3] _pdbx_struct_oper_list.vector[3]
1 1 0 0 0 0 1 0 0 0 0 1 0
2 0 -1 0 10 1 0 0 0 0 0 1 0
"""
COLUMNS = """loop_ _atom_site.group_PDB _atom_site.type_symbol _atom_site.label_atom_id
_atom_site.label_alt_id _atom_site.label_comp_id _atom_site.label_asym_id
_atom_site.label_entity_id _atom_site.label_seq_id _atom_site.pdbx_PDB_ins_code
_atom_site.Cartn_x _atom_site.Cartn_y _atom_site.Cartn_z _atom_site.occupancy
_atom_site.B_iso_or_equiv _atom_site.pdbx_formal_charge _atom_site.auth_seq_id
_atom_site.auth_asym_id _atom_site.pdbx_PDB_model_num
"""
ATOMS = """HETATM N N . MSE A 1 2 . 1 2 3 1.0 20.5 ? 10 X 1
HETATM SE SE . MSE A 1 2 . 2 2 3 1.0 20.5 ? 10 X 1
ATOM O OG A SER A 1 3 A 4 2 3 0.4 9 ? 10 X 1
ATOM O OG B SER A 1 3 A 5 2 3 0.6 9 ? 10 X 1
ATOM C CB A SER A 1 3 A 4 3 3 0.4 9 ? 10 X 1
ATOM C CB B SER A 1 3 A 5 3 3 0.6 9 ? 10 X 1
ATOM C CA . SER A 1 3 A 5 4 3 1.0 9 ? 10 X 1
ATOM C CA A SER A 1 4 . 6 4 3 0.5 9 ? 11 X 1
ATOM C CA B THR A 1 4 . 7 4 3 0.5 9 ? 11 X 1
HETATM FE FE . HEM B 2 . . 0 0 0 1.0 9 ? 301 X 1
HETATM N NA . HEM B 2 . . 0 1 0 1.0 9 -1 301 X 1
HETATM ZN ZN . ZN C 4 . . 0 0 5 1.0 9 2 302 X 1
HETATM O O4 . NAG D 5 . . 8 0 5 1.0 9 ? 1 D 1
HETATM C C1 . NAG D 5 . . 8 1 5 1.0 9 ? 2 D 1
HETATM O "O4'" . NAG D 5 . . 8 2 5 1.0 9 ? 2 D 1
HETATM O O . HOH E 3 . . 9 0 5 1.0 9 ? 401 X 1
HETATM O O . HOH E 3 . . 9 1 5 1.0 9 ? 402 X 1
HETATM O O . HOH E 3 . . 9 7 5 1.0 9 ? 402 X 2
"""
TEXT = HEAD + COLUMNS + ATOMS


def read(text: str, **options):
    return parse_structure(text.encode(), "a.cif", **options)


@pytest.fixture(scope="module")
def entry():
    return read(TEXT)


def atoms_of(structure, residue):
    first, past = structure.residues.atom_ptr[residue : residue + 2]
    return structure.atoms.name[first:past].tolist()


def test_the_entry_is_named_dated_and_resolved(entry):
    assert entry.name == "1ABC"
    assert entry.methods == ("X-RAY DIFFRACTION", "NEUTRON DIFFRACTION")
    assert entry.resolution == pytest.approx(1.85)
    assert str(entry.released) == "1998-04-08"
    assert str(entry.deposited) == "1998-01-02"


def test_dates_and_resolution_may_be_absent():
    bare = TEXT.replace("1998-04-08", "1900-01-01").replace("2011-07-13", "?")
    bare = bare.replace("1998-01-02", "?").replace("1.85", ".")
    entry = read(bare)
    assert (entry.released, entry.deposited, entry.resolution) == (None, None, None)


def test_chains_have_both_names_and_a_kind(entry):
    chains = entry.chains
    assert chains.label.tolist() == ["A", "B", "C", "D", "E"]
    assert chains.author.tolist() == ["X", "X", "X", "D", "X"]
    assert chains.entity.tolist() == ["1", "2", "4", "5", "3"]
    assert chains.kind.tolist() == ["protein", "ligand", "ion", "glycan", "water"]
    assert np.diff(chains.residue_ptr).tolist() == [5, 1, 1, 2, 2]


def test_residues_without_coordinates_are_there_with_author_numbers(entry):
    residues = entry.residues
    assert residues.observed[:5].tolist() == [False, True, True, True, False]
    assert residues.number[:5].tolist() == [1, 2, 3, 4, 5]
    assert residues.author_number[:5].tolist() == [9, 10, 10, 11, 12]
    assert residues.insertion[:5].tolist() == ["", "", "A", "", ""]
    without = TEXT.replace("_pdbx_poly_seq_scheme", "_other")
    assert read(without).residues.author_number[0] == UNKNOWN_NUMBER


def test_sequences_of_chains_apart_make_entities_apart():
    tags = ("asym_id", "entity_id", "seq_id", "mon_id")
    scheme = "data_x\nloop_ " + " ".join(f"_pdbx_poly_seq_scheme.{tag}" for tag in tags) + "\n"
    rows = "A 1 1 GLY A 1 2 SER B 1 1 TRP C 1 1 GLY C 1 2 SER\n"
    atoms = "".join(
        f"ATOM C CA . {code} {chain} 1 1 . 0 0 {i} 1 9 ? 1 {chain} 1\n"
        for i, (chain, code) in enumerate([("A", "GLY"), ("B", "TRP"), ("C", "GLY")])
    )
    found = read(scheme + rows + COLUMNS + atoms)
    assert [found.sequence(chain) for chain in range(3)] == ["GS", "W", "GS"]
    assert found.chains.entity.tolist() == ["1", "1.2", "1"]


def test_an_ion_is_one_atom():
    assert read(TEXT.replace("'Zn 2'", "'H2 N'")).chains.kind[2] == "ligand"
    assert read(TEXT.replace("'Zn 2'", "?")).chains.kind[2] == "ion"


def test_modified_residues_have_the_letter_of_their_parent(entry):
    assert entry.sequence(0) == "GMSSX"
    assert entry.residues.parent[:5].tolist() == ["GLY", "MET", "SER", "SER", ""]
    listed = HEAD + (
        "loop_ _pdbx_struct_mod_residue.label_comp_id _pdbx_struct_mod_residue.parent_comp_id\n"
        "QQQ TRP\n"
    )
    assert read(listed + COLUMNS + ATOMS).sequence(0) == "GMSSW"


def test_the_location_of_highest_occupancy_is_kept_whole_and_the_first_at_ties(entry):
    first, past = entry.residues.atom_ptr[2:4]
    assert entry.atoms.name[first:past].tolist() == ["OG", "CB", "CA"]
    assert entry.atoms.altloc[first:past].tolist() == ["B", "B", ""]
    assert entry.atoms.position[first, 0] == 5
    assert entry.residues.component[3] == "SER"
    assert entry.atoms.position[past, 0] == 6
    ties = TEXT.replace("0.4 9", "0.5 9").replace("0.6 9", "0.5 9")
    assert read(ties).atoms.altloc[first:past].tolist() == ["A", "A", ""]
    other = TEXT.replace("7 4 3 0.5", "7 4 3 0.6")
    assert read(other).sequence(0) == "GMSTX"


def test_atoms_of_two_locations_are_never_mixed_if_one_has_all():
    mixed = TEXT.replace("4 3 3 0.4 9", "4 3 3 0.9 9").replace("5 3 3 0.6 9", "5 3 3 0.1 9")
    found = read(mixed)
    first, past = found.residues.atom_ptr[2:4]
    assert found.atoms.altloc[first:past].tolist() == ["A", "A", ""]


def test_an_atom_that_the_kept_location_lacks_comes_from_another():
    text = TEXT + "ATOM H HG A SER A 1 3 A 4 2 3 0.4 9 ? 10 X 1\n"
    found = read(text)
    assert atoms_of(found, 2) == ["OG", "CB", "CA", "HG"]


def test_atoms_have_elements_charges_and_quoted_names(entry):
    atoms = entry.atoms
    names = atoms.name.tolist()
    assert atoms.element[names.index("SE")] == 34
    assert atoms.element[names.index("ZN")] == 30
    assert atoms.charge[names.index("NA")] == -1
    assert atoms.charge[names.index("ZN")] == 2
    assert "O4'" in names
    assert (atoms.position.dtype, atoms.element.dtype) == (np.float32, np.uint8)
    assert (np.diff(atoms.residue) >= 0).all()


def test_links_within_the_entry_are_kept_hydrogen_bonds_and_images_are_not(entry):
    names = entry.atoms.name[entry.links.atoms].tolist()
    assert names == [["OG", "ZN"], ["O4", "C1"]]
    assert entry.links.kind.tolist() == ["metalc", "covale"]


def test_links_named_by_author_are_found():
    text = TEXT.replace("ptnr1_label_asym_id", "ptnr1_auth_asym_id")
    text = text.replace("_struct_conn.ptnr1_label_seq_id", "_struct_conn.other")
    text = text.replace("metalc A SER 3 OG", "metalc X HEM . FE").replace(
        "1_555 10 C", "1_555 301 C"
    )
    found = read(text)
    assert found.atoms.name[found.links.atoms[0]].tolist() == ["FE", "ZN"]


def test_a_model_is_chosen(entry):
    assert (entry.model, entry.models) == (1, (1, 2))
    second = read(TEXT, model=2)
    assert second.atoms.position.tolist() == [[9, 7, 5]]
    with pytest.raises(DataError, match=r"a\.cif: has no model 3, 1 to 2"):
        read(TEXT, model=3)


def test_an_assembly_copies_chains_and_their_links(entry):
    built = entry.assembly("1")
    assert built.chains.label.tolist() == ["A", "C", "A-2", "C-2", "B"]
    assert built.chains.entity.tolist() == ["1", "4", "1", "4", "2"]
    zinc = built.atoms.position[built.atoms.element == 30]
    assert zinc.tolist() == [[0, 0, 5], [10, 0, 5]]
    first = entry.atoms.position[0]
    assert built.atoms.position[built.residues.atom_ptr[7]].tolist() == [10 - first[1], first[0], 3]
    assert built.atoms.name[built.links.atoms].tolist() == [["OG", "ZN"]] * 2
    lengths = np.diff(built.atoms.position[built.links.atoms], axis=1)[:, 0]
    assert np.allclose(*np.linalg.norm(lengths, axis=1))
    water = entry.assembly("2")
    assert water.atoms.position.tolist() == [[10, 9, 5], [9, 9, 5], [1, 10, 5], [1, 9, 5]]
    with pytest.raises(DataError, match="1ABC: has no assembly '3'; choose one of 1, 2"):
        entry.assembly("3")


def test_an_operator_that_the_file_lacks_is_named():
    with pytest.raises(DataError, match=r"a\.cif: assembly '1' names the operator '7'"):
        read(TEXT.replace("1 1,2 A,C", "1 1,7 A,C"))


def test_atoms_and_chains_can_be_taken(entry):
    heavy = entry.take_atoms(~np.isin(entry.atoms.name, ["OG", "SE"]))
    assert heavy.atoms.name[heavy.links.atoms].tolist() == [["O4", "C1"]]
    assert len(heavy.residues.number) == len(entry.residues.number)
    assert atoms_of(heavy, 2) == ["CB", "CA"]
    some = entry.take_chains([2, 0])
    assert some.chains.label.tolist() == ["C", "A"]
    assert some.atoms.name[some.links.atoms].tolist() == [["OG", "ZN"]]
    assert some.residues.chain.tolist() == [0, 1, 1, 1, 1, 1]
    assert (some.atoms.residue == np.repeat(range(6), np.diff(some.residues.atom_ptr))).all()


def test_a_structure_pickles(entry):
    again = pickle.loads(pickle.dumps(entry))
    assert again.sequence(0) == entry.sequence(0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda t: t[: t.rindex("HETATM") + 30], r"line \d+: is not valid mmCIF \(Wrong number"),
        (lambda t: "", "is empty"),
        (lambda t: "hello", "is neither mmCIF nor PDB; expected mmCIF or PDB"),
        (lambda t: HEAD, r"holds no atoms \(_atom_site\)"),
        (lambda t: t.replace("4 2 3 0.4", "nan 2 3 0.4"), r"atom OG of SER 10 in chain A .*row 3"),
        (lambda t: t.replace("4 2 3 0.4", "? 2 3 0.4"), "has the position"),
        (
            lambda t: t.replace("4 2 3 0.4", "4x 2 3 0.4"),
            "Cartn_x of row 3 is '4x', expected a num",
        ),
        (lambda t: t.replace("4 2 3 0.4", "1e39 2 3 0.4"), "has the position"),
        (lambda t: t.replace("A 1 4 .", "A 1 6 ."), r"has a residue 6 \(SER\).* ends at 5"),
        (lambda t: t.replace("? 11 X", "? 99999999999 X"), "expected a whole number of 32 bits"),
    ],
)
def test_a_damaged_file_is_one_sentence(change, said):
    with pytest.raises(DataError, match=said) as caught:
        read(change(TEXT))
    assert str(caught.value).startswith("a.cif")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_are_one_sentence():
    for data in (TEXT.encode("utf-16"), TEXT.replace(" CA ", " 'Cé' ").encode("latin-1")):
        with pytest.raises(DataError, match=r"a\.cif: (is UTF-16|.*not UTF-8)"):
            parse_structure(data, "a.cif")


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
def test_line_endings_case_of_tags_and_compression_do_not_matter(entry, tmp_path, ending):
    file = tmp_path / "a.cif.gz"
    file.write_bytes(
        gzip.compress(TEXT.replace("_atom_site.", "_ATOM_SITE.").replace("\n", ending).encode())
    )
    found = read_structure(file)
    assert found.atoms.position.tolist() == entry.atoms.position.tolist()
    assert found.sequence(0) == entry.sequence(0)


def test_a_file_that_expands_beyond_the_limit_is_refused(tmp_path):
    file = tmp_path / "a.cif.gz"
    file.write_bytes(gzip.compress(b"data_x\n" + b" " * 5_000_000))
    with pytest.raises(DataError, match="more than 1,000,000 bytes"):
        read_structure(file, max_bytes=1_000_000)


def test_a_truncated_archive_names_the_file(tmp_path):
    file = tmp_path / "a.cif.gz"
    file.write_bytes(gzip.compress(TEXT.encode())[:-200])
    with pytest.raises(DataError, match=r"a\.cif\.gz: cannot be read to the end"):
        read_structure(file)


COMPONENTS = st.sampled_from(["ALA", "GLY", "MSE", "TRP"])
COORDINATE = st.integers(-999_999, 999_999).map(lambda i: i / 1000)
RESIDUE = st.tuples(COMPONENTS, st.dictionaries(st.sampled_from(["N", "CA", "C", "O"]), COORDINATE))
CHAINS = st.lists(st.lists(RESIDUE, min_size=1, max_size=6), min_size=1, max_size=4)


@given(CHAINS)
def test_what_is_written_is_read(chains):
    rows, sequences = [], []
    for c, chain in enumerate(chains):
        for n, (code, atoms) in enumerate(chain, start=1):
            sequences.append(f"{c + 1} {n} {code}")
            for name, x in atoms.items():
                rows.append(
                    f"ATOM {name[0]} {name} . {code} {c}a {c + 1} {n} . {x} {len(rows)} 0 "
                    f"1 5 ? {n} Q 1"
                )
    text = "data_x\nloop_ _entity_poly_seq.entity_id _entity_poly_seq.num _entity_poly_seq.mon_id\n"
    text += "\n".join(sequences) + "\n" + COLUMNS + "\n".join(rows) + "\n"
    kept = [(c, chain) for c, chain in enumerate(chains) if any(atoms for _, atoms in chain)]
    if not kept:
        with pytest.raises(DataError):
            read(text)
        return
    found = read(text)
    assert found.chains.label.tolist() == [f"{c}a" for c, _ in kept]
    residues = [residue for _, chain in kept for residue in chain]
    assert found.residues.component.tolist() == [code for code, _ in residues]
    assert [atoms_of(found, r) for r in range(len(residues))] == [list(a) for _, a in residues]
    positions = [x for _, atoms in residues for x in atoms.values()]
    assert found.atoms.position[:, 0].tolist() == np.float32(positions).tolist()


def test_a_hundred_thousand_residues_are_read():
    count = 100_000
    rows = [f"ATOM C CA . ALA A 1 {n} . {n / 10} 0 0 1 5 ? {n} A 1" for n in range(1, count + 1)]
    found = read("data_x\n" + COLUMNS + "\n".join(rows) + "\n")
    assert len(found.residues.number) == found.residues.number[-1] == count
    assert found.residues.atom_ptr[-1] == count
