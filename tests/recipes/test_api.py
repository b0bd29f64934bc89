"""`import bevatron as bv`: the same four functions for every system, in memory or to files."""

import gzip
import inspect
import json
import pydoc
import shutil
import subprocess
import sys
from importlib.resources import files
from itertools import islice

import ase.io
import numpy as np
import pytest

import bevatron as bv
from bevatron.cli import main
from bevatron.errors import BevatronError, CheckpointError, ConfigError
from bevatron.models.mace import load_model
from bevatron.recipes.training import begin

DATA = files("bevatron.recipes") / "demo_data"
SHORT = {"train": {"epochs": 1, "device": "cpu"}, "report": False}
MACE = {
    "preset": "small",
    "model": {"num_channels": 4, "l_max": 1, "max_L": 0, "correlation": 1, "r_max": 3.0},
}
GPSPP = {"model": {"num_layers": 1, "node_width": 16, "edge_width": 8, "num_heads": 2}}


def head(name, lines, place):
    with gzip.open(str(DATA / name), "rt") as file:
        path = place / name.removesuffix(".gz")
        path.write_text("".join(islice(file, lines)))
    return path


@pytest.fixture(scope="module")
def water(tmp_path_factory):
    """A file of structures, and a run."""
    place = tmp_path_factory.mktemp("mace")
    data = head("structures.extxyz.gz", 8 * 14, place)
    done = bv.train("mace", data=data, output=place / "run", **SHORT, **MACE)
    assert done.finished == "epochs"
    return data, place / "run"


@pytest.fixture(scope="module")
def gaps(tmp_path_factory):
    """A file of molecules, and a run."""
    pytest.importorskip("rdkit")
    place = tmp_path_factory.mktemp("gpspp")
    data = head("molecules.csv.gz", 40, place)
    bv.train("gpspp", data={"train": [str(data)]}, output=place / "run", **SHORT, **GPSPP)
    return data, place / "run"


@pytest.fixture(scope="module")
def communities(tmp_path_factory):
    """A graph, and a run."""
    place = tmp_path_factory.mktemp("graph")
    read = {"read": {"features": "rows"}}
    data = {"train": [str(DATA / "communities.npz")], **read}
    bv.train("graph", data=data, output=place / "run", **SHORT)
    return DATA / "communities.npz", place / "run"


def test_nothing_is_imported_before_it_is_used():
    code = "import sys, bevatron as bv; dir(bv); "
    code += "print([m for m in ('torch', 'numpy', 'yaml') if m in sys.modules], bv.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("]")[0] == "["


ORDERS = ["import bevatron.train", "from bevatron.train import fit", "bv.load", "bv.train"]
FORKS = f"""
import os, torch
for first in {ORDERS}:
    if os.fork() == 0:
        try:
            exec("import bevatron as bv\\n" + first)
            import bevatron.train as package
            from bevatron.train.loop import fit
            assert package.fit is fit
            assert bv.train is package
            bv.train("nothing")
        except Exception as error:
            print(first, "->", error, flush=True)
        os._exit(0)
    os.wait()
"""


@pytest.fixture(scope="module")
def ends():
    """How each order of imports ends, in processes that have imported nothing but torch."""
    done = subprocess.run([sys.executable, "-c", FORKS], check=True, capture_output=True, text=True)
    return dict(line.split(" -> ", 1) for line in done.stdout.splitlines())


@pytest.mark.parametrize("first", ORDERS)
def test_train_is_a_function_and_a_package_whatever_comes_first(first, ends):
    assert ends[first].startswith("there is no recipe 'nothing'")


def test_potentials_are_evaluated_and_used_as_by_commands(water, tmp_path, capsys):
    data, run = water
    errors = bv.evaluate(run, data)
    assert main(["evaluate", str(run), str(data), "--out", str(tmp_path / "e.json")]) == 0
    assert errors["total"]["forces_rmse"] > 0
    predicted = bv.predict(run, data)
    assert bv.predict(str(run), str(data), tmp_path / "out.xyz") == len(predicted) == 14
    calculator = bv.load(run)
    for atoms, written in zip(predicted, ase.io.read(tmp_path / "out.xyz", ":"), strict=True):
        assert atoms.get_potential_energy() == pytest.approx(written.info["predicted_energy"])
        np.testing.assert_allclose(
            atoms.get_forces(), written.arrays["predicted_forces"], atol=1e-8
        )
        assert "stress" not in atoms.calc.results
    for again in (bv.predict(calculator, predicted[:2]), bv.predict(run, predicted[0])):
        assert again[0].get_potential_energy() == pytest.approx(predicted[0].get_potential_energy())
        assert again[0] is not predicted[0]
    atoms = predicted[3].copy()
    atoms.calc = calculator
    assert atoms.get_potential_energy() == pytest.approx(predicted[3].get_potential_energy())
    assert bv.evaluate(calculator, [data])["total"] == pytest.approx(errors["total"])
    again = shutil.copytree(run, tmp_path / "again")
    assert bv.predict([run, again], predicted[0])[0].calc.results["energy_std"] == 0


def test_what_a_potential_cannot_do_is_one_sentence(water, tmp_path):
    data, run = water
    gold = ase.Atoms("Au", cell=[4, 4, 4], pbc=True)
    with pytest.raises(BevatronError, match="structures, frame 0 holds Au, which the model does"):
        bv.predict(run, gold)
    with pytest.raises(ConfigError, match="takes one potential"):
        bv.evaluate([run, run], data)
    with pytest.raises(CheckpointError, match="there is no such run"):
        bv.load(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match=r"model\.json: is a file, expected a run or a model"):
        bv.load(run / "model.json")
    with pytest.raises(CheckpointError, match=r"what bevatron\.load returned, got int$"):
        bv.predict(3, data)
    with pytest.raises(CheckpointError, match=r"got MACE$"):
        bv.predict(load_model(run), data)
    with pytest.raises(ConfigError, match="'out' goes with a file to predict, got list"):
        bv.predict(run, [gold], tmp_path / "out.extxyz")
    with pytest.raises(ConfigError, match="evaluate: expected files or stores"):
        bv.evaluate(run, [gold])
    with pytest.raises(BevatronError, match="structures, frame 0 holds no atoms"):
        bv.predict(run, ase.Atoms())
    with pytest.raises(ConfigError, match="holds a run already"):
        bv.train("mace", data=data, output=run, **SHORT, **MACE)
    with pytest.raises(ConfigError, match=r"train.epoch: unknown key \(did you mean 'epochs'"):
        bv.train("mace", data=data, output=tmp_path / "a", train={"epoch": 1})


@pytest.mark.parametrize("system", ["water", "gaps", "communities"])
def test_an_argument_that_there_is_not_is_named_with_the_function_that_was_called(
    system, request, tmp_path
):
    data, run = request.getfixturevalue(system)
    calls = {
        "load": lambda: bv.load(run, nonsense=3),
        "evaluate": lambda: bv.evaluate(run, data, nonsense=3),
        "predict": lambda: bv.predict(run, data, tmp_path / "out", nonsense=3),
    }
    loaded = bv.load(run)
    for name, call in [*calls.items(), ("predict", lambda: bv.predict(loaded, data, nonsense=3))]:
        with pytest.raises(TypeError) as error:
            call()
        assert str(error.value) == f"bevatron.{name}: has no argument 'nonsense' for this model"
    with pytest.raises(ConfigError, match=r"^nonsense: unknown key"):
        bv.train("mace", data=data, output=tmp_path / "a", nonsense=3)


def test_a_mistake_of_the_code_keeps_its_own_words(water, monkeypatch):
    def evaluate(model, sources, **options):
        raise TypeError("read() got an unexpected keyword argument 'unknown'")

    monkeypatch.setattr("bevatron.recipes.mace.api.evaluate", evaluate)
    with pytest.raises(TypeError, match=r"^read\(\) got"):
        bv.evaluate(water[1], water[0], device="cpu")


def test_a_way_to_resume_that_there_is_not_is_refused():
    unchecked = inspect.unwrap(begin)  # tests check annotations, users do not
    with pytest.raises(ConfigError, match="resume: expected one of 'never', 'auto', 'must'"):
        unchecked(None, "yes")


def test_the_tables_of_an_evaluation_are_written_where_a_text_says(communities, tmp_path):
    data, run = communities
    out = tmp_path / "errors.json"
    assert bv.evaluate(run, data, out=str(out)) == json.loads(out.read_text())


def test_a_yaml_file_is_trained_with_changes(water, tmp_path):
    data, _ = water
    path = tmp_path / "run.yaml"
    path.write_text(f"recipe: mace\ndata: {{train: ['{data}'], valid_size: 0.3}}\n")
    done = bv.train(path, output=tmp_path / "run", **SHORT, **MACE)
    assert done.folder == tmp_path / "run"
    assert "valid_size: 0.3" in (tmp_path / "run" / "config.yaml").read_text()
    assert bv.train(path, output=tmp_path / "run", resume="must", **SHORT, **MACE).epochs == 1


def test_molecules_are_evaluated_and_predicted(gaps, tmp_path):
    data, run = gaps
    (errors,) = bv.evaluate(run, data).values()
    assert errors["gap"]["mae"] > 0
    found = bv.predict(run, ["CCO", "no molecule"])
    assert np.isfinite(found.values[0]).all()
    assert found.reason[1]
    predictor = bv.load(run, dtype="float64")
    assert bv.predict(predictor, ["CCO"]).values[0] == pytest.approx(found.values[0], abs=1e-4)
    assert bv.predict(predictor, "CCO").values[0] == pytest.approx(found.values[0], abs=1e-4)
    with pytest.raises(BevatronError, match="molecules"):
        bv.predict(predictor, "molecules")
    assert bv.predict(predictor, data, tmp_path / "out.csv").rows == 39
    assert len(bv.predict(run, data)) == 39
    with pytest.raises(ConfigError, match=r"mode: is an option of bevatron\.load"):
        bv.predict(predictor, ["C"], mode="3d")


def test_graphs_are_evaluated_and_predicted(communities, tmp_path):
    data, run = communities
    errors = bv.evaluate(run, data)
    assert 0 <= errors["test"]["accuracy"] <= 1
    predictor = bv.load(run)
    assert bv.evaluate(predictor, [data])["test"] == pytest.approx(errors["test"])
    found = bv.predict(run, data)
    assert len(found.classes) == bv.predict(predictor, data, tmp_path / "out.csv") == 1500
    np.testing.assert_array_equal(predictor.predict(data).classes, found.classes)


def test_help_and_completion_see_the_functions():
    assert {"train", "load", "evaluate", "predict"} <= set(dir(bv))
    assert "evaluate(model" in pydoc.render_doc(bv, renderer=pydoc.plaintext)
