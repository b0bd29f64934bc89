"""Names and shapes of the arrays in DeepMind's parameter files.

The blocks of a stack are one array with the blocks as first axis. Matrices are transposed, [in,
out], and those of attention have an axis for heads: [in, H, D], and [H, D, out] for the last layer.
In the triangle multiplication with incoming edges, left and right are swapped.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from bevatron.models.alphafold2.config import AlphaFold2Config

PREFIX = "alphafold/alphafold_iteration/"

_TEMPLATES = "evoformer/template_embedding/single_template_embedding/"

_STACKS = {
    "evoformer.blocks": "evoformer/evoformer_iteration",
    "extra_msa_stack.blocks": "evoformer/extra_msa_stack",
    "template_embedder.template_pair_stack.blocks": (
        f"{_TEMPLATES}template_pair_stack/__layer_stack_no_state"
    ),
}

_TRIANGLE = {
    "norm_in": "layer_norm_input",
    "a": "left_projection",
    "b": "right_projection",
    "a_gate": "left_gate",
    "b_gate": "right_gate",
    "norm_out": "center_layer_norm",
    "out": "output_projection",
    "out_gate": "gating_linear",
}
_EXCHANGED = {"a": "b", "b": "a", "a_gate": "b_gate", "b_gate": "a_gate"}
_TRANSITION = {"norm": "input_layer_norm", "up": "transition1", "down": "transition2"}
_ATTENTION = {"attention.norm": "query_norm", "bias.norm": "feat_2d_norm", "norm": "query_norm"}
_LEAVES: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "msa_att_row": ("msa_row_attention_with_pair_bias", _ATTENTION),
    "msa_att_col": ("msa_column_attention", _ATTENTION),
    "msa_transition": ("msa_transition", _TRANSITION),
    "outer_product_mean": (
        "outer_product_mean",
        {"norm": "layer_norm_input", "a": "left_projection", "b": "right_projection"},
    ),
    "tri_mul_out": ("triangle_multiplication_outgoing", _TRIANGLE),
    "tri_mul_in": (
        "triangle_multiplication_incoming",
        {name: _TRIANGLE[_EXCHANGED.get(name, name)] for name in _TRIANGLE},
    ),
    "tri_att_start": ("triangle_attention_starting_node", _ATTENTION),
    "tri_att_end": ("triangle_attention_ending_node", _ATTENTION),
    "pair_transition": ("pair_transition", _TRANSITION),
}
"""Parts of a block: the module there, and the layers that it has as modules."""

_PARAMETERS = {
    "q.weight": "attention//query_w",
    "k.weight": "attention//key_w",
    "v.weight": "attention//value_w",
    "gate.weight": "attention//gating_w",
    "gate.bias": "attention//gating_b",
    "out.weight": "attention//output_w",
    "out.bias": "attention//output_b",
}
_FOLD = "structure_module/fold_iteration"
_IPA = f"{_FOLD}/invariant_point_attention"
_ANGLES = f"{_FOLD}/rigid_sidechain"

_SINGLE = {
    "input_embedder.linear_tf_z_i": "evoformer/left_single",
    "input_embedder.linear_tf_z_j": "evoformer/right_single",
    "input_embedder.linear_tf_m": "evoformer/preprocess_1d",
    "input_embedder.linear_msa_m": "evoformer/preprocess_msa",
    "input_embedder.linear_relpos": "evoformer/pair_activiations",
    "recycling_embedder.linear": "evoformer/prev_pos_linear",
    "recycling_embedder.norm_m": "evoformer/prev_msa_first_row_norm",
    "recycling_embedder.norm_z": "evoformer/prev_pair_norm",
    "extra_msa_embedder.linear": "evoformer/extra_msa_activations",
    "evoformer.linear": "evoformer/single_activations",
    "template_embedder.template_pair_embedder.linear": f"{_TEMPLATES}embedding2d",
    "template_embedder.template_pair_stack.norm": f"{_TEMPLATES}output_layer_norm",
    "template_embedder.template_single_embedder.linear_1": "evoformer/template_single_embedding",
    "template_embedder.template_single_embedder.linear_2": "evoformer/template_projection",
    "structure_module.norm_s": "structure_module/single_layer_norm",
    "structure_module.norm_z": "structure_module/pair_layer_norm",
    "structure_module.linear_in": "structure_module/initial_projection",
    "structure_module.ipa.q": f"{_IPA}/q_scalar",
    "structure_module.ipa.kv": f"{_IPA}/kv_scalar",
    "structure_module.ipa.q_points": f"{_IPA}/q_point_local",
    "structure_module.ipa.kv_points": f"{_IPA}/kv_point_local",
    "structure_module.ipa.bias": f"{_IPA}/attention_2d",
    "structure_module.ipa.out": f"{_IPA}/output_projection",
    "structure_module.norm_ipa": f"{_FOLD}/attention_layer_norm",
    "structure_module.transition.layers.0.linear_1": f"{_FOLD}/transition",
    "structure_module.transition.layers.0.linear_2": f"{_FOLD}/transition_1",
    "structure_module.transition.layers.0.linear_3": f"{_FOLD}/transition_2",
    "structure_module.transition.norm": f"{_FOLD}/transition_layer_norm",
    "structure_module.bb_update.linear": f"{_FOLD}/affine_update",
    "structure_module.angle_resnet.linear_in": f"{_ANGLES}/input_projection",
    "structure_module.angle_resnet.linear_initial": f"{_ANGLES}/input_projection_1",
    "structure_module.angle_resnet.layers.0.linear_1": f"{_ANGLES}/resblock1",
    "structure_module.angle_resnet.layers.0.linear_2": f"{_ANGLES}/resblock2",
    "structure_module.angle_resnet.layers.1.linear_1": f"{_ANGLES}/resblock1_1",
    "structure_module.angle_resnet.layers.1.linear_2": f"{_ANGLES}/resblock2_1",
    "structure_module.angle_resnet.linear_out": f"{_ANGLES}/unnormalized_angles",
    "aux_heads.plddt.norm": "predicted_lddt_head/input_layer_norm",
    "aux_heads.plddt.linear_1": "predicted_lddt_head/act_0",
    "aux_heads.plddt.linear_2": "predicted_lddt_head/act_1",
    "aux_heads.plddt.linear_3": "predicted_lddt_head/logits",
    "aux_heads.distogram.linear": "distogram_head/half_logits",
    "aux_heads.experimentally_resolved.linear": "experimentally_resolved_head/logits",
    "aux_heads.masked_msa.linear": "masked_msa_head/logits",
    "aux_heads.tm.linear": "predicted_aligned_error_head/logits",
}
"""Layers outside the stacks; norms are those whose names say so."""


class Place(NamedTuple):
    """Location of one of our tensors in a parameter file.

    Attributes
    ----------
    array : name of the array
    block : index of its first axis; None if it has no axis of blocks
    """

    array: str
    block: int | None


def place(ours: str) -> Place:
    """Find the array that holds a tensor of ours.

    Examples
    --------
    >>> array, block = place("evoformer.blocks.3.msa_transition.up.bias")
    >>> array.removeprefix(PREFIX), block
    ('evoformer/evoformer_iteration/msa_transition/transition1//bias', 3)
    """
    stacked = re.match(r"(.*\.blocks)\.(\d+)\.(?:pair_stack\.)?(\w+)\.(.*)$", ours)
    if stacked is None:
        return Place(PREFIX + _single(ours), None)
    stack, block, part, leaf = stacked.groups()
    module, layers = _LEAVES[part]
    if stack.startswith("extra") and part == "msa_att_col":
        module = "msa_column_global_attention"
    array = f"{PREFIX}{_STACKS[stack]}/{module}{_parameter(layers, leaf)}"
    return Place(array, int(block))


def _parameter(layers: Mapping[str, str], leaf: str) -> str:
    """Name a parameter of a block's part: its own, of its attention, or of a layer."""
    layer, _, kind = leaf.rpartition(".")
    if layer in layers:
        return f"/{layers[layer]}//{_kind(layer, kind)}"
    if leaf in {"bias.weight", "bias.linear.weight"}:
        return "//feat_2d_weights"
    if layers is _ATTENTION:
        return "/" + _PARAMETERS[leaf.removeprefix("attention.")]
    return f"//output_{kind[0]}"


def _single(ours: str) -> str:
    if ours.endswith("head_weights"):
        return f"{_IPA}//trainable_point_weights"
    layer, _, kind = ours.rpartition(".")
    if layer.startswith("template_embedder.template_pointwise_att."):
        found = _PARAMETERS[f"{layer.rpartition('.')[2]}.{kind}"]
        return f"evoformer/template_embedding/{found}"
    return f"{_SINGLE[layer]}//{_kind(layer.rpartition('.')[2], kind)}"


def _kind(layer: str, kind: str) -> str:
    if "norm" in layer:
        return {"weight": "scale", "bias": "offset"}[kind]
    return {"weight": "weights", "bias": "bias"}[kind]


def their_shape(
    ours: str, array: str, shape: tuple[int, ...], config: AlphaFold2Config
) -> tuple[int, ...]:
    """Return the shape of a tensor in the file, without an axis of blocks.

    Parameters
    ----------
    ours, array : the two names
    shape : ours
    config : has the numbers of heads
    """
    kind = array.rpartition("//")[2]
    if len(shape) == 1:
        heads = _heads(ours, config) if kind == "gating_b" else None
        return shape if heads is None else (heads, shape[0] // heads)
    out, inner = shape
    if ".outer_product_mean.out." in ours:
        side = round(inner**0.5)
        return (side, side, out)
    one_head = "extra_msa_stack" in ours and "msa_att_col" in ours and kind in _OF_ONE_HEAD
    if one_head or kind not in {*_OF_ONE_HEAD, "query_w", "gating_w", "output_w"}:
        return (inner, out)
    heads = _heads(ours, config)
    return (heads, inner // heads, out) if kind == "output_w" else (inner, heads, out // heads)


_OF_ONE_HEAD = {"key_w", "value_w"}
"""Layers that have one head, and no axis for it, in global attention."""


def _heads(ours: str, config: AlphaFold2Config) -> int:
    if "template_pointwise_att" in ours:
        return config.templates.num_heads
    stacks = {"extra_msa_stack": config.extra_msa, "evoformer": config.evoformer}
    stack = stacks.get(ours.partition(".")[0], config.templates)
    return stack.triangles.num_heads if ".tri_att_" in ours else stack.num_heads
