"""Sizes of AlphaFold3's diffusion module and confidence head."""

import math
from dataclasses import dataclass, field

from bevatron.models.alphafold3.config_trunk import PairConfig, PairformerConfig
from bevatron.models.common.folding import AUTOMATIC, Checkpointing
from bevatron.models.common.hyper_parameters import check_heads, check_ranges


@dataclass(frozen=True)
class AtomConfig:
    """A transformer over windows of atoms.

    Attributes
    ----------
    width : channels of an atom
    pair_width : channels of a pair of atoms
    num_heads : heads of the attention
    num_blocks : number of blocks
    """

    width: int = 128
    pair_width: int = 16
    num_heads: int = 4
    num_blocks: int = 3

    def __post_init__(self) -> None:
        check_ranges(self, [(name, 1, math.inf) for name in ("width", "pair_width", "num_blocks")])
        check_heads(self.width, self.num_heads)


@dataclass(frozen=True)
class TokenTransformerConfig:
    """The transformer over tokens of the diffusion module.

    Attributes
    ----------
    width : channels of a token
    num_heads : heads of the attention
    num_blocks : number of blocks
    """

    width: int = 768
    num_heads: int = 16
    num_blocks: int = 24

    def __post_init__(self) -> None:
        check_ranges(self, [(name, 1, math.inf) for name in ("width", "num_blocks")])
        check_heads(self.width, self.num_heads)


@dataclass(frozen=True)
class TrunkWidths:
    """Channels of the trunk's outputs.

    Attributes
    ----------
    inputs : channels of the input embedding
    single : channels of the single representation
    pair : channels of the pair representation
    """

    inputs: int = 449
    single: int = 384
    pair: int = 128

    def __post_init__(self) -> None:
        check_ranges(self, [(name, 1, math.inf) for name in ("inputs", "single", "pair")])


@dataclass(frozen=True)
class DiffusionConfig:
    """The diffusion module (AlphaFold3, algorithm 20).

    Attributes
    ----------
    encoder : transformer over atoms, to tokens
    transformer : transformer over tokens
    decoder : transformer over atoms, from tokens
    noise_width : channels of the noise-level embedding
    checkpointing : what the backward pass recomputes; by default as little as fits the GPU
    """

    encoder: AtomConfig = field(default_factory=AtomConfig)
    transformer: TokenTransformerConfig = field(default_factory=TokenTransformerConfig)
    decoder: AtomConfig = field(default_factory=AtomConfig)
    noise_width: int = 256
    checkpointing: Checkpointing = AUTOMATIC

    def __post_init__(self) -> None:
        check_ranges(self, [("noise_width", 1, math.inf)])


@dataclass(frozen=True)
class ConfidenceConfig:
    """The confidence head (AlphaFold3, algorithm 31).

    Attributes
    ----------
    pairformer : its Pairformer blocks, without dropout in published models
    pae_bins : bins of the aligned error
    pde_bins : bins of the error of distances
    plddt_bins : bins of lDDT
    atoms_per_token : maximum number of atoms of a token, each with weights of its own
    """

    pairformer: PairformerConfig = field(
        default_factory=lambda: PairformerConfig(num_blocks=4, pair=PairConfig(dropout=0.0))
    )
    pae_bins: int = 64
    pde_bins: int = 64
    plddt_bins: int = 50
    atoms_per_token: int = 24

    def __post_init__(self) -> None:
        bins = [(name, 2, math.inf) for name in ("pae_bins", "pde_bins", "plddt_bins")]
        check_ranges(self, [*bins, ("atoms_per_token", 1, math.inf)])
