"""Several processes train one graph as one process does, whatever the partition."""

import json
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import graph_recipe_rank
from graph_data_sets import planted, write
from graph_ranks import run_ranks

from bevatron.errors import ConfigError, DataError
from bevatron.recipes.graph.evaluate import evaluate_graphs
from bevatron.recipes.graph.predict import predict_file
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.train.logger import read_journal
from bevatron.train.loop import fit


def losses(folder):
    records = [r for r in read_journal(folder / "metrics.jsonl") if r["kind"] == "epoch"]
    found = [value for r in records for value in (r["loss"], r.get("valid", {}).get("loss"))]
    return [value for value in found if value is not None]


def sizes(folder):
    """Graphs and vertices that the log counts in each epoch."""
    records = [r for r in read_journal(folder / "metrics.jsonl") if r["kind"] == "epoch"]
    return [[r["sizes"][name] for name in ("graphs", "nodes")] for r in records]


def parts_of(report):
    """The table rows of a report: what the model reaches on each part."""
    result = report.partition(">Learning curves</h2>")[0]
    rows = re.findall(r"<tr>(?:(?!</tr>).)*</tr>", result, re.DOTALL)
    found = [row for row in rows if re.search(r">(training|validation|test)<", row)]
    assert len(found) == 3
    return found


def classes_of(report):
    """Those of its table of classes."""
    table = report[report.index("precision") :]
    found = re.findall(r"<tr><td>\d.*?</tr>", table[: table.index("</table>")], re.DOTALL)
    assert len(found) > 1
    return found


def test_losses_of_20_steps_are_those_of_one_process(tmp_path):
    plain = write(tmp_path / "plain.npz")
    with np.load(plain) as graph:
        weights = np.arange(len(graph["edge_src"])) % 7 / 3 + 0.25  # no numbers of float32
    write(tmp_path / "weighted.npz", edge_weight=weights)
    run_ranks(3, lambda _: graph_recipe_rank.train(tmp_path), tmp_path)
    assert "2d over 3 ranks: 90 vertices" in (tmp_path / "output0").read_text()
    for name in graph_recipe_rank.LAYERS:
        graph_recipe_rank.run(name, tmp_path, tmp_path / "one")
        one, several = losses(tmp_path / "one" / name), losses(tmp_path / "several" / name)
        assert len(one) == (8 if name.startswith("auto") else 24)
        assert several == pytest.approx(one, rel=1e-9)
        assert sizes(tmp_path / "several" / name) == sizes(tmp_path / "one" / name)
        assert (tmp_path / "several" / name / "report.html").exists() == (name == "2d")
        file = graph_recipe_rank.graph_of(name, tmp_path)
        found, ours = (evaluate_graphs(tmp_path / w / name, [file]) for w in ("several", "one"))
        assert found["test"] == pytest.approx(ours["test"], rel=1e-6)
    plain, weighted = (losses(tmp_path / "one" / name) for name in ("2d", "2d weighted"))
    assert plain[-1] != pytest.approx(weighted[-1], rel=1e-3), "weights count"
    together = (tmp_path / "several" / "2d" / "report.html").read_text()
    alone = (tmp_path / "one" / "2d" / "report.html").read_text()
    for words in (*parts_of(alone), *classes_of(alone)):
        assert words in together


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with graphs and the run of a model."""
    folder = tmp_path_factory.mktemp("cut")
    write(folder / "plain.npz")
    values = planted()
    edges = np.stack([values["edge_src"], values["edge_dst"]])
    masks = {f"{part}_mask": np.isin(np.arange(90), values[part]) for part in ("train", "val")}
    data = {"edge_index": edges, "x": values["x"], "y": values["y"], "num_nodes": 90, **masks}
    tensors = {k: torch.from_numpy(v) if hasattr(v, "dtype") else v for k, v in data.items()}
    torch.save(tensors, folder / "packed.pt")
    config = GraphRun.from_values({
        "data": {"train": [str(folder / "plain.npz")]}, "output": str(folder / "run"),
        "model": {"hidden": 4, "heads": 2}, "report": False,
        "train": {"epochs": 5, "device": "cpu", "threads": 1},
    })  # fmt: skip
    fit(build(config))
    return folder


def test_evaluation_and_prediction_cut_the_graph_and_write_what_one_process_writes(trained):
    for folder in ("cut", "one"):
        (trained / folder).mkdir()
    run_ranks(2, lambda _: graph_recipe_rank.use(trained), trained)
    said = "".join((trained / f"output{rank}").read_text() for rank in range(2))
    cut = [line for line in said.splitlines() if "over 2 ranks: 90 vertices" in line]
    assert len(cut) == 4, "each evaluation and prediction, told once"
    assert said.count("the split used in training, split 0 of") == 2
    assert said.count("all labelled") == 2, "one table each"
    assert said.count("90 vertices in") == 2
    for name in ("plain.npz", "packed.pt"):
        table, file = trained / "one" / f"{name}.json", trained / name
        run = trained / "run"
        evaluate_graphs(run, [file], device="cpu", dtype="float64", out=table)
        expected = json.loads(table.read_text())
        found = json.loads((trained / "cut" / table.name).read_text())
        assert list(found) == ["train", "valid", "test", "all labelled"]
        for part in expected:
            assert found[part] == pytest.approx(expected[part], rel=1e-9)
        predicted = trained / "one" / f"{name}.csv"
        predict_file(run, file, predicted, device="cpu", dtype="float64")
        ours, theirs = (
            (trained / who / f"{name}.csv").read_text().splitlines() for who in ("one", "cut")
        )
        assert len(theirs) == 91
        assert theirs == ours


def test_two_processes_with_dropout_resume_to_the_last_bit(tmp_path):
    write(tmp_path / "plain.npz")
    run_ranks(2, lambda _: graph_recipe_rank.resume(tmp_path), tmp_path)
    for partition in graph_recipe_rank.DROPPED:
        whole, resumed = (tmp_path / name / partition for name in ("whole", "resumed"))
        assert losses(resumed) == losses(whole), partition
        one, other = (load_file(run / "weights.safetensors") for run in (whole, resumed))
        for name in one:
            assert torch.equal(one[name], other[name]), (partition, name)


def test_all_processes_say_what_one_process_says_of_duplicate_edges(tmp_path, monkeypatch):
    values = planted()
    pair = {k: np.concatenate([values[k], values[k][7:8]]) for k in ("edge_src", "edge_dst")}
    write(tmp_path / "twice.npz", **pair)
    write(tmp_path / "few.npz", x=np.ones((50, 3), np.float32))
    found = run_ranks(2, lambda _: graph_recipe_rank.refuse(tmp_path), tmp_path)
    for number, name in enumerate(("twice.npz", "few.npz")):
        config = GraphRun.from_values({"data": {"train": [str(tmp_path / name)]}})
        with pytest.raises(DataError) as caught:
            build(config)
        alone = str(caught.value).replace(" (1 such entries in all)", "")
        assert alone in {said[number] for said in found}
        assert all(said[number].endswith(alone) for said in found), "the others name the rank"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model": {"layer": "gin"}, "partition": "2d"},
            "partition: '2d' does not run model.layer 'gin'; choose auto or rows",
        ),
        (
            {"model": {"layer": "agnn"}, "partition": "feature"},
            "partition: 'feature' does not run model.layer 'agnn'; choose auto or 2d or rows",
        ),
        ({"model": {"norm": "batch"}}, "model.norm: 'batch' averages over all vertices"),
    ],
)
def test_what_needs_the_whole_graph_is_refused(changes, message, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = write(tmp_path / "g.npz")
    config = GraphRun.from_values({"data": {"train": [str(file)]}, **changes})
    with pytest.raises(ConfigError, match=message):
        build(config)
