"""Names of weights in published state dicts, for the modules that OpenFold and Protenix share.

Each table maps the name of one of our layers to the published one, inside the module.
"""

from collections.abc import Mapping

TRIANGLE_MULTIPLICATION = {
    "norm_in": "layer_norm_in",
    "a": "linear_a_p",
    "a_gate": "linear_a_g",
    "b": "linear_b_p",
    "b_gate": "linear_b_g",
    "norm_out": "layer_norm_out",
    "out": "linear_z",
    "out_gate": "linear_g",
}

ATTENTION = {
    "q": "linear_q",
    "k": "linear_k",
    "v": "linear_v",
    "gate": "linear_g",
    "out": "linear_o",
}

TRIANGLE_ATTENTION = {
    "attention.norm": "layer_norm",
    "bias": "linear",
    **{f"attention.{ours}": f"mha.{theirs}" for ours, theirs in ATTENTION.items()},
}

OUTER_PRODUCT_MEAN = {"norm": "layer_norm", "a": "linear_1", "b": "linear_2", "out": "linear_out"}

RELU_TRANSITION = {"norm": "layer_norm", "up": "linear_1", "down": "linear_2"}
"""Names of OpenFold."""

SWIGLU_TRANSITION = {
    "norm": "layernorm1",
    "gate": "linear_no_bias_a",
    "up": "linear_no_bias_b",
    "down": "linear_no_bias",
}
"""Names of Protenix."""


def inside(ours: str, theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return a table of layers inside a module, given its two names."""
    return {f"{ours}.{mine}": f"{theirs}.{name}" for mine, name in names.items()}
