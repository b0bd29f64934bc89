"""What a molecule is does not depend on how it is written: order of atoms and eigenvectors."""

import numpy as np
import pytest
import torch
from random_molecules import collate, small_model

from bevatron.models.gpspp import observe
from bevatron.models.gpspp.features import Featurizer, featurize
from bevatron.models.gpspp.features.order import canonical_order
from bevatron.models.gpspp.features.topology import laplacian

Chem = pytest.importorskip("rdkit.Chem")

SYMMETRIC = {
    "chain": "CCCCCO",
    "ring": "c1ccccc1",
    "cage": "C12C3C4C1C5C2C3C45",
    "twins": "FC(F)(F)C(F)(F)C(F)(F)F",
    "two rings": "C1CC2CCC1CC2",
    "meso": "C[C@H](O)[C@@H](C)O",
    "chiral": "C[C@H](O)[C@H](C)O",
    "double bonds": r"F/C=C\C=C\F",
    "salt of three parts": "[Na+].[Na+].[O-]S(=O)(=O)[O-]",
    "two equal parts": "CC(C)C.CC(C)C",
    "zwitterion": "C[N+](C)(C)CC([O-])=O",
    "asymmetric": "CC(=O)Nc1ccc(O)cc1F",
    "eight": "C1CCCCCCC1",
    "pair": "CC",
    "atom": "C",
}

WRITINGS = 6


def predictions(samples, mode="2d", name="set1"):
    torch.manual_seed(0)
    model = small_model(torch.float64, feature_set=name).eval()
    batch = collate([{**sample, "targets": np.zeros(1, np.float32)} for sample in samples])
    batch = batch.to("cpu", torch.float64)
    with torch.no_grad():
        return model(batch, inputs=observe(batch, mode))["prediction"][:, 0].numpy()


@pytest.mark.parametrize("name", ["set1", "set2", "set3"])
@pytest.mark.parametrize("smiles", SYMMETRIC.values(), ids=SYMMETRIC.keys())
def test_any_writing_of_a_smiles_gives_the_same_prediction(smiles, name):
    molecule = Chem.MolFromSmiles(smiles)
    written = [Chem.MolToSmiles(molecule, doRandom=True) for _ in range(WRITINGS)]
    found = predictions(featurize([smiles, *written], name), name=name)
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


def embedded(smiles):
    from rdkit.Chem import AllChem

    molecule = Chem.AddHs(Chem.MolFromSmiles(smiles))
    AllChem.EmbedMolecule(molecule, randomSeed=3)
    return Chem.RemoveHs(molecule)


@pytest.mark.parametrize("mode", ["2d", "3d", "both"])
@pytest.mark.parametrize("smiles", ["c1ccccc1C(C)(C)C", "OCCO", "FC(F)(F)CC(F)(F)F", "C1CCCCC1"])
def test_any_order_of_an_sdf_gives_the_same_prediction(smiles, mode):
    """Atoms alike in 2D have different places in a conformer."""
    molecule, random = embedded(smiles), np.random.default_rng(0)
    blocks = [
        Chem.MolToMolBlock(Chem.RenumberAtoms(molecule, order.tolist()))
        for order in (random.permutation(molecule.GetNumAtoms()) for _ in range(WRITINGS))
    ]
    empty = np.zeros(0, np.uint8)
    raw = [{"smiles": empty, "block": np.frombuffer(b.encode(), np.uint8)} for b in blocks]
    samples = Featurizer().many(raw)
    assert all(len(sample["positions"]) for sample in samples)
    found = predictions(samples, mode)
    np.testing.assert_allclose(found, found[0], rtol=1e-6)


def test_a_turned_structure_has_the_same_eigenvectors():
    molecule = embedded("CC(C)Oc1ccc(cc1)C(C)C")
    places = molecule.GetConformer().GetPositions()
    turn = np.linalg.qr(np.random.default_rng(1).normal(size=(3, 3)))[0]
    first, second = (featurize(molecule, positions=p) for p in (places, places @ turn + 5.0))
    np.testing.assert_array_equal(first["laplacian_vectors"], second["laplacian_vectors"])


def test_version_1_keeps_the_order_in_which_a_molecule_is_written():
    """Models trained on it predict what they did."""
    adjacency = np.zeros((1, 6, 6), dtype=bool)
    ring = np.arange(6)
    adjacency[0, ring, ring - 1] = adjacency[0, ring - 1, ring] = True
    values, vectors = laplacian(adjacency)
    expected = np.linalg.eigh(np.diag(np.full(6, 2.0)) - adjacency[0])[1][:, 1:]
    overlap = np.abs((vectors[0, :, :5] * expected).sum(axis=0))
    np.testing.assert_allclose(overlap, 1.0, atol=1e-12)
    raw = {"smiles": np.frombuffer(b"C1CCCCC1", np.uint8)}
    first = Featurizer(version=1)(raw)["laplacian_vectors"]
    np.testing.assert_allclose(first, vectors[0], atol=1e-6)
    np.testing.assert_allclose(values[0, :5], [1, 1, 3, 3, 4], atol=1e-9)


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_degenerate_vectors_span_their_space_and_leave_the_constant_out(parts):
    """Also where an eigenvalue is cut after the seventh vector."""
    num = 9 * parts
    adjacency = np.zeros((1, num, num), dtype=bool)
    for part in range(parts):
        for leaf in range(1, 9):  # stars: eight leaves have the eigenvalue 1 seven times
            adjacency[0, 9 * part, 9 * part + leaf] = adjacency[0, 9 * part + leaf, 9 * part] = True
    order = np.random.default_rng(0).permutation(num)[None]
    values, vectors = laplacian(adjacency, order)
    matrix = np.diag(adjacency[0].sum(1)) - adjacency[0].astype(float)
    np.testing.assert_allclose(matrix @ vectors[0], vectors[0] * values[0], atol=1e-12)
    np.testing.assert_allclose(vectors[0].T @ vectors[0], np.eye(7), atol=1e-12)
    np.testing.assert_allclose(vectors[0].sum(axis=0), 0.0, atol=1e-12)
    assert np.count_nonzero(values[0] < 1e-9) == parts - 1


def test_alike_atoms_are_told_apart_by_their_distances():
    paths = np.abs(np.subtract.outer(np.arange(4), np.arange(4))).astype(np.uint64)[None]
    nothing = np.zeros((1, 4), dtype=np.int64)
    same = np.full((1, 4), 6, dtype=np.uint64)
    order = canonical_order(same, paths, nothing)[0]
    numbered = paths[0][np.ix_(order, order)]
    for shuffle in ([3, 2, 1, 0], [1, 0, 3, 2], [2, 0, 1, 3]):
        other = paths[:, shuffle][:, :, shuffle]
        order = canonical_order(same, other, nothing)[0]
        np.testing.assert_array_equal(other[0][np.ix_(order, order)], numbered)
    far = np.array([[0, 0, 0, 9]])
    ranks = [np.argsort(canonical_order(same, paths, remote)[0]) for remote in (far, far[:, ::-1])]
    np.testing.assert_array_equal(ranks[0], ranks[1][::-1])
