"""`bevatron convert` of AlphaFold2 and AlphaFold3: weights of others, both ways."""

import pickle
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from bevatron.cli import main
from bevatron.errors import CheckpointError, ConfigError
from bevatron.models import alphafold2, alphafold3
from bevatron.recipes.alphafold3.start import started_from

MODELS = {
    "to-openfold": (alphafold2, "weights.pt"),
    "to-deepmind": (alphafold2, "weights.npz"),
    "to-protenix": (alphafold3, "weights.pt"),
}


def small(system):
    torch.manual_seed(4)
    return system.build("small")


def converted(*words):
    return main(["convert", *map(str, words)])


@pytest.mark.parametrize("command", MODELS)
def test_a_model_goes_there_and_back_but_not_over_another(tmp_path, capsys, command):
    system, name = MODELS[command]
    model = small(system)
    system.save_model(model, tmp_path / "ours")
    file, back = tmp_path / name, tmp_path / "back"
    assert converted(command, tmp_path / "ours", file) == 0
    assert converted(system.KIND, file, back, "--preset", "small") == 0
    loaded = system.load_model(back)
    assert loaded.config == model.config
    found = loaded.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name
    assert converted(system.KIND, file, back, "--preset", "small") == 2
    assert "exists already" in capsys.readouterr().err
    assert converted(system.KIND, tmp_path / "ours", tmp_path / "again") == 2
    said = capsys.readouterr().err
    assert f"{tmp_path / 'ours'}: is a folder, not a file of weights; runs and model" in said


@pytest.mark.parametrize("command", MODELS)
def test_weights_of_other_sizes_name_the_option_that_chooses_them(tmp_path, capsys, command):
    system, name = MODELS[command]
    torch.manual_seed(4)
    msa = replace(small(alphafold3).config.msa, width=16)
    narrow = {"c_z": 16} if system is alphafold2 else {"msa": msa}
    system.save_model(system.build("small", **narrow), tmp_path / "narrow")
    assert converted(command, tmp_path / "narrow", tmp_path / name) == 0
    assert converted(system.KIND, tmp_path / name, tmp_path / "back", "--preset", "small") == 2
    said = capsys.readouterr().err
    assert " asks for " in said
    assert "(preset small); weights of other sizes need `--preset alphafold" in said


def test_the_files_are_as_others_read_them(tmp_path):
    chains, complexes = small(alphafold2), small(alphafold3)
    alphafold2.save_model(chains, tmp_path / "chains")
    alphafold3.save_model(complexes, tmp_path / "complexes")
    converted("to-openfold", tmp_path / "chains", tmp_path / "openfold.pt")
    converted("to-deepmind", tmp_path / "chains", tmp_path / "params.npz")
    converted("to-protenix", tmp_path / "complexes", tmp_path / "protenix.pt")
    theirs = torch.load(tmp_path / "openfold.pt", weights_only=True)
    assert set(theirs) == set(alphafold2.to_openfold(chains))
    with np.load(tmp_path / "params.npz") as arrays:
        assert set(arrays) == set(alphafold2.to_deepmind(chains))
    checkpoint = torch.load(tmp_path / "protenix.pt", weights_only=True)
    assert set(checkpoint["model"]) == set(alphafold3.to_protenix(complexes))


def test_protenix_weights_of_several_processes_are_read(tmp_path):
    model = small(alphafold3)
    theirs = {f"module.{name}": value for name, value in alphafold3.to_protenix(model).items()}
    path = tmp_path / "protenix.pt"
    torch.save({"model": theirs, "step": 3}, path)
    found = started_from(path, model.config).state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(found[name], value), name


def test_a_run_starts_from_a_model(tmp_path):
    model = small(alphafold3)
    alphafold3.save_model(model, tmp_path / "model")
    found = started_from(tmp_path / "model", model.config).state_dict()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    other = replace(model.config, msa=replace(model.config.msa, num_blocks=1))
    with pytest.raises(CheckpointError, match=r"start_from: .*model: Unexpected key.*msa"):
        started_from(tmp_path / "model", other)
    alphafold2.save_model(small(alphafold2), tmp_path / "chains")
    with pytest.raises(CheckpointError, match="is a model of alphafold2, not of alphafold3"):
        started_from(tmp_path / "chains", model.config)


@pytest.mark.parametrize("command", MODELS)
def test_models_without_templates_are_recognised(tmp_path, capsys, command):
    system, name = MODELS[command]
    templates = replace(small(system).config.templates, num_blocks=0)
    model = system.build("small", templates=templates)
    system.save_model(model, tmp_path / "ours")
    file = tmp_path / name
    converted(command, tmp_path / "ours", file)
    assert converted(system.KIND, file, tmp_path / "back", "--preset", "small") == 0
    assert "small without templates" in capsys.readouterr().out
    loaded = system.load_model(tmp_path / "back")
    assert loaded.config.templates.num_blocks == 0
    assert not any("template" in name for name in loaded.state_dict())


def test_a_run_with_templates_does_not_start_from_weights_of_protenix_without(tmp_path):
    config = small(alphafold3).config
    without = replace(config, templates=replace(config.templates, num_blocks=0))
    path = tmp_path / "protenix.pt"
    torch.save({"model": alphafold3.to_protenix(alphafold3.AlphaFold3(without))}, path)
    with pytest.raises(CheckpointError, match=r"start_from: .*pt: has no blocks for templates"):
        started_from(path, config)
    assert started_from(path, without).config == without


@pytest.mark.parametrize("command", ["to-openfold", "to-deepmind"])
@pytest.mark.parametrize("name", ["alphafold2", "alphafold2-ptm"])
def test_the_preset_follows_from_the_heads(tmp_path, capsys, monkeypatch, command, name):
    small_values = dict(alphafold2.PRESETS["small"])
    errors = {"alphafold2": False, "alphafold2-ptm": True}
    for each, has_errors in errors.items():
        monkeypatch.setitem(alphafold2.PRESETS, each, small_values | {"aligned_error": has_errors})
    alphafold2.save_model(alphafold2.build(name), tmp_path / "ours")
    file = tmp_path / MODELS[command][1]
    converted(command, tmp_path / "ours", file)
    assert converted("alphafold2", file, tmp_path / "back") == 0
    assert f"{name}, " in capsys.readouterr().out
    assert alphafold2.load_model(tmp_path / "back").config.aligned_error is errors[name]


@pytest.mark.parametrize("system", ["alphafold2", "alphafold3"])
def test_what_does_not_fit_is_said_in_one_sentence(tmp_path, capfd, system):
    path = tmp_path / "weights.pt"
    torch.save({"a": torch.zeros(2)}, path)
    assert converted(system, path, tmp_path / "out", "--preset", "small") != 0
    assert "weights.pt: " in (said := capfd.readouterr().err)
    assert "is missing from the weights" in said
    assert converted(system, tmp_path / "none.pt", tmp_path / "out", "--preset", "small") != 0
    assert "none.pt: cannot be read" in capfd.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("system", ["alphafold2", "alphafold3"])
@pytest.mark.parametrize("content", [b"", b"hello world\n", b"." * 10, b"\x80\x02X\x01\0\0\0\xff."])
def test_what_is_no_file_of_torch_is_refused_in_one_sentence(tmp_path, capfd, system, content):
    path = tmp_path / "weights.pt"
    path.write_bytes(content)
    assert converted(system, path, tmp_path / "out", "--preset", "small") != 0
    assert "weights.pt: cannot be read (" in capfd.readouterr().err


@pytest.mark.parametrize("system", ["alphafold2", "alphafold3"])
@pytest.mark.parametrize(
    "values", [{1: torch.zeros(2)}, {"a": 3.0}, {"model": 1, "ema": 1}, {"ema": {"decay": 0.9}}]
)
def test_what_is_not_tensors_by_name_is_refused_in_one_sentence(tmp_path, capfd, system, values):
    path = tmp_path / "weights.pt"
    torch.save(values, path)
    assert converted(system, path, tmp_path / "out", "--preset", "small") != 0
    assert "weights.pt: holds no weights by name" in capfd.readouterr().err


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"\x93NUMPY"])
def test_a_damaged_file_of_arrays_is_refused_in_one_sentence(tmp_path, capfd, content):
    path = tmp_path / "params.npz"
    path.write_bytes(content)
    assert converted("alphafold2", path, tmp_path / "out") != 0
    assert "params.npz: cannot be read (" in capfd.readouterr().err


def test_files_that_are_no_weights_are_named_in_one_short_sentence(tmp_path, capsys):
    torch.save({"a": torch.ones(3)}, tmp_path / "whole.pt")
    np.savez(tmp_path / "whole.npz", a=np.ones(3))
    for kind in ("pt", "npz"):
        data = (tmp_path / f"whole.{kind}").read_bytes()
        (tmp_path / f"cut.{kind}").write_bytes(data[: len(data) // 2])
    torch.save({}, tmp_path / "empty.pt")
    np.savez(tmp_path / "empty.npz")
    (tmp_path / "code.pt").write_bytes(pickle.dumps({"a": ConfigError}, protocol=4))
    said = {
        "none.pt": "cannot be read (No such file or directory); check the path",
        "none.npz": "cannot be read (No such file or directory); check the path",
        "empty.pt": "holds no weights by name",
        "empty.npz": "holds no weights by name",
        "cut.npz": "cannot be read (File is not a zip file); copy or download it again",
        "cut.pt": "archive: failed finding central directory); copy or download it again",
        "code.pt": "cannot be read (no file of torch, or with more than tensors and plain values)",
    }
    for name, sentence in said.items():
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            assert converted("alphafold2", tmp_path / name, tmp_path / "out") == 2
        told = capsys.readouterr().err
        assert told.startswith(f"error: {tmp_path / name}: ")
        assert told.endswith(f"{sentence}\n")
        assert told.count("\n") == 1
