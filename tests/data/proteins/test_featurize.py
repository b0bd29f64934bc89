"""Entries of AlphaFold3: tokens, atoms, bonds and frames, compared with Protenix's features."""

import dataclasses
from functools import cache

import numpy as np
import pytest

from bevatron.data.proteins.featurize import ENTRY_FIELDS, describe, featurize
from bevatron.data.proteins.frames import pose_frames
from bevatron.data.proteins.sample import element_class
from bevatron.data.readers.proteins.structures import parse_structure, read_structure
from bevatron.errors import DataError

pytestmark = pytest.mark.shared
read = cache(read_structure)
GOLDEN = ["1fix", "1pfe", "7bqu"]


@pytest.fixture
def entry(shared, dictionary):
    """Function from a name to the features of its first assembly."""

    def made(name, **options):
        structure = read(shared / f"data/complexes/mmcif/{name}.cif.gz")
        return featurize(structure.assembly("1"), dictionary, **options)

    return made


def token_of_atom(entry):
    return np.repeat(np.arange(len(entry["restype"])), entry["num_atoms"])


def names(entry):
    return ["".join(chr(c + 32) for c in row).strip() for row in entry["ref_atom_name_chars"]]


def match(ours, golden):
    """Our atom and our token of each of theirs: chains have another order there."""
    tokens = token_of_atom(ours)
    places = {
        (int(ours["asym_id"][token]) - 1, int(ours["residue_index"][token]), name): atom
        for atom, (token, name) in enumerate(zip(tokens, names(ours), strict=True))
    }
    of_token = golden["atom_to_token_idx"]
    atom = np.array(
        [
            places[int(golden["asym_id"][token]), int(golden["residue_index"][token]), str(name)]
            for token, name in zip(of_token, golden["atom_name"], strict=True)
        ]
    )
    assert sorted(atom) == list(range(len(places)))
    token = np.full(len(golden["restype_index"]), -1)
    token[of_token] = tokens[atom]
    assert sorted(token) == list(range(len(ours["restype"])))
    return atom, token


def pairs(array):
    return {tuple(row) for row in np.asarray(array).tolist()}


def test_backbones_stay_where_a_chain_is_interrupted(dictionary):
    """Without its bond to the next residue, CO of a serine's backbone has a twin, its own COH."""
    atoms = {"N": (0, 1.4), "CA": (0, 0), "C": (1.5, 0), "O": (2, 1), "CB": (-1, -1), "OG": (-2, 0)}
    row = "ATOM  {:5d}  {:<3} SER A{:>4}    {:8.3f}{:8.3f}   0.000  1.00 12.50           {}\n"
    text = "".join(
        row.format(i, name, number, x + 9 * number, y, name[0])
        for number in (1, 4)
        for i, (name, (x, y)) in enumerate(atoms.items(), 1)
    )
    found = featurize(parse_structure(text.encode(), "a.pdb"), dictionary)
    assert found["permutation_ptr"][1] == 0


@pytest.mark.parametrize("name", GOLDEN)
def test_tokens_are_those_of_protenix(shared, entry, name):
    golden = np.load(shared / f"golden/alphafold3/features_{name}.npz")
    ours = entry(name)
    atom, token = match(ours, golden)
    for key, theirs, first in (
        ("restype", "restype_index", 0),
        ("residue_index", "residue_index", 0),
        ("entity_id", "entity_id", 1),
        ("sym_id", "sym_id", 1),
        ("asym_id", "asym_id", 1),
    ):
        np.testing.assert_array_equal(ours[key][token], golden[theirs] + first, key)
    kinds = np.stack([golden[f"is_{kind}"] for kind in ("protein", "rna", "dna", "ligand")])
    of_atom = golden["atom_to_token_idx"]
    np.testing.assert_array_equal(
        ours["molecule_type"][token][of_atom], kinds.argmax(axis=0), "molecule_type"
    )
    assert set(ours["centre_atom"]) == set(atom[golden["pae_rep_atom_mask"] > 0])
    assert set(ours["representative_atom"]) == set(atom[golden["distogram_rep_atom_mask"] > 0])
    assert (token_of_atom(ours)[ours["centre_atom"]] == np.arange(len(token))).all()


@pytest.mark.parametrize("name", GOLDEN)
def test_atoms_are_those_of_protenix(shared, entry, name):
    golden = np.load(shared / f"golden/alphafold3/features_{name}.npz")
    ours = entry(name)
    atom, _ = match(ours, golden)
    classes = element_class(ours["ref_element"])[atom]
    np.testing.assert_array_equal(classes, golden["ref_element_index"])
    np.testing.assert_array_equal(ours["ref_charge"][atom], golden["ref_charge"])
    np.testing.assert_array_equal(
        ours["ref_atom_name_chars"][atom], golden["ref_atom_name_chars_index"]
    )
    np.testing.assert_array_equal(ours["resolved"][atom], golden["label_coordinate_mask"])
    seen = golden["label_coordinate_mask"] > 0
    np.testing.assert_allclose(
        ours["position"][atom][seen], golden["label_coordinate"][seen], atol=1e-4
    )
    assert (ours["position"][~ours["resolved"]] == 0).all()
    spaces = np.stack([ours["ref_space_uid"][atom], golden["ref_space_uid"]])
    assert len(np.unique(spaces, axis=1).T) == len(set(golden["ref_space_uid"]))
    assert ours["resolution"] == golden["resolution"][0]


@pytest.mark.parametrize("name", GOLDEN)
def test_bonds_are_those_of_protenix(shared, entry, name):
    golden = np.load(shared / f"golden/alphafold3/features_{name}.npz")
    ours = entry(name)
    atom, token = match(ours, golden)
    assert pairs(ours["token_bonds"]) == pairs(token[golden["token_bonds_pairs"]])
    theirs = pairs(np.sort(atom[golden["bond_mask_pairs"]], axis=1))
    assert pairs(ours["polymer_ligand_bonds"]) == theirs
    differ = pairs(np.sort(atom[golden["bonds"][:, :2]], axis=1)) ^ pairs(ours["bonds"])
    # The cyclic depsipeptide is closed through a side chain: its sequence has no bond there.
    called = sorted({tuple(names(ours)[i] for i in pair) for pair in differ})
    assert (len(differ), called) == ((2, [("C", "N")]) if name == "1pfe" else (0, []))


@pytest.mark.parametrize("name", GOLDEN)
def test_frames_are_those_of_protenix_in_its_own_poses(shared, entry, name):
    golden = np.load(shared / f"golden/alphafold3/features_{name}.npz")
    ours = entry(name)
    atom, token = match(ours, golden)
    np.testing.assert_array_equal(ours["has_frame"][token], golden["has_frame"])
    theirs = np.where(golden["has_frame"][:, None] > 0, atom[golden["frame_atom_index"]], -1)
    of_token = golden["atom_to_token_idx"]
    single = np.bincount(of_token) == 1
    np.testing.assert_array_equal(ours["frame_atoms"][token][~single], theirs[~single])
    checked = 0
    for space in set(golden["ref_space_uid"][single[of_token]]):
        members = np.flatnonzero(golden["ref_space_uid"] == space)
        found = pose_frames(golden["ref_pos"][members])
        expected = golden["frame_atom_index"][of_token[members]]
        valid = golden["has_frame"][of_token[members]] > 0
        np.testing.assert_array_equal(
            np.where(found >= 0, members[found], -1)[valid], expected[valid]
        )
        assert (found[~valid] == -1).all()
        checked += len(members)
    assert checked == single.sum()


def test_frames_are_of_known_neighbours_that_are_on_no_line():
    bent = np.array([[0.0, 0, 0], [1.0, 0, 0], [1.2, 1.1, 0]])
    assert pose_frames(bent).tolist() == [[1, 0, 2], [0, 1, 2], [1, 2, 0]]
    line = np.array([[0.0, 0, 0], [1.0, 0, 0], [2.1, 0.1, 0]])
    assert (pose_frames(line) == -1).all()  # at 180 degrees within it, at 0 at its ends
    unknown = np.concatenate([bent, np.full((1, 3), np.nan)])
    assert pose_frames(unknown).tolist() == [*pose_frames(bent).tolist(), [-1] * 3]


@pytest.mark.parametrize("name", GOLDEN)
def test_permutations_are_those_of_protenix(shared, entry, name):
    golden = np.load(shared / f"golden/alphafold3/features_{name}.npz")
    ours = entry(name)
    atom, _ = match(ours, golden)
    for space in set(golden["ref_space_uid"]):
        members = np.flatnonzero(golden["ref_space_uid"] == space)
        columns = golden["atom_perm_list"][members].T
        theirs = {tuple(column) for column in columns[columns[:, 0] >= 0].tolist()}
        residue = ours["ref_space_uid"][atom[members[0]]]
        first, past = ours["permutation_ptr"][residue : residue + 2]
        listed = ours["permutation_atoms"][first:past].reshape(-1, len(members))
        assert (pairs(listed) or {tuple(range(len(members)))}) == theirs


@pytest.mark.parametrize("name", ["1bna", "1pfe"])
def test_permutations_of_a_structure_are_those_that_protenix_aligns_with(shared, entry, name):
    golden = np.load(shared / f"golden/alphafold3/permutation_{name}.npz")
    ours = entry(name)
    counts = {}
    for key, space, listed in (
        ("theirs", golden["in__ref_space_uid"], golden["in__atom_perm_list"]),
        ("ours", ours["ref_space_uid"], None),
    ):
        sizes = np.bincount(space)
        if listed is None:
            number = np.maximum(np.diff(ours["permutation_ptr"]) // sizes, 1)
        else:
            first = np.searchsorted(space, np.arange(len(sizes)), sorter=np.argsort(space))
            rows = listed[np.argsort(space, kind="stable")]
            number = (rows[first] >= 0).sum(axis=1)
        counts[key] = sorted(zip(sizes.tolist(), number.tolist(), strict=True))
    assert counts["ours"] == counts["theirs"]


def test_molecules_are_chains_joined_by_bonds(shared, entry):
    golden = np.load(shared / "golden/alphafold3/features_1pfe.npz")
    ours = entry("1pfe")
    atom, _ = match(ours, golden)
    chain = ours["asym_id"][token_of_atom(ours)][atom] - 1
    for key, theirs in (("molecule_id", "mol_id"), ("molecule_entity", "entity_mol_id")):
        both = np.stack([ours[key][chain], golden[theirs]])
        number = len(np.unique(both, axis=1).T)
        assert number == len(set(ours[key])) == len(set(golden[theirs]))


def test_atoms_of_copies_have_the_same_number(entry):
    ours = entry("1pfe")
    tokens = token_of_atom(ours)
    described = np.array(names(ours))
    for entity in set(ours["entity_id"]):
        numbered = {}
        for atom in np.flatnonzero(ours["entity_id"][tokens] == entity):
            key = (int(ours["residue_index"][tokens[atom]]), described[atom])
            assert numbered.setdefault(int(ours["entity_atom"][atom]), key) == key
        assert sorted(numbered) == list(range(len(set(numbered.values()))))


def test_every_field_is_there_and_has_its_type(entry):
    ours = entry("1pfe")
    assert set(ours) == {field.name for field in ENTRY_FIELDS}
    for field in ENTRY_FIELDS:
        field.check(ours[field.name])


def test_an_entry_says_what_it_is(entry):
    words = describe(entry("1fix"))
    assert (words["name"], words["methods"]) == ("1FIX", ["X-RAY DIFFRACTION"])
    chains = [(chain["label"], chain["kind"], chain["sequence"]) for chain in words["chains"]]
    assert chains == [("A", "rna", "UUCGGGCGCC"), ("B", "dna", "GGCGCCCGAA")]
    assert words["components"] == ["C", "DA", "DC", "DG", "G", "U"]


def test_too_many_tokens_are_refused(entry):
    with pytest.raises(DataError, match="1FIX: has 20 tokens, more than 19; leave"):
        entry("1fix", max_tokens=19)


def test_an_entry_of_water_is_refused(shared, dictionary):
    structure = read(shared / "data/complexes/mmcif/1fix.cif.gz")
    water = structure.take_chains(np.flatnonzero(structure.chains.kind == "water"))
    with pytest.raises(DataError, match="1FIX: no atom of a polymer or ligand is left"):
        featurize(water, dictionary)


def test_a_position_that_is_no_number_is_refused(shared, dictionary):
    structure = read(shared / "data/complexes/mmcif/1fix.cif.gz")
    position = structure.atoms.position.copy()
    position[30, 1] = np.nan
    atoms = dataclasses.replace(structure.atoms, position=position)
    with pytest.raises(DataError, match=r"1FIX: atom .* in chain A has the position .*nan"):
        featurize(dataclasses.replace(structure, atoms=atoms), dictionary)
