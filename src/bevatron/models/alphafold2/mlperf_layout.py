"""The layout of MLPerf HPC's checkpoints: names, order and merged layers, from OpenFold's layout.

Its optimiser numbers weights in the order of its modules, so a file must have that order.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_NAMES = (
    (r"^evoformer\.", "evoformer_stack."),
    (r"^aux_heads\.", "auxiliary_heads."),
    (r"\.pair_stack\.", ".core."),
    (r"\.(msa_transition|outer_product_mean)\.", r".core.\1."),
    (r"\._msa_att\.", "."),
    (r"^template_embedder\.template_single_", "template_angle_"),
    (r"^template_embedder\.template_pointwise_att\.", "template_pointwise_attention."),
    (r"^template_embedder\.", ""),
    (r"_points\.linear\.", "_points."),
    (r"\.transition\.layers\.0\.", ".transition."),
)

_TRIANGLE_ATTENTION = ("layer_norm", "linear", "mha")
_TRIANGLE_MULTIPLICATION = (
    *("linear_a_p", "linear_a_g", "linear_b_p", "linear_b_g", "linear_g", "linear_z"),
    *("layer_norm_in", "layer_norm_out"),
)
_ORDER: Mapping[str, tuple[str, ...]] = {
    "msa_att_row": ("layer_norm_m", "layer_norm_z", "linear_z", "mha"),
    "mha": ("linear_q", "linear_k", "linear_v", "linear_o", "linear_g"),
    "tri_att_start": _TRIANGLE_ATTENTION,
    "tri_att_end": _TRIANGLE_ATTENTION,
    "tri_mul_out": _TRIANGLE_MULTIPLICATION,
    "tri_mul_in": _TRIANGLE_MULTIPLICATION,
    "ipa": (
        *("head_weights", "linear_q", "linear_kv", "linear_q_points", "linear_kv_points"),
        *("linear_b", "linear_out"),
    ),
    "template_pair_stack": (
        *("tri_att_start", "tri_att_end", "tri_mul_out", "tri_mul_in", "pair_transition"),
    ),
}
"""Layers of modules in their order, where it is not ours; of the templates' stack, of a block."""


def in_mlperf_layout(state: Mapping[str, Tensor], *, merged: bool = False) -> dict[str, Tensor]:
    """Bring a state dict of OpenFold into the layout and order of MLPerf HPC's reference.

    Parameters
    ----------
    merged
        Join the projections of each attention (queries, keys, values and gates; for templates keys
        and values), as ScaleFold trains them; the bias of gates has no layer then.
    """
    renamed = {}
    for name, value in state.items():
        new = name
        for pattern, replacement in _NAMES:
            new = re.sub(pattern, replacement, new)
        renamed[new] = value
    ordered = {name: renamed[name] for name in _in_order(renamed)}
    return _merged(ordered) if merged else ordered


def _in_order(names: Iterable[str]) -> list[str]:
    """Sort names by the order of the modules that hold them, else as they come."""
    seen: dict[tuple[str, ...], dict[str, int]] = {}

    def places(name: str) -> list[int]:
        path, found = name.split("."), []
        for depth, child in enumerate(path):
            parent = path[depth - 1] if depth else ""
            if parent.isdigit() and path[0] == "template_pair_stack":
                parent = path[0]
            known = seen.setdefault(tuple(path[:depth]), {})
            place = known.setdefault(child, len(known))
            order = _ORDER.get(parent, ())
            found.append(order.index(child) if child in order else place)
        return found

    return sorted(names, key=places)


def _merged(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found = {}
    for name, value in state.items():
        layer = re.search(r"\.mha\.linear_([qkvg])\.(weight|bias)$", name)
        parts = "kv" if name.startswith("template_pointwise") else "qkvg"
        if layer is None or (layer[2] == "weight" and layer[1] not in parts):
            found[name] = value
        elif layer[2] == "bias":
            found[name.replace("linear_g.bias", "linear_g_bias")] = value
        elif layer[1] == parts[0]:
            rows = [state[name.replace(f"_{layer[1]}.", f"_{part}.")] for part in parts]
            found[name.replace(f"_{layer[1]}.", f"_{parts}.")] = torch.cat(rows)
    return found
