"""Checkpoints of mace-torch into model folders and back, file to file, without mace-torch."""

import json
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from bevatron.cli import main
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import unlabelled_structure
from bevatron.models.mace import load_model
from bevatron.recipes.mace import convert
from bevatron.recipes.mace.potential import Potential


def test_a_converted_checkpoint_gives_the_energies_and_forces_of_mace_torch(shared, converted):
    golden = json.loads((shared / "golden/mace_reference.json").read_text())
    structures = golden["models"]["real_mace_tutorial_solvent_f32"]["structures"]
    potential = Potential(converted)
    for one in structures.values():
        sample = add_neighbours(
            unlabelled_structure(one["numbers"], one["positions"], one["cell"], one["pbc"]), 3.0
        )
        result = next(potential.evaluate([sample]))
        assert float(result["energy"]) == pytest.approx(one["energy"], abs=1e-9)
        np.testing.assert_allclose(result["forces"], one["forces"], rtol=0, atol=1e-9)


def test_there_and_back_again_is_the_same_model(converted, tmp_path, capsys):
    back, again = tmp_path / "back.pt", tmp_path / "again"
    assert main(["convert", "to-mace-torch", str(converted), str(back)]) == 0
    assert (tmp_path / "back.json").exists()
    config = ["--config", str(tmp_path / "back.json")]
    assert main(["convert", "mace-torch", str(back), str(again), *config]) == 0
    assert "16x0e, 3 elements, cutoff 3 Å" in capsys.readouterr().out
    before, after = (load_file(folder / "weights.safetensors") for folder in (converted, again))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    same = [(folder / "model.json").read_text() for folder in (converted, again)]
    assert same[0] == same[1]


def test_a_state_dict_in_safetensors_is_read_too(checkpoint, converted, tmp_path):
    state, config = checkpoint
    tensors = torch.load(state, weights_only=True)
    path = tmp_path / "state.safetensors"
    save_file({name: value.contiguous().clone() for name, value in tensors.items()}, path)
    out = tmp_path / "out"
    assert main(["convert", "mace-torch", str(path), str(out), "--config", str(config)]) == 0
    before, after = (load_file(folder / "weights.safetensors") for folder in (converted, out))
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_what_cannot_be_converted_is_told(checkpoint, converted, tmp_path, refused):
    state, config = checkpoint
    out = tmp_path / "out"
    assert "--config FILE.json" in refused("convert", "mace-torch", state, out)
    assert "a whole model is converted without --config" in refused(
        "convert", "mace-torch", config, out, "--config", config
    )
    assert "cannot be read as JSON" in refused(
        "convert", "mace-torch", state, out, "--config", state
    )
    assert "exists already" in refused(
        "convert", "mace-torch", state, converted, "--config", config
    )
    part = tmp_path / "part.json"
    part.write_text('{"r_max": 3}')
    assert "missing in the configuration" in refused(
        "convert", "mace-torch", state, out, "--config", part
    )
    assert "the file does not exist" in refused("convert", "mace-torch", tmp_path / "none", out)
    assert "ends with .model or .pt" in refused(
        "convert", "to-mace-torch", converted, tmp_path / "a.onnx"
    )
    assert not out.exists()


def test_a_model_file_needs_trust_and_mace_torch(shared, tmp_path, refused, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "mace", None)
    file = shared / "data/mace/models/real_mace_tutorial_solvent_f32.model"
    assert "(`--trust`)" in refused("convert", "mace-torch", file, tmp_path / "out")
    assert "mace" in refused("convert", "mace-torch", file, tmp_path / "out", "--trust")


def test_warnings_of_the_other_package_are_not_shown(tmp_path, monkeypatch, converted):
    def warned(*_, **__):
        warnings.warn("torch.jit is deprecated", FutureWarning, stacklevel=1)
        return load_model(converted)

    monkeypatch.setattr(convert, "load_mace_torch_file", warned)
    monkeypatch.setattr(convert, "save_mace_torch_file", warned)
    (tmp_path / "a.model").write_bytes(b"some pickle")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert.from_mace_torch_file(tmp_path / "a.model", tmp_path / "folder", trust=True)
        convert.to_mace_torch_file(tmp_path / "folder", tmp_path / "b.model")
