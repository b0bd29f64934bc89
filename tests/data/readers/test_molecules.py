"""Readers of molecules: what is found by itself, what is refused and in which words."""

import gzip
import os
import pickle

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch

from bevatron.data.readers.molecules import (
    MoleculeOptions,
    molecules_in_memory,
    open_molecules,
)
from bevatron.data.readers.molecules.ogb import read_split
from bevatron.errors import DataError, TrustError

BLOCK = """
     x

  2  1  0  0  0  0  0  0  0  0999 V2000
    0.0000    0.0000    {z}    0.0000 C   0  0
    1.4000    0.0000    0.0000 O   0  0
  1  2  1  0
M  END
"""


def entry(z="0.5000", gap="1.5"):
    return BLOCK.replace("{z}    0.0000", f"{z}") + f"> <gap>\n{gap}\n\n$$$$\n"


@pytest.fixture
def table(tmp_path):
    """Writes a text as a table and returns its path."""

    def write(text, name="m.csv", **options):
        path = tmp_path / name
        data = text.encode() if isinstance(text, str) else text
        path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
        return path

    return write


def rows(reader):
    return list(reader.read(0, reader.num_samples))


def smiles(reader):
    return [sample["smiles"].tobytes().decode() for sample in rows(reader)]


def targets(reader):
    return np.stack([sample["targets"] for sample in rows(reader)])


def test_columns_are_found_by_themselves(table):
    reader = open_molecules(table("id,SMILES,gap,note\n1,CCO,2.5,a\n2,C,,b\n"))
    assert smiles(reader) == ["CCO", "C"]
    assert reader.targets == ("gap",)
    np.testing.assert_array_equal(targets(reader)[:, 0], np.array([2.5, np.nan], np.float32))
    assert reader.describe(1).endswith("m.csv, line 3")


@pytest.mark.parametrize("name", ["m.csv", "m.csv.gz"])
def test_quotes_bom_and_line_ends_of_windows(table, name):
    text = '\ufeffsmiles,y\r\n"C,C |x|",1\r\n"CC",NaN\r\n'
    reader = open_molecules(table(text, name))
    assert smiles(reader) == ["C,C |x|", "CC"]
    assert np.isnan(targets(reader)[1, 0])


def test_tabs_parquet_and_plain_lists(table, tmp_path):
    assert smiles(open_molecules(table("smiles\ty\nCC\t1\n", "m.tsv"))) == ["CC"]
    pa.parquet.write_table(pa.table({"smiles": ["CC", None], "y": [1, 2]}), tmp_path / "m.parquet")
    reader = open_molecules(tmp_path / "m.parquet")
    assert smiles(reader) == ["CC", ""]
    assert targets(reader).tolist() == [[1.0], [2.0]]
    assert reader.describe(1).endswith("m.parquet, row 1")
    plain = open_molecules(table("CC ethane\nC\n", "m.smi"), MoleculeOptions(unlabelled=True))
    assert plain.describe(1).endswith("m.smi, line 2")
    assert smiles(plain) == ["CC", "C"]
    assert plain.targets == ()


def test_a_column_of_words_with_some_numbers_is_no_target(table):
    reader = open_molecules(table("smiles,y,note\nC,1,none\nCC,2,7\nCO,3,see 4\n"))
    assert reader.targets == ("y",)


def test_numbers_of_rows_are_no_targets_and_words_for_nothing_are_no_labels(table):
    path = table("Compound ID,smiles,mol_id,y\n1,C,7,1\n2,CC,8,n/a\n3,CO,9,NULL\n")
    reader = open_molecules(path)
    assert reader.targets == ("y",)
    np.testing.assert_array_equal(targets(reader)[:, 0], [1.0, np.nan, np.nan])


def test_several_targets_must_be_named(table):
    path = table("smiles,a,b\nC,1,2\n")
    with pytest.raises(DataError, match=r"several columns.*a, b"):
        open_molecules(path)
    reader = open_molecules(path, MoleculeOptions(targets=("b", "a")))
    assert targets(reader).tolist() == [[2.0, 1.0]]


@pytest.mark.parametrize(
    ("text", "options", "sentence"),
    [
        ("", {}, "empty"),
        ("smiles,y\n", {}, "holds no rows"),
        ("smiles,note,y\n", {"targets": ("y",)}, "holds no rows"),
        ("a,b\n1,2\n", {}, "no column is called 'smiles'"),
        ("smiles;y\nC;1\n", {}, "separated by semicolons; write it with commas"),
        ("smiles,y\nC,1\n", {"smiles": "mol"}, "no column 'mol'"),
        ("smiles,y\nC,1\n", {"targets": ("z",)}, "no column 'z'"),
        ("smiles,y\nC,1\nC,abc\n", {"targets": ("y",)}, "line 3: 'y' is 'abc'"),
        ("smiles,y\nC,inf\n", {"targets": ("y",)}, "line 2: 'y' is infinite"),
        ("smiles,y\nC,1\nC,1e300\n", {}, r"line 3: 'y' is 1e\+300, beyond 3.4e\+38"),
        ("smiles,y\nC,1\nC,1,2\n", {}, "as a table .*line 3: Expected 2 columns"),
        ("smiles,y,y\nC,1,2\n", {}, "two columns"),
        ("smiles,note\nC,a\n", {}, r"no column of numbers.*columns\.targets"),
        ("smiles,mass,y\nC,1,2\nC,2,3\nC,3,abc\n", {}, r"line 4: 'y' is 'abc'.*columns\.targets"),
        ("smiles,mass,y\nC,1,2\nC,2,3\nC,3,inf\n", {}, "line 4: 'y' is infinite"),
        ("smiles,y,split\nC,1,middle\n", {}, "line 2: 'split' is 'middle'"),
        (b"smiles,y\n\xff\xfe,1\n", {}, "not UTF-8; save it in UTF-8"),
        ("smiles,y\nC,1\n".encode("utf-16"), {}, "is written in UTF-16; save it in UTF-8"),
        ("smiles;y\nC;1,5\n", {}, "separated by semicolons; write it with commas"),
        ("smiles,y\nC,no\n", {}, "classes are numbers too"),
    ],
)
def test_what_is_wrong_with_a_table_is_said_in_one_sentence(table, text, options, sentence):
    with pytest.raises(DataError, match=sentence):
        rows(open_molecules(table(text), MoleculeOptions(**options)))


def test_labels_that_float32_cannot_hold_are_refused_in_lists_and_structures_too(table):
    for label, sentence in ((-1e39, "molecule 1: 'y' is -1e.39, beyond"), (np.inf, "is infinite")):
        with pytest.raises(DataError, match=sentence):
            molecules_in_memory(["C", "CC"], [1.0, label], ["y"])
    sdf = table(entry(gap="1e300"), "m.sdf")
    with pytest.raises(DataError, match=r"row 0: 'gap' is 1e\+300"):
        rows(open_molecules(sdf, MoleculeOptions(targets=("gap",))))


def test_missing_molecules_of_a_list_keep_their_places():
    reader = molecules_in_memory(["C", None, float("nan"), np.float64("nan"), "CC"])
    assert smiles(reader) == ["C", "", "", "", "CC"]
    with pytest.raises(DataError, match=r"molecule 1: expected a SMILES .* got float"):
        molecules_in_memory(["C", 1.5])


def test_columns_in_latin_1_are_kept_where_they_are_not_molecules(table):
    path = table("smiles,name,y\nCCO,éthanol,1\n".encode("latin-1"))
    reader = open_molecules(path, MoleculeOptions(unlabelled=True))
    assert reader.files[0].everything()["name"].to_pylist() == ["éthanol"]
    assert targets(open_molecules(path)).tolist() == [[1.0]]
    path = table("smiles,name,y\nCCO,日本,1\n", "utf8.csv")
    reader = open_molecules(path)
    assert reader.files[0].everything()["name"].to_pylist() == ["日本"]


def test_cells_of_several_lines_are_read_in_a_large_table(table):
    note = '"a note\nof two lines"'
    path = table("smiles,note,y\n" + "".join(f"CCO,{note},{i}\n" for i in range(60_000)))
    reader = open_molecules(path, MoleculeOptions(targets=("y",)))
    assert reader.files[0].raw(59_999)["targets"].tolist() == [59_999]
    assert set(reader.files[0].everything()["note"].to_pylist()) == {note.strip('"')}


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ('C,1,"a\nCC,2,b\nCCC,3,c\n', "line 2: a quote is opened and never closed"),
        ('C,1,a\nC,1,"a\nCC,2,b', "line 3: a quote is opened and never closed"),
        ('C,1,"a\n' + "CC,2,b\n" * 300_000, "holds a cell above 1 MB; is a quote opened"),
    ],
)
def test_a_quote_that_is_never_closed_hides_no_rows(table, rows, sentence):
    with pytest.raises(DataError, match=sentence):
        open_molecules(table("smiles,y,note\n" + rows))


def test_a_last_cell_of_several_lines_is_no_mistake(table):
    for note in ('"a\nb"', '"a, b\nc, d"', '"a\n"', '5"', ""):
        assert len(smiles(open_molecules(table(f"smiles,y,note\nC,1,x\nCC,2,{note}\n")))) == 2
    options = MoleculeOptions(unlabelled=True)
    assert smiles(open_molecules(table('smiles,note\nC,"a, b\nc, d"\n'), options)) == ["C"]


def test_a_table_whose_name_is_not_utf8_is_refused(table):
    for name in (b"d\xff.csv", b"d\xff.parquet"):
        path = table("smiles,y\nC,1\n", os.fsdecode(name))
        with pytest.raises(DataError, match="the name of the file is not UTF-8; rename it"):
            open_molecules(path)


def test_a_missing_file_an_unknown_kind_and_a_double_are_refused(table, tmp_path):
    path = table("smiles,y\nC,1\n")
    for wrong, sentence in (
        ([tmp_path / "no.csv"], "does not exist"),
        ([table("x", "m.docx")], "not a known kind"),
        ([path, path], "twice"),
        ([tmp_path], "folder"),
        ([], "no file"),
    ):
        with pytest.raises(DataError, match=sentence):
            open_molecules(wrong)


def test_files_of_other_targets_do_not_go_together(table):
    first, second = table("smiles,y\nC,1\n"), table("smiles,z\nC,1\n", "n.csv")
    with pytest.raises(DataError, match=r"n\.csv: its targets are z"):
        open_molecules([first, second])


def test_a_given_division_is_read(table):
    reader = open_molecules(table("smiles,y,split\nC,1,train\nC,1,Val\nC,1,test\nC,1,\n"))
    assert [int(sample["split"]) for sample in rows(reader)] == [0, 1, 2, -1]


def test_a_reader_pickles_and_notices_a_change(table):
    path = table("smiles,y\nCC,1\n")
    reader = open_molecules(path)
    data = pickle.dumps(reader)
    assert smiles(pickle.loads(data)) == ["CC"]
    path.write_text("smiles,y\nCCC,1\n")
    with pytest.raises(DataError, match="changed"):
        smiles(pickle.loads(data))
    assert open_molecules(path).fingerprint != reader.fingerprint


def test_structures_of_an_sdf_go_with_the_rows(table):
    csv = table("smiles,y\nCO,1\nOC,2\n")
    sdf = table(entry() + entry("0.7000").replace("\n$$$$\n", "\n$$$$"), "m.sdf")
    reader = open_molecules(csv, MoleculeOptions(geometry=sdf))
    blocks = [sample["block"].tobytes() for sample in rows(reader)]
    assert [b"0.7000" in block for block in blocks] == [False, True]
    assert not any(b"$$$$" in block for block in blocks)
    with pytest.raises(DataError, match="holds 1 structures for 2 rows"):
        open_molecules(csv, MoleculeOptions(geometry=table(entry(), "n.sdf")))
    packed = table(entry() + entry(), "p.sdf.gz")
    assert len(rows(open_molecules(csv, MoleculeOptions(geometry=packed)))) == 2


def test_an_sdf_has_targets_of_its_own(table):
    path = table(entry() + entry(gap="n/a"), "m.sdf")
    reader = open_molecules(path, MoleculeOptions(targets=("gap",)))
    np.testing.assert_array_equal(targets(reader)[:, 0], np.array([1.5, np.nan], np.float32))
    assert "columns.targets may name gap" in open_molecules(path).report()[0]
    with pytest.raises(DataError, match=r"no entry has a data item 'y' .*gap"):
        open_molecules(path, MoleculeOptions(targets=("y",)))
    for gap, sentence in (("x", "row 0: 'gap' is 'x'"), ("inf", "row 0: 'gap' is infinite")):
        wrong = table(entry(gap=gap), "w.sdf")
        with pytest.raises(DataError, match=sentence):
            rows(open_molecules(wrong, MoleculeOptions(targets=("gap",))))


def test_an_sdf_of_rdkit_has_targets_that_some_entries_lack(tmp_path):
    chem = pytest.importorskip("rdkit.Chem")
    path = tmp_path / "m.sdf"
    with chem.SDWriter(str(path)) as writer:
        for gap in (None, "2.5"):
            molecule = chem.MolFromSmiles("CO")
            if gap is not None:
                molecule.SetProp("gap", gap)
            writer.write(molecule)
    assert ">  <gap>  (2)" in path.read_text()
    reader = open_molecules(path, MoleculeOptions(targets=("gap",)))
    np.testing.assert_array_equal(targets(reader)[:, 0], np.array([np.nan, 2.5], np.float32))


@pytest.fixture
def positions(tmp_path):
    """Writes positions of a water with its hydrogen first and of a carbon that disagrees."""

    def write(**changes):
        arrays = {
            "idx": np.array([1, 2]),
            "n_atoms": np.array([3, 1], np.uint8),
            "n_heavy": np.array([1, 1], np.uint8),
            "map_status": np.array([1, 0], np.uint8),
            "pos_e4": np.array([[0, 0, 0], [10000, 0, 0], [0, 1, 2], [5, 5, 5]], np.int32),
            "heavy_perm": np.array([1, 0], np.uint8),
        } | changes
        path = tmp_path / "p.npz"
        np.savez(path, **{name: value for name, value in arrays.items() if value is not None})
        return path

    return write


def test_positions_of_an_npz_are_brought_into_the_order_of_the_smiles(table, positions):
    csv = table("idx,smiles,y\n1,O,1\n2,C,2\n")
    reader = open_molecules(csv, MoleculeOptions(geometry=positions()))
    water, carbon = rows(reader)
    np.testing.assert_allclose(water["positions"], [[1.0, 0, 0]])
    assert len(carbon["positions"]) == 0
    assert smiles(pickle.loads(pickle.dumps(reader))) == ["O", "C"]


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"idx": np.array([1, 3])}, "molecule 1 has idx 3, the table's row 1 has 2"),
        ({"n_atoms": np.array([3], np.uint8)}, "holds 1 molecules for 2 rows"),
        ({"pos_e4": None}, "lacks 'pos_e4'"),
        ({"heavy_perm": np.array([7, 0], np.uint8)}, "names an atom that is not"),
    ],
)
def test_positions_of_another_table_are_refused(table, positions, changes, sentence):
    csv = table("idx,smiles,y\n1,O,1\n2,C,2\n")
    with pytest.raises(DataError, match=sentence):
        rows(open_molecules(csv, MoleculeOptions(geometry=positions(**changes))))


@pytest.fixture
def pcqm(tmp_path):
    """A tiny folder as OGB's archive makes it."""
    folder = tmp_path / "pcqm4m-v2"
    (folder / "raw").mkdir(parents=True)
    lines = ["idx,smiles,homolumogap", "0,CO,1.5", "1,CO,2.5", "2,CCO,3.5", "3,CC,"]
    (folder / "raw" / "data.csv.gz").write_bytes(gzip.compress("\n".join(lines).encode()))
    parts = {"train": [0, 1], "valid": [2], "test-dev": [3], "test-challenge": []}
    arrays = {name: np.array(rows, dtype=np.int64) for name, rows in parts.items()}
    torch.save(arrays, folder / "split_dict.pt")
    (folder / "pcqm4m-v2-train.sdf").write_text(entry() + entry("0.7000"))
    return folder


def test_ogbs_folder_is_read_as_downloaded(pcqm):
    reader = open_molecules(pcqm)
    assert reader.targets == ("homolumogap",)
    samples = rows(reader)
    assert [int(sample["split"]) for sample in samples] == [0, 0, 1, 2]
    assert [len(sample["block"]) > 0 for sample in samples] == [True, True, False, False]
    assert b"0.7000" in samples[1]["block"].tobytes()
    (pcqm / "pcqm4m-v2-train.sdf").unlink()
    assert not any(len(sample["block"]) for sample in rows(open_molecules(pcqm)))


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("tensors", [True, False])
def test_split_files_are_read_in_every_form(tmp_path, legacy, tensors):
    value = torch.arange(3) if tensors else np.arange(3)
    path = tmp_path / "split_dict.pt"
    torch.save({"train": value}, path, _use_new_zipfile_serialization=not legacy)
    np.testing.assert_array_equal(read_split(path)["train"], [0, 1, 2])


class Harmful:
    """Would make a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("legacy", [True, False])
def test_a_split_file_runs_no_code(tmp_path, legacy):
    mark, path = tmp_path / "mark", tmp_path / "split_dict.pt"
    torch.save({"train": Harmful(mark)}, path, _use_new_zipfile_serialization=not legacy)
    mark.unlink(missing_ok=True)
    with pytest.raises(TrustError, match="run code"):
        read_split(path)
    assert not mark.exists()


def test_a_damaged_split_file_is_refused(tmp_path):
    path = tmp_path / "split_dict.pt"
    path.write_bytes(b"not a pickle")
    with pytest.raises((DataError, TrustError)):
        read_split(path)


def test_molecules_of_a_program_are_a_reader_too():
    chem = pytest.importorskip("rdkit.Chem")
    reader = molecules_in_memory(["C", chem.MolFromSmiles("CC")], [[1, 2], [3, 4]], ["a", "b"])
    assert reader.targets == ("a", "b")
    first, second = rows(pickle.loads(pickle.dumps(reader)))
    assert first["smiles"].tobytes() == b"C"
    assert chem.Mol(second["binary"].tobytes()).GetNumAtoms() == 2
    with pytest.raises(DataError, match="2 rows for 1 molecules"):
        molecules_in_memory(["C"], [1, 2])
    with pytest.raises(DataError, match="molecule 0: expected a SMILES"):
        molecules_in_memory([3])


@pytest.mark.shared
def test_qm9_is_read(shared):
    folder = shared / "data" / "gpspp"
    options = MoleculeOptions(targets=("gap_ev",), geometry=folder / "qm9_b3lyp.npz")
    reader = open_molecules(folder / "qm9_smiles.csv.gz", options)
    assert reader.num_samples == 130831
    sample = next(iter(reader.read(5, 6)))
    assert len(sample["positions"]) > 0
