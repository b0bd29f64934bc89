"""Features of molecules: those of the official code, and each against its definition."""

import json
from itertools import pairwise

import numpy as np
import pytest

from bevatron.data.samples import FEATURE_SETS, collate_molecules, molecule_fields
from bevatron.data.samples.molecules import UNREACHABLE
from bevatron.models.gpspp.features import Featurizer, canonical, featurize, scaffold
from bevatron.models.gpspp.features.elements import element_tables

Chem = pytest.importorskip("rdkit.Chem")

AWKWARD = {
    "one atom": "C",
    "one ion": "[Na+]",
    "salt": "[Na+].[O-]C(=O)c1ccccc1",
    "isotopes": "[13CH3][2H]",
    "molecular hydrogen": "[H][H]",
    "explicit hydrogen": "[H]C([H])([H])[H]",
    "charged": "C[N+](C)(C)CC([O-])=O",
    "radical": "C[CH2]",
    "chiral": "C[C@H](N)C(=O)O",
    "stereo bond": r"F/C=C\Cl",
    "metal complex": "[Fe+2].[Cl-].[Cl-]",
    "lanthanide": "[La+3]",
    "hypervalent": "FS(F)(F)(F)(F)F",
    "long chain": "C" * 70,
    "cage": "C12C3C4C1C5C2C3C45",
    "dative": "[NH3]->[Cu]",
    "oganesson": "[Og]",
}

SMALL = [
    "C1CC2CC1C2C3CC3",
    "c1ccc2c(c1)cccc2C1CC1",
    "C12C3C4C1C5C2C3C45",
    "CC(C)(C)C1CC2(C1)CC2",
    "C1=CC=C2C=CC=C2C=C1",
    "CCO",
    "C1CC1",
    "c1ccccc1O",
    "CC(=O)Nc1ccc(O)cc1",
    "C1CC2CCC1CC2",
    "C=CC#N",
    "O",
]


@pytest.fixture(params=AWKWARD.values(), ids=AWKWARD.keys())
def awkward(request):
    return request.param


def adjacency(arrays):
    num = len(arrays["atom_features"])
    matrix = np.zeros((num, num), dtype=int)
    for sender, receiver in arrays["bonds"]:
        matrix[receiver, sender] = 1
    return matrix


def paths_by_hand(matrix):
    num = len(matrix)
    found = np.full((num, num), UNREACHABLE)
    reached = np.eye(num, dtype=bool)
    found[reached] = 0
    for length in range(1, num):
        further = (reached @ matrix > 0) & (found == UNREACHABLE)
        found[further] = length
        reached = further
    return found


@pytest.fixture
def official(shared):
    folder = shared / "golden" / "gpspp"
    with np.load(folder / "small_inputs.npz") as file:
        inputs = {name: file[name] for name in file}
    return json.loads((folder / "small.json").read_text())["smiles"], inputs


@pytest.mark.shared
def test_features_are_those_of_the_official_code(official):
    smiles, inputs = official
    for number, arrays in enumerate(featurize(smiles)):
        theirs = {name[2:]: inputs[name] for name in inputs if name.startswith(f"{number}_")}
        num = len(arrays["atom_features"])
        half = len(arrays["bonds"]) // 2  # theirs: all bonds one way, then all the other
        np.testing.assert_array_equal(arrays["atom_features"], theirs["node_feat"])
        for way in (0, 1):
            own = slice(way, None, 2)
            other = slice(way * half, (way + 1) * half)
            np.testing.assert_array_equal(arrays["bond_features"][own], theirs["edge_feat"][other])
            np.testing.assert_array_equal(arrays["bonds"][own, 0], theirs["senders"][other])
            np.testing.assert_array_equal(arrays["bonds"][own, 1], theirs["receivers"][other])
        paths = arrays["shortest_paths"].reshape(num, num) + 1
        np.testing.assert_array_equal(paths, theirs["shortest_path_distances"])
        walks = theirs["random_walk_landing_probs"]
        np.testing.assert_allclose(arrays["random_walk"], walks, atol=1e-6)
        values = theirs["lap_eig_vals"][0, :, 0]
        np.testing.assert_allclose(arrays["laplacian_values"], values, atol=1e-6)
        batch = collate_molecules([arrays], np.zeros(1, dtype=np.int64), [1.0])
        np.testing.assert_array_equal(batch.degree.numpy() + 1, theirs["centrality_encoding"])
        # Vectors up to sign where the eigenvalue stands alone.
        for k in range(7):
            if all(abs(values[k] - values[j]) > 1e-3 for j in range(7) if j != k) and k < 6:
                overlap = arrays["laplacian_vectors"][:, k] @ theirs["lap_eig_vecs"][:, k]
                assert abs(overlap) == pytest.approx(1.0, abs=1e-4)


def test_every_index_is_in_its_vocabulary(awkward):
    for name, chosen in FEATURE_SETS.items():
        arrays = featurize(awkward, name)
        for field in molecule_fields(name, 0):
            if field.name not in {"split", "source"}:
                field.check(arrays[field.name])
        atoms, bonds = arrays["atom_features"], arrays["bond_features"]
        assert (atoms >= 0).all()
        assert (atoms < chosen.atom_sizes).all()
        assert (bonds >= 0).all()
        assert (bonds < chosen.bond_sizes).all()


def test_paths_walks_and_eigenpairs_are_those_of_their_definitions(awkward):
    arrays = featurize(awkward)
    matrix = adjacency(arrays)
    num = len(matrix)
    paths = arrays["shortest_paths"].reshape(num, num)
    np.testing.assert_array_equal(paths, paths_by_hand(matrix))
    degree = matrix.sum(1)
    step = matrix / np.maximum(degree, 1)[:, None]
    for k in range(1, 17):
        back = np.diag(np.linalg.matrix_power(step, k)) if degree.any() else np.zeros(num)
        np.testing.assert_allclose(arrays["random_walk"][:, k - 1], back, atol=1e-6)
    laplacian = np.diag(degree) - matrix
    values, vectors = arrays["laplacian_values"], arrays["laplacian_vectors"]
    assert np.isfinite(vectors).all()
    kept = min(num - 1, 7) if degree.any() else 0
    expected = np.sort(np.linalg.eigvalsh(laplacian))[1 : kept + 1]
    np.testing.assert_allclose(values[:kept], expected, atol=1e-5)
    assert not values[kept:].any()
    assert not vectors[:, kept:].any()
    np.testing.assert_allclose(laplacian @ vectors, vectors * values, atol=1e-5)
    np.testing.assert_allclose(vectors[:, :kept].T @ vectors[:, :kept], np.eye(kept), atol=1e-5)


def test_both_directions_of_a_bond_stand_together(awkward):
    bonds, features = featurize(awkward)["bonds"], featurize(awkward)["bond_features"]
    np.testing.assert_array_equal(bonds[::2], bonds[1::2, ::-1])
    np.testing.assert_array_equal(features[::2], features[1::2])


@pytest.mark.parametrize("smiles", SMALL)
def test_environments_are_those_of_rdkit(smiles):
    chosen = FEATURE_SETS["ying21"]
    arrays = featurize(smiles, "ying21")
    molecule = Chem.MolFromSmiles(smiles)
    for radius in range(2, 9):
        column = chosen.atom.index(f"environment_{radius}")
        for atom in range(molecule.GetNumAtoms()):
            bonds = Chem.FindAtomEnvironmentOfRadiusN(molecule, radius, atom, useHs=True)
            submolecule = Chem.PathToSubmol(molecule, bonds, atomMap={})
            assert arrays["atom_features"][atom, column] == submolecule.GetNumAtoms()


def test_features_are_what_a_chemist_says():
    chosen = FEATURE_SETS["ying21_periodic"]
    arrays = featurize("C[C@H]([NH3+])C(=O)[O-]", "ying21_periodic")
    columns = dict(zip(chosen.atom, arrays["atom_features"].T.tolist(), strict=True))
    assert columns["atomic_number"] == [5, 5, 6, 5, 7, 7]
    assert columns["formal_charge"] == [5, 5, 6, 5, 5, 4]
    assert columns["num_hydrogens"] == [3, 1, 3, 0, 0, 0]
    assert columns["degree"] == [4, 4, 4, 3, 1, 1]
    assert columns["hybridisation"] == [2, 2, 2, 1, 1, 1]
    assert columns["chiral_centre"][1] in {1, 2}
    assert sum(map(bool, columns["chiral_centre"])) == 1
    assert columns["donor"][2] == 1
    assert columns["period"] == [1] * 6
    assert columns["group"] == [13, 13, 14, 13, 15, 15]
    assert columns["default_valence"] == [5, 5, 4, 5, 3, 3]
    assert columns["outer_electrons"] == [4, 4, 5, 4, 6, 6]
    assert columns["van_der_waals_radius"] == [4, 4, 3, 4, 2, 2]
    assert columns["covalent_radius"] == [4, 4, 3, 4, 2, 2]
    assert all(0 <= value < 33 for value in columns["gasteiger_charge"])


def test_a_value_beyond_its_vocabulary_at_either_end_is_other():
    place = FEATURE_SETS["ying21"].atom.index("formal_charge")
    found = [
        int(featurize(f"[Fe{charge}]", "ying21")["atom_features"][0, place])
        for charge in ("-6", "-5", "+5", "+6")
    ]
    assert found == [11, 0, 10, 11]


def test_bonds_are_what_a_chemist_says():
    arrays = featurize(r"C#CC/C=C\c1ccccc1", "ying21")
    bonds = {
        tuple(pair): row.tolist()
        for pair, row in zip(arrays["bonds"], arrays["bond_features"], strict=True)
    }
    assert bonds[0, 1][0] == 2
    assert bonds[3, 4][:2] == [1, 1]
    assert bonds[5, 6][0] == 3
    assert bonds[5, 6][3] == 1
    assert bonds[0, 1][3] == 0
    assert bonds[4, 5][2] == 1


@pytest.mark.parametrize(
    ("symbol", "period", "group", "kind"),
    [
        ("H", 1, 1, 0),
        ("He", 1, 18, 9),
        ("C", 2, 14, 0),
        ("Cl", 3, 17, 8),
        ("K", 4, 1, 1),
        ("Fe", 4, 8, 3),
        ("I", 5, 17, 8),
        ("Ba", 6, 2, 2),
        ("La", 8, 3, 4),
        ("Lu", 8, 3, 4),
        ("Hf", 6, 4, 3),
        ("Pb", 6, 14, 6),
        ("U", 9, 3, 5),
        ("Rf", 7, 4, 3),
        ("Og", 7, 18, 9),
        ("Si", 3, 14, 7),
    ],
)
def test_periods_groups_and_types_of_elements(symbol, period, group, kind):
    number = Chem.GetPeriodicTable().GetAtomicNumber(symbol)
    tables = element_tables()
    found = [tables[name][number] for name in ("period", "group", "element_type")]
    assert found == [period - 1, group - 1, kind]
    assert tables["atomic_number"][number] == number - 1


def test_all_elements_have_a_place_in_the_table():
    tables = element_tables()
    assert set(tables["group"][1:]) == set(range(18))
    assert set(tables["period"][1:]) == set(range(9))


def test_many_at_once_are_as_one_by_one():
    everything = [*AWKWARD.values(), *SMALL]
    for alone, together in zip(map(featurize, everything), featurize(everything), strict=True):
        for name, array in alone.items():
            np.testing.assert_allclose(array, together[name], atol=1e-6)


def test_conformer_of_a_cxsmiles_is_kept_and_hydrogen_goes():
    arrays = featurize("[H]O[H] |(0.76,-0.48,0.1;0,0.12,0.3;-0.76,-0.48,0.2)|")
    np.testing.assert_allclose(arrays["positions"], [[0, 0.12, 0.3]], atol=1e-6)


def test_coordinates_of_a_drawing_are_no_structure():
    arrays = featurize("CO |(0,0,;1.5,0,)|")
    assert len(arrays["positions"]) == 0
    assert b"drawing" in arrays["reason"].tobytes()


def test_an_rdkit_molecule_brings_its_conformer():
    from rdkit.Chem import AllChem

    molecule = Chem.AddHs(Chem.MolFromSmiles("CCO"))
    AllChem.EmbedMolecule(molecule, randomSeed=1)
    arrays = featurize(molecule)
    np.testing.assert_array_equal(arrays["atom_features"], featurize("CCO")["atom_features"])
    heavy = molecule.GetConformer().GetPositions()[:3]
    np.testing.assert_allclose(arrays["positions"], heavy, atol=1e-5)


@pytest.mark.parametrize(
    ("smiles", "sentence"),
    [
        ("C(C", "cannot be parsed"),
        ("", "empty"),
        ("C*", "not an element"),
        ("CC(C)(C)(C)C", "valence"),
        ("C" * 1100, "atoms"),
    ],
)
def test_what_is_no_molecule_is_named(smiles, sentence):
    from bevatron.errors import DataError

    with pytest.raises(DataError, match=sentence):
        featurize(smiles)
    raw = {"smiles": np.frombuffer(smiles.encode(), dtype=np.uint8)}
    fine = {"smiles": np.frombuffer(b"CC", dtype=np.uint8)}
    made = Featurizer().many([fine, raw, fine])
    assert [len(sample["atom_features"]) for sample in made] == [2, 0, 2]
    assert sentence in made[1]["reason"].tobytes().decode()
    for field in molecule_fields("set1", 0):
        if field.name not in {"split", "source"}:
            field.check(made[1][field.name])


@pytest.mark.parametrize(
    ("smiles", "sentence"),
    [
        ("\u0421CO", r"has '\u0421' \(U\+0421, cyrillic capital letter es\), which is not ASCII"),
        ("CCO\u200b", r"U\+200B, zero width space"),
        ("\ufeffCCO", r"U\+FEFF"),
        ("Cl\u00e9", r"U\+00E9"),
        ("CC\u00a0O", r"U\+00A0, no-break space"),
    ],
)
def test_letters_that_rdkit_would_drop_are_refused(smiles, sentence):
    from bevatron.errors import DataError

    with pytest.raises(DataError, match=sentence):
        featurize(smiles)


def test_what_follows_a_smiles_is_ignored_aloud():
    def reason(text):
        return featurize(text)["reason"].tobytes().decode()

    assert reason("CC O") == "ignored: what follows the SMILES after a space"
    assert reason(" CCO \n") == reason("CO |(0,0,1;1.5,0,0)| methanol") == ""
    places = [[0, 0, 0], [1.5, 0, 0], [2.0, 1.0, 0.0]]
    assert len(featurize("CCO ethanol", positions=places)["positions"]) == 3


@pytest.mark.parametrize("positions", [np.zeros((2, 3)), np.full((3, 3), np.nan), np.zeros((3, 3))])
def test_positions_that_make_no_sense_are_refused(positions):
    from bevatron.errors import DataError

    with pytest.raises(DataError, match="3D left out"):
        featurize("CCO", positions=positions)


def test_an_unknown_feature_set_is_named():
    from bevatron.errors import ConfigError

    with pytest.raises(ConfigError, match="set1"):
        featurize("C", "set9")


def test_large_molecules_are_searched_right():
    ring = "C1" + "C" * 98 + "1"
    paths = featurize(ring)["shortest_paths"].reshape(99, 99)
    expected = np.abs(np.subtract.outer(np.arange(99), np.arange(99)))
    np.testing.assert_array_equal(paths, np.minimum(expected, 99 - expected))


def test_paths_beyond_254_are_clipped():
    paths = featurize("C" * 300)["shortest_paths"].reshape(300, 300)
    assert paths[0, 254] == paths[0, 299] == 254
    assert paths[0, 253] == 253


def test_keys_are_of_molecules_not_of_their_smiles():
    same = featurize(["CC(=O)Oc1ccccc1C(=O)O", "OC(=O)c1ccccc1OC(C)=O"])
    assert same[0]["key"] == same[1]["key"] != 0
    others = ["CCO", "COC", "CCCO", "C1CCC1", "C1CC1C"]
    keys = {int(arrays["key"]) for arrays in featurize(others)}
    assert len(keys) == len(others)
    assert canonical("OCC") == "CCO"
    assert scaffold("CCc1ccccc1") == scaffold("Oc1ccccc1")


def test_signs_of_eigenvectors_do_not_depend_on_the_company():
    alone = featurize("CC(=O)Nc1ccc(O)cc1")["laplacian_vectors"]
    together = featurize(["CC(=O)Nc1ccc(O)cc1"] * 3)
    for first, second in pairwise(together):
        np.testing.assert_array_equal(first["laplacian_vectors"], second["laplacian_vectors"])
    np.testing.assert_allclose(alone, together[0]["laplacian_vectors"], atol=1e-6)
