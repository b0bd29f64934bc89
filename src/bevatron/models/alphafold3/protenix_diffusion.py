"""Names of weights in Protenix's files and here: the diffusion module, the confidence head, atoms.

`convert` joins these tables with those of the trunk. An empty name stands where parts belong
to the module itself.
"""

from torch import nn

from bevatron.models.alphafold3.adaptive import AdaptiveNorm, ConditionedTransition
from bevatron.models.alphafold3.atom_attention import AtomDecoder, AtomEncoder, TrunkToAtoms
from bevatron.models.alphafold3.atom_transformer import AtomTransformer, WindowAttention
from bevatron.models.alphafold3.conditioning import DiffusionConditioning
from bevatron.models.alphafold3.confidence import ConfidenceHead
from bevatron.models.alphafold3.diffusion import DiffusionModule
from bevatron.models.alphafold3.diffusion_transformer import (
    ConditionedAttention,
    ConditionedBias,
    DiffusionBlock,
)
from bevatron.models.alphafold3.relative_position import RelativePositionEncoding
from bevatron.models.common.folding.published_names import ATTENTION

CONDITIONED_ATTENTION = {
    "norm": "layernorm_a",
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
        "condition_norm": "layernorm_s",
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
    ConditionedBias: {"norm": "layernorm_z", "linear": "linear_nobias_z"},
    ConditionedAttention: CONDITIONED_ATTENTION,
    WindowAttention: CONDITIONED_ATTENTION
    | {ours: f"attention.{theirs}" for ours, theirs in ATTENTION.items()}
    | {"key_norm": "layernorm_kv"},
    DiffusionBlock: {
        "attention": "attention_pair_bias",
        "transition": "conditioned_transition_block",
    },
    AtomTransformer: {"blocks": "diffusion_transformer.blocks"},
    TrunkToAtoms: {
        "single_norm": "layernorm_s",
        "single": "linear_no_bias_s",
        "pair_norm": "layernorm_z",
        "pair": "linear_no_bias_z",
        "coordinates": "linear_no_bias_r",
    },
    AtomEncoder: ENCODER,
    AtomDecoder: {
        "from_tokens": "linear_no_bias_a",
        "transformer": "atom_transformer",
        "norm": "layernorm_q",
        "update": "linear_no_bias_out",
    },
    RelativePositionEncoding: {"linear": "linear_no_bias"},
    DiffusionConditioning: {
        "relative_position": "relpe",
        "pair_norm": "layernorm_z",
        "pair": "linear_no_bias_z",
        "pair_transitions.0": "transition_z1",
        "pair_transitions.1": "transition_z2",
        "single_norm": "layernorm_s",
        "single": "linear_no_bias_s",
        "noise_embedding": "fourier_embedding",
        "noise_norm": "layernorm_n",
        "noise": "linear_no_bias_n",
        "single_transitions.0": "transition_s1",
        "single_transitions.1": "transition_s2",
    },
    ConfidenceHead: {
        "trunk_norm": "input_strunk_ln",
        "column": "linear_no_bias_s1",
        "row": "linear_no_bias_s2",
        "distance_bin": "linear_no_bias_d",
        "distance": "linear_no_bias_d_wo_onehot",
        "pairformer": "pairformer_stack",
        "pae_norm": "pae_ln",
        "pde_norm": "pde_ln",
        "plddt_norm": "plddt_ln",
        "resolved_norm": "resolved_ln",
        "pae": "linear_no_bias_pae",
        "pde": "linear_no_bias_pde",
        "plddt": "plddt_weight",
        "resolved": "resolved_weight",
    },
    DiffusionModule: {
        "conditioning": "diffusion_conditioning",
        "encoder": "atom_attention_encoder",
        "single_norm": "layernorm_s",
        "single": "linear_no_bias_s",
        "transformer": "diffusion_transformer",
        "token_norm": "layernorm_a",
        "decoder": "atom_attention_decoder",
    },
}
