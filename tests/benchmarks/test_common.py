"""What benchmarks share: options, rows of several calls, intervals of a trace, repeated samples."""

import argparse
import ast
import gc
import json
import weakref
from contextlib import nullcontext
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from benchmarks.common import arguments, timing, trace
from benchmarks.common.arguments import add_out, add_rows, change, read_all, read_rows
from benchmarks.common.report import RESULTS, write_result
from benchmarks.common.training import TracedSteps, repeated
from benchmarks.mace import kernels_agreement

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("flush", [False, True])
def test_calls_that_are_timed_in_turn_have_their_medians_and_clocks(monkeypatch, flush):
    """Each meets a flushed cache or, without a flush, what it left there itself."""
    now, began, clock = 0.0, [], 1.5

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.at = now

        def synchronize(self):
            assert self.at == now

        def elapsed_time(self, other):
            return other.at - self.at

    def taking(name, ms, later):
        """A call that slows the clock down, and that takes longer in later rounds."""
        early = 2 if flush else 4

        def call():
            nonlocal now, clock
            began.append(name)
            now, clock = now + ms + later * (began.count(name) > early), 1.5 - ms / 100

        return call

    def sleep(cycles):
        nonlocal now
        began.append("spin")
        now += cycles / clock / 1e6

    monkeypatch.setattr("torch.cuda.Event", Event)
    monkeypatch.setattr("torch.cuda._sleep", sleep)
    calls = [taking("a", 2.0, 0.5), taking("b", 4.0, 0.0), taking("c", 8.0, 0.0)]
    cache = Mock(zero_=lambda: began.append("flush"))
    monkeypatch.setattr("torch.empty", lambda *_, **__: cache)
    found = timing.in_turn(calls, 3, warm_up=2, flush=flush)
    assert began == [
        each
        for name in "abccbaabccbaabc"
        for each in ("spin", "flush" if flush else name, name, "spin")
    ]
    assert np.allclose(found, [(2.5, 1.48), (4.0, 1.46), (8.0, 1.42)])
    assert timing.in_turn([]) == []


def test_a_replay_keeps_what_its_graph_reads(monkeypatch):
    monkeypatch.setattr("torch.cuda.CUDAGraph", Mock)
    monkeypatch.setattr("torch.cuda.graph", lambda _: nullcontext())
    read = torch.ones(3)
    held = weakref.ref(read)
    replay = timing.captured(partial(torch.sum, read), rehearsals=0)
    del read
    gc.collect()
    assert held() is not None
    assert replay() == 3
    del replay
    gc.collect()
    assert held() is None


def test_rows_of_a_call_are_not_written_into_the_results():
    parser = argparse.ArgumentParser()
    add_rows(parser, "some-rows")
    options = parser.parse_args([])
    assert not options.out.resolve().is_relative_to(RESULTS)
    assert (options.results, options.collect) == (RESULTS, None)
    parser = argparse.ArgumentParser()
    add_out(parser)
    assert parser.parse_args([]).out == RESULTS


def test_rows_of_all_calls_are_joined(tmp_path):
    for name, rows in (("b", [2, 3]), ("a", [1])):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rows-1.json").write_text(json.dumps(rows))
    assert read_all(tmp_path) == [[1], [2, 3]]
    assert read_rows(tmp_path) == [1, 2, 3]
    with pytest.raises(SystemExit, match=r"holds no costs\.json"):
        read_all(tmp_path, "costs.json")


def test_a_call_waits_for_its_file_if_it_was_given_one(tmp_path, monkeypatch):
    waited = []

    def sleep(seconds):
        waited.append(seconds)
        if len(waited) == 3:
            (tmp_path / "go").touch()

    monkeypatch.setattr(arguments.time, "sleep", sleep)
    arguments.wait_for(None)
    assert not waited
    arguments.wait_for(tmp_path / "go")
    assert len(waited) == 3


def test_results_of_one_day_do_not_replace_each_other_in_the_history(tmp_path):
    write_result("train/start", [{"s": 0}], folder=tmp_path)
    path = tmp_path / "train" / "start.json"
    for seconds in (1, 2):
        earlier = {**json.loads(path.read_text()), "date": "2026-01-01", "rows": [{"s": seconds}]}
        path.write_text(json.dumps(earlier))
        write_result("train/start", [{"s": 0}], folder=tmp_path)
    kept = sorted((tmp_path / "history" / "train").glob("*.json"))
    assert [json.loads(each.read_text())["rows"][0]["s"] for each in kept] == [1, 2]
    assert len([*(tmp_path / "history" / "train").glob("*.md")]) == 2


def test_the_union_counts_what_overlaps_once():
    assert trace.union([(0, 10), (2, 4), (8, 12), (20, 21)]) == 13


def test_settings_of_a_recipe_are_changed_by_name():
    values = {"optim": {"lr": 1.0, "clip": 5.0}}
    change(values, ["optim.lr=0.5", "loader.workers=2"])
    assert values == {"optim": {"lr": 0.5, "clip": 5.0}, "loader": {"workers": 2}}


def test_samples_are_repeated():
    samples = [{"atoms": np.array([1])}, {"atoms": np.array([1, 2])}]
    data = repeated(samples, 5, "molecule")
    assert len(data) == 5
    assert np.array_equal(data.lengths("atoms"), [1, 2, 1, 2, 1])
    assert data[3] is samples[1]
    assert data.describe(3) == "molecule 1"


def test_some_steps_of_a_task_are_traced(monkeypatch):
    calls = []

    class Profile:
        def __init__(self, activities):
            pass

        def start(self):
            calls.append("start")

        def stop(self):
            calls.append("stop")

    class Task:
        def normalisers(self, batch):
            calls.append(batch)

    class Traced(TracedSteps, Task):
        first, traced = 2, 2

    monkeypatch.setattr("benchmarks.common.training.profile", Profile)
    task = Traced()
    for batch in range(1, 6):
        task.normalisers(batch)
    assert calls == [1, "start", 2, 3, "stop", 4, 5]


def test_collected_rows_are_written_where_the_options_say(tmp_path):
    rows = tmp_path / "rows"
    rows.mkdir()
    for seed in range(2):
        for number, name in enumerate(("reference", "auto")):
            loss = (np.linspace(2, 1, 120) + 1e-3 * number + 0.1 * seed).tolist()
            row = {"kernels": name, "seed": seed, "setting": "small", "loss": loss}
            (rows / f"{name}-{seed}.json").write_text(json.dumps(row))
    kernels_agreement.collect(rows, tmp_path / "results", "cpu")
    result = json.loads((tmp_path / "results/mace/kernels_agreement.json").read_text())
    assert [row["seed"] for row in result["rows"]] == [0, 1]
    assert (tmp_path / "results/mace/kernels_agreement.png").exists()


def test_names_that_scripts_import_from_the_package_exist():
    # Those of peers are imported by no test, and mypy does not read them.
    missing = []
    scripts = [path for room in ("benchmarks", "tools") for path in (ROOT / room).rglob("*.py")]
    for script in scripts:
        for node in ast.walk(ast.parse(script.read_text())):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("bevatron"):
                module = import_module(str(node.module))
                missing += [
                    f"{script.relative_to(ROOT)}:{node.lineno} {node.module}.{name.name}"
                    for name in node.names
                    if not hasattr(module, name.name)
                    and not (
                        hasattr(module, "__path__") and find_spec(f".{name.name}", module.__name__)
                    )
                ]
    assert missing == []
