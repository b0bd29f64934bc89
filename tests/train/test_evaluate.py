"""Evaluation, prediction and what else reads a data set once."""

import numpy as np
import pytest
import tiny
import torch

from bevatron.train.console import Console
from bevatron.train.evaluate import evaluate, ordered_batches, predict
from bevatron.train.logger import Journal, read_journal
from bevatron.train.profiling.autograd_memory import saved_bytes_by_module
from bevatron.train.settings import BatchConfig, LoaderConfig


def test_metrics_do_not_depend_on_the_batches():
    data, model = tiny.TinyData(23), tiny.TinyModel().double()
    found = [
        evaluate(tiny.TinyTask(), model, data, data.sizes, batch=BatchConfig(capacity=capacity))
        for capacity in (9, 50, 10**6)
    ]
    assert found[0]["graphs"] == 23
    for other in found[1:]:
        assert other == pytest.approx(found[0], rel=1e-12)


def test_a_sample_above_capacity_is_evaluated_alone():
    data, model = tiny.TinyData(4, sizes=[2, 40, 3, 1]), tiny.TinyModel().double()
    found = evaluate(tiny.TinyTask(), model, data, data.sizes, batch=BatchConfig(capacity=6))
    assert found["graphs"] == 4


def test_the_model_is_in_eval_mode_only_meanwhile():
    modes = []

    class Watching(tiny.TinyTask):
        def predict(self, model, batch):
            modes.append(model.training)
            return super().predict(model, batch)

    data, model = tiny.TinyData(4), tiny.TinyModel().double()
    evaluate(Watching(), model, data, data.sizes)
    assert not any(modes)
    assert model.training


@pytest.mark.parametrize(
    "batch", [BatchConfig(capacity=12), BatchConfig(algorithm="fixed_count", size=4)]
)
def test_predictions_come_in_the_order_of_the_data(batch):
    data, model = tiny.TinyData(17), tiny.TinyModel().double()
    loader = LoaderConfig(window=4)
    order, energies = [], []
    for made, outputs in predict(
        tiny.TinyTask(), model, data, data.sizes, batch=batch, loader=loader
    ):
        order += made.sample_indices.tolist()
        energies += outputs["energy"].tolist()
        assert not outputs["energy"].requires_grad
    assert order == list(range(17))
    alone = tiny.collate([data[5]], [5], [1.0])
    assert energies[5] == pytest.approx(model(alone)["energy"].item())


def test_ordered_batches_keep_to_every_capacity():
    sizes = {"atoms": np.array([3, 3, 3, 9, 1, 1]), "edges": np.array([1, 9, 1, 1, 1, 1])}
    batches = ordered_batches(sizes, {"atoms": 9, "edges": 10})
    assert [indices.tolist() for indices, _ in batches] == [[0, 1], [2], [3], [4, 5]]
    assert ordered_batches({"atoms": np.array([], dtype=np.int64)}, {"atoms": 3}) == []


def test_memory_kept_for_the_backward_pass_is_counted_once_without_weights():
    weight = torch.ones(100, 100, requires_grad=True)
    x = torch.ones(10, 100)

    def compute():
        y = x @ weight  # keeps x (weight is excluded)
        return (y.tanh() + y.sin()).sum()  # keeps tanh(y) and y

    (found,) = saved_bytes_by_module(torch.nn.Identity(), compute, [weight]).values()
    assert found.total == 3 * 4000


def test_a_journal_is_cut_back_and_leaves_out_a_torn_line(tmp_path):
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.write({"kind": "step", "loss": float("nan"), "terms": {"a": float("inf")}})
    journal.sync()
    kept = journal.length()
    journal.write({"kind": "step", "loss": 2.0})
    journal.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st')
    records = list(read_journal(tmp_path / "metrics.jsonl"))
    assert [record["loss"] for record in records] == [None, 2.0]
    assert records[0]["terms"] == {"a": None}
    Journal(tmp_path / "metrics.jsonl", kept).close()
    assert (tmp_path / "metrics.jsonl").stat().st_size == kept


def test_on_a_terminal_there_is_a_progress_bar_and_the_log_stays_plain(tmp_path, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    console = Console(tmp_path / "log.txt")
    record = {
        "step": 1,
        "epoch": 0,
        "loss": 0.5,
        "lr": 0.1,
        "time": {"atoms_per_s": 7.0, "wait_share": 0.5},
    }
    console.begin_epoch(0, 3, 0, 2)
    console.step(record)
    console.say("[bold] is no markup")
    console.close()
    text = (tmp_path / "log.txt").read_text()
    assert text.endswith("[bold] is no markup\n")
    assert "\x1b" not in text


def test_other_ranks_say_nothing(tmp_path, capsys):
    console = Console(tmp_path / "log.txt", active=False)
    console.say("hello")
    console.begin_epoch(0, 1, 0, 1)
    console.close()
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "log.txt").exists()
