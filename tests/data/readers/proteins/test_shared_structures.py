"""Real entries, compared with tables and features of other implementations."""

import csv
import json
from functools import cache

import numpy as np
import pytest

from bevatron.data.readers.proteins.components import expected_atoms, open_components
from bevatron.data.readers.proteins.structure import POLYMERS
from bevatron.data.readers.proteins.structures import read_structure

pytestmark = pytest.mark.shared
read = cache(read_structure)


def test_every_listed_chain_has_its_sequence_date_and_resolution(shared):
    folder = shared / "data/proteins"
    rows = list(csv.DictReader((folder / "chains.csv").open()))
    modified = resolutions = 0
    for row in rows:
        entry = read(folder / f"mmcif/{row['pdb_id']}.cif.gz")
        named = (entry.chains.author == row["auth_chain"]) & (entry.chains.kind == "protein")
        (chain,) = np.flatnonzero(named).tolist()
        ours, theirs = entry.sequence(chain), row["sequence"]
        assert len(ours) == len(theirs) == int(row["length"])
        # The table has X wherever a residue is modified.
        differ = [(a, b) for a, b in zip(ours, theirs, strict=True) if a != b]
        assert {b for _, b in differ} <= {"X"}
        modified += bool(differ)
        assert entry.methods == (row["method"],) or not row["method"]
        date = row["release_date"]
        assert str(entry.released) == date or (
            entry.released is None and date in {"", "1900-01-01"}
        )
        # The table takes another field where a file has two, and none for some.
        resolutions += entry.resolution == (float(row["resolution"]) if row["resolution"] else None)
        first, past = entry.chains.residue_ptr[chain : chain + 2]
        backbone = np.zeros(len(entry.residues.number), dtype=int)
        for name in ("N", "CA", "C"):
            np.add.at(backbone, entry.atoms.residue[entry.atoms.name == name], 1)
        # It counts both components of a residue of 3dl7 that has two.
        found = (backbone[first:past] == 3).sum()
        assert found == int(row["n_backbone"]) or row["pdb_id"] in {"3dl7", "3jqh"}
    assert (len(rows), modified) == (335, 10)
    assert resolutions >= 324


@pytest.mark.parametrize("name", ["1ckb", "1d66"])
def test_atoms_of_a_chain_are_those_of_openfold(shared, name):
    golden = np.load(shared / f"golden/alphafold2/features_raw_{name}_A.npz")
    entry = read(shared / f"data/proteins/mmcif/{name}.cif.gz")
    named = (entry.chains.author == "A") & (entry.chains.kind == "protein")
    (chain,) = np.flatnonzero(named).tolist()
    assert entry.sequence(chain) == str(golden["sequence"][0])
    assert str(entry.released) == str(golden["release_date"][0])
    assert entry.resolution == pytest.approx(float(golden["resolution"][0]))
    first = entry.chains.residue_ptr[chain]
    for place, (positions, mask) in enumerate(
        zip(golden["all_atom_positions"], golden["all_atom_mask"], strict=True)
    ):
        atoms = slice(*entry.residues.atom_ptr[first + place : first + place + 2])
        heavy = entry.atoms.position[atoms][entry.atoms.element[atoms] > 1]
        known = heavy[entry.atoms.name[atoms][entry.atoms.element[atoms] > 1] != "OXT"]
        theirs = positions[mask > 0]
        assert sorted(known.tolist()) == sorted(theirs.tolist())


@pytest.mark.parametrize("name", ["1fix", "1pfe", "7bqu"])
def test_atoms_of_an_assembly_are_those_of_protenix(shared, name):
    golden = np.load(shared / f"golden/alphafold3/features_{name}.npz")
    entry = read(shared / f"data/complexes/mmcif/{name}.cif.gz").assembly("1")
    dry = entry.take_chains(np.flatnonzero(entry.chains.kind != "water"))
    dry = dry.take_atoms(dry.atoms.element > 1)
    ours = {
        (str(dry.residues.component[r]), str(atom), *np.round(position, 2).tolist())
        for r, atom, position in zip(
            dry.atoms.residue, dry.atoms.name, dry.atoms.position.astype(float), strict=True
        )
    }
    seen = golden["label_coordinate_mask"] > 0
    theirs = {
        (str(code), str(atom), *np.round(position, 2).tolist())
        for code, atom, position in zip(
            golden["res_name"][seen],
            golden["atom_name"][seen],
            golden["label_coordinate"][seen].astype(float),
            strict=True,
        )
    }
    # Protenix exchanges NH1 and NH2 of an arginine whose names are the wrong way round.
    assert {atom[:2] for atom in ours ^ theirs} <= {("ARG", "NH1"), ("ARG", "NH2")}
    assert len(ours ^ theirs) <= 4
    assert len(dry.chains.label) == len(np.unique(golden["asym_id"]))


def test_polymers_have_the_sequences_of_the_manifest(shared):
    folder = shared / "data/complexes"
    listed = json.loads((folder / "manifest.json").read_text())["structures"]
    kinds = {"polypeptide(L)": "protein", "polydeoxyribonucleotide": "dna"}
    kinds |= {"polyribonucleotide": "rna"}
    for row in listed:
        entry = read(folder / row["file"])
        ours = {
            (str(kind), len(entry.sequence(chain)))
            for chain, kind in enumerate(entry.chains.kind)
            if kind in POLYMERS
        }
        theirs = {(kinds[e["type"]], len(e["seq"])) for e in row["entities"] if e["type"] in kinds}
        assert ours == theirs or not row["entities"], row["id"]
        assert len(entry.models) == row["models"]


def test_the_assembly_files_of_alphafold3_pytorch_are_parted_into_ligands(shared):
    entry = read(shared / "data/complexes/mmcif/721p.cif.gz")
    assert entry.chains.kind.tolist() == ["protein"] * 2 + ["ion", "ligand"] * 2
    assert entry.chains.entity.tolist() == ["4", "4", "MG", "GNP", "MG", "GNP"]
    assert [len(entry.sequence(chain)) for chain in range(3)] == [166, 166, 0]
    # All polymers have entity 6 there.
    entry = read(shared / "data/complexes/mmcif/7a4d.cif.gz")
    assert [len(entry.sequence(chain)) for chain in range(6)] == [118, 117, 113, 112, 41, 41]
    assert entry.chains.entity[:6].tolist() == ["6", "6.2", "6.3", "6.4", "6.5", "6.5"]
    assert sorted(entry.links.kind.tolist()) == ["covale"] * 3 + ["disulf"] * 6


@pytest.mark.slow
def test_atoms_that_a_file_names_as_before_2007_are_found(shared, tmp_path):
    entry = read(shared / "data/complexes/mmcif/6lu7.cif.gz")
    components = shared / "data/complexes/ccd_subset.cif.gz"
    found = expected_atoms(entry, open_components(components, tmp_path / "components.arrow"))
    (residue,) = np.flatnonzero(entry.residues.component == "02J").tolist()
    mine = found.residue == residue
    seen = entry.atoms.name[found.atom[mine & found.observed]].tolist()
    named = dict(zip(found.name[mine & found.observed].tolist(), seen, strict=True))
    assert named == {"C4": "C4", "C5": "C5", "C6": "C6", "O1": "O1"} | {
        "N": "N2", "CA": "C3", "C": "C41", "O": "O42",
    }  # fmt: skip


def test_a_residue_fused_of_several_derives_from_none(shared):
    entry = read(shared / "data/proteins/mmcif/3kcs.cif.gz")
    (residue,) = np.flatnonzero(entry.residues.component == "NRQ").tolist()
    assert (entry.residues.parent[residue], entry.residues.letter[residue]) == ("", "X")
