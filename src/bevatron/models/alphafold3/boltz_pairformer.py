"""Conversion of weights from and to Boltz-2's Pairformer."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from bevatron.models.alphafold3.convert import names_of, renamed
from bevatron.models.alphafold3.pair import PairBlock
from bevatron.models.alphafold3.pairformer import AttentionPairBias, Pairformer, PairformerBlock
from bevatron.models.common.folding import (
    Transition,
    TriangleAttention,
    TriangleMultiplication,
    published_names,
)

JOINED = ("p_in.weight", "g_in.weight")
"""Layers of a triangle multiplication that compute the factors a and b, the former's rows first."""

NAMES: dict[type[nn.Module], Mapping[str, str]] = {
    TriangleMultiplication: {
        "a": "p_in.a",
        "b": "p_in.b",
        "a_gate": "g_in.a",
        "b_gate": "g_in.b",
        "out": "p_out",
        "out_gate": "g_out",
    },
    TriangleAttention: published_names.TRIANGLE_ATTENTION,
    Transition: {"gate": "fc1", "up": "fc2", "down": "fc3"},
    PairBlock: {
        "multiply_outgoing": "tri_mul_out",
        "multiply_incoming": "tri_mul_in",
        "attend_starting": "tri_att_start",
        "attend_ending": "tri_att_end",
        "transition": "transition_z",
    },
    AttentionPairBias: {
        "attention.q": "proj_q",
        "attention.k": "proj_k",
        "attention.v": "proj_v",
        "attention.gate": "proj_g",
        "attention.out": "proj_o",
        "bias.norm": "proj_z.0",
        "bias.linear": "proj_z.1",
    },
    PairformerBlock: {
        "pair": "",
        "attention.attention.norm": "pre_norm_s",
        "attention": "attention",
        "transition": "transition_s",
    },
    Pairformer: {"blocks": "layers"},
}


def from_boltz(
    module: Pairformer | PairformerBlock, weights: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the state dict of a Pairformer from one of Boltz-2's, or of a block from a layer's.

    Raises CheckpointError if a tensor is missing, unknown or of another shape; it names the first.
    """
    apart = {}
    for name, value in weights.items():
        if name.endswith(JOINED):
            layer = name.removesuffix(".weight")
            apart[f"{layer}.a.weight"], apart[f"{layer}.b.weight"] = value.chunk(2)
        else:
            apart[name] = value
    return renamed(module, apart, names_of(module, NAMES), "Boltz")


def to_boltz(module: Pairformer | PairformerBlock) -> dict[str, Tensor]:
    """Return the state dict of a Pairformer, or of a block, under Boltz-2's names."""
    own = module.state_dict()
    found = {theirs: own[ours] for ours, theirs in names_of(module, NAMES).items()}
    for first in [name for name in found if name.endswith("_in.a.weight")]:
        layer = first.removesuffix(".a.weight")
        found[f"{layer}.weight"] = torch.cat([found.pop(first), found.pop(f"{layer}.b.weight")])
    return found
