"""Predictions compared with known complexes: perfect ones, spoilt ones, and those of a model."""

import json

import numpy as np
import pytest
import torch

import bevatron as bv
from bevatron import cli
from bevatron.data.proteins.featurize import featurize
from bevatron.data.proteins.poses import make_pools
from bevatron.data.proteins.sample import Sources, sample
from bevatron.data.readers.proteins import open_components, read_structure
from bevatron.errors import ConfigError, DataError
from bevatron.models.alphafold3.predict import Predicted
from bevatron.recipes.alphafold3.evaluate import evaluate_stores, means
from bevatron.recipes.alphafold3.inputs import whole_sizes
from bevatron.recipes.alphafold3.measures import measure

pytestmark = pytest.mark.shared

SCORES = {"plddt": 50.0, "ptm": 0.5, "iptm": None}


@pytest.fixture(scope="module")
def entry(shared, components):
    """Two proteins that touch, with a ligand: the first two chains of a haemoglobin."""
    dictionary = open_components(components)
    structure = read_structure(shared / "data/complexes/mmcif/2hhb.cif.gz")
    kinds, entities = structure.chains.kind.tolist(), structure.chains.author.tolist()
    kept = [c for c in range(len(kinds)) if entities[c] in "AB" and kinds[c] != "water"]
    made = featurize(structure.take_chains(np.array(kept)), dictionary)
    codes = [dictionary[code] for code in codes_of(made)]
    return sample(made, 0, Sources(make_pools(codes, 1)), whole_sizes(4))


def codes_of(entry):
    from bevatron.data.proteins.featurize import describe

    return describe(entry)["components"]


def structure_at(entry, position):
    tokens = len(entry["restype"])
    flat = np.zeros((tokens, tokens, 64), dtype=np.float32)
    return Predicted(
        0, 0, position.astype(np.float32), np.full(len(position), 50.0, np.float32),
        flat[..., 0], flat[..., 0], flat, SCORES,
    )  # fmt: skip


def rotation():
    return np.linalg.qr(np.random.default_rng(0).normal(size=(3, 3)))[0]


def test_the_truth_moved_as_a_whole_is_perfect(entry):
    turn = rotation()
    turn *= np.sign(np.linalg.det(turn))
    found = measure(entry, structure_at(entry, entry["position"] @ turn + 5))
    for name in ("lddt", "lddt_protein", "lddt_protein_ligand", "lddt_interface", "dockq"):
        assert found[name] == pytest.approx(1, abs=1e-4), name
    assert found["rmsd"] < 1e-3
    assert found["pocket_rmsd"] < 1e-2
    assert found["plddt"] == 50.0
    assert found["distogram"] == pytest.approx(np.log(64), rel=1e-4)
    assert "iptm" not in found


def test_what_is_moved_apart_is_wrong_where_it_was_moved(entry):
    chain = entry["asym_id"][entry["atom_to_token"]]
    ligand = entry["molecule_type"][entry["atom_to_token"]] == 3
    polymers = np.unique(chain[~ligand])
    moved = entry["position"].copy()
    moved[chain == polymers[1]] += 30
    found = measure(entry, structure_at(entry, moved))
    assert found["lddt_protein"] == pytest.approx(1, abs=1e-4)
    assert found["lddt_protein_protein"] < 0.1
    assert found["dockq"] < 0.1
    assert found["rmsd"] > 5
    moved = entry["position"].copy()
    moved[ligand] += np.array([4.0, 0.0, 0.0])
    found = measure(entry, structure_at(entry, moved))
    assert found["dockq"] == pytest.approx(1, abs=1e-4)
    assert found["pocket_rmsd"] == pytest.approx(4, abs=1e-2)
    assert found["rmsd"] < 1e-3


def test_atoms_that_can_be_exchanged_do_not_count_as_wrong(entry):
    """The carboxylates of haem are symmetric: exchanging their oxygens changes nothing."""
    ptr, listed = entry["permutation_ptr"], entry["permutation_atoms"]
    uid = entry["ref_space_uid"]
    kind = entry["molecule_type"][entry["atom_to_token"]]
    position, number = entry["position"].copy(), 0
    for place, residue in enumerate(np.unique(uid)):
        atoms = np.flatnonzero(uid == residue)
        orders = listed[ptr[place] : ptr[place + 1]].reshape(-1, len(atoms))
        if kind[atoms[0]] == 3 and len(orders) > 1:
            position[atoms] = position[atoms[orders[1]]]
            number += 1
    assert number
    found = measure(entry, structure_at(entry, position))
    assert found["pocket_rmsd"] < 1e-2
    assert found["lddt"] == pytest.approx(1, abs=1e-4)


def test_a_store_is_evaluated_and_means_say_of_how_many(tiny_model, complexes, tmp_path, capsys):
    command = ["evaluate", str(tiny_model), str(complexes), "--steps", "1", "--device", "cpu"]
    assert cli.main([*command, "--out", str(tmp_path / "table.json")]) == 0
    said = capsys.readouterr().out
    table = json.loads((tmp_path / "table.json").read_text())
    assert [row["name"] for row in table["complexes"]] == [
        "1bna.cif.gz", "1fix.cif.gz", "1pfe.cif.gz",
    ]  # fmt: skip
    assert table["mean"]["lddt"]["structures"] == 3
    assert table["mean"]["lddt_rna"]["structures"] == 1
    assert 0 <= table["mean"]["lddt"]["value"] < 0.9
    assert table["mean"]["rmsd"]["value"] > 1
    assert "structures" in said
    assert "lDDT DNA" in said


def test_the_best_ranked_of_several_samples_counts(tiny_model, complexes):
    model = bv.load(tiny_model, device="cpu")
    best = bv.evaluate(model, complexes, samples=3, steps=1, most=1)["complexes"]
    sampled = []
    predict = model.predict

    def watched(*given):
        sampled.append(predict(*given))
        return sampled[-1]

    model.predict = watched
    again = bv.evaluate(model, complexes, samples=3, steps=1, most=1)["complexes"]
    assert best == again
    assert len(best) == 1
    scores = [each.scores["ranking_score"] for each in sampled[0]]
    assert scores == sorted(scores, reverse=True)
    assert best[0]["ptm"] == sampled[0][0].scores["ptm"]


def test_means_leave_out_complexes_without_the_measure():
    found = means([{"name": "a", "dockq": 0.5, "lddt": 1.0}, {"name": "b", "lddt": 0.0}])
    assert found["dockq"] == {"value": 0.5, "structures": 1}
    assert found["lddt"] == {"value": 0.5, "structures": 2}


def test_means_are_in_one_order_whatever_the_first_complex_has():
    found = means([{"lddt": 1.0, "lddt_dna": 1.0, "ptm": 0.5}, {"lddt_protein": 1.0, "dockq": 1.0}])
    assert list(found) == ["lddt", "lddt_dna", "lddt_protein", "dockq", "ptm"]


def test_what_is_no_store_is_refused(tiny_model, tmp_path):
    with pytest.raises(DataError, match=r"holds no structure.*FASTA.* `bevatron predict`"):
        evaluate_stores(tiny_model, [tmp_path])
    with pytest.raises(ConfigError, match="at least one store"):
        evaluate_stores(tiny_model, [])
    with pytest.raises(ConfigError, match="most: expected 1 or more, got -1"):
        evaluate_stores(tiny_model, [tmp_path], most=-1)
    with pytest.raises(DataError, match="it is a folder"):
        evaluate_stores(tmp_path / "no model", [tmp_path], out=tmp_path)
    with pytest.raises(ConfigError, match="steps: expected 1 or more, got 0"):
        bv.load(tiny_model, device="cpu").predict({}, 1, 0)
    assert torch.is_grad_enabled()


def test_structures_that_are_no_store_are_prepared_for_the_while(
    tiny_model, shared, components, tmp_path, capsys
):
    file, bad = shared / "data/complexes/mmcif/1fix.cif.gz", tmp_path / "bad.cif"
    bad.write_bytes(b"nothing")
    table = evaluate_stores(tiny_model, [file, bad], steps=1, device="cpu", components=components)
    said = capsys.readouterr().out
    assert "bad.cif" in said
    assert "files left out: 1\n" in said
    assert "listed in" not in said, "the list is removed with the store"
    (row,) = table["complexes"]
    assert (row["name"], row["store"]) == (file.name, f"{file}, {bad}")
