"""Model folders of all kinds: what is read is what was written, anything else is refused."""

import json

import pytest
import torch
from model_kinds import KINDS

from bevatron.errors import CheckpointError


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_comes_back_and_others_do_not(kind, tmp_path):
    make, save, load = KINDS[kind]
    model = make()
    save(model, tmp_path / kind)
    again = load(tmp_path / kind)
    for name, value in model.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    for other, (_, _, load_other) in KINDS.items():
        if other != kind:
            with pytest.raises(CheckpointError, match=f"kind '{kind}', expected '{other}'"):
                load_other(tmp_path / kind)


@pytest.mark.parametrize(("kind", "key"), [("gpspp", "num_layers"), ("graph_attention", "hidden")])
def test_weights_of_another_configuration_are_refused_by_name(kind, key, tmp_path):
    make, save, load = KINDS[kind]
    save(make(), tmp_path / kind)
    path = tmp_path / kind / "model.json"
    found = json.loads(path.read_text())
    found["config"][key] += 1
    path.write_text(json.dumps(found))
    with pytest.raises(CheckpointError, match=f"{kind}: the weights do not fit"):
        load(tmp_path / kind)
