"""Names of weights in Protenix's files and here: the diffusion module and its parts.

A module lists how its parts are called there; a key's name is put together on the way down. What is
not listed has the same name in both, as the numbers of blocks.
"""

from collections.abc import Iterator

from torch import nn

from bevatron.models.alphafold3.adaptive import AdaptiveNorm, ConditionedTransition
from bevatron.models.alphafold3.atom_attention import AtomDecoder, AtomEncoder, TrunkToAtoms
from bevatron.models.alphafold3.atom_transformer import AtomTransformer, WindowAttention
from bevatron.models.alphafold3.conditioning import DiffusionConditioning
from bevatron.models.alphafold3.diffusion import DiffusionModule
from bevatron.models.alphafold3.diffusion_transformer import (
    AttentionProjections,
    ConditionedAttention,
    DiffusionBlock,
    PairBias,
)
from bevatron.models.alphafold3.relative_position import RelativePositionEncoding
from bevatron.models.alphafold3.transition import Transition

ATTENTION = {
    "norm": "layernorm_a",
    "attention": "attention",
    "bias": "",
    "output_gate": "linear_a_last",
}
ENCODER = {
    "position": "linear_no_bias_ref_pos",
    "charge": "linear_no_bias_ref_charge",
    "features": "linear_no_bias_f",
    "offset": "linear_no_bias_d",
    "inverse_distance": "linear_no_bias_invd",
    "same_space": "linear_no_bias_v",
    "trunk": "",
    "pair_of_query": "linear_no_bias_cl",
    "pair_of_key": "linear_no_bias_cm",
    "pair_mlp.0": "small_mlp.1",
    "pair_mlp.1": "small_mlp.3",
    "pair_mlp.2": "small_mlp.5",
    "transformer": "atom_transformer",
    "to_tokens": "linear_no_bias_q",
}

NAMES: dict[type[nn.Module], dict[str, str]] = {
    AdaptiveNorm: {
        "condition_norm": "layernorm_s.weight",
        "scale": "linear_s",
        "shift": "linear_nobias_s",
    },
    ConditionedTransition: {
        "norm": "adaln",
        "gate": "linear_nobias_a1",
        "up": "linear_nobias_a2",
        "down": "linear_nobias_b",
        "output_gate": "linear_s",
    },
    AttentionProjections: {
        "query": "linear_q",
        "key": "linear_k",
        "value": "linear_v",
        "gate": "linear_g",
        "output": "linear_o",
    },
    PairBias: {"norm": "layernorm_z.weight", "projection": "linear_nobias_z"},
    ConditionedAttention: ATTENTION,
    WindowAttention: ATTENTION | {"key_norm": "layernorm_kv"},
    DiffusionBlock: {
        "attention": "attention_pair_bias",
        "transition": "conditioned_transition_block",
    },
    AtomTransformer: {"blocks": "diffusion_transformer.blocks"},
    TrunkToAtoms: {
        "single_norm": "layernorm_s.weight",
        "single": "linear_no_bias_s",
        "pair_norm": "layernorm_z.weight",
        "pair": "linear_no_bias_z",
        "coordinates": "linear_no_bias_r",
    },
    AtomEncoder: ENCODER,
    AtomDecoder: {
        "from_tokens": "linear_no_bias_a",
        "transformer": "atom_transformer",
        "norm": "layernorm_q.weight",
        "update": "linear_no_bias_out",
    },
    Transition: {
        "norm": "layernorm1",
        "gate": "linear_no_bias_a",
        "up": "linear_no_bias_b",
        "down": "linear_no_bias",
    },
    RelativePositionEncoding: {"projection": "linear_no_bias"},
    DiffusionConditioning: {
        "relative_position": "relpe",
        "pair_norm": "layernorm_z.weight",
        "pair": "linear_no_bias_z",
        "pair_transitions.0": "transition_z1",
        "pair_transitions.1": "transition_z2",
        "single_norm": "layernorm_s.weight",
        "single": "linear_no_bias_s",
        "noise_embedding": "fourier_embedding",
        "noise_norm": "layernorm_n.weight",
        "noise": "linear_no_bias_n",
        "single_transitions.0": "transition_s1",
        "single_transitions.1": "transition_s2",
    },
    DiffusionModule: {
        "conditioning": "diffusion_conditioning",
        "encoder": "atom_attention_encoder",
        "single_norm": "layernorm_s.weight",
        "single": "linear_no_bias_s",
        "transformer": "diffusion_transformer",
        "token_norm": "layernorm_a.weight",
        "decoder": "atom_attention_decoder",
    },
}


def protenix_names(module: nn.Module) -> dict[str, str]:
    """Return Protenix's name of every key of a module's state dict.

    Examples
    --------
    >>> protenix_names(Transition(8, 2))["up.weight"]
    'linear_no_bias_b.weight'
    """
    return dict(_walk(module, "", ""))


def _walk(module: nn.Module, ours: str, theirs: str) -> Iterator[tuple[str, str]]:
    names = NAMES.get(type(module), {})
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    for name in own:
        yield ours + name, theirs + names.get(name, name)
    for name, child in module.named_children():
        yield from _walk_child(child, name, names, ours, theirs)


def _walk_child(
    child: nn.Module, name: str, names: dict[str, str], ours: str, theirs: str
) -> Iterator[tuple[str, str]]:
    if isinstance(child, nn.ModuleList):
        for number, item in enumerate(child):
            listed = f"{name}.{number}"
            there = names.get(listed, f"{names.get(name, name)}.{number}")
            yield from _walk(item, f"{ours}{listed}.", f"{theirs}{there}.")
        return
    there = names.get(name, name)
    yield from _walk(child, f"{ours}{name}.", f"{theirs}{there}." if there else theirs)
