"""Training for a given time, and the ablations that are made of it."""

import itertools
import json
import subprocess
import threading
import time
from importlib.resources import files
from types import SimpleNamespace

import pytest
import yaml
from benchmarks.paper import gpspp_ablation
from benchmarks.paper.gpspp_ablation import ROWS, Ablation, chosen_rows, configuration, run_ablation
from benchmarks.paper.timed import Budget, fit_within

from bevatron.errors import BevatronError, ConfigError
from bevatron.models.gpspp import GPSPlusPlus
from bevatron.recipes.gpspp.run import GpsppRun, build
from bevatron.recipes.gpspp.stores import prepare_molecules
from bevatron.train.logger import read_journal

DEMO = files("bevatron.recipes") / "demo_data" / "molecules.csv.gz"
TINY = {
    "num_layers": 1, "node_width": 16, "edge_width": 8, "global_width": 4, "num_heads": 2,
    "ffn_width": 16, "expansion": 2, "embedding_width": 4, "num_kernels": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """The bundled molecules, prepared."""
    return prepare_molecules([DEMO], tmp_path_factory.mktemp("m") / "store", workers=1).path


@pytest.fixture
def base(tmp_path):
    """A recipe that is quick."""
    path = tmp_path / "base.yaml"
    train = {"threads": 1, "dtype": "float64"}
    path.write_text(yaml.safe_dump({"recipe": "gpspp", "model": TINY, "train": train}))
    return path


def run_of(folder, store, **changes):
    values = {
        "output": str(folder / "run"), "model": TINY, "molecules": 16, "report": False,
        "data": {"train": [str(store)], "train_size": 64, "valid_size": 16},
        "train": {"device": "cpu", "threads": 1, **changes},
    }  # fmt: skip
    return build(GpsppRun.from_values(values))


def test_a_run_ends_with_its_time_and_its_rate_at_zero(tmp_path, store, monkeypatch):
    run = run_of(tmp_path, store)
    looks = itertools.count(1)  # a clock that goes on when it is looked at: no step is slow
    clock = SimpleNamespace(monotonic=lambda: 0.02 * next(looks))
    monkeypatch.setattr("benchmarks.paper.timed.time", clock)
    timed = fit_within(run, Budget(seconds=2.0, warmup=0.2))
    assert 2.0 <= clock.monotonic() < 2.4
    assert timed.result.finished is None or timed.result.finished == "time"
    assert timed.result.stopped_by is None
    steps = [r for r in read_journal(run.folder / "metrics.jsonl") if r["kind"] == "step"]
    rates = [record["lr"] for record in steps]
    top = rates.index(max(rates))
    assert top > 0
    assert rates[0] < 0.1 * rates[top]
    assert rates[:top] == sorted(rates[:top])
    assert rates[top:] == sorted(rates[top:], reverse=True)
    assert rates[-1] < 0.1 * max(rates)
    assert timed.curve[-1]["elapsed"] >= 2.0
    assert all("gap_mae" in record["valid"] for record in timed.curve)
    assert len(timed.curve) > 2
    assert not (run.folder / "checkpoints").exists() or not any(
        (run.folder / "checkpoints").iterdir()
    )


def test_a_number_of_epochs_is_a_budget_too(tmp_path, store):
    run = run_of(tmp_path, store, evaluate_every=2)
    timed = fit_within(run, Budget(epochs=3))
    assert [record["epoch"] for record in timed.curve] == [0, 1, 2]
    assert [bool(record["valid"]) for record in timed.curve] == [False, True, True]
    assert timed.result.finished == "epochs"
    with pytest.raises(ValueError, match="seconds or epochs"):
        fit_within(run, Budget())


def test_rows_are_chosen_by_name_and_table():
    assert set(chosen_rows([])) == set(ROWS)
    assert chosen_rows(["set2"]) == ["baseline", "set2"]
    assert {ROWS[name].table for name in chosen_rows(["table4"])} == {0, 4}
    assert "no-attention" in chosen_rows(["table7"])
    with pytest.raises(ConfigError, match=r"there is no 'table5' .known: table3, table4"):
        chosen_rows(["table5"])


@pytest.mark.parametrize("name", list(ROWS))
def test_every_row_is_a_model_that_differs(name, tmp_path, base):
    ablation = Ablation((tmp_path,), tmp_path, epochs=1, base=base)
    plain = configuration(ablation, "baseline", 0)
    found = configuration(ablation, name, 3)
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


def test_an_ablation_writes_its_table_and_goes_on(tmp_path, store, base, monkeypatch, capsys):
    words = f"{store} --out {tmp_path / 'a'} --base {base} --epochs 2 --seeds 2"
    words += " --rows no-attention set2 --molecules 16 --train-size 48 --valid-size 16"
    words += " --device cpu"
    assert gpspp_ablation.main(words.split()) == 0
    out = capsys.readouterr().out
    assert "set2: left out" in out
    result = json.loads((tmp_path / "a" / "gpspp_ablation.json").read_text())
    rows = {row["row"]: row for row in result["rows"]}
    assert list(rows) == ["baseline", "no-attention"]
    assert rows["baseline"]["change"] == 0.0
    last = {
        (run["row"], run["seed"]): run["curve"][-1]["valid"] for run in result["runs"]
    }  # fmt: skip
    change = [last["no-attention", seed] - last["baseline", seed] for seed in (0, 1)]
    assert rows["no-attention"]["change"] == pytest.approx(sum(change) / 2)
    assert rows["no-attention"]["parameters"] < rows["baseline"]["parameters"]
    assert {run["steps"] for run in result["runs"]} == {result["runs"][0]["steps"]}
    assert (tmp_path / "a" / "gpspp_ablation.png").stat().st_size > 1000

    def refuse(*args):
        raise AssertionError("was run again")

    monkeypatch.setattr(gpspp_ablation, "run_cell", refuse)
    assert gpspp_ablation.main(words.split()) == 0


COMMON = {
    "rows": ("baseline",), "seeds": 1, "epochs": 1, "device": "cpu", "molecules": 16,
    "train_size": 32, "valid_size": 16,
}  # fmt: skip


def test_a_run_in_a_process_of_its_own_is_the_same(tmp_path, store, base):
    one = run_ablation(Ablation((store,), tmp_path / "1", base=base, **COMMON))
    two = run_ablation(Ablation((store,), tmp_path / "2", base=base, **COMMON), jobs=2)
    assert two["rows"][0]["valid"] == pytest.approx(one["rows"][0]["valid"], rel=1e-9)


def test_runs_side_by_side_have_a_gpu_each_and_failures_are_told(tmp_path, store, monkeypatch):
    used, two_run = [], threading.Event()

    def run(words, *, input, env, **_):  # noqa: A002
        used.append((json.loads(input)["cell"][1], env.get("CUDA_VISIBLE_DEVICES")))
        if len(used) >= 2:
            two_run.set()
        two_run.wait(30)
        failed = len(used) == 4
        return subprocess.CompletedProcess(words, int(failed), "", "Traceback\nError: too hot\n")

    monkeypatch.setattr(gpspp_ablation, "visible_gpus", lambda: ["0", "1", "2"])
    monkeypatch.setattr(gpspp_ablation.subprocess, "run", run)
    ablation = Ablation((store,), tmp_path, **{**COMMON, "device": "cuda", "seeds": 4})
    with pytest.raises(BevatronError, match=r"the run failed .Error: too hot."):
        run_ablation(ablation, jobs=2)
    assert sorted(seed for seed, _ in used) == [0, 1, 2, 3]
    assert {gpu for _, gpu in used} == {"0", "1"}
    assert {gpu for _, gpu in used[:2]} == {"0", "1"}


@pytest.mark.parametrize(("budget", "most"), [({"minutes": 1.0}, 2), ({"epochs": 1}, 5)])
def test_runs_share_a_gpu_only_where_time_does_not_count(
    tmp_path, store, monkeypatch, budget, most
):
    running, found, enough_run = [], [], threading.Event()

    def run(words, *, input, env, **_):  # noqa: A002
        running.append(env["CUDA_VISIBLE_DEVICES"])
        if len(running) >= most:
            enough_run.set()
        enough_run.wait(30)
        time.sleep(0.2)  # for one more, if there were no bound
        found.append((len(running), set(running)))
        running.pop()
        cell = gpspp_ablation._file(  # what a run leaves behind
            Ablation((store,), tmp_path, epochs=1), *json.loads(input)["cell"]
        )
        cell.parent.mkdir(exist_ok=True)
        last = {"valid": 1.0, "valid_3d": None, "train": 1.0, "minutes": 1.0, "epoch": 1}
        row = {"row": "baseline", "seed": json.loads(input)["cell"][1], "table": 0, "epochs": 1}
        cell.write_text(json.dumps({**row, "parameters": 1, "metric": "gap_mae", "curve": [last]}))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(gpspp_ablation, "visible_gpus", lambda: ["3", "4"])
    monkeypatch.setattr(gpspp_ablation.subprocess, "run", run)
    options = {**COMMON, "epochs": None, "device": "cuda", "seeds": 5, **budget}
    run_ablation(Ablation((store,), tmp_path, **options), jobs=5)
    assert max(number for number, _ in found) == most
    assert set.union(*(places for _, places in found)) == {"3", "4"}


def test_gpus_are_shared_out_by_their_names(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert gpspp_ablation.visible_gpus() == ["2", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpspp_ablation.visible_gpus() == []


def test_an_ablation_needs_data_and_a_limit(tmp_path, store):
    with pytest.raises(ConfigError, match="--minutes or --epochs"):
        Ablation((store,), tmp_path)
    with pytest.raises(ConfigError, match="a file of molecules or prepared stores"):
        Ablation((), tmp_path, epochs=1)
