"""The ablations of GPS++: their rows, their table, and that they go on where they stopped."""

import json
from importlib.resources import files

import pytest
import yaml
from benchmarks.paper import gpspp_ablation
from benchmarks.paper.gpspp_ablation import ROWS, chosen_rows, configuration, parser

from bevatron.models.gpspp import GPSPlusPlus
from bevatron.recipes.gpspp.stores import prepare_molecules
from tiny_sizes import GPSPP

DEMO = files("bevatron.recipes") / "demo_data" / "molecules.csv.gz"


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The bundled molecules, prepared."""
    return prepare_molecules([DEMO], tmp_path_factory.mktemp("m") / "store", workers=1).path


@pytest.fixture
def base(tmp_path):
    """A recipe that is quick."""
    path = tmp_path / "base.yaml"
    train = {"threads": 1, "dtype": "float64"}
    path.write_text(yaml.safe_dump({"recipe": "gpspp", "model": GPSPP, "train": train}))
    return path


def test_rows_are_chosen_by_name_and_table():
    assert set(chosen_rows([])) == set(ROWS)
    assert chosen_rows(["set2"]) == ["baseline", "set2"]
    assert {ROWS[name].table for name in chosen_rows(["table4"])} == {0, 4}
    assert "no-attention" in chosen_rows(["table7"])
    with pytest.raises(SystemExit, match=r"there is no 'table5' .known: table3, table4"):
        chosen_rows(["table5"])


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_is_a_model_that_differs(name, tmp_path, base):
    options = parser().parse_args(["store", "--out", str(tmp_path), "--base", str(base)])
    plain = configuration(options, "baseline", 0)
    found = configuration(options, name, 3)
    assert found.train.seed == 3
    assert found.molecules == plain.molecules
    changed = (found.model, found.corruption) != (plain.model, plain.corruption)
    assert changed == (name != "baseline")
    GPSPlusPlus(found.model)
    model = found.model
    blind = model.attention and not (model.distance_bias or model.distance_sum)
    assert found.optim.lr == pytest.approx(2e-4 if blind else 4e-4)
    assert blind == (name == "no-3d-bias-centrality")
    assert found.data.feature_set == model.feature_set


def test_an_ablation_goes_on_where_it_stopped_and_writes_its_table(
    tmp_path, store, base, monkeypatch, capsys
):
    cells = tmp_path / "cells"
    words = f"{store} --out {cells} --base {base} --epochs 2 --seeds 2 --device cpu"
    words += " --rows no-attention set2 --molecules 16 --train-size 48 --valid-size 16"
    gpspp_ablation.main(words.split())
    assert "set2: left out" in capsys.readouterr().out
    runs = [json.loads(path.read_text()) for path in sorted(cells.glob("*.json"))]
    assert len(runs) == 4
    assert {run["steps"] for run in runs} == {runs[0]["steps"]}
    gpspp_ablation.main(["--collect", str(cells), "--results", str(tmp_path)])
    rows = json.loads((tmp_path / "gpspp" / "ablation.json").read_text())["rows"]
    assert [row["row"] for row in rows] == ["baseline", "no-attention"]
    last = {(run["row"], run["seed"]): run["curve"][-1]["valid"] for run in runs}
    change = [1e3 * (last["no-attention", n] - last["baseline", n]) for n in (0, 1)]
    assert rows[1]["change"].split()[0] == f"{sum(change) / 2:+.1f}"
    assert (tmp_path / "gpspp" / "ablation_time.png").stat().st_size > 1000

    def refuse(*args):
        raise AssertionError("was run again")

    monkeypatch.setattr(gpspp_ablation, "train", refuse)
    gpspp_ablation.main(words.split())


def test_an_ablation_needs_data_and_a_limit(capsys):
    for words in ([], ["store"]):
        with pytest.raises(SystemExit):
            gpspp_ablation.main(words)
        assert "expected a STORE and --epochs" in capsys.readouterr().err
