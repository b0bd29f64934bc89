"""What README.md and docs/mace.md tell a user to type works as it is written."""

import gzip
import re
import shlex
from importlib.resources import files
from itertools import islice

import numpy as np
import pytest
import yaml

from bevatron import cli
from bevatron.recipes.mace.run import MaceRun
from doc_pages import blocks, lines, only_parsed

DATA = files("bevatron.recipes") / "demo_data" / "structures.extxyz.gz"
PAGES = ("README.md", "docs/mace.md")


def commands():
    """Every command line of ours in the fenced blocks and in running text."""
    found = []
    for page in PAGES:
        for line in (line for line in lines(page) if "bevatron " in line):
            words = shlex.split(line.partition(" > ")[0], comments=True)
            if "bevatron" in words and "..." not in words and "pip" not in words:
                found.append(words[words.index("bevatron") + 1 :])
    return list(map(list, dict.fromkeys(map(tuple, found))))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder to work in, with the files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    kinds = {"gap": "gpspp", "cora": "graph_attention", "complexes": "alphafold3"}
    kinds |= dict.fromkeys(("water", "replay", "a", "../mp-small"), "mace")
    for run, kind in kinds.items():
        (tmp_path / "runs" / run).mkdir(parents=True)
        (tmp_path / "runs" / run / "model.json").write_text(f'{{"kind": "{kind}"}}')
    with gzip.open(str(DATA), "rt") as file:
        text = "".join(islice(file, 8 * 12))
    for name in ("water.extxyz", "test.extxyz", "new.extxyz"):
        (tmp_path / name).write_text(text)
    with gzip.open(str(DATA.parent / "molecules.csv.gz"), "rt") as file:
        table = "".join(islice(file, 40))
    for name in ("molecules.csv", "test.csv"):
        (tmp_path / name).write_text(table)
    (tmp_path / "cora.npz").write_bytes((DATA.parent / "communities.npz").read_bytes())
    (tmp_path / "start.extxyz").write_text("".join(text.splitlines(keepends=True)[:8]))
    for block in blocks("docs/mace.md", "yaml"):
        name = re.match(r"# (\S+\.yaml)", block)
        if name:
            (tmp_path / name[1]).write_text(block)
    return tmp_path


def test_pages_hold_commands():
    named = {words[0] for words in commands()}
    assert {"prepare", "train", "evaluate", "predict", "convert", "inspect", "relax"} <= named


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_understood(words, place, monkeypatch):
    called = only_parsed(monkeypatch)
    assert cli.main(words) == 0
    assert called or words[-1] == "--help"


def test_yaml_blocks_are_configurations(place):
    found = [yaml.safe_load(block) for block in blocks("docs/mace.md", "yaml")]
    assert len(found) == 3
    for values in found:
        values.pop("recipe", None)
        config = MaceRun.from_values(values)
        assert config.data.sources()


SHORT = {
    "mace": 'preset="small", model={"num_channels": 4, "l_max": 1, "max_L": 0, "correlation": 1}',
    "gpspp": 'model={"num_layers": 1, "node_width": 16, "edge_width": 8, "num_heads": 2}',
    "graph": "",
}


@pytest.mark.parametrize("number", range(4))
def test_python_of_the_readme_runs(number, place):
    block = blocks("README.md", "python")[number]
    assert len(blocks("README.md", "python")) == 4
    system = re.findall(r'bv.train\("(\w+)"', block)
    if system == ["gpspp"]:
        pytest.importorskip("rdkit")
    for name in system:
        assert len(block.splitlines()) <= 6
        short = f'report=False, train={{"epochs": 1, "device": "cpu"}}, {SHORT[name]}'
        block = re.sub(r"(bv.train\(.*)\)", rf"\1, {short})", block)
    seen = {}
    exec(compile(block, "README.md", "exec"), seen)
    if system == ["mace"]:
        energy = seen["predicted"][0].get_potential_energy()
        assert np.isfinite(energy)
    elif system == ["graph"]:
        assert len(seen["classes"]) == 1500
    elif not system:
        assert seen["o"].shape == seen["q"].shape


def test_python_blocks_run(place):
    """Training in Python, then dynamics with what was trained, shortened."""
    dynamics, training = blocks("docs/mace.md", "python")
    assert len([line for line in training.splitlines() if line and "import" not in line]) <= 10
    short = 'train={"epochs": 1, "device": "cpu"}, report=False, preset="small"'
    assert training.count('preset="small"') == 1
    training = training.replace('preset="small"', short)
    training = training.replace("run(1000)", "run(2)")
    exec(compile(training, "docs/mace.md", "exec"), {"__name__": "page"})
    assert (place / "runs/water/model.json").exists()
    assert "run(1000)" in dynamics
    seen = {}
    exec(compile(dynamics.replace("run(1000)", "run(2)"), "docs/mace.md", "exec"), seen)
    assert seen["atoms"].get_temperature() > 0
