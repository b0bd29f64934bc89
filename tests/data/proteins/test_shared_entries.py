"""Every shared structure becomes an entry whose tables fit together."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.proteins.featurize import ENTRY_FIELDS, featurize
from bevatron.data.proteins.layout import lay_out
from bevatron.data.readers.proteins.components import Components
from bevatron.data.readers.proteins.structures import read_structure
from bevatron.errors import DataError

pytestmark = pytest.mark.shared
EVERY_KIND = ["1pfe", "1fix", "4gxy", "5ugo", "721p", "7a4d", "8f9h", "1gl4", "7pzb"]
VIRUS_CAPSIDS = {"1f2n", "7cth"}


@pytest.fixture(scope="module")
def plain(dictionary):
    """The dictionary, with frames of ligands in its ideal coordinates: to embed takes a minute."""
    patch = pytest.MonkeyPatch()
    patch.setattr("bevatron.data.proteins.conformers._embedded", lambda *_: [])
    yield Components(dictionary.path)
    patch.undo()


def first_assembly(structure):
    return structure.assembly(structure.assemblies[0].name if structure.assemblies else "1")


def check_structure(structure):
    """Residues and atoms fit together; no residue has two atoms of one name."""
    residue, name = structure.atoms.residue, structure.atoms.name
    assert len(name) == structure.residues.atom_ptr[-1] > 0
    assert np.isfinite(structure.atoms.position).all()
    assert len(set(structure.chains.label.tolist())) == len(structure.chains.label)
    assert len(set(zip(residue.tolist(), name.tolist(), strict=True))) == len(name)


def check_tables(entry):
    """Indices point to what they say, bonds are symmetric, permutations keep the bonds."""
    for field in ENTRY_FIELDS:
        field.check(entry[field.name])
    tokens, atoms, residues = (len(entry[k]) for k in ("restype", "position", "component"))
    token = np.repeat(np.arange(tokens), entry["num_atoms"])
    assert len(token) == atoms
    for key in ("centre_atom", "representative_atom"):
        np.testing.assert_array_equal(token[entry[key]], np.arange(tokens), key)
    residue = entry["ref_space_uid"]
    assert set(np.diff(residue)) <= {0, 1}
    assert (residue[0], residue[-1]) == (0, residues - 1)
    frames = entry["frame_atoms"][entry["has_frame"]]
    own = residue[entry["centre_atom"][entry["has_frame"]]]
    assert (residue[frames] == own[:, None]).all()
    assert (entry["frame_atoms"][~entry["has_frame"]] == -1).all()
    bonded = entry["token_bonds"]
    assert {tuple(p) for p in bonded} == {tuple(p) for p in bonded[:, ::-1]}
    assert entry["resolved"].any()
    assert np.isfinite(entry["position"]).all()
    for ids in ("asym_id", "entity_id", "molecule_id", "molecule_entity"):
        assert set(entry[ids]) == set(range(1, entry[ids].max() + 1)), ids
    check_permutations(entry)


def check_permutations(entry):
    residue, pointer = entry["ref_space_uid"], entry["permutation_ptr"]
    first = np.searchsorted(residue, np.arange(len(entry["component"]) + 1))
    inside = residue[entry["bonds"]]
    within = inside[:, 0] == inside[:, 1]
    linked = np.zeros(len(residue), dtype=bool)
    linked[entry["bonds"][~within].ravel()] = True
    order = np.argsort(inside[within, 0], kind="stable")
    bonds = entry["bonds"][within][order]
    edges = np.searchsorted(residue[bonds[:, 0]], np.arange(len(first)))
    for place in np.flatnonzero(np.diff(pointer)):
        members = np.arange(first[place], first[place + 1])
        listed = entry["permutation_atoms"][pointer[place] : pointer[place + 1]]
        listed = listed.reshape(-1, len(members))
        own = bonds[edges[place] : edges[place + 1]] - first[place]
        joined = np.zeros((len(members), len(members)), dtype=bool)
        joined[own[:, 0], own[:, 1]] = joined[own[:, 1], own[:, 0]] = True
        assert listed[0].tolist() == list(range(len(members)))
        assert len({row.tobytes() for row in listed}) == len(listed) > 1
        chosen = listed[:: max(1, len(listed) // 10)]
        assert (joined[chosen[:, :, None], chosen[:, None, :]] == joined).all()
        elements = entry["ref_element"][members]
        assert (elements[chosen] == elements).all()
        fixed = np.flatnonzero(linked[members])
        assert (chosen[:, fixed] == fixed).all()


@pytest.mark.parametrize("name", EVERY_KIND)
def test_tables_of_an_entry_fit_together(shared, plain, name):
    (path,) = (shared / "data/complexes/mmcif").glob(f"{name}.*")
    check_tables(featurize(first_assembly(read_structure(path)), plain))


def part_of(paths):
    """Every third; all of them where examples are drawn anew (make test-long)."""
    return paths if settings.get_current_profile_name() == "random" else paths[::3]


@pytest.mark.slow
def test_shared_structures_become_entries(shared, plain):
    folders = ("complexes/mmcif", "proteins/mmcif", "complexes/prot_dna/bound")
    paths = [path for folder in folders for path in sorted((shared / "data" / folder).iterdir())]
    assert len(paths) == 101 + 171 + 44
    slowest, number = (0.0, ""), 0
    for path in part_of(paths):
        structure = read_structure(path)
        check_structure(structure)
        if path.name[:4] in VIRUS_CAPSIDS:
            continue
        structure = first_assembly(structure)
        began = time.process_time()
        entry = featurize(structure, plain)
        slowest = max(slowest, (time.process_time() - began, path.name))
        check_tables(entry)
        number += 1
    print(f"{number} entries, the slowest took {slowest[0]:.2f} s ({slowest[1]})")
    assert number > 100


@pytest.mark.slow
def test_shared_pdb_files_are_read(shared):
    data = shared / "data/complexes"
    files = [*data.glob("prot_dna/*/*.pdb.gz"), *data.glob("bm5/*/*.pdb.gz")]
    assert len(files) == 836
    (damaged,) = (file for file in files if file.name == "1HMA.pdb.gz")  # within its last model
    with pytest.raises(DataError, match="line 23161: has no three numbers"):
        read_structure(damaged)
    for file in part_of(sorted(files)):
        if file != damaged:
            check_structure(read_structure(file))


@pytest.mark.parametrize("name", ["7a4d", "721p"])
def test_an_entry_is_ready_in_a_fraction_of_a_second(shared, plain, name):
    path = shared / f"data/complexes/mmcif/{name}.cif.gz"
    featurize(first_assembly(read_structure(path)), plain)
    began = time.process_time()
    featurize(first_assembly(read_structure(path)), plain)
    seconds = time.process_time() - began
    print(f"{name}: {seconds:.3f} s")
    # About 0.05 s; alphafold3-pytorch's features, without its alignments, take 2 s.
    assert seconds < 0.6


@pytest.fixture(scope="module")
def mixed(shared, plain):
    """DNA, a cyclic peptide with modified residues, ligands and ions, in two copies."""
    structure = read_structure(shared / "data/complexes/mmcif/1pfe.cif.gz").assembly("1")
    return structure, featurize(structure, plain)


@given(data=st.data())
def test_tokens_to_atoms_and_back(mixed, data):
    _, entry = mixed
    number = len(entry["num_atoms"])
    chosen = sorted(data.draw(st.sets(st.integers(0, number - 1), min_size=1)))
    ends = np.cumsum(entry["num_atoms"])
    atoms = np.concatenate([np.arange(ends[t] - entry["num_atoms"][t], ends[t]) for t in chosen])
    token = np.repeat(np.arange(number), entry["num_atoms"])
    assert sorted(set(token[atoms].tolist())) == chosen
    assert len(atoms) == entry["num_atoms"][chosen].sum()


def test_atoms_lead_back_to_the_structure(mixed, plain):
    structure, entry = mixed
    layout = lay_out(structure, plain)
    dry = layout.structure
    seen = entry["resolved"]
    source = layout.source[seen]
    assert len(set(source.tolist())) == len(source)
    np.testing.assert_array_equal(entry["position"][seen], dry.atoms.position[source])
    np.testing.assert_array_equal(entry["ref_element"][seen], dry.atoms.element[source])
    names = [
        "".join(chr(c + 32) for c in row).strip() for row in entry["ref_atom_name_chars"][seen]
    ]
    assert names == dry.atoms.name[source].tolist()
    # Every heavy atom of the file that its component has is in the entry.
    heavy = np.flatnonzero(dry.atoms.element > 1)
    assert set(heavy.tolist()) == set(source.tolist())


def test_selenomethionine_is_one_token_of_methionine(shared, plain):
    structure = read_structure(shared / "data/complexes/mmcif/3en2.cif.gz")
    found = (structure.residues.component == "MSE") & structure.residues.observed
    place = int(np.flatnonzero(found)[0])
    chain = structure.residues.chain[place]
    entry = featurize(structure.take_chains([int(chain)]), plain)
    token = np.flatnonzero(entry["residue_index"] == structure.residues.number[place])
    assert len(token) == 1
    assert (entry["restype"][token[0]], entry["num_atoms"][token[0]]) == (12, 8)
    first = int(entry["num_atoms"][: token[0]].sum())
    assert 34 not in entry["ref_element"]
    assert entry["ref_element"][first : first + 8].tolist() == [7, 6, 6, 8, 6, 6, 16, 6]


def test_an_entry_without_any_coordinates_has_nothing_resolved(shared, plain):
    structure = read_structure(shared / "data/complexes/mmcif/1fix.cif.gz")
    empty = structure.take_atoms(np.zeros(len(structure.atoms.name), dtype=bool))
    bare, whole = featurize(empty, plain), featurize(structure, plain)
    assert not bare["resolved"].any()
    np.testing.assert_array_equal(bare["bonds"], whole["bonds"])
