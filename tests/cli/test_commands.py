"""The command line: every command on small real data, and every mistake in one sentence."""

import json
import os
import re
import subprocess
import sys

import ase.io
import numpy as np
import pytest
import torch
import yaml

from bevatron.cli import main
from bevatron.parallel import mesh
from bevatron.train.run import FitResult
from bevatron.train.run_folder import RunFolder
from cli_runs import CUTOFF, TINY, losses, metrics

# Preparing and training.


def test_a_run_from_a_store_leaves_a_complete_folder(shelf):
    names = {path.name for path in (shelf / "run").iterdir()}
    expected = {"config.yaml", "metrics.jsonl", "log.txt", "weights.safetensors", "model.json"}
    assert expected | {"checkpoints", "best"} <= names
    assert "report.html" not in names
    assert losses(shelf / "run")
    assert " structures/s" in (shelf / "run" / "log.txt").read_text()


def test_the_gpu_of_a_run_starts_before_its_options_are_parsed(monkeypatch, tmp_path):
    started = []
    monkeypatch.setattr(mesh, "start_gpu", started.append)
    (tmp_path / "run.yaml").write_text("train: {device: cpu}")
    given = ("mace", "mace --train.device=cpu", "mace --dry-run", str(tmp_path / "run.yaml"))
    for words in given:
        assert main(["train", *words.split(), "--nonsense"]) == 2
    assert started == ["auto", "cpu"]  # a file may name the device, and nothing runs dry on one


def test_a_file_and_its_store_give_the_same_losses(shelf, train, tmp_path):
    assert train(data=shelf / "data.xyz") == 0
    assert losses(tmp_path / "run") == losses(shelf / "run")


def test_a_run_writes_a_report_where_it_is_wanted(train, tmp_path):
    assert train("--report", "true") == 0
    assert (tmp_path / "run" / "report.html").stat().st_size > 10_000
    assert list((tmp_path / "run" / "plots").glob("*.png"))


def test_yaml_is_read_and_changed_by_options(structures, tmp_path):
    config = {
        "recipe": "mace",
        "output": str(tmp_path / "run"),
        "preset": "small",
        "data": {"train": [str(structures)], "valid_size": 0.25, "prepare_workers": 1},
        "model": {"num_channels": 4, "l_max": 1, "max_L": 0, "r_max": 3.0, "correlation": 1},
        "loss": {"stage_two": {"start_epoch": 1}},
        "optim": {"lr": "3e-4"},
        "batch": {"capacity": {"atoms": 20, "edges": 500}},
        "train": {"epochs": 2, "device": "cpu"},
        "report": False,
    }
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    changes = ["--optim.lr", "0.002", "--train.epochs=1", "--loss.stage-two.energy-weight", "7"]
    assert main(["train", str(path), *changes]) == 0
    found = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert found["optim"]["lr"] == 0.002
    assert found["loss"]["stage_two"] == {
        "start_epoch": 1,
        "energy_weight": 7.0,
        "forces_weight": 100.0,
        "stress_weight": 0.0,
        "virials_weight": 0.0,
    }
    assert found["batch"]["capacity"] == {"atoms": 20, "edges": 500}
    assert found["model"]["num_channels"] == 4
    assert found["model"]["radial_mlp"] == [32, 32, 32]
    # A run's own configuration starts it again.
    again = ["train", str(tmp_path / "run" / "config.yaml"), "--resume", "must"]
    assert main([*again, "--train.epochs", "2"]) == 0
    assert max(line["epoch"] for line in metrics(tmp_path / "run") if line["kind"] == "step") == 1


def test_the_last_of_several_presets_counts_and_is_recorded(structures, tmp_path, refused):
    given = ["--data", str(structures), *TINY[2:]]
    for last, first, width in (("small", "default", 32), ("default", "small", 64)):
        folder = tmp_path / last
        presets = ["--preset", first, f"--preset={last}"]
        assert main(["train", "mace", "--output", str(folder), *presets, *given]) == 0
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert config["preset"] == last
        assert config["model"]["radial_mlp"] == [width] * 3
    # All of a run's own configuration is written out: another preset would change nothing.
    said = refused("train", folder / "config.yaml", "--preset", "small", "--dry-run")
    assert "--preset small: changes nothing" in said


def test_data_sets_with_heads_of_their_own_are_read_from_yaml(structures, frames, tmp_path):
    other = tmp_path / "other.xyz"
    other.write_text("".join(frames[:6]))
    heads = {
        "one": {"train": [str(structures)]},
        "two": {"train": [str(other)], "e0": {"H": -10.0, "C": -50.0, "O": -100.0}},
    }
    config = {
        "output": str(tmp_path / "run"),
        "preset": "small",
        "data": {"heads": heads, "prepare_workers": 1},
        "model": {"num_channels": 4, "l_max": 1, "max_L": 0, "r_max": 3.0, "correlation": 1},
    }
    path = tmp_path / "heads.yaml"
    path.write_text(yaml.safe_dump(config))
    options = ["--train.epochs", "1", "--train.device", "cpu", "--no-report"]
    assert main(["train", str(path), *options]) == 0
    model = json.loads((tmp_path / "run" / "model.json").read_text())["config"]
    assert model["heads"] == ["one", "two"]
    assert model["atomic_energies"][1] == [-10.0, -50.0, -100.0]


def test_isolated_energies_and_capacities_are_given_on_the_command_line(train, tmp_path):
    e0 = ["--data.e0", "H", "-10", "C", "-50.5", "O", "-100"]
    assert train(*e0, "--batch.capacity", "atoms", "20", "edges", "900") == 0
    model = json.loads((tmp_path / "run" / "model.json").read_text())["config"]
    assert model["atomic_energies"] == [[-10.0, -50.5, -100.0]]


def test_data_are_staged_to_the_folder_that_is_named(train, shelf, tmp_path):
    assert train("--stage-to", tmp_path / "disk", data=shelf / "store") == 0
    assert list((tmp_path / "disk").rglob("*.arrow"))
    assert losses(tmp_path / "run") == losses(shelf / "run")


def test_dry_run_says_what_would_be_and_trains_nothing(train, tmp_path, capsys):
    assert train("--dry-run") == 0
    said = capsys.readouterr().out
    assert re.search(r"parameters +[\d,]+ \([\d,]+ trained\)", said)
    for word in ("steps", "memory", "fill", "validation structures", "slowest rank over mean"):
        assert word in said


def test_a_dry_run_leaves_nothing_behind(train, tmp_path, structures):
    assert train("--dry-run", output=tmp_path / "new" / "run") == 0
    assert [path.name for path in tmp_path.iterdir()] == [structures.name]
    (tmp_path / "run").mkdir()
    assert train("--dry-run") == 0
    assert list((tmp_path / "run").iterdir()) == []
    assert train() == 0
    before = sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*"))
    assert train("--dry-run", "--model.num-channels", "8") == 0
    assert sorted(path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")) == before


def test_two_runs_do_not_write_into_one_folder(structures, tmp_path, refused):
    folder, again = RunFolder(tmp_path / "run"), RunFolder(tmp_path / "run")
    with folder.claimed():
        said = refused("train", "mace", "--data", structures, "--output", folder.path, *TINY)
        assert "run: another process is training there" in said
    with again.claimed():
        assert not folder.metrics.exists()


def test_what_the_data_decide_is_not_told_as_it_was_before_them(shelf):
    kept = yaml.safe_load((shelf / "run" / "config.yaml").read_text())
    assert kept["model"]["num_channels"] == 4
    assert not {"avg_num_neighbors", "scale", "atomic_numbers"} & kept["model"].keys()
    assert json.loads((shelf / "run" / "model.json").read_text())["config"]["avg_num_neighbors"] > 1


def test_a_stopped_run_says_how_it_goes_on(train, tmp_path, monkeypatch, capsys):
    stopped = FitResult(tmp_path, None, "SIGINT", 0, 1, {}, None, 0, 1.0)
    monkeypatch.setattr("bevatron.recipes.training.fit", lambda run: stopped)
    assert train("--output", tmp_path / "run") == 130
    assert "--resume auto resumes" in capsys.readouterr().out


def test_a_run_that_a_launcher_starts_again_goes_on_and_says_so(train, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    assert train() == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert train("--train.epochs", "2") == 0
    said = capsys.readouterr().out
    assert "restarted by Slurm (once so far): the run continues" in said
    assert "resumed from" in said


def test_resume_must_auto_and_never(train, refused, structures, shelf, tmp_path):
    run = ["train", "mace", "--data", structures, "--output", tmp_path / "run", *TINY]
    assert "no checkpoint to resume" in refused(*run, "--resume", "must")
    assert train("--resume", "auto") == 0
    steps = len(losses(tmp_path / "run"))
    sentence = refused(*run)
    assert "holds a run already" in sentence
    assert "--resume auto" in sentence
    assert train("--resume", "must", "--train.epochs", "2") == 0
    assert len(losses(tmp_path / "run")) == 2 * steps
    assert "'model.num_channels' was 4 and is 8" in refused(
        *run, "--resume", "auto", "--model.num-channels", "8"
    )


def test_elements_of_the_model_may_be_more_than_those_of_the_data(structures, tmp_path, refused):
    values = {"data": {"train": [str(structures)], "prepare_workers": 1, "e0": {}}}
    path = tmp_path / "elements.yaml"
    options = ["train", path, *TINY, "--output"]
    values["data"]["e0"] = {"H": -10.0, "C": -50.0, "N": -70.0, "O": -100.0}
    values["model"] = {"atomic_numbers": [1, 6, 7, 8]}
    path.write_text(yaml.safe_dump(values))
    assert main([str(option) for option in [*options, tmp_path / "run"]]) == 0
    model = json.loads((tmp_path / "run" / "model.json").read_text())["config"]
    assert model["atomic_numbers"] == [1, 6, 7, 8]
    path.write_text(yaml.safe_dump({**values, "model": {"atomic_numbers": [1, 6]}}))
    assert "data hold also [8]" in refused(*options, tmp_path / "few")
    path.write_text(yaml.safe_dump({**values, "model": {"heads": ["a", "b"]}}))
    assert "set --data.heads instead" in refused(*options, tmp_path / "few")


# Using a model.


def test_predict_keeps_order_and_columns_and_adds_results(shelf, tmp_path):
    out = tmp_path / "out.xyz"
    arguments = [str(shelf / "run"), str(shelf / "data.xyz"), str(out)]
    assert main(["predict", *arguments, "--capacity", "20"]) == 0
    before, after = ase.io.read(shelf / "data.xyz", ":"), ase.io.read(out, ":")
    assert len(after) == len(before)
    for old, new in zip(before, after, strict=True):
        assert set(new.info) - set(old.info) == {"predicted_energy"}
        assert new.info["REF_energy"] == old.info["REF_energy"]
        assert new.info["config_type"] == old.info["config_type"]
        np.testing.assert_allclose(new.positions, old.positions, atol=1e-8)
        np.testing.assert_allclose(new.arrays["REF_forces"], old.arrays["REF_forces"], atol=1e-8)
        energies = new.arrays["predicted_energies"]
        assert energies.sum() == pytest.approx(new.info["predicted_energy"], abs=1e-6)
    errors = [new.info["predicted_energy"] - new.info["REF_energy"] for new in after]
    assert np.abs(errors).max() < 5


def test_what_is_written_has_the_name_of_its_format(shelf, tmp_path, refused):
    source, run = shelf / "data.xyz", shelf / "run"
    for command in ("predict", "relax"):
        said = refused(command, run, source, tmp_path / "out.csv")
        assert "extended XYZ is written; name it out.extxyz" in said
    assert not list(tmp_path.iterdir())


def test_a_committee_adds_its_spread(shelf, train, tmp_path, refused):
    assert train("--train.seed", "1", data=shelf / "store") == 0
    out, other = tmp_path / "out.xyz", tmp_path / "run"
    arguments = [str(shelf / "run"), str(shelf / "data.xyz"), str(out)]
    assert main(["predict", *arguments, "--committee", str(other), "--prefix", "my_"]) == 0
    same = f"{tmp_path}/../{tmp_path.name}/run"
    said = refused("predict", *arguments, "--committee", str(other), same)
    assert said == f"{other}: is given 2 times; a committee needs different models"
    alone = tmp_path / "alone.xyz"
    energies = []
    for model in (shelf / "run", other):
        assert main(["predict", str(model), str(shelf / "data.xyz"), str(alone)]) == 0
        energies.append(ase.io.read(alone).info["predicted_energy"])
    first = ase.io.read(out)
    assert first.info["my_energy"] == pytest.approx(np.mean(energies))
    assert first.info["my_energy_std"] == pytest.approx(np.std(energies))
    assert first.arrays["my_forces_std"].shape == (len(first),)


def test_relax_writes_structures_without_the_labels_of_the_start(shelf, tmp_path):
    out = tmp_path / "relaxed.xyz"
    arguments = [str(shelf / "run"), str(shelf / "data.xyz"), str(out)]
    assert main(["relax", *arguments, "--steps", "2", "--fmax", "0.01"]) == 0
    first = ase.io.read(out)
    assert first.info["relax_steps"] == 2
    assert "REF_energy" not in first.info
    assert "REF_forces" not in first.arrays
    assert np.isfinite(first.get_forces()).all()


def test_inspect_and_bench_print_tables(shelf, tmp_path, capsys):
    store = str(shelf / "store")
    figures = tmp_path / "figures"
    assert main(["inspect", store, "--out", str(figures), "--plan", "--ranks", "2"]) == 0
    assert (figures / "inspect.html").exists()
    said = capsys.readouterr().out
    assert "balanced" in said
    assert re.search(r", [\d,]+ atoms per batch", said)
    assert "structures per" in said
    assert main(["bench", "store", store]) == 0
    assert main(["bench", "loader", store, "--workers", "0"]) == 0
    assert main(["bench", "packing", store, "--ranks", "2"]) == 0
    said = capsys.readouterr().out
    for word in ("read µs (median)", "structures/s", "algorithm1", "slowest rank over mean"):
        assert word in said


def test_bench_measures_the_steps_of_a_run(shelf, tmp_path, capsys):
    steps = [str(shelf / "store"), "--model", str(shelf / "run"), "--device", "cpu"]
    assert main(["bench", "cost", *steps, "--dtype", "float64", "--most", "200"]) == 0
    assert "µs: " in capsys.readouterr().out
    picture = tmp_path / "curve.png"
    assert main(["bench", "capacity", *steps, "--most", "100", "--out", str(picture)]) == 0
    assert picture.exists()
    said = capsys.readouterr()
    assert "atoms/s" in said.out
    assert "ms a step" in said.err


# Mistakes.


BAD_DATA = {
    "no energy": (r"REF_energy=\S+", "", "no frame has an energy"),
    "zeros": (r"REF_energy=\S+", "REF_energy=0.0", "is zero in every frame"),
    "another name": (r"REF_energy", "my_energy", r"--labels.energy-key 'my_energy'"),
    "NaN": (r"REF_energy=\S+", "REF_energy=nan", r"frame 0: .*NaN"),
    "no element": (r"\nO ", "\nQq ", r"frame 0: .*'Qq', which is not an element"),
    "no volume": (r'pbc="F F F"', 'pbc="T T T"', r"frame 0: the cell has zero volume"),
    "stress": (
        r'pbc="F F F"',
        'pbc="T T T" Lattice="9 0 0 0 9 0 0 0 9" REF_stress="1 2 3 4"',
        r"frame 0: .*stress.* 4 numbers",
    ),
}


@pytest.mark.parametrize("case", BAD_DATA)
def test_bad_data_are_refused_with_file_and_frame(case, frames, tmp_path, refused):
    pattern, replacement, sentence = BAD_DATA[case]
    path = tmp_path / "bad.xyz"
    text = "".join(frames)
    path.write_text(re.sub(pattern, replacement, text))
    assert path.read_text() != text
    said = refused("prepare", path, "--out", tmp_path / "store", "--cutoff", CUTOFF)
    assert said.startswith(str(path))
    assert re.search(sentence, said)
    said = refused("train", "mace", "--data", path, "--output", tmp_path / "run", *TINY)
    assert re.search(sentence.replace("--labels", "--data.labels"), said)


def test_one_structure_is_too_few_to_set_one_aside(frames, tmp_path, refused, capsys):
    path, run = tmp_path / "one.xyz", ["--output", str(tmp_path / "run"), *TINY]
    path.write_text(frames[0])
    said = refused("train", "mace", "--data", path, *run)
    assert "too few to set some aside; give --data.valid, or --data.valid-size 0" in said
    assert main(["train", "mace", "--data", str(path), *run, "--data.valid-size", "0"]) == 0
    assert f"bevatron predict {tmp_path / 'run'} FILE OUT" in capsys.readouterr().out


def test_suspect_data_are_warned_of(frames, tmp_path, capsys):
    path, run = tmp_path / "kcal.xyz", ["--output", str(tmp_path / "run"), *TINY]
    path.write_text("".join([*frames[:3], re.sub(r"(\nO( +\S+){3} +)\S+", r"\g<1>9e3", frames[3])]))
    assert main(["train", "mace", "--data", str(path), "--data.valid", str(path), *run]) == 0
    said = capsys.readouterr().out
    assert re.search(r"warning: forces have an RMS of .* 9e\+03 in .*kcal.xyz, frame 3", said)
    assert re.search(r"warning: .*kcal.xyz is among the training data too", said)


def test_coinciding_atoms_are_refused(frames, tmp_path, refused):
    path = tmp_path / "bad.xyz"
    lines = frames[1].splitlines()
    lines[3] = lines[2]
    path.write_text(frames[0] + "\n".join(lines) + "\n")
    said = refused("prepare", path, "--out", tmp_path / "store", "--cutoff", CUTOFF)
    assert "frame 1: atoms 0 and 1 coincide" in said


def test_evaluate_without_files_asks_for_one(shelf, refused):
    assert "expected at least one file or store of labelled structures" in refused(
        "evaluate", shelf / "run"
    )


def test_a_store_of_another_cutoff_is_refused(shelf, refused):
    said = refused("train", "mace", "--data", shelf / "store", "--preset", "small")
    assert "prepared with a cutoff of 3.0 Å, the model needs 4.5 Å" in said
    assert "train a new model with model.r_max: 3" in said


def test_validation_data_with_other_elements_are_refused_before_the_training(
    structures, tmp_path, refused
):
    path = tmp_path / "salt.xyz"
    path.write_text(
        "2\nProperties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy=-3.0\n"
        "Na 0 0 0 0.1 0 0\nCl 0 0 2.1 -0.1 0 0\n"
    )
    run = ["train", "mace", "--data", structures, "--output", tmp_path / "run", *TINY]
    assert f"{path}, frame 0: holds Na, Cl, but" in refused(*run, "--data.valid", path)


def test_a_loss_without_its_label_is_refused(structures, frames, tmp_path, refused):
    run = ["train", "mace", "--output", tmp_path / "run", *TINY, "--data"]
    assert "have no stress" in refused(*run, structures, "--loss.stress-weight", "1")
    path = tmp_path / "energies.xyz"
    path.write_text("".join(frames).replace(":REF_forces:R:3", ":other:R:3"))
    assert "have no forces" in refused(*run, path, "--data.labels.forces-key", "")


def test_a_structure_above_the_capacity_is_named_with_what_to_do(structures, tmp_path, refused):
    run = ["train", "mace", "--data", structures, "--output", tmp_path / "run", *TINY]
    said = refused(*run, "--batch.capacity", "5")
    assert f"{structures}, frame 0 costs 6" in said
    assert "--batch.oversized alone" in said


def test_a_missing_package_is_named_and_the_folder_stays_free(
    train, refused, structures, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = ["train", "mace", "--data", structures, "--output", tmp_path / "run", *TINY]
    assert "pip install 'bevatron[wandb]'" in refused(*run, "--train.wandb", "true")
    assert train() == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_named(shelf, refused, structures, tmp_path):
    run = ["train", "mace", "--data", structures, "--output", tmp_path / "run", *TINY]
    assert "'cuda'" in refused(*run, "--train.device", "cuda")
    predict = ["predict", shelf / "run", shelf / "data.xyz", tmp_path / "out.xyz"]
    assert "device: 'cuda' cannot be used here" in refused(*predict, "--device", "cuda")


def test_predict_and_evaluate_name_the_structure_with_an_unknown_element(shelf, tmp_path, refused):
    path = tmp_path / "salt.xyz"
    path.write_text(
        '1\nProperties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy=1.0 pbc="F F F"\n'
        "H 0 0 0 0.1 0 0\n"
        '2\nProperties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy=2.0 pbc="F F F"\n'
        "Na 0 0 0 0.1 0 0\nCl 0 0 2 -0.1 0 0\n"
    )
    expected = f"{path}, frame 1 holds Na, Cl, which the model does not know (it knows H, C, O)"
    out = tmp_path / "out.xyz"
    assert refused("predict", shelf / "run", path, out) == expected
    assert refused("relax", shelf / "run", path, out) == expected
    assert refused("evaluate", shelf / "run", path) == expected
    assert not out.exists()


def test_predict_names_the_frame_that_makes_no_sense(shelf, tmp_path, refused):
    good = "1\nProperties=species:S:1:pos:R:3\nH 0 0 0\n"
    for atoms, sentence in {
        "H 0 0 0\nH 0 0 0": "coincide",
        "H 0 0 nan\nH 0 0 0": "NaN",
        "Qq 0 0 0\nH 0 0 0": "Qq",
    }.items():
        path = tmp_path / "bad.xyz"
        path.write_text(f"{good}2\nProperties=species:S:1:pos:R:3\n{atoms}\n")
        said = refused("predict", shelf / "run", path, tmp_path / "out.xyz")
        assert said.startswith(f"{path}, frame 1")
        assert sentence in said


def test_a_pickle_is_not_opened_without_trust(tmp_path, refused, shelf):
    path = tmp_path / "foreign.model"
    torch.save({"a": torch.nn.Linear(1, 1)}, path)
    assert "--trust" in refused("convert", "mace-torch", path, tmp_path / "out")
    pickled = tmp_path / "frames.pkl"
    pickled.write_bytes(b"\x80\x04.")
    said = refused("prepare", pickled, "--out", tmp_path / "store", "--cutoff", "3")
    assert "pass `--labels.trust`" in said
    assert "pickle" in refused("predict", shelf / "run", pickled, tmp_path / "out.xyz")


def test_errors_of_the_device_and_of_diverging_losses_reach_the_user(train, capsys, monkeypatch):
    from bevatron.errors import DivergenceError
    from bevatron.models.mace import MaceTask

    def fails(error):
        def loss(self, model, batch, normalisers):
            raise error

        return loss

    monkeypatch.setattr(MaceTask, "loss", fails(torch.OutOfMemoryError("CUDA out of memory")))
    assert train() == 2
    assert "batch.capacity" in capsys.readouterr().err
    monkeypatch.setattr(MaceTask, "loss", fails(DivergenceError("the loss became NaN; frame 3")))
    assert train("--resume", "auto") == 2
    assert "error: the loss became NaN; frame 3" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(train, shelf, tmp_path, refused, capsys):
    (tmp_path / "file").write_text("")
    assert train(output=tmp_path / "file") == 2
    assert str(tmp_path / "file") in capsys.readouterr().err
    out = tmp_path / "nowhere" / "out.xyz"
    said = refused("predict", shelf / "run", shelf / "data.xyz", out)
    assert said == f"{out}: cannot be written, its folder does not exist; make it first"
    assert str(tmp_path / "file") in refused("inspect", shelf / "store", "--out", tmp_path / "file")


# Through the shell.


def shell(*arguments, before=""):
    command = " ".join(map(str, arguments))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        ["bash", "-c", f"{before} {sys.executable} -m bevatron {command}"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        check=False,
    )


def test_a_full_disk_is_told_to_the_shell_and_leaves_no_half_file(shelf, tmp_path):
    out = tmp_path / "out.xyz"
    # Compiled sources would be cut off as well, and break all later processes.
    full = "export PYTHONDONTWRITEBYTECODE=1; ulimit -f 1;"
    done = shell("predict", shelf / "run", shelf / "data.xyz", out, before=full)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {out}: cannot be written")
    assert not list(tmp_path.iterdir())


def test_two_processes_train_from_a_plain_file_with_one_log(structures, tmp_path):
    # Alone, it meets at a port of its own.
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, "-m", "bevatron", "train", "mace", "--data", structures]
    done = subprocess.run(
        [*command, "--output", tmp_path / "run", *TINY],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("training ended") == 1
    assert log.count("frames; energy") == 1
    assert done.stdout.count("training ended") == 1
    assert sum(line["kind"] == "epoch" for line in metrics(tmp_path / "run")) == 1


def test_ctrl_c_during_the_import_of_torch_ends_without_a_traceback():
    program = """
import sys, types
import bevatron.cli as cli
sys.modules["torch"] = None  # what is left of an interrupted import cannot be imported again
sys.modules["torch.distributed"] = types.ModuleType("torch.distributed")
def interrupted(*_, **__):
    raise KeyboardInterrupt
cli._dispatch = interrupted
sys.argv = ["bevatron", "evaluate", "run", "file"]
cli.run()
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "")


def test_arguments_that_may_be_left_out_are_in_brackets(capsys):
    assert main(["demo", "--help"]) == 0
    assert "usage: bevatron demo [OUT]" in capsys.readouterr().out
    assert main(["convert", "mace-torch", "--help"]) == 0
    assert "SOURCE [OUT] [--OPTION" in capsys.readouterr().out


def test_a_command_names_the_help_that_shows_all_options(refused):
    assert "`bevatron train mace --help-all` shows all" in refused(
        "train", "mace", "--optim.lrr", 1
    )
