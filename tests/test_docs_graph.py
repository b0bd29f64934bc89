"""What docs/graph_attention.md tells a user to type works as it is written, on a small graph."""

import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent / "recipes"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.paper import graph_benchmark
from graph_data_sets import write

from bevatron import cli
from doc_pages import ROOT, blocks, lines

SCRIPT = "benchmarks.paper.graph_benchmark"
PAGE = "docs/graph_attention.md"
SHORT = ["--train.epochs", "2", "--train.device", "cpu"]


def commands():
    """Every command line of ours, in fenced blocks and in running text."""
    words = [shlex.split(line) for line in lines(PAGE) if "bevatron " in line or SCRIPT in line]
    names = ("bevatron", SCRIPT)
    return [line[next(i for i, word in enumerate(line) if word in names) :] for line in words]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the page speaks of."""
    folder = tmp_path_factory.mktemp("page")
    write(folder / "cora.npz")
    for number, name in enumerate("abc"):
        write(folder / f"{name}.npz", seed=number, train=None, val=None, test=None)
    raw = folder / "papers100M" / "raw"
    raw.mkdir(parents=True)
    with np.load(folder / "cora.npz") as graph:
        index = np.stack([graph["edge_src"], graph["edge_dst"]])
        np.savez(raw / "data.npz", edge_index=index, num_nodes_list=np.array([90]),
                 node_feat=graph["x"])  # fmt: skip
        np.savez(raw / "node-label.npz", node_label=graph["y"][:, None].astype(np.float32))
    return folder


def test_all_commands_work_in_the_order_of_the_page(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    seen = []
    for program, *words in commands():
        main = cli.main if program == "bevatron" else graph_benchmark.main
        extra = []
        if words[0] == "train" and "--help" not in words:
            extra = SHORT
            if "papers100M" in words:  # here one process, and no folder of splits
                extra = [*SHORT, "--data.read.random-split", "0.6", "0.2", "0.2"]
            if "runs/cora" not in words:
                extra = [*extra, "--no-report"]
        if program == SCRIPT:
            extra = ["--repeat", "1", "--warmup", "0", "--device", "cpu", "--shrink", "4096"]
        if "--help" in words:
            continue
        assert main([*words, *extra]) == 0, words
        seen.append(words[0] if program == "bevatron" else program)
    assert {"train", "evaluate", "predict", SCRIPT} <= set(seen)
    assert len((place / "classes.csv").read_text().splitlines()) == 91
    for name in ("times.png", "weak.png", "runs/cora/report.html", "runs/many/model.json"):
        assert (place / name).exists()


def test_python_blocks_run(place, monkeypatch, capsys):
    monkeypatch.chdir(place)
    training, layer = blocks(PAGE, "python")
    short = 'preset="gat-cora", report=False, train={"epochs": 2, "device": "cpu"}'
    assert training.count('preset="gat-cora"') == 1
    training = training.replace('preset="gat-cora"', short)
    exec(compile(training, PAGE, "exec"), {"__name__": "page"})
    exec(compile(layer, PAGE, "exec"), {"__name__": "page"})
    out = capsys.readouterr().out
    assert "kernel: dot_attention" in out
    assert "kernel: composed" in out


def test_batch_script_names_options_that_exist():
    text = (ROOT / "examples" / "bench_graph.sbatch").read_text()
    options = set(re.findall(r"graph_benchmark(.*?)\|\|", text, flags=re.DOTALL)[0].split())
    named = {option[2:] for option in options if option.startswith("--")}
    assert named == {"sweep", "device", "out", "plot"}
    assert named <= set(graph_benchmark.time_attention.__annotations__)
