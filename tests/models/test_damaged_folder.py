"""Model folders that a disk, a copy or a hand has damaged: one sentence, never other numbers."""

import json
import os
import random
import shutil

import pytest
import torch
from model_kinds import KINDS
from safetensors.torch import load_file, save_file

from bevatron import files
from bevatron.errors import BevatronError, CheckpointError
from bevatron.recipes.kinds import kind_of_model, newest_model

JUNK = (None, -1, 0, 2.5, "x", "", [], [[]], {}, {"a": 1}, True, float("nan"), [1, "a"])


@pytest.fixture(params=KINDS)
def kind(request):
    return request.param


@pytest.fixture
def folder(kind, tmp_path):
    make, save, _ = KINDS[kind]
    save(make(), tmp_path / "model")
    return tmp_path / "model"


def damaged(data: bytes, count: int):
    """Copies of a file's bytes: cut, empty, with flipped bits, other contents."""
    draw = random.Random(0)
    yield b""
    yield b"\0" * len(data)
    yield b"<!DOCTYPE html><html><body>404: Not Found</body></html>"
    yield b"[" * 100_000
    for _ in range(count):
        yield data[: draw.randrange(len(data))]
        flipped = bytearray(data)
        flipped[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        yield bytes(flipped)


def test_weights_that_do_not_match_their_checksum_are_refused(kind, folder):
    file = folder / "weights.safetensors"
    for data in damaged(file.read_bytes(), 40):
        file.write_bytes(data)
        with pytest.raises(CheckpointError, match=r"weights\.safetensors: is damaged, it does not"):
            KINDS[kind][2](folder)


def test_a_folder_without_checksums_is_read_or_refused_in_a_sentence(kind, folder):
    """As 0.1.0 wrote them."""
    description = folder / "model.json"
    values = json.loads(description.read_text())
    del values["files"]
    description.write_text(json.dumps(values))
    load, file = KINDS[kind][2], folder / "weights.safetensors"
    load(folder)
    for data in damaged(file.read_bytes(), 40):
        file.write_bytes(data)
        read_or_refused(load, folder)


def read_or_refused(load, folder):
    """Whatever is in the files, nothing but a sentence may come out of them."""
    said = f"{folder}: read"
    try:
        load(folder)
    except BevatronError as error:
        said = str(error)
    assert str(folder) in said
    assert "\n" not in said
    assert len(said) < 800


def test_a_damaged_description_is_read_or_refused_in_a_sentence(kind, folder):
    file = folder / "model.json"
    for data in damaged(file.read_bytes(), 60):
        file.write_bytes(data)
        read_or_refused(KINDS[kind][2], folder)


def test_a_configuration_of_other_values_is_read_or_refused_in_a_sentence(kind, folder):
    file = folder / "model.json"
    values, draw = json.loads(file.read_text()), random.Random(0)
    for key in values["config"]:
        for junk in draw.sample(JUNK, 4):
            file.write_text(json.dumps({**values, "config": {**values["config"], key: junk}}))
            read_or_refused(KINDS[kind][2], folder)
    for key in values:
        for junk in JUNK:
            file.write_text(json.dumps({**values, key: junk}))
            read_or_refused(KINDS[kind][2], folder)
        file.write_text(json.dumps({k: v for k, v in values.items() if k != key}))
        read_or_refused(KINDS[kind][2], folder)


@pytest.mark.parametrize("text", ["", "{", "[]", '"mace"', "{}", '{"kind": 3}', "\x00"])
def test_a_command_names_the_damaged_description(text, tmp_path):
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"model\.json: is damaged"):
        kind_of_model([str(tmp_path), "a.xyz"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_neither_written_nor_read(kind, folder, value):
    make, save, load = KINDS[kind]
    model = make()
    name = next(name for name, value in model.state_dict().items() if value.is_floating_point())
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    model.state_dict()[name].view(-1)[-1] = value
    with pytest.raises(CheckpointError, match=rf"model: the model is not saved, its '{name}'"):
        save(model, folder)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    file = folder / "weights.safetensors"
    save_file({**load_file(file), name: model.state_dict()[name].contiguous()}, file)
    values = json.loads((folder / "model.json").read_text())
    values["files"] = {file.name: files.checksum(file.read_bytes())}
    (folder / "model.json").write_text(json.dumps(values))
    with pytest.raises(CheckpointError, match=rf"weights\.safetensors: '{name}' holds NaN"):
        load(folder)


def test_a_kill_while_a_model_is_replaced_leaves_the_old_one_or_the_new_one(kind, tmp_path):
    """In a run's folder, where the best model is used until the final one is there."""
    make, save, load = KINDS[kind]
    old, new = make(), make()
    with torch.no_grad():
        next(new.parameters()).add_(1.0)
    name = next(iter(dict(new.named_parameters())))
    weights = [model.state_dict()[name] for model in (old, new)]
    run, left = tmp_path / "run", []
    save(old, run)
    save(old, run / "best")

    def as_killed_here(step, path):
        left.append(shutil.copytree(run, tmp_path / f"killed{len(left)}"))

    files.crash_hooks.append(as_killed_here)
    try:
        save(new, run)
    finally:
        files.crash_hooks.remove(as_killed_here)
    assert len(left) == 8  # write, fsync, rename and fsync_folder of two files
    for folder in (*left, run):
        found = load(newest_model(folder)).state_dict()[name]
        assert any(torch.equal(found, each) for each in weights), folder.name
    assert torch.equal(found, weights[1])


def test_a_full_disk_leaves_the_model_that_was_there(kind, folder):
    make, save, load = KINDS[kind]

    def full(name, path):
        if name == "write":
            raise OSError(28, "No space left on device")

    files.crash_hooks.append(full)
    try:
        with pytest.raises(CheckpointError, match="disk is full"):
            save(make(), folder)
    finally:
        files.crash_hooks.remove(full)
    load(folder)


def test_a_disk_that_is_found_full_at_the_end_leaves_the_model_that_was_there(
    kind, folder, monkeypatch
):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    make, save, load = KINDS[kind]
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointError, match="disk is full"):
        save(make(), folder)
    load(folder)
