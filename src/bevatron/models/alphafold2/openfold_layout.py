"""Names of the tensors in OpenFold's state dicts, also in older files and in MLPerf HPC's.

Our names are mapped to OpenFold's; the names of a model then suffice for the way back. Other
layouts are first converted to OpenFold's.
"""

import re
from collections.abc import Mapping

from torch import Tensor

from bevatron.models.common.folding.published_names import (
    ATTENTION,
    OUTER_PRODUCT_MEAN,
    RELU_TRANSITION,
    TRIANGLE_ATTENTION,
    TRIANGLE_MULTIPLICATION,
    inside,
)

_PARTS: Mapping[str, Mapping[str, str]] = {
    "msa_att_row": {
        "bias.norm": "layer_norm_z",
        "bias.linear": "linear_z",
        "attention.norm": "layer_norm_m",
        **inside("attention", "mha", ATTENTION),
    },
    "msa_att_col": {
        "attention.norm": "_msa_att.layer_norm_m",
        **inside("attention", "_msa_att.mha", ATTENTION),
        "norm": "layer_norm_m",
        **{ours: f"global_attention.{theirs}" for ours, theirs in ATTENTION.items()},
    },
    "msa_transition": RELU_TRANSITION,
    "outer_product_mean": OUTER_PRODUCT_MEAN,
    "tri_mul_out": TRIANGLE_MULTIPLICATION,
    "tri_mul_in": TRIANGLE_MULTIPLICATION,
    "tri_att_start": TRIANGLE_ATTENTION,
    "tri_att_end": TRIANGLE_ATTENTION,
    "pair_transition": RELU_TRANSITION,
    "template_pointwise_att": {ours: f"mha.{theirs}" for ours, theirs in ATTENTION.items()},
    "ipa": {
        "q": "linear_q",
        "kv": "linear_kv",
        "q_points": "linear_q_points.linear",
        "kv_points": "linear_kv_points.linear",
        "bias": "linear_b",
        "out": "linear_out",
    },
}
"""Layers inside a module of this name, ours and OpenFold's; all others differ only in norms."""

_OLDER = (
    (r"^(?:module|model)\.", ""),
    (r"^evoformer_stack\.", "evoformer."),
    (r"^auxiliary_heads\.", "aux_heads."),
    (r"\.core\.(msa_transition|outer_product_mean)\.", r".\1."),
    (r"\.core\.", ".pair_stack."),
    (r"^template_(?:angle|single)_embedder\.", "template_embedder.template_single_embedder."),
    (r"^template_pair_(embedder|stack)\.", r"template_embedder.template_pair_\1."),
    (r"^template_pointwise_att(?:ention)?\.", "template_embedder.template_pointwise_att."),
    (r"(evoformer\.blocks\.\d+\.msa_att_col)\.(mha|layer_norm_m)\.", r"\1._msa_att.\2."),
    (r"(ipa\.linear_(?:q|kv)_points)\.(weight|bias)$", r"\1.linear.\2"),
    (r"structure_module\.transition\.linear_", "structure_module.transition.layers.0.linear_"),
    (r"\.mha\.linear_g_bias$", ".mha.linear_g.bias"),
)

_FUSED = {"linear_qkvg": "qkvg", "linear_kv": "kv"}
"""Layers of MLPerf's attention that stack several of ours."""


def openfold_name(ours: str) -> str:
    """Return OpenFold's name of a tensor of ours.

    Examples
    --------
    >>> openfold_name("evoformer.blocks.3.msa_att_row.attention.gate.bias")
    'evoformer.blocks.3.msa_att_row.mha.linear_g.bias'
    """
    path = ours.split(".")
    for depth, module in enumerate(path, 1):
        layer = _PARTS.get(module, {}).get(".".join(path[depth:-1]))
        if layer is not None:
            return ".".join([*path[:depth], layer, path[-1]])
    return re.sub(r"(^|\.)norm(?=[._])", r"\1layer_norm", ours)


def current_name(name: str) -> str:
    """Return OpenFold's present name for one of an older file or of MLPerf's.

    Examples
    --------
    >>> current_name("evoformer_stack.blocks.0.core.tri_mul_in.linear_z.bias")
    'evoformer.blocks.0.pair_stack.tri_mul_in.linear_z.bias'
    """
    for pattern, replacement in _OLDER:
        name = re.sub(pattern, replacement, name)
    return name


def in_openfold_layout(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Bring a state dict of OpenFold, old or new, or of MLPerf, plain or fused, into one layout."""
    found = {}
    for name, value in state.items():
        fused = re.search(r"\.mha\.(linear_qkvg|linear_kv)\.weight$", name)
        if fused is None:
            found[current_name(name)] = value
            continue
        parts = _FUSED[fused[1]]
        for part, rows in zip(parts, value.chunk(len(parts)), strict=True):
            found[current_name(name.replace(fused[1], f"linear_{part}"))] = rows
    return found
