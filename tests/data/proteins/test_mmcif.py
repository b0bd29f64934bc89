"""A structure that is written as mmCIF is read again as it was."""

import dataclasses

import numpy as np
import pytest

from bevatron.data.proteins.mmcif import format_mmcif, format_pdb
from bevatron.data.readers.proteins import parse_structure, read_structure

pytest.importorskip("gemmi")

ENTRIES = ("1bna", "7a4d", "4gxy", "1pfe", "2hhb", "1ckb")


@pytest.mark.parametrize("entry", ENTRIES)
def test_reading_what_was_written_gives_the_same(entry, shared):
    before = read_structure(next((shared / "data").glob(f"*/mmcif/{entry}.cif.gz")))
    after = parse_structure(format_mmcif(before, {"ranking_score": "0.81"}).encode(), "again")
    for table in ("atoms", "residues", "chains", "links"):
        for field in dataclasses.fields(getattr(before, table)):
            old, new = (getattr(getattr(each, table), field.name) for each in (before, after))
            if field.name in {"position", "b_factor", "occupancy"}:
                np.testing.assert_allclose(new, old, atol=0.006)
            elif field.name not in {"altloc", "author_number"}:
                # Not of locations and numbers that the file left out.
                assert old.tolist() == new.tolist(), field.name


def test_text_of_any_kind_is_quoted(shared):
    structure = read_structure(next((shared / "data").glob("*/mmcif/1crn.cif.gz")))
    names = structure.atoms.name.astype("U12")
    names[0] = 'O5\' "x"'
    odd = dataclasses.replace(structure, atoms=dataclasses.replace(structure.atoms, name=names))
    again = parse_structure(format_mmcif(odd, {"said": "it's a 'test' # 1"}).encode(), "odd")
    assert again.atoms.name[0] == 'O5\' "x"'


@pytest.mark.parametrize(("name", "written"), [("Häm 1", "H_m_1"), ("", "structure")])
def test_a_structure_of_any_name_can_be_read_again(shared, name, written):
    structure = read_structure(next((shared / "data").glob("*/mmcif/1crn.cif.gz")))
    text = format_mmcif(dataclasses.replace(structure, name=name))
    assert text.startswith(f"data_{written}\n")
    assert len(parse_structure(text.encode(), "again").atoms.name) == len(structure.atoms.name)
    assert "ATOM" in format_pdb(text)


@pytest.mark.parametrize(("label", "written"), [("B", "B"), ("AB12", "A"), ("α", "A")])
def test_a_chain_as_pdb_has_a_label_of_one_letter(shared, label, written):
    structure = read_structure(next((shared / "data").glob("*/mmcif/1crn.cif.gz")))
    labels = np.array([label])
    chains = dataclasses.replace(structure.chains, label=labels, author=labels)
    text = format_pdb(format_mmcif(dataclasses.replace(structure, chains=chains)))
    atoms = [line for line in text.splitlines() if line.startswith("ATOM")]
    assert len(atoms) == len(structure.atoms.name)
    assert {line[20:22] for line in atoms} == {f" {written}"}
