"""Models know what they were trained on: elements, sizes, 3D, and the version of the features."""

import csv
import dataclasses
import json

import numpy as np
import pytest
import torch

from bevatron import cli
from bevatron.errors import ConfigError, DataError
from bevatron.models.gpspp import (
    CorruptionConfig,
    GPSPlusPlusConfig,
    TrainedOn,
    load_model,
    save_model,
)
from bevatron.models.gpspp import build as new_model
from bevatron.recipes.gpspp.data import MoleculeDataConfig, load_molecules
from bevatron.recipes.gpspp.domain import trained_on
from bevatron.recipes.gpspp.finetune import trained_model
from bevatron.recipes.gpspp.predictor import MoleculePredictor
from bevatron.recipes.gpspp.run import GpsppRun, build
from bevatron.recipes.gpspp.stores import prepare_files, prepare_molecules
from bevatron.train.loop import fit
from tiny_sizes import GPSPP

pytest.importorskip("rdkit.Chem")

SMILES = ["CCO", "CCN", "CCF", "CC=O", "CCCO", "CCC#N", "CCCC", "CC(F)F", "COC", "C1CC1"]
IN_3D = "[H]O[H] |(0.76,-0.48,0.1;0,0.12,0.3;-0.76,-0.48,0.2)|"
FIRST, NEWEST = 1, 2


def config(folder, *sources, **changes):
    values = {"output": str(folder), "model": GPSPP, "molecules": 4, "report": False}
    values |= {"train": {"epochs": 1, "device": "cpu", "threads": 1}, **changes}
    values["data"] = {
        "train": [str(s) for s in sources], "prepare_workers": 1, "valid_size": 2,
        **changes.get("data", {}),
    }  # fmt: skip
    return GpsppRun.from_values(values)


def write(path, smiles=SMILES):
    rows = "".join(f'"{each}",{i}.5\n' for i, each in enumerate(smiles))
    path.write_text(f"smiles,gap\n{rows}")
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    return write(tmp_path_factory.mktemp("molecules") / "m.csv")


@pytest.fixture(scope="module")
def run(tmp_path_factory, table):
    folder = tmp_path_factory.mktemp("run") / "run"
    fit(build(config(folder, table)))
    return folder


def model(seed=0, **changes):
    torch.manual_seed(seed)
    return new_model("gpspp-4", torch.float64, **{**GPSPP, **changes})


def test_a_run_records_its_elements_and_sizes(run):
    stored = json.loads((run / "model.json").read_text())["config"]
    known = stored["trained_on"]
    assert set(known["atomic_numbers"]) <= {6, 7, 8, 9}
    assert 6 in known["atomic_numbers"]
    assert (known["min_atoms"], known["max_atoms"], known["positions"]) == (3, 4, False)
    assert stored["features_version"] == NEWEST
    assert "trained_on" not in (run / "config.yaml").read_text()


def test_elements_are_those_of_the_training_part_alone(tmp_path):
    table = tmp_path / "m.csv"
    table.write_text("smiles,gap,split\nCCO,1,train\nCC,2,train\nCCBr,3,valid\nCCCI,3,test\n")
    other = write(tmp_path / "other.csv", ["CN", "C[Na]"])
    found = load_molecules(
        MoleculeDataConfig(train=(table, other), prepare_workers=1, split="random", valid_size=0.0),
        tmp_path / "a",
    )
    known = trained_on(found.train, GPSPlusPlusConfig(), CorruptionConfig())
    assert known.atomic_numbers == (6, 7, 8, 11, 35, 53)
    given = load_molecules(MoleculeDataConfig(train=(table,), prepare_workers=1), tmp_path / "b")
    known = trained_on(given.train, GPSPlusPlusConfig(), CorruptionConfig())
    assert known == TrainedOn((6, 8), 2, 3, positions=False, formal_charges=(0,))


def test_molecules_outside_the_training_data_are_named_and_predicted(run, tmp_path, capsys):
    unknown = tmp_path / "unknown.csv"
    smiles = ["CCO", "CCBr", "ClCCCCBr", "C", "no molecule"]
    unknown.write_text("smiles\n" + "\n".join(smiles) + "\n")
    out = tmp_path / "out.csv"
    assert cli.main(["predict", str(run), str(unknown), str(out), "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "3 outside the training data" in said
    assert "1 without a prediction" in said
    rows = list(csv.DictReader(out.open()))
    assert [row["reason"] for row in rows[:4]] == [
        "",
        "outside the training data, which have no Br",
        "outside the training data, which have no Cl, Br and at most 4 heavy atoms (6 here)",
        "outside the training data, which have at least 3 heavy atoms (1 here)",
    ]
    assert all(float(row["predicted_gap"]) for row in rows[:4])
    assert rows[4]["reason"]
    source = write(tmp_path / "s.csv", smiles)
    store = prepare_molecules([source], tmp_path / "s", samples_per_shard=2, workers=1)
    found = MoleculePredictor(run).predict(store)
    assert found.reason == [row["reason"] for row in rows]
    assert found.outside.tolist() == [False, True, True, True, False]
    assert MoleculePredictor(run).embed(smiles).reason == found.reason


def test_charges_that_no_training_molecule_has_are_named(table, tmp_path):
    known = TrainedOn((6, 7, 8), 1, 9, positions=False, formal_charges=(-1, 0))
    smiles = ["CCO", "CC[O-]", "C[NH3+]", "[O-]CC[NH2+]CBr"]
    found = MoleculePredictor(model(trained_on=known)).predict(smiles)
    assert found.reason == [
        "",
        "",
        "outside the training data, which have no atom of charge +1",
        "outside the training data, which have no Br and no atom of charge +1",
    ]
    # Models of before know no charges, and one set of features has none.
    old = dataclasses.replace(known, formal_charges=None)
    assert not MoleculePredictor(model(trained_on=old)).predict(["C[NH3+]"]).reason[0]
    assert known.joined(old).formal_charges is None
    plus = dataclasses.replace(known, formal_charges=(0, 1))
    assert known.joined(plus).formal_charges == (-1, 0, 1)
    files = MoleculeDataConfig(train=(table,), feature_set="set2", prepare_workers=1)
    train = load_molecules(files, tmp_path / "s").train
    set2 = GPSPlusPlusConfig(feature_set="set2")
    assert trained_on(train, set2, CorruptionConfig()).formal_charges is None


def test_evaluation_counts_the_molecules_outside(run, tmp_path, capsys):
    labelled = write(tmp_path / "m.csv", ["CCO", "CCBr", "CCCCCCCC", "CCN"])
    assert cli.main(["evaluate", str(run), str(labelled), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)[str(labelled)].values()
    assert found["outside the training data"] == 2


def test_an_ensemble_names_what_any_of_its_models_does_not_know():
    known = TrainedOn((6, 8), 1, 5, positions=True)
    wider = dataclasses.replace(known, atomic_numbers=(6, 8, 35))
    models = [model(trained_on=known), model(1, trained_on=wider), model(2), model(3)]
    found = MoleculePredictor(models).predict(["CO", "CBr", "CCCCCC"])
    assert found.reason == [
        "",
        "outside the training data, which have no Br",
        "outside the training data, which have at most 5 heavy atoms (6 here)",
    ]
    assert MoleculePredictor(model()).predict(["CBr"]).reason == [""]


def test_3d_is_refused_by_a_model_that_was_trained_without(run, tmp_path, capsys):
    with pytest.raises(ConfigError, match="trained without 3D structures"):
        MoleculePredictor(run, mode="3d")
    table = write(tmp_path / "m.csv")
    command = ["predict", str(run), str(table), str(tmp_path / "o.csv"), "--mode", "both"]
    assert cli.main(command) == 2
    assert "trained without 3D" in capsys.readouterr().err
    table = write(tmp_path / "water.csv", [IN_3D, *SMILES])
    shown = config(tmp_path / "run", table, train={"epochs": 0, "device": "cpu"})
    fit(build(shown))
    assert MoleculePredictor(tmp_path / "run", mode="3d").predict([IN_3D]).seen_3d.all()
    hidden = config(
        tmp_path / "flat", table, corruption={"masking": [1, 0, 0]}, train={"epochs": 0}
    )
    assert not build(hidden).model.config.trained_on.positions


def test_a_fine_tuned_model_knows_the_molecules_of_both_trainings(run, tmp_path):
    table = write(tmp_path / "m.csv", ["CCBr", "CBr", "CCCCCBr", "BrCCBr", "CCCBr"])
    data = {"valid_size": 0.0}
    made = build(config(tmp_path / "run", table, start_from=str(run), data=data))
    before = trained_model(run).config.trained_on
    known = made.model.config.trained_on
    assert known.atomic_numbers == (*before.atomic_numbers, 35)
    assert (known.min_atoms, known.max_atoms) == (2, 6)


# Versions of the features.


@pytest.fixture
def old(tmp_path):
    """A model folder that records no version, as those before the second."""
    save_model(model(), tmp_path / "old")
    description = tmp_path / "old" / "model.json"
    values = json.loads(description.read_text())
    del values["config"]["features_version"], values["config"]["trained_on"]
    description.write_text(json.dumps(values))
    return tmp_path / "old"


def prepared(table, out, version=None):
    return prepare_molecules([table], out, workers=1, features_version=version)


def test_an_old_model_keeps_the_features_that_it_was_trained_on(old, table, tmp_path):
    assert load_model(old).config.features_version == FIRST
    stores = [prepared(table, tmp_path / str(v), v) for v in (FIRST, NEWEST)]
    predictor = MoleculePredictor(old, precision="float64")
    expected = predictor.predict(stores[0]).values
    np.testing.assert_allclose(predictor.predict(SMILES).values, expected, rtol=1e-9)
    current = MoleculePredictor(model(), precision="float64")
    other = current.predict(stores[1]).values
    np.testing.assert_allclose(current.predict(SMILES).values, other, rtol=1e-9)
    assert np.abs(other - expected).max() > 1e-6
    with pytest.raises(DataError, match=r"has version 2 .* have version 1; give the molecules'"):
        predictor.predict(stores[1])
    with pytest.raises(DataError, match=r"has version 1 .* have version 2; prepare"):
        current.predict(stores[0])


def test_models_of_different_versions_make_one_ensemble(old):
    both = MoleculePredictor([old, model()], precision="float64").predict(SMILES).values
    one, other = (
        MoleculePredictor(each, precision="float64").predict(SMILES).values
        for each in (old, model())
    )
    np.testing.assert_allclose(both, (one + other) / 2, rtol=1e-9)


def test_a_run_takes_the_version_of_its_stores_and_mixes_none(table, tmp_path):
    first, second = (prepared(table, tmp_path / str(v), v).path for v in (FIRST, NEWEST))
    assert build(config(tmp_path / "a", first)).model.config.features_version == FIRST
    assert build(config(tmp_path / "b", first, table)).model.config.features_version == FIRST
    assert build(config(tmp_path / "c", table)).model.config.features_version == NEWEST
    with pytest.raises(DataError, match=r"2: has version 2 of the features"):
        build(config(tmp_path / "d", first, second))


def test_fine_tuning_an_old_model_goes_on_with_its_version(old, table, tmp_path):
    made = build(config(tmp_path / "a", table, start_from=str(old)))
    assert made.model.config.features_version == FIRST
    with pytest.raises(DataError, match="has version 2 of the features"):
        build(config(tmp_path / "b", prepared(table, tmp_path / "s").path, start_from=str(old)))


def test_a_store_that_was_begun_with_an_older_version_is_kept_and_told_of(table, tmp_path):
    prepared(table, tmp_path / "s", FIRST)
    content = {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    lines = prepare_files([table], tmp_path / "s", workers=1)
    assert content == {path.name: path.read_bytes() for path in (tmp_path / "s").iterdir()}
    assert any("version 1 of the features" in line for line in lines)
    lines = prepare_files([table], tmp_path / "new", workers=1)
    assert not any("version" in line for line in lines)
