"""Weights in the layouts of OpenFold, MLPerf HPC, ScaleFold and DeepMind."""

import json
import re

import numpy as np
import pytest
import torch
from tiny_model import TINY, random_weights

from bevatron.errors import CheckpointError
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.convert import (
    from_deepmind,
    from_mlperf,
    from_openfold,
    to_deepmind,
    to_mlperf,
    to_openfold,
)
from bevatron.models.alphafold2.deepmind_layout import place, their_shape
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.openfold_layout import openfold_name


@pytest.fixture
def model():
    return random_weights(AlphaFold2(TINY))


def equal(model, other):
    states = model.state_dict(), other.state_dict()
    return all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def on_meta(preset):
    with torch.device("meta"):
        return AlphaFold2(AlphaFold2Config.preset(preset))


@pytest.mark.parametrize(
    ("preset", "listed", "count"),
    [
        ("alphafold2", "initial_training", 93_229_082),
        ("alphafold2-ptm", "model_1_ptm", 93_237_338),
    ],
)
def test_names_shapes_and_count_are_those_of_openfold(shared, preset, listed, count):
    keys = json.loads((shared / "golden/alphafold2/openfold_keys.json").read_text())[listed]
    state = on_meta(preset).state_dict()
    assert {openfold_name(name): list(value.shape) for name, value in state.items()} == keys
    assert sum(value.numel() for value in state.values()) == count


KINDS = {
    "LinearWeightMHA": ("query_w", "key_w", "value_w", "gating_w"),
    "LinearMHAOutputWeight": ("output_w",),
    "LinearBiasMHA": ("gating_b",),
    "LinearWeightOPM": ("output_w",),
}


def test_arrays_are_those_of_deepmind(shared):
    names = json.loads((shared / "golden/alphafold2/deepmind_npz_names.json").read_text())
    model, found = on_meta("alphafold2-ptm"), {}
    for name, value in model.state_dict().items():
        array, block = place(name)
        entry = names[array]
        assert list(value.shape) == entry["torch_shape"]
        assert entry["stacked"] == (block is not None)
        if not entry["stacked"] or block < 2:
            assert entry["openfold"][block or 0] == openfold_name(name)
        found.setdefault(array, []).append(block)
        shape = their_shape(name, array, tuple(value.shape), model.config)
        kind = entry["type"]
        assert (len(shape) > value.ndim) == (kind in KINDS)
        assert kind not in KINDS or array.rpartition("//")[2] in KINDS[kind]
    assert found.keys() == names.keys()
    for array, blocks in found.items():
        assert len(blocks) == names[array]["n"]


def test_openfold_and_back(model):
    state = to_openfold(model)
    assert state.keys() != model.state_dict().keys()
    assert equal(model, from_openfold(state, TINY))


def test_deepmind_and_back(model):
    assert equal(model, from_deepmind(to_deepmind(model), TINY))


def test_a_head_of_deepmind_is_rows_of_ours(model):
    arrays = to_deepmind(model)
    layer = "evoformer_iteration/msa_row_attention_with_pair_bias/attention"
    query = arrays[f"alphafold/alphafold_iteration/evoformer/{layer}//query_w"]
    attention = model.evoformer.blocks[1].msa_att_row.attention
    assert query.shape == (2, 24, 4, 6)
    assert np.array_equal(query[1, :, 2], attention.q.weight[12:18].detach().numpy().T)
    output = arrays[f"alphafold/alphafold_iteration/evoformer/{layer}//output_w"]
    assert np.array_equal(output[1, 2], attention.out.weight[:, 12:18].detach().numpy().T)


def test_deepmind_exchanges_left_and_right_of_incoming_edges(model):
    arrays = to_deepmind(model)
    triangles = model.evoformer.blocks[0].pair_stack
    for name, layer in (
        ("outgoing", triangles.tri_mul_out.a),
        ("incoming", triangles.tri_mul_in.b),
    ):
        path = f"evoformer/evoformer_iteration/triangle_multiplication_{name}/left_projection"
        left = arrays[f"alphafold/alphafold_iteration/{path}//weights"][0]
        assert np.array_equal(left, layer.weight.detach().numpy().T)


def mlperf(state, *, fused):
    """Rename and merge OpenFold's tensors as MLPerf HPC and ScaleFold do."""
    found = {}
    for name, value in state.items():
        new = re.sub(r"^evoformer\.", "evoformer_stack.", name).replace("._msa_att.", ".")
        new = re.sub(r"^aux_heads\.", "auxiliary_heads.", new)
        new = new.replace(".pair_stack.", ".core.")
        new = re.sub(r"\.(msa_transition|outer_product_mean)\.", r".core.\1.", new)
        new = new.replace("template_embedder.template_single_", "template_angle_")
        new = new.replace(
            "template_embedder.template_pointwise_att.", "template_pointwise_attention."
        )
        new = new.replace("template_embedder.", "").replace("_points.linear.", "_points.")
        new = new.replace("structure_module.transition.layers.0.", "structure_module.transition.")
        if fused and ".mha." in new:
            layer, kind = re.search(r"linear_(\w)\.(\w+)$", new).groups()
            parts = "kv" if "template_pointwise" in new else "qkvg"
            if kind == "weight" and layer in parts:
                if layer == parts[0]:
                    rows = [state[name.replace(f"linear_{layer}.", f"linear_{p}.")] for p in parts]
                    merged = new.replace(f"linear_{layer}.", f"linear_{parts}.")
                    found[merged] = torch.cat(rows)
                continue
            if (layer, kind) == ("g", "bias"):
                new = new.replace("linear_g.bias", "linear_g_bias")
        found[new] = value
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_mlperf_with_moments(model, fused):
    weights = mlperf(to_openfold(model), fused=fused)
    names = " ".join(weights)
    assert ("linear_qkvg" in names) == fused
    assert "evoformer_stack.blocks.1.core.tri_att_end." in names
    state = {
        number: {"step": 7, "exp_avg": 2 * value, "exp_avg_sq": 3 * value}
        for number, value in enumerate(weights.values())
    }
    checkpoint = {"alphafold_state_dict": weights, "optimizer_state_dict": {"state": state}}
    found, moments = from_mlperf(checkpoint, TINY)
    assert equal(model, found)
    for name, value in model.named_parameters():
        assert torch.equal(moments[f"{name}/exp_avg"], 2 * value)
        assert torch.equal(moments[f"{name}/exp_avg_sq"], 3 * value)
        assert moments[f"{name}/step"] == 7


@pytest.mark.parametrize("merged", [False, True])
def test_a_checkpoint_of_mlperf_has_its_names_order_and_moments(model, merged):
    moments = {f"{name}/step": torch.tensor(9.0) for name, _ in model.named_parameters()}
    for name, value in model.named_parameters():
        moments |= {f"{name}/exp_avg": 2 * value, f"{name}/exp_avg_sq": 3 * value}
    found = to_mlperf(model, moments, 11, merged=merged)
    weights, theirs = found["alphafold_state_dict"], mlperf(to_openfold(model), fused=merged)
    assert weights.keys() == theirs.keys()
    assert all(torch.equal(weights[name], value) for name, value in theirs.items())
    again, back = from_mlperf(found, TINY)
    assert equal(model, again)
    assert back.keys() == moments.keys()
    assert all(torch.equal(back[name], value) for name, value in moments.items())
    if merged:
        return
    # Weights have the order of the reference's modules, by which its optimiser numbers them.
    order = [name for name in weights if name.startswith("evoformer_stack.blocks.1.")]
    layers = [*dict.fromkeys(name.split(".", 3)[3].rpartition(".")[0] for name in order)]
    attention = [f"mha.linear_{x}" for x in "qkvog"]
    assert layers[:8] == [
        f"msa_att_row.{x}" for x in ("layer_norm_m", "layer_norm_z", "linear_z", *attention)
    ]
    multiplication = [x for x in layers if x.startswith("core.tri_mul_in")]
    assert [x.rpartition(".")[2] for x in multiplication] == [
        *("linear_a_p", "linear_a_g", "linear_b_p", "linear_b_g", "linear_g", "linear_z"),
        *("layer_norm_in", "layer_norm_out"),
    ]
    first = next(name for name in weights if "template_pair_stack" in name)
    assert first.startswith("template_pair_stack.blocks.0.tri_att_start.layer_norm.")
    optimizer = torch.optim.Adam([torch.zeros_like(w) for w in weights.values()])
    optimizer.load_state_dict(found["optimizer_state_dict"])
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_moments_load_into_the_optimiser(model):
    from bevatron.train.optim import load_optimizer_tensors, optimizer_tensors

    weights = mlperf(to_openfold(model), fused=True)
    state = {
        number: {"step": 7, "exp_avg": 2 * value, "exp_avg_sq": 3 * value}
        for number, value in enumerate(weights.values())
    }
    checkpoint = {"alphafold_state_dict": weights, "optimizer_state_dict": {"state": state}}
    model, moments = from_mlperf(checkpoint, TINY)
    optimizer = torch.optim.Adam(model.parameters())
    load_optimizer_tensors(model, optimizer, moments)
    kept = optimizer_tensors(model, optimizer)
    assert kept.keys() == moments.keys()
    assert all(torch.equal(kept[name], value) for name, value in moments.items())


def test_what_does_not_fit_is_named(model):
    state = to_openfold(model)
    name = "evoformer.blocks.1.msa_transition.linear_1.bias"
    with pytest.raises(CheckpointError, match=f"{name}: this tensor is missing"):
        from_openfold({n: v for n, v in state.items() if n != name}, TINY)
    with pytest.raises(CheckpointError, match=r"extra\.weight: the model has no such tensor"):
        from_openfold(state | {"extra.weight": torch.zeros(1)}, TINY)
    with pytest.raises(CheckpointError, match=f"{name}: the weights have shape \\(3,\\)"):
        from_openfold(state | {name: torch.zeros(3)}, TINY)

    arrays = to_deepmind(model)
    array = "alphafold/alphafold_iteration/evoformer/prev_pos_linear//bias"
    with pytest.raises(CheckpointError, match="prev_pos_linear//bias: this array is missing"):
        from_deepmind({n: v for n, v in arrays.items() if n != array}, TINY)
    with pytest.raises(CheckpointError, match="other: the model has no such array"):
        from_deepmind(arrays | {"other": np.zeros(1)}, TINY)
    with pytest.raises(CheckpointError, match="prev_pos_linear//bias: the array has shape"):
        from_deepmind(arrays | {array: np.zeros(3)}, TINY)
    stack = "alphafold/alphafold_iteration/evoformer/evoformer_iteration/msa_transition"
    short = {n: v[:1] if n.startswith(stack) else v for n, v in arrays.items()}
    with pytest.raises(CheckpointError, match="in block 1"):
        from_deepmind(short, TINY)
