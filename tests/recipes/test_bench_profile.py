"""A profile of a run on a CPU: complete, and nothing of the run is changed."""

import hashlib
import json
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import ase
import ase.io
import graph_data_sets
import numpy as np
import pytest
import torch
import yaml

from bevatron import cli
from bevatron.data.padding import BatchShape
from bevatron.data.padding.size_buckets import SizeBuckets
from bevatron.errors import ConfigError
from bevatron.recipes import bench_profile
from bevatron.recipes.bench_profile import _activations, profile, profile_folder, short
from bevatron.recipes.mace.run import build
from bevatron.recipes.training import configuration
from bevatron.train import loop
from bevatron.train.capture import step as captured_step
from bevatron.train.profiling import steps as profiled_steps
from bevatron.train.profiling.steps import ProfiledTrainer
from bevatron.train.report.plots import png
from tiny_sizes import GPSPP


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a tiny finished run, its settings as they are kept there."""
    folder = tmp_path_factory.mktemp("profiling")
    generator = np.random.default_rng(0)
    frames = []
    for _ in range(10):
        number = int(generator.integers(2, 5))
        atoms = ase.Atoms("H" * number, generator.uniform(0, 2.5, (number, 3)))
        atoms.info["REF_energy"] = float(generator.normal())
        atoms.arrays["REF_forces"] = generator.normal(size=(number, 3))
        frames.append(atoms)
    ase.io.write(folder / "data.extxyz", frames)
    settings = {
        "output": str(folder / "run"),
        "preset": "small",
        "data": {"train": [str(folder / "data.extxyz")], "prepare_workers": 1},
        "model": {"num_channels": 2, "l_max": 1, "max_L": 0, "correlation": 1, "radial_mlp": [4]},
        "batch": {"capacity": 8},
        "optim": {"accumulate": 2},
        "train": {"epochs": 1, "device": "cpu", "threads": 1},
        "report": False,
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(settings))
    assert cli.main(["train", str(folder / "run.yaml")]) == 0
    return folder / "run"


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_command_prints_tables_and_writes_pictures_and_leaves_the_run_alone(
    run, tmp_path, capsys
):
    before = contents(run)
    out = tmp_path / "profile"
    arguments = ["--steps", "3", "--warm", "1", "--out", str(out)]
    assert cli.main(["bench", "profile", str(run), *arguments]) == 0
    printed = capsys.readouterr().out
    for words in ("CPU time of 3 steps", "host only", "aten::", "activations by module", "if"):
        assert words in printed
    assert contents(run) == before
    assert {path.name for path in out.iterdir()} == {
        "profile.json",
        "profile.png",
        "activations.png",
    }
    found = json.loads((out / "profile.json").read_text())
    (rank,) = found["ranks"]
    assert sum(rank["shares"].values()) == pytest.approx(1.0)
    assert 0 < rank["shares"]["computing"] < 1
    assert rank["shares"]["communicating"] == 0
    # Two batches a step of at most eight atoms.
    assert 4 < rank["sizes"]["atoms"] <= 16
    assert {"matrix product", "memory-bound", "copy"} <= set(rank["classes"])
    spent = sum(total["ms"] for total in rank["classes"].values()) + rank["host_only"]
    assert spent == pytest.approx(rank["traced_step"], rel=1e-6)
    assert 0 < sum(found["gains"].values()) < found["step"]
    assert found["gains"]["host"] > 0
    assert found["gains"]["data"] > 0
    memory = rank["memory"]
    assert memory["optimizer"] > 2 * memory["gradients"] > 0
    assert memory["averages"] == memory["gradients"]
    modules = memory["modules"]
    assert "interactions.0" in modules
    assert memory["activations"] == sum(sum(saved.values()) for saved in modules.values())
    assert any(saved["gradient"] for saved in modules.values())


def test_one_that_is_stopped_says_so_and_promises_no_checkpoint(run, monkeypatch, capsys):
    launch = ProfiledTrainer._launch

    def stopped(*arguments):
        os.kill(os.getpid(), signal.SIGINT)
        return launch(*arguments)

    monkeypatch.setattr(ProfiledTrainer, "_launch", stopped)
    before = contents(run)
    assert cli.main(["bench", "profile", str(run), "--steps", "3", "--warm", "1"]) == 2
    printed = capsys.readouterr()
    assert printed.err == "error: stopped by SIGINT before enough steps were profiled\n"
    assert "resumed" not in printed.out
    assert contents(run) == before


def test_a_yaml_file_without_a_run_leaves_only_the_profile(run, tmp_path):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["output"] = str(tmp_path / "later")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    tables, _ = profile_folder(tmp_path / "run.yaml", steps=1, warm=1)
    assert len(tables) == 6
    assert [path.name for path in (tmp_path / "later").iterdir()] == ["profile"]


def test_a_run_of_relative_paths_is_profiled_from_any_folder(run, tmp_path, monkeypatch):
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["output"], settings["data"]["train"] = "runs/tiny", ["data.extxyz"]
    shutil.copytree(run, tmp_path / "runs" / "tiny")
    (tmp_path / "runs" / "tiny" / "config.yaml").write_text(yaml.safe_dump(settings))
    shutil.copy(run.parent / "data.extxyz", tmp_path)
    monkeypatch.chdir(tmp_path / "runs")
    _, (line,) = profile_folder(Path("tiny"), steps=1, warm=1)
    assert line.startswith("written: tiny/profile/profile.json")
    assert (tmp_path / "runs" / "tiny" / "profile" / "profile.json").is_file()


def test_batches_that_several_epochs_fill_better_are_enough_for_a_profile(run, tmp_path):
    config = replace(configuration(str(run / "config.yaml")), output=tmp_path / "run")
    atoms = int(build(config).sizes["atoms"].sum())
    # An epoch fills little more than half of its two batches.
    barely = replace(config, batch=replace(config.batch, capacity=atoms - 1))
    assert profile(build(barely), steps=4, warm=1)["steps"] == 4


@pytest.mark.parametrize(("device", "steps"), [("cpu", 3), ("cuda", 50)])
def test_fewer_steps_are_traced_without_a_gpu(run, monkeypatch, device, steps):
    asked = []
    monkeypatch.setattr(
        bench_profile, "parse_device", lambda name, _key: SimpleNamespace(type=name)
    )
    monkeypatch.setattr(bench_profile, "profile", lambda _run, *numbers: asked.append(numbers))
    built = SimpleNamespace(settings=SimpleNamespace(train=SimpleNamespace(device=device)))
    monkeypatch.setattr(bench_profile, "recipe", lambda _name: (None, lambda _config: built))
    assert profile_folder(run) == ([], [])
    assert asked == [(steps, 10)]


def test_what_is_missing_in_a_configuration_is_named_by_its_key(tmp_path, capsys):
    (tmp_path / "m.csv").write_text("smiles,a,b\nC,1,2\nCC,2,3\n")
    settings = {"recipe": "gpspp", "data": {"train": [str(tmp_path / "m.csv")]}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    assert cli.main(["bench", "profile", str(tmp_path / "run.yaml")]) == 2
    assert capsys.readouterr().err.endswith("choose with data.columns.targets\n")


def test_a_folder_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.yaml"):
        profile_folder(tmp_path)
    with pytest.raises(ConfigError, match="gone: there is no such run or YAML file"):
        profile_folder(tmp_path / "gone")
    with pytest.raises(ConfigError, match="steps"):
        profile_folder(tmp_path, steps=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_kernels_launches_and_peaks_are_counted(run, tmp_path):
    profile_folder(run, steps=10, warm=3, device="cuda", out=tmp_path)
    found = json.loads((tmp_path / "profile.json").read_text())
    (rank,) = found["ranks"]
    assert rank["launches"] > 0
    assert rank["memory"]["peak"] > rank["memory"]["weights"]
    assert not any(name.startswith("aten::") for name in rank["kernels"])


@pytest.mark.parametrize("gradient", [0, 2**20])
def test_names_of_long_modules_leave_room_for_what_is_below_the_bars(gradient):
    names = [f"confidence.pairformer.blocks.{i}.pair.attend_starting" for i in range(3)]
    saved = {"forward": 2**20, "gradient": gradient}
    sizes = {f"sizes_of_the_batch_{i}": 1 for i in range(12)}
    figure = _activations({"memory": {"modules": dict.fromkeys(names, saved), "batch": sizes}})
    png(figure)
    ((ax,), inside) = (figure.axes, figure.bbox)
    legend = ax.get_legend()
    assert (legend is not None) == bool(gradient)  # one kind of bars needs none
    for text in (ax.xaxis.label, ax.title, *([] if legend is None else legend.get_texts())):
        box = text.get_window_extent()
        assert inside.x0 <= box.x0
        assert box.x1 <= inside.x1


def test_names_of_kernels_lose_their_arguments():
    name = "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, 4>(float*, int)"
    assert short(name) == "at::native::{anonymous}::CatArrayBatchedCopy<float, 4>"
    assert short("_sum_by_sender") == "_sum_by_sender"
    assert len(short("x" * 300)) == 90


@pytest.fixture
def capturing(monkeypatch):
    """Let steps on a CPU take the path of captured ones."""
    monkeypatch.setattr(captured_step, "obstacle", lambda *_: None)


def quick(folder, **settings):
    """Write the configuration of a run that never begins."""
    train = {"epochs": 2, "device": "cpu", "threads": 1, **settings.pop("train", {})}
    values = {"output": str(folder / "run"), "train": train, "report": False, **settings}
    (folder / "run.yaml").write_text(yaml.safe_dump(values))
    return folder / "run.yaml"


def test_steps_over_one_whole_graph_are_profiled_as_they_are_captured(tmp_path, capturing):
    file = graph_data_sets.write(tmp_path / "g.npz")
    model = {"hidden": 4, "heads": 2}
    path = quick(tmp_path, recipe="graph", data={"train": [str(file)]}, model=model)
    profile_folder(path, steps=2, warm=2)
    found = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())
    assert found["captured"]
    assert found["ranks"][0]["sizes"] == {"graphs": 1.0, "vertices": 90.0, "edges": 720.0}
    assert "stack.layers.0" in found["ranks"][0]["memory"]["modules"]


def test_steps_of_molecules_are_profiled(tmp_path, capturing):
    molecules = ["C", "CC", "CCC", "CCO", "CCN", "CO", "c1ccccc1", "CC(=O)O", "C1CC1", "CF", "C=C"]
    lines = ["smiles,size", *(f"{one},{10 * len(one)}" for one in molecules)]
    (tmp_path / "m.csv").write_text("\n".join(lines))
    data = {"train": [str(tmp_path / "m.csv")], "prepare_workers": 1, "valid_size": 2}
    data["columns"] = {"targets": ["size"]}
    path = quick(tmp_path, recipe="gpspp", data=data, model=GPSPP, molecules=4)
    profile_folder(path, steps=2, warm=1)
    (rank,) = json.loads((tmp_path / "run" / "profile" / "profile.json").read_text())["ranks"]
    assert 2 < rank["sizes"]["molecules"] <= 4
    assert "blocks.0.attention" in rank["memory"]["modules"]


def test_all_shapes_of_batches_are_captured_before_steps_are_timed(run, monkeypatch):
    seen = []

    class Watched(ProfiledTrainer):
        def _now(self):
            if self._phase == "warm":
                shapes = {shape for shape, _ in self.captured._graphs._graphs}
                seen.append((shapes, self.captured.buckets))
            return super()._now()

    def one_that_few_batches_fit_and_one_for_all(rule, sizes):
        edges, atoms, graphs = sizes[np.argmin(sizes[:, 0])].tolist()
        smallest = BatchShape(edges=edges, atoms=atoms + 1, graphs=graphs + 1)
        return SizeBuckets((smallest, BatchShape(edges=256, atoms=32, graphs=16)))

    monkeypatch.setattr(captured_step, "choose_shapes", one_that_few_batches_fit_and_one_for_all)
    monkeypatch.setattr(
        loop,
        "captured_step",
        lambda run, state, mesh, _: captured_step.CapturedStep(run, state, mesh),
    )
    monkeypatch.setattr(profiled_steps, "ProfiledTrainer", Watched)
    config = configuration(str(run / "config.yaml"))
    optim = replace(config.optim, fused=True)
    built = build(replace(config, optim=optim, batch=replace(config.batch, capacity=12)))
    found = profile(built, steps=2, warm=1)
    ((shapes, buckets),) = seen
    assert found["captured"]
    assert len(buckets.shapes) == 2
    assert shapes == set(buckets.shapes)
