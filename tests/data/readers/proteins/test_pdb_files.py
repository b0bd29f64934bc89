"""The PDB format, which goes the way of mmCIF."""

import gzip

import numpy as np
import pytest

from bevatron.data.readers.proteins.structures import parse_structure, read_structure
from bevatron.errors import DataError

PDB = """HEADER    TEST                                    02-JAN-98   1ABC
EXPDTA    X-RAY DIFFRACTION
REMARK   2 RESOLUTION.    2.10 ANGSTROMS.
REVDAT   2   13-JUL-11 1ABC    1       VERSN
REVDAT   1   08-APR-98 1ABC    0
SEQRES   1 A    4  GLY ALA MSE SER
LINK         SG  CYS B   1                ZN    ZN A 301     1555   1555  2.30
ATOM      1  N   ALA A   2      11.104   6.134  -6.504  1.00 12.50           N
ATOM      2  CA AALA A   2      11.639   6.071  -5.147  0.30 12.50           C
ATOM      3  CA BALA A   2      11.739   6.071  -5.147  0.70 12.50           C
ATOM      4  N   MSE A   2A     12.104   6.134  -6.504  1.00 12.50           N
TER       5      MSE A   2A
ATOM      6  SG  CYS B   1      10.000   0.000   2.300  1.00 12.50           S
TER       7      CYS B   1
HETATM    8 ZN    ZN A 301      10.000   0.000   0.000  1.00 12.50          ZN
HETATM    9  O   HOH A 401       1.000   2.000   3.000  1.00 12.50           O
END
"""


def test_a_pdb_file_has_what_an_mmcif_file_has():
    entry = parse_structure(PDB.encode(), "a.pdb")
    assert (entry.name, entry.resolution) == ("1ABC", pytest.approx(2.1))
    assert (str(entry.released), str(entry.deposited)) == ("1998-04-08", "1998-01-02")
    assert entry.methods == ("X-RAY DIFFRACTION",)
    assert entry.chains.author.tolist() == ["A", "B", "A", "A"]
    assert entry.chains.kind.tolist() == ["protein", "protein", "ion", "water"]
    assert entry.sequence(0) == "GAMS"
    assert entry.residues.observed[:4].tolist() == [False, True, True, False]
    assert entry.residues.insertion[2] == "A"
    assert entry.atoms.altloc[1] == "B"
    assert entry.atoms.name[entry.links.atoms].tolist() == [["SG", "ZN"]]


def test_a_chain_without_a_name_is_a_polymer_too():
    text = PDB.replace(" A ", "   ").replace(" A   2", "     2").replace("AALA A", "AALA  ")
    text = text.replace("BALA A", "BALA  ").replace("A 301 ", "  301 ").replace("A 401", "  401")
    for sequence in ("GAMS", "AM"):
        chains = parse_structure(text.encode(), "a.pdb").chains
        assert chains.author.tolist() == ["A", "B", "A", "A"]
        assert chains.kind.tolist() == ["protein", "protein", "ion", "water"]
        assert parse_structure(text.encode(), "a.pdb").sequence(0) == sequence
        text = "\n".join(line for line in text.split("\n") if not line.startswith("SEQRES"))


def test_lines_of_either_ending_and_compression_are_read(tmp_path):
    file = tmp_path / "a.pdb.gz"
    file.write_bytes(gzip.compress(PDB.replace("\n", "\r\n").encode()))
    plain = parse_structure(PDB.encode(), "a.pdb")
    assert read_structure(file).atoms.position.tolist() == plain.atoms.position.tolist()


def test_without_a_sequence_the_residues_are_those_observed():
    text = "".join(line for line in PDB.splitlines(True) if not line.startswith("SEQRES"))
    entry = parse_structure(text.encode(), "a.pdb")
    assert entry.sequence(0) == "AM"
    assert entry.residues.number[:2].tolist() == [1, 2]


def test_without_a_sequence_numbers_leave_room_for_residues_that_are_missing():
    """Where the author's numbers jump and the residues are apart, as many are missing."""
    row = "ATOM  {:5d}  CA  GLY A{:>4}{}   {:8.3f}   0.000   0.000  1.00 12.50           C\n"
    # A gap of 4, a jump of a bonded pair, an insertion, a piece of another chain, any number.
    authors = [
        (1, " ", 0),
        (6, " ", 12),
        (9, " ", 13.5),
        (9, "A", 15),
        (3, " ", 60),
        (9999, " ", 99),
    ]
    text = "".join(row.format(i, *each) for i, each in enumerate(authors, 1))
    entry = parse_structure(text.encode(), "a.pdb")
    assert entry.residues.number.tolist() == [1, 6, 7, 8, 10, 1010]
    assert entry.sequence(0) == "GGGGGG"


def test_models_are_counted_and_chosen():
    atoms = [line for line in PDB.splitlines(True) if line.startswith("ATOM")]
    moved = [line.replace("11.104", "19.104") for line in atoms]
    text = "".join(
        ["MODEL        1\n", *atoms, "ENDMDL\nMODEL        2\n", *moved, "ENDMDL\nEND\n"]
    )
    assert parse_structure(text.encode(), "a.pdb").models == (1, 2)
    second = parse_structure(text.encode(), "a.pdb", model=2)
    assert second.atoms.position[0, 0] == np.float32(19.104)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("  11.104", "     nan"),
        ("  11.104", "  1x.104"),
        ("  11.104", "        "),
        ("  11.104   6.134  -6.504  1.00 12.50           N", "  11.1"),
    ],
)
def test_a_damaged_line_is_one_sentence(old, new):
    with pytest.raises(DataError, match=r"^a\.pdb, line 8: has no three numbers [^\n]*$"):
        parse_structure(PDB.replace(old, new).encode(), "a.pdb")
