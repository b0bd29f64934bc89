"""Conversion of weights from and to Protenix.

Each kind of module has a table of Protenix's names of its parts; a part may be a path of several
names. The longest matching path wins, and names in no table are equal.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from bevatron.errors import CheckpointError
from bevatron.models.alphafold3 import protenix_diffusion
from bevatron.models.alphafold3.confidence import DISTANCE_BINS, FARTHEST, ConfidenceHead
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.msa import MsaBlock, MsaModule, PairWeightedAveraging
from bevatron.models.alphafold3.pair import PairBlock
from bevatron.models.alphafold3.pairformer import AttentionPairBias, PairformerBlock
from bevatron.models.alphafold3.templates import TemplateEmbedder
from bevatron.models.alphafold3.trunk import Embedding, Trunk
from bevatron.models.common.folding import (
    GatedAttention,
    OuterProductMean,
    Transition,
    TriangleAttention,
    TriangleMultiplication,
    published_names,
)

PAIR = {
    "multiply_outgoing": "tri_mul_out",
    "multiply_incoming": "tri_mul_in",
    "attend_starting": "tri_att_start",
    "attend_ending": "tri_att_end",
    "transition": "pair_transition",
}
EMBEDDING = {
    "single": "linear_no_bias_sinit",
    "row": "linear_no_bias_zinit1",
    "column": "linear_no_bias_zinit2",
    "relative_position": "relative_position_encoding",
    "bond": "linear_no_bias_token_bond",
}

TEMPLATES = "template_embedder."
"""The tensors of templates in Protenix."""

NAMES: dict[type[nn.Module], Mapping[str, str]] = {
    **protenix_diffusion.NAMES,
    TriangleMultiplication: published_names.TRIANGLE_MULTIPLICATION,
    TriangleAttention: published_names.TRIANGLE_ATTENTION,
    OuterProductMean: published_names.OUTER_PRODUCT_MEAN,
    Transition: published_names.SWIGLU_TRANSITION,
    GatedAttention: published_names.ATTENTION,
    PairBlock: PAIR,
    AttentionPairBias: {
        "attention.norm": "layernorm_a",
        "bias.norm": "layernorm_z",
        "bias.linear": "linear_nobias_z",
    },
    PairformerBlock: {
        "pair": "",
        "attention": "attention_pair_bias",
        "transition": "single_transition",
    },
    PairWeightedAveraging: {
        "norm": "layernorm_m",
        "v": "linear_no_bias_mv",
        "gate": "linear_no_bias_mg",
        "bias.norm": "layernorm_z",
        "bias.linear": "linear_no_bias_z",
        "out": "linear_no_bias_out",
    },
    MsaBlock: {
        "outer_product_mean": "outer_product_mean_msa",
        "averaging": "msa_stack.msa_pair_weighted_averaging",
        "transition": "msa_stack.transition_m",
        "pair": "pair_stack",
    },
    MsaModule: {"row": "linear_no_bias_m", "inputs": "linear_no_bias_s"},
    TemplateEmbedder: {
        "norm_in": "layernorm_z",
        "pair": "linear_no_bias_z",
        "features": "linear_no_bias_a",
        "blocks": "pairformer_stack.blocks",
        "norm_out": "layernorm_v",
        "out": "linear_no_bias_u",
    },
    Embedding: EMBEDDING,
    Trunk: {
        "embedding": "",
        "recycled_single.norm": "layernorm_s",
        "recycled_single.linear": "linear_no_bias_s",
        "recycled_pair.norm": "layernorm_z_cycle",
        "recycled_pair.linear": "linear_no_bias_z_cycle",
        "templates": TEMPLATES.removesuffix("."),
        "msa": "msa_module",
        "pairformer": "pairformer_stack",
    },
    AlphaFold3: {
        "input_encoder": "input_embedder.atom_attention_encoder",
        "trunk": "",
        "distogram": "distogram_head",
        "diffusion": "diffusion_module",
        "confidence": "confidence_head",
    },
}


def protenix_names(module: nn.Module) -> dict[str, str]:
    """Map every key of a module's state dict to Protenix's name.

    Examples
    --------
    >>> protenix_names(TriangleAttention(8, 2, 4, starting=True))["attention.q.weight"]
    'mha.linear_q.weight'
    """
    return names_of(module, NAMES)


def names_of(
    module: nn.Module, tables: Mapping[type[nn.Module], Mapping[str, str]]
) -> dict[str, str]:
    """Return the name of every key of a module's state dict by tables for kinds of modules."""
    return {key: _name(module, key, tables) for key in module.state_dict()}


def from_protenix(
    weights: Mapping[str, Tensor], config: AlphaFold3Config, dtype: torch.dtype | None = None
) -> AlphaFold3:
    """Build a model from a state dict of Protenix.

    Raises CheckpointError if a tensor is missing, unknown or of another shape, naming the first.

    Parameters
    ----------
    weights : by name, with or without DDP's prefix ``module.``
    config : sizes of the model
    dtype : floating-point type of the weights
    """
    prefix = "module."
    if all(name.startswith(prefix) for name in weights):
        weights = {name.removeprefix(prefix): value for name, value in weights.items()}
    if not config.templates.num_blocks and without_templates(weights):
        weights = {name: x for name, x in weights.items() if not name.startswith(TEMPLATES)}
    model = AlphaFold3(config).to(dtype)
    model.load_state_dict(state_from_protenix(model, weights))
    return model


def without_templates(weights: Iterable[str]) -> bool:
    """Whether names of Protenix are of a model whose template embedder has no blocks (v0.5.0).

    Its other tensors are there, but nothing uses them.
    """
    of_templates = [name for name in weights if TEMPLATES in name]
    return bool(of_templates) and not any(
        TEMPLATES + "pairformer_stack." in n for n in of_templates
    )


def state_from_protenix(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the state dict of a model or of a part of it from one of Protenix.

    Raises CheckpointError as `from_protenix`.
    """
    given = dict(weights)
    for name, bins in _distance_bins(module).items():
        stored = given.pop(name, bins).to(bins)
        if stored.shape != bins.shape or not torch.allclose(stored, bins):
            raise CheckpointError(f"{name}: other bins of distances than those of the model")
    return renamed(module, given, protenix_names(module), "Protenix")


def renamed(
    module: nn.Module, weights: Mapping[str, Tensor], names: Mapping[str, str], whose: str
) -> dict[str, Tensor]:
    """Return weights under a module's own names; CheckpointError names the first bad one."""
    own = module.state_dict()
    missing = sorted(set(names.values()) - set(weights))
    unknown = sorted(set(weights) - set(names.values()))
    if missing:
        raise CheckpointError(f"{missing[0]}: this tensor is missing from the weights of {whose}")
    if unknown:
        raise CheckpointError(f"{unknown[0]}: the model has no such tensor of {whose}")
    for ours, theirs in names.items():
        if weights[theirs].shape != own[ours].shape:
            raise CheckpointError(
                f"{theirs}: the weights have shape {tuple(weights[theirs].shape)}, the "
                f"configuration asks for {tuple(own[ours].shape)}"
            )
    return {ours: weights[theirs] for ours, theirs in names.items()}


def to_protenix(module: nn.Module) -> dict[str, Tensor]:
    """Return the state dict of a model or of a part of it under Protenix's names.

    Of a model without templates, the tensors that Protenix has but does not use are zeros.
    """
    own = module.state_dict()
    weights = {theirs: own[ours] for ours, theirs in protenix_names(module).items()}
    if isinstance(module, AlphaFold3) and module.trunk.templates is None:
        config = module.config
        unused = TemplateEmbedder(config.widths.pair, config.templates, config.checkpointing)
        found = unused.state_dict()
        for ours, theirs in protenix_names(unused).items():
            weights[TEMPLATES + theirs] = torch.zeros_like(found[ours])
    return weights | _distance_bins(module)


def _distance_bins(module: nn.Module) -> dict[str, Tensor]:
    """Return the ends of distance bins by name, constants here, which Protenix's files hold."""
    lower = torch.linspace(*DISTANCE_BINS)
    ends = {"lower_bins": lower, "upper_bins": torch.cat([lower[1:], torch.tensor([FARTHEST])])}
    return {
        _name(module, f"{path}.{name}".removeprefix("."), NAMES): bins
        for path, part in module.named_modules()
        if isinstance(part, ConfidenceHead)
        for name, bins in ends.items()
    }


def _name(module: nn.Module, key: str, tables: Mapping[type[nn.Module], Mapping[str, str]]) -> str:
    table = tables.get(type(module), {})
    parts = key.split(".")
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        if path in table:
            break
    rest = ".".join(parts[length:])
    there = table.get(path, path)
    inside = _name(module.get_submodule(path), rest, tables) if rest else ""
    return ".".join(part for part in (there, inside) if part)
