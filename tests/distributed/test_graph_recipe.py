"""Several processes train one graph as one process does, whatever the partition."""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))
import graph_recipe_rank
from graph_data_sets import write

from bevatron.errors import ConfigError
from bevatron.recipes.graph.evaluate import evaluate_graphs
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.train.logger import read_journal


def losses(folder):
    records = [r for r in read_journal(folder / "metrics.jsonl") if r["kind"] == "epoch"]
    found = [value for r in records for value in (r["loss"], r.get("valid", {}).get("loss"))]
    return [value for value in found if value is not None]


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


def torchrun(ranks, *arguments):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone",
               "--nproc-per-node", str(ranks), *map(str, arguments)]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, check=False
    )


def test_losses_of_20_steps_are_those_of_one_process(tmp_path):
    plain = write(tmp_path / "plain.npz")
    with np.load(plain) as graph:
        weights = np.arange(len(graph["edge_src"])) % 7 / 3 + 0.25  # no numbers of float32
    write(tmp_path / "weighted.npz", edge_weight=weights)
    done = torchrun(3, graph_recipe_rank.__file__, tmp_path)
    assert done.returncode == 0, done.stderr[-6000:]
    assert "two_dimensional over 3 ranks: 90 vertices" in done.stdout
    for name in graph_recipe_rank.LAYERS:
        graph_recipe_rank.run(name, tmp_path, tmp_path / "one")
        one, several = losses(tmp_path / "one" / name), losses(tmp_path / "several" / name)
        assert len(one) == 24
        assert several == pytest.approx(one, rel=1e-9)
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": {"layer": "gin"}}, "model.layer: 'gin' does not run on several processes"),
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
