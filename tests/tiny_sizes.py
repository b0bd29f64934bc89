"""Sizes of models that train in a moment."""

from bevatron.models.alphafold3.config import TOKEN_FEATURES
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    ConfidenceConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.config_trunk import (
    MsaConfig,
    PairConfig,
    PairformerConfig,
    TemplateConfig,
)

_PAIR = PairConfig(hidden=8, num_heads=2, head_width=4, transition=1)
_ATOMS = AtomConfig(width=8, pair_width=4, num_heads=2, num_blocks=1)
ALPHAFOLD3 = {
    "widths": TrunkWidths(inputs=TOKEN_FEATURES + 8, single=8, pair=8),
    "atoms": _ATOMS,
    "templates": TemplateConfig(num_blocks=1, width=8, pair=_PAIR),
    "msa": MsaConfig(num_blocks=2, width=8, outer_width=4, num_heads=2, pair=_PAIR),
    "pairformer": PairformerConfig(2, 2, 4, 1, _PAIR),
    "diffusion": DiffusionConfig(
        encoder=_ATOMS, transformer=TokenTransformerConfig(8, 2, 2), decoder=_ATOMS, noise_width=8
    ),
    "confidence": ConfidenceConfig(PairformerConfig(1, 2, 4, 1, _PAIR)),
}

GPSPP = {
    "num_layers": 1, "node_width": 16, "edge_width": 8, "global_width": 4, "num_heads": 2,
    "ffn_width": 16, "expansion": 2, "embedding_width": 4, "num_kernels": 4,
}  # fmt: skip
