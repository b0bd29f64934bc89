"""Steps over one whole graph are captured, and have the losses of steps launched one by one."""

import itertools
import json

import pytest
import torch
from graph_data_sets import write

from bevatron.parallel.mesh import Mesh
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.train.capture import step as captured_step
from bevatron.train.capture import step_graphs
from bevatron.train.capture.cuda_graphs import GraphPool
from bevatron.train.loop import begin_state, fit

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_GPU = Mesh(device=torch.device("cuda"))


def make(
    folder, *, cuda_graphs=None, graphs=1, dropout=0.0, lr=0.02, epochs=6, resume=False, **model
):
    """A run on small graphs of its own."""
    folder.mkdir(exist_ok=True)
    files = [str(write(folder / f"{seed}.npz", seed=seed)) for seed in range(graphs)]
    values = {
        "output": str(folder / "run"),
        "data": {"train": files, "valid": files[:1] if graphs > 1 else []},
        "model": {
            "hidden": 4, "heads": 2, "dropout": dropout, "attention_dropout": dropout, **model,
        },
        "optim": {"lr": lr, "weight_decay": 1e-3},
        "train": {
            "epochs": epochs, "device": DEVICE, "threads": 1, "dtype": "float64",
            "cuda_graphs": cuda_graphs,
        },
        "report": False,
    }  # fmt: skip
    return build(GraphRun.from_values(values), resume=resume)


def losses(folder, kind="step"):
    """Of every step, or of the validation in every epoch."""
    lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    records = [record for record in map(json.loads, lines) if record["kind"] == kind]
    return [record["valid"]["loss"] if kind == "epoch" else record["loss"] for record in records]


@pytest.fixture
def capturing(monkeypatch):
    """Let runs on a CPU take the captured step; count the batches that are put on the device."""
    made = []
    if DEVICE == "cpu":
        monkeypatch.setattr(captured_step, "obstacle", lambda *_: None)
    standing = step_graphs.StandingFeed
    monkeypatch.setattr(
        step_graphs, "StandingFeed", lambda *given: made.append(given) or standing(*given)
    )
    return made


def test_captured_steps_have_the_losses_of_launched_ones(tmp_path, capturing):
    fit(make(tmp_path / "launched", cuda_graphs=False))
    assert not capturing
    fit(make(tmp_path / "captured"))
    assert len(capturing) == 1, "one graph, one capture, all epochs"
    found, expected = losses(tmp_path / "captured"), losses(tmp_path / "launched")
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(set(found)) == 6, "the weights move"


def test_captured_validations_have_the_metrics_of_launched_ones(tmp_path, capturing, monkeypatch):
    captured = []
    capture = GraphPool.capture
    monkeypatch.setattr(
        GraphPool, "capture", lambda self, *work: captured.append(work) or capture(self, *work)
    )
    fit(make(tmp_path / "launched", cuda_graphs=False))
    assert not captured
    fit(make(tmp_path / "captured"))
    assert [work[0].__name__ for work in captured] == ["step", "predict"]
    found, expected = (losses(tmp_path / name, "epoch") for name in ("captured", "launched"))
    assert found == pytest.approx(expected, rel=1e-9)
    assert len(set(found)) == 6, "the weights move"


def test_running_means_know_nothing_of_rehearsals_and_warm_ups(tmp_path, capturing, monkeypatch):
    class Warming(GraphPool):
        def compile_ahead(self, work, say):
            work()

        def capture(self, work, warm_up=None):
            (warm_up or work)()
            return super().capture(work, warm_up)

    if DEVICE == "cpu":
        monkeypatch.setattr(step_graphs, "GraphPool", Warming)
    fit(make(tmp_path / "launched", cuda_graphs=False, norm="batch"))
    fit(make(tmp_path / "captured", norm="batch"))
    assert capturing
    # Adam makes steps of the rounding errors of biases before a norm, whose gradients are zero.
    for kind in ("step", "epoch"):
        found, expected = (losses(tmp_path / name, kind) for name in ("captured", "launched"))
        assert found == pytest.approx(expected, rel=1e-6)


def test_dropout_is_drawn_anew_in_every_captured_step(tmp_path, capturing):
    fit(make(tmp_path / "still", dropout=0.5, lr=1e-12))
    assert capturing
    found = sorted(losses(tmp_path / "still"))
    assert all(two - one > 1e-6 for one, two in itertools.pairwise(found))


def test_a_resumed_run_drops_what_an_uninterrupted_one_does(tmp_path, capturing):
    fit(make(tmp_path / "whole", dropout=0.5))
    fit(make(tmp_path / "halves", dropout=0.5, epochs=3))
    fit(make(tmp_path / "halves", dropout=0.5, resume=True))
    assert len(capturing) == 3
    assert losses(tmp_path / "halves") == pytest.approx(losses(tmp_path / "whole"), rel=1e-9)


def test_one_small_graph_is_captured(tmp_path):
    run = make(tmp_path / "one")
    assert captured_step.obstacle(run, begin_state(run, Mesh(), None), ON_GPU) is None


def test_several_graphs_are_not(tmp_path):
    run = make(tmp_path / "many", graphs=3)
    why = captured_step.obstacle(run, begin_state(run, Mesh(), None), ON_GPU)
    assert why == "batches of this kind cannot be padded to one shape"


def test_a_graph_cut_over_processes_is_not(tmp_path):
    run = make(tmp_path / "cut")
    mesh = Mesh(rank=0, world=2, device=torch.device("cuda"))
    why = captured_step.obstacle(run, begin_state(run, Mesh(), None), mesh)
    assert why == "all processes take the same batch"


def test_a_large_graph_is_captured_only_if_asked_for(tmp_path, capturing, monkeypatch):
    monkeypatch.setattr(captured_step, "LARGE_BATCH", 10)
    fit(make(tmp_path / "large"))
    assert not capturing
    fit(make(tmp_path / "asked", cuda_graphs=True))
    assert capturing
