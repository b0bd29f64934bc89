"""Names of the tensors in OpenFold's state dicts, also in older files and in MLPerf HPC's.

Our names are turned into OpenFold's by rules on the path of a tensor, so that the names of one
model are all that is needed to go back. Other layouts are first brought into OpenFold's.
"""

import re
from collections.abc import Mapping

from torch import Tensor

_PATHS = (
    (r"(tri_att_(?:start|end))\.attention\.norm\.", r"\1.layer_norm."),
    (r"(tri_att_(?:start|end))\.attention\.", r"\1.mha."),
    (r"(tri_att_(?:start|end))\.bias\.", r"\1.linear."),
    (r"msa_att_row\.attention\.norm\.", r"msa_att_row.layer_norm_m."),
    (r"msa_att_row\.attention\.", r"msa_att_row.mha."),
    (r"msa_att_row\.bias\.norm\.", r"msa_att_row.layer_norm_z."),
    (r"msa_att_row\.bias\.linear\.", r"msa_att_row.linear_z."),
    (r"msa_att_col\.attention\.norm\.", r"msa_att_col._msa_att.layer_norm_m."),
    (r"msa_att_col\.attention\.", r"msa_att_col._msa_att.mha."),
    (r"msa_att_col\.norm\.", r"msa_att_col.layer_norm_m."),
    (r"msa_att_col\.(q|k|v|gate|out)\.", r"msa_att_col.global_attention.\1."),
    (r"template_pointwise_att\.(q|k|v|out)\.", r"template_pointwise_att.mha.\1."),
    (r"(mha|global_attention)\.(q|k|v)\.", r"\1.linear_\2."),
    (r"(mha|global_attention)\.gate\.", r"\1.linear_g."),
    (r"(mha|global_attention)\.out\.", r"\1.linear_o."),
    (r"(tri_mul_(?:out|in))\.([ab])\.", r"\1.linear_\2_p."),
    (r"(tri_mul_(?:out|in))\.([ab])_gate\.", r"\1.linear_\2_g."),
    (r"(tri_mul_(?:out|in))\.out\.", r"\1.linear_z."),
    (r"(tri_mul_(?:out|in))\.out_gate\.", r"\1.linear_g."),
    (r"outer_product_mean\.a\.", r"outer_product_mean.linear_1."),
    (r"outer_product_mean\.b\.", r"outer_product_mean.linear_2."),
    (r"outer_product_mean\.out\.", r"outer_product_mean.linear_out."),
    (r"(msa|pair)_transition\.up\.", r"\1_transition.linear_1."),
    (r"(msa|pair)_transition\.down\.", r"\1_transition.linear_2."),
    (r"ipa\.(q|kv|out)\.", r"ipa.linear_\1."),
    (r"ipa\.(q|kv)_points\.", r"ipa.linear_\1_points.linear."),
    (r"ipa\.bias\.", r"ipa.linear_b."),
    (r"(^|\.)norm(?=[._])", r"\1layer_norm"),
)

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
"""Layers of MLPerf's attention that hold several of ours, one below the other."""


def openfold_name(ours: str) -> str:
    """Return the name that OpenFold has for a tensor of ours.

    Examples
    --------
    >>> openfold_name("evoformer.blocks.3.msa_att_row.attention.gate.bias")
    'evoformer.blocks.3.msa_att_row.mha.linear_g.bias'
    """
    for pattern, replacement in _PATHS:
        ours = re.sub(pattern, replacement, ours)
    return ours


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
