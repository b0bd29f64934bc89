"""Checkpoints of mace-torch that are damaged or ask for what this model has not: one sentence."""

import json
import random
import sys
import types

import pytest
import torch
from safetensors.torch import save_file

from bevatron.cli import main
from bevatron.errors import BevatronError, CheckpointError, ConfigError
from bevatron.models.mace import (
    from_mace_torch,
    load_mace_torch_file,
    mace_torch_file,
    to_mace_torch,
)

JUNK = (None, -1, 0, 2.5, "x", "", [], [[]], {}, {"a": 1}, float("nan"), float("inf"), [1, "a"])

UNSUPPORTED = [
    ("gate", None, "'silu'"),
    ("gate", "None", "'silu'"),
    ("gate", "tanh", "'silu'"),
    ("gate", torch.tanh, "'silu'"),
    ("gate", "<built-in method abs of type object at 0x7f>", "'silu'"),
    ("radial_type", "gaussian", "'bessel'"),
    ("radial_type", "chebyshev", "'bessel'"),
    ("distance_transform", "Soft", "'Agnesi'"),
    ("interaction_cls", "RealAgnosticResidualNonLinearInteractionBlock", "'RealAgnosticInter"),
    ("interaction_cls_first", "<class 'mace.modules.blocks.Other'>", "'RealAgnosticInter"),
    ("readout_cls", "GeneralNonLinearBiasReadoutBlock", "'NonLinearReadoutBlock'"),
    ("readout_cls", "LinearReadoutBlock", "NonLinearReadoutBlock"),
    ("class", "MACELES", "ScaleShiftMACE"),
    ("use_last_readout_only", True, "False"),
    ("use_so3", True, "False"),
    ("embedding_specs", {"charge": {}}, "None"),
    ("an_option_of_tomorrow", 3, "not known here"),
]


@pytest.mark.parametrize(("key", "value", "supported"), UNSUPPORTED)
def test_an_option_is_refused_by_key_and_value_with_what_is_supported(key, value, supported, tiny):
    state, config = to_mace_torch(tiny())
    with pytest.raises(ConfigError) as refused:
        from_mace_torch(state, {**config, key: value})
    shown = "torch" if callable(value) else str(value).split(".")[-1].strip("'>")
    shown = {"None": "None", "torch": "tanh"}.get(shown, shown)
    shown = "abs" if "abs" in shown else shown
    assert str(refused.value).startswith(f"{key}: ")
    assert shown in str(refused.value)
    assert supported in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_gate_that_is_not_named_is_not_guessed(tiny):
    state, config = to_mace_torch(tiny())
    del config["gate"]
    with pytest.raises(ConfigError, match="gate: missing"):
        from_mace_torch(state, config)
    # A model of one layer has no read-out with an activation.
    state, config = to_mace_torch(tiny(num_interactions=1))
    assert from_mace_torch(state, {**config, "gate": None}).config.num_interactions == 1


def refused_or_same(state, config, before):
    """A changed checkpoint is refused in a sentence, or the change has no meaning."""
    try:
        model = from_mace_torch(state, config)
    except BevatronError as error:
        said = str(error)
    else:
        said = ""
    if said:
        assert "\n" not in said
        assert len(said) < 800
        return said
    assert model.config == before.config
    for name, value in before.state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    return ""


def test_other_values_of_any_key_are_refused_in_a_sentence(tiny):
    before = tiny(pair_repulsion=True, distance_transform="agnesi", interaction="density_residual")
    state, config = to_mace_torch(before)
    for key in config:
        for junk in JUNK:
            if (key, junk) == ("avg_num_neighbors", 2.5):  # as good as any other
                continue
            refused_or_same(state, {**config, key: junk}, before)
        refused_or_same(state, {k: v for k, v in config.items() if k != key}, before)


def damaged_entries(value):
    """Other tensors in place of one of a state dict."""
    yield torch.zeros(0, dtype=value.dtype)
    yield torch.zeros(3, 5, 7, dtype=value.dtype)
    yield value.repeat(2) if value.ndim == 1 else value.unsqueeze(0)[:0]
    if value.is_floating_point() and value.numel():
        yield torch.full_like(value, torch.nan)
        yield torch.full_like(value, torch.inf)
        yield torch.full(value.shape, 7)
        yield value.to(torch.complex64)


def test_other_values_of_any_entry_are_refused_in_a_sentence_with_its_name(tiny):
    before = tiny(pair_repulsion=True, distance_transform="agnesi", interaction="density_residual")
    state, config = to_mace_torch(before)
    for name, value in state.items():
        for other in damaged_entries(value):
            said = refused_or_same({**state, name: other}, config, before)
            assert not said or f"'{name}'" in said, (name, other.shape, other.dtype, said)
        refused_or_same({k: v for k, v in state.items() if k != name}, config, before)


DAMAGED = {
    "empty": (lambda data: b"", "is empty"),
    "web page": (lambda data: b"\n<!DOCTYPE html><html>Not found</html>", "is a web page"),
    "pointer": (lambda data: b"version https://git-lfs.github.com/spec/v1\noid", "Git LFS"),
    "compressed": (lambda data: b"\x1f\x8b\x08" + data, "gunzip"),
    "text": (lambda data: b"not a checkpoint at all", ""),
    "zeros": (lambda data: b"\0" * len(data), ""),
    "half": (lambda data: data[: len(data) // 2], ""),
    "a byte less": (lambda data: data[:-1], ""),
    "first bytes": (lambda data: data[:20], ""),
}


@pytest.fixture
def written(tiny, tmp_path, monkeypatch):
    """A checkpoint in all kinds of files; mace-torch seems to be there."""
    state, config = to_mace_torch(tiny())
    torch.save(state, tmp_path / "a.pt")
    save_file(state, tmp_path / "a.safetensors")
    torch.save({"model": state}, tmp_path / "a.model")
    (tmp_path / "a.json").write_text(json.dumps(config))
    monkeypatch.setitem(sys.modules, "mace", types.ModuleType("mace"))
    return tmp_path


def arguments(folder, kind):
    given = ["convert", "mace-torch", folder / f"a.{kind}", folder / "out"]
    return [*given, "--trust"] if kind == "model" else [*given, "--config", folder / "a.json"]


@pytest.mark.parametrize("damage", DAMAGED)
@pytest.mark.parametrize("kind", ["pt", "safetensors", "model"])
def test_a_damaged_file_is_one_sentence(written, kind, damage, refused):
    change, reason = DAMAGED[damage]
    file = written / f"a.{kind}"
    file.write_bytes(change(file.read_bytes()))
    said = refused(*arguments(written, kind))
    assert said.startswith(f"{file}: ")
    assert reason in said
    assert not (written / "out").exists()


@pytest.mark.parametrize("kind", ["pt", "safetensors", "model"])
def test_flipped_bytes_are_refused_in_a_sentence_or_read(written, kind, capsys):
    file, draw = written / f"a.{kind}", random.Random(0)
    whole = file.read_bytes()
    for _ in range(25):
        data = bytearray(whole)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        file.write_bytes(data)
        code = main([str(argument) for argument in arguments(written, kind)])
        said = capsys.readouterr().err
        assert code in {0, 2}
        assert code == 0 or said.splitlines()[-1].startswith("error: ")
        for path in (written / "out").glob("*"):
            path.unlink()


def test_pickles_of_other_things_are_named(written, refused, monkeypatch):
    assert "holds a dict, expected a MACE or ScaleShiftMACE; convert a state dict" in refused(
        *arguments(written, "model")
    )
    torch.save(torch.nn.Linear(2, 2), written / "a.model")
    assert "holds a Linear, expected" in refused(*arguments(written, "model"))
    torch.save(torch.nn.Linear(2, 2), written / "a.pt")
    assert "a whole model is converted without --config" in refused(*arguments(written, "pt"))
    (written / "a.model").write_bytes(b"\x80\x04cno_such_package.models\nMACE\n.")
    assert "no_such_package" in refused(*arguments(written, "model"))
    other = type("ScaleShiftMACE", (torch.nn.Module,), {})()
    monkeypatch.setattr(mace_torch_file, "_unpickled", lambda path: other)
    assert "another version of mace-torch" in refused(*arguments(written, "model"))


def test_what_is_refused_is_named_with_its_file(written, refused):
    config = json.loads((written / "a.json").read_text())
    (written / "a.json").write_text(json.dumps({**config, "gate": None}))
    said = refused(*arguments(written, "pt"))
    assert said.startswith(f"{written / 'a.json'}: gate: ")
    (written / "a.json").write_text(json.dumps(config))
    state = torch.load(written / "a.pt", weights_only=True)
    state["scale_shift.scale"] = torch.tensor(torch.nan)
    torch.save(state, written / "a.pt")
    said = refused(*arguments(written, "pt"))
    assert said.startswith(f"{written / 'a.pt'}: the state dict's 'scale_shift.scale' holds NaN")


def test_a_web_page_is_named_before_trust_is_asked_for(tmp_path):
    file = tmp_path / "MACE.model"
    file.write_text("<html>")
    with pytest.raises(CheckpointError, match="web page"):
        load_mace_torch_file(file)
