"""Extended XYZ as it is found in the wild, against ASE's reader where ASE reads it."""

import gzip
import pickle

import numpy as np
import pytest

from bevatron.data.readers import LabelOptions, open_reader
from bevatron.data.samples import RAW_STRUCTURE_FIELDS
from bevatron.errors import DataError

FILES = [
    "MoNbTaW_train",
    "acac_train",
    "alexandria_random_1k",
    "bpa3_train",
    "ethanol_methanol_train",
    "fe_magnetic",
    "inp",
    "mlearn_Cu_training",
    "mlearn_Ge_training",
    "mlearn_Li_training",
    "mlearn_Mo_training",
    "mlearn_Ni_training",
    "mlearn_Si_training",
    "mpf_TP",
    "mptrj_random_1k",
    "random_TP",
    "ta",
    "water192_dpmd",
    "water768_dpmd_replicated",
]


def read_text(tmp_path, text, options=None):
    path = tmp_path / "frames.xyz"
    path.write_bytes(text.encode())
    reader = open_reader(path, options)
    return list(reader.read(0, reader.num_samples))


def water(energy, header="", shift=0.0):
    return (
        f'3\nProperties=species:S:1:pos:R:3:forces:R:3 energy={energy} pbc="F F F" {header}\n'
        f"O 0 0 {shift} 0.1 0.2 0.3\nH 0 0.76 0.59 0 0 0\nH 0 -0.76 0.59 -0.1 -0.2 -0.3\n"
    )


@pytest.mark.parametrize("name", FILES)
def test_first_frames_of_real_files_are_those_that_ase_reads(shared, name):
    import ase.io

    path = shared / "data" / "mace" / f"{name}.extxyz.gz"
    reader = open_reader(path)
    for sample, atoms in zip(reader.read(0, 3), ase.io.iread(path, index=":3"), strict=True):
        for field in RAW_STRUCTURE_FIELDS:
            field.check(sample[field.name])
        assert (sample["atomic_numbers"] == atoms.numbers).all()
        np.testing.assert_allclose(sample["positions"], atoms.positions, atol=1e-12)
        np.testing.assert_allclose(sample["cell"], atoms.cell.array, atol=1e-12)
        assert (sample["pbc"] == atoms.pbc).all()
        assert sample["energy"] == atoms.info["REF_energy"]
        np.testing.assert_allclose(sample["forces"], atoms.arrays["REF_forces"], atol=1e-12)
        if "REF_stress" in atoms.info:
            stress = np.reshape(atoms.info["REF_stress"], (3, 3))
            np.testing.assert_allclose(sample["stress"], stress, atol=1e-10)
        else:
            assert np.isnan(sample["stress"]).all()


def test_a_whole_real_file_in_pieces_is_the_same_as_at_once(shared):
    reader = open_reader(shared / "data" / "mace" / "mptrj_random_1k.extxyz.gz")
    assert reader.num_samples == 1000
    whole = list(reader.read(0, 1000))
    other = pickle.loads(pickle.dumps(reader))
    assert [int(s["source"][1]) for s in whole] == list(range(1000))
    for start, stop in [(900, 1000), (0, 3), (500, 510), (3, 3)]:
        pieces = list(other.read(start, stop))
        assert len(pieces) == stop - start
        for a, b in zip(pieces, whole[start:stop], strict=True):
            assert all(
                np.array_equal(a[key], b[key], equal_nan=True) for key in b if key != "group"
            )
    assert len({int(z) for s in whole for z in s["atomic_numbers"]}) == 85
    assert "stress: all from REF_stress" in reader.report()[0]


@pytest.mark.parametrize("pbc", [[1, 1, 1], [1, 0, 1], [0, 0, 0]])
def test_what_ase_writes_with_its_results_comes_back(tmp_path, pbc):
    import ase.io
    from ase.build import bulk
    from ase.calculators.emt import EMT

    atoms = bulk("Cu", "fcc", cubic=True) * (2, 1, 1)
    atoms.pbc = pbc
    atoms.rattle(0.1, seed=1)
    atoms.calc = EMT()
    energy, forces = atoms.get_potential_energy(), atoms.get_forces()
    stress = atoms.get_stress(voigt=False) if any(pbc) else np.full((3, 3), np.nan)
    atoms.arrays["initial_charges"] = np.ones(8)
    ase.io.write(tmp_path / "a.extxyz", [atoms, atoms])
    _, sample = open_reader(tmp_path / "a.extxyz").read(0, 2)
    np.testing.assert_allclose(sample["energy"], energy, atol=1e-6)
    np.testing.assert_allclose(sample["forces"], forces, atol=1e-6)
    np.testing.assert_allclose(sample["stress"], stress, atol=1e-6)
    assert sample["pbc"].tolist() == [bool(p) for p in pbc]


def test_groups_of_real_files_are_kept(shared):
    reader = open_reader(shared / "data" / "mace" / "ethanol_methanol_train.extxyz.gz")
    sample = next(reader.read(0, 1))
    assert bytes(sample["group"]) == b"methanol"


def test_small_frames_that_cross_the_blocks_of_the_scan_are_all_found(tmp_path, monkeypatch):
    from bevatron.data.readers import extxyz

    text = "".join(water(-10.0 - i, shift=1e-3 * i) for i in range(50))
    whole = read_text(tmp_path, text)
    monkeypatch.setattr(extxyz, "_BLOCK", 97)
    monkeypatch.setattr(extxyz, "_RANGE", 301)
    pieces = read_text(tmp_path, text)
    assert len(whole) == len(pieces) == 50
    for a, b in zip(whole, pieces, strict=True):
        assert a["energy"] == b["energy"]
        assert (a["positions"] == b["positions"]).all()


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_compressed_files_read_the_same(tmp_path, suffix):
    import bz2
    import lzma

    module = {".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix]
    path = tmp_path / f"frames.extxyz{suffix}"
    with module.open(path, "wb") as file:
        file.write("".join(water(-10.0 - i) for i in range(5)).encode())
    reader = open_reader(path)
    assert [float(s["energy"]) for s in reader.read(3, 5)] == [-13.0, -14.0]
    assert [float(s["energy"]) for s in reader.read(0, 2)] == [-10.0, -11.0]


def test_order_of_columns_and_columns_of_no_interest_do_not_matter(tmp_path):
    text = (
        '2\nLattice="5 0 0 0 6 0 0 0 7" Properties=id:I:1:forces:R:3:tag:S:1:Z:I:1:pos:R:3:fix:L:1'
        " REF_energy=-1.5\n"
        "1 .1 .2 .3 surface 8 1 2 3 T\n2 -.1 -.2 -.3 bulk 1 1 2 4 F\n"
    )
    (sample,) = read_text(tmp_path, text)
    assert sample["atomic_numbers"].tolist() == [8, 1]
    assert sample["positions"].tolist() == [[1, 2, 3], [1, 2, 4]]
    assert sample["forces"].tolist() == [[0.1, 0.2, 0.3], [-0.1, -0.2, -0.3]]
    assert np.diag(sample["cell"]).tolist() == [5, 6, 7]
    assert sample["pbc"].tolist() == [True, True, True]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('pbc="T T F"', [True, True, False]),
        ("pbc='T F T'", [True, False, True]),
        ("pbc=[True, False, False]", [True, False, False]),
        ("pbc={0 1 1}", [False, True, True]),
        ('pbc = "F F F"', [False, False, False]),
        ("pbc=F", [False, False, False]),
        ("", [True, True, True]),
    ],
)
def test_ways_to_write_pbc(tmp_path, text, expected):
    header = f'Lattice="3 0 0 0 3 0 0 0 3" {text} Properties=species:S:1:pos:R:3 energy=-1'
    frame = f"1\n{header}\nHe 0 0 0\n"
    assert read_text(tmp_path, frame)[0]["pbc"].tolist() == expected


def test_without_a_lattice_nothing_is_periodic(tmp_path):
    (sample,) = read_text(tmp_path, "1\nProperties=species:S:1:pos:R:3 energy=-1\nHe 0 0 0\n")
    assert not sample["pbc"].any()
    assert not sample["cell"].any()


def test_odd_comment_lines(tmp_path):
    header = (
        r'note="a \"quoted\" = word" name="it' + "'" + 's" "two words"=3 flag key_only '
        r"nested=[[1, 2], [3, 4]] curly={1 2 3} config_type='my group'"
    )
    (sample,) = read_text(tmp_path, water(-5, header))
    assert bytes(sample["group"]) == b"my group"
    assert sample["energy"] == -5


def test_windows_line_ends_blank_lines_tabs_and_fortran_numbers(tmp_path):
    text = (
        "\r\n\r\n 2 \r\nProperties=species:S:1:pos:R:3 energy=-1.0D+01\r\n"
        "h\t0 0 0.0D0\r\n  CL 0 0 1.27d+00\r\n\r\n"
    )
    (sample,) = read_text(tmp_path, text)
    assert sample["energy"] == -10
    assert sample["positions"][1].tolist() == [0, 0, 1.27]
    assert sample["atomic_numbers"].tolist() == [1, 17]


def test_a_byte_order_mark_is_skipped(tmp_path):
    whole, marked = (read_text(tmp_path, mark + water(-1) + water(-2)) for mark in ("", "\ufeff"))
    assert [sample["energy"] for sample in marked] == [-1, -2]
    assert (marked[0]["positions"] == whole[0]["positions"]).all()


def test_last_line_without_its_end(tmp_path):
    assert len(read_text(tmp_path, (water(-1) + water(-2)).rstrip("\n"))) == 2


def test_plain_xyz_has_no_labels_and_is_read_only_on_request(tmp_path):
    text = "2\nsome words, E: -3 eV\nC 0 0 0 9.9\n8 0 0 1.1 9.9\n"
    with pytest.raises(DataError, match="no frame has an energy"):
        read_text(tmp_path, text)
    (sample,) = read_text(tmp_path, text, LabelOptions(allow_unlabelled=True))
    assert sample["atomic_numbers"].tolist() == [6, 8]
    assert np.isnan(sample["energy"])
    assert sample["forces"].shape == (0, 3)


def test_elements_are_reported_wherever_they_stand(tmp_path):
    path = tmp_path / "a.xyz"
    path.write_text(
        "2\nProperties=pos:R:3:species:S:1 energy=-1\n0 0 0 Si\n0 0 1 O\n"
        "2\nProperties=species:S:1:pos:R:3 energy=-1\n  N 0 0 0\nCl 0 0 1\n"
    )
    assert open_reader(path).report()[0].endswith("elements: N O Si Cl")


def test_text_that_is_no_xyz_is_named(tmp_path):
    with pytest.raises(
        DataError, match="frame 1: line 6 should be a number of atoms but is 'VEC1'"
    ):
        read_text(tmp_path, water(-1) + "VEC1\n")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: t[:-12], "frame 1: the line of atom 2 has 5 columns; expected 7"),
        (lambda t: "\n".join(t.split("\n")[:7]), r"frame 1: cut off \(the file ends after 2 of 5"),
        (
            lambda t: t.replace("H 0 0.76 0.59 0 0 0", "H 0 0.76 0.59 0 0", 1),
            "atom 1 has 6 columns",
        ),
        (lambda t: t.replace("0.76", "0..76", 1), "frame 0: atom 1: '0..76' is not a number"),
        (lambda t: t.replace("pos:R:3:", "", 1), "no positions"),
        (lambda t: t.replace("species:S:1:", "", 1), "no elements"),
        (lambda t: t.replace("species:S:1", "species:S", 1), "expected name:type:width"),
        (lambda t: t.replace('"F F F"', '"maybe"', 1), "pbc is 'maybe'"),
        (lambda t: t.replace("pbc=", 'Lattice="1 2 3" pbc=', 1), "Lattice has 3 numbers"),
        (lambda t: t.replace("pbc=", 'Lattice="a 0 0 0 1 0 0 0 1" pbc=', 1), "not numbers"),
    ],
)
def test_damage_is_refused_by_file_and_frame(tmp_path, damage, message):
    with pytest.raises(DataError, match=message) as caught:
        read_text(tmp_path, damage(water(-1) + water(-2)))
    assert "frames.xyz, frame" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_shifted_column_is_noticed_even_if_the_words_add_up(tmp_path):
    text = (
        "2\nProperties=Z:I:1:pos:R:3 energy=-1\n8 0 0\n1 8 0 0 1\n"
        "2\nProperties=Z:I:1:pos:R:3 energy=-1\n8 0 0 0\n1 0 0 1\n"
    )
    with pytest.raises(DataError, match="frame 0: the line of atom 0 has 3 columns; expected 4"):
        read_text(tmp_path, text)


def test_truncated_gzip_is_refused(tmp_path):
    path = tmp_path / "frames.xyz.gz"
    rng = np.random.default_rng(0)
    text = "".join(water(e) for e in rng.normal(size=200))
    path.write_bytes(gzip.compress(text.encode())[:-200])
    with pytest.raises(DataError, match=r"frames\.xyz\.gz: cannot be read to the end"):
        open_reader(path)


def test_a_file_that_changes_meanwhile_is_noticed(tmp_path):
    path = tmp_path / "frames.xyz"
    path.write_text(water(-1) + water(-2))
    reader = pickle.loads(pickle.dumps(open_reader(path)))
    path.write_text(water(-1))
    with pytest.raises(DataError, match="changed while it was being read"):
        list(reader.read(0, 1))
    path.unlink()
    with pytest.raises(DataError, match="can no longer be read"):
        list(reader.read(0, 1))
