"""Sizes of AlphaFold3's trunk: templates, alignment, Pairformer."""

from dataclasses import dataclass, field

from bevatron.models.common.hyper_parameters import check_dropout, check_ranges


@dataclass(frozen=True)
class PairConfig:
    """A block that updates a pair by its triangles.

    Attributes
    ----------
    hidden : channels of the projections of triangle multiplication
    num_heads : heads of triangle attention
    head_width : channels of each of these heads
    transition : hidden channels of the transition as a multiple of its input channels
    dropout : dropout rate, row- or column-wise
    """

    hidden: int = 128
    num_heads: int = 4
    head_width: int = 32
    transition: int = 4
    dropout: float = 0.25

    def __post_init__(self) -> None:
        check_ranges(self, [*_SIZES, ("hidden", 1, 65536), ("transition", 1, 64)])
        check_dropout(self.dropout)


@dataclass(frozen=True)
class TemplateConfig:
    """The template embedder (AlphaFold3, algorithm 16).

    The sizes are Protenix's, so that its weights fit; AlphaFold3 has 64 hidden channels and heads
    of 16.

    Attributes
    ----------
    num_blocks : pair blocks; 0 = no templates
    width : channels of a template's pair
    pair : sizes of these blocks
    """

    num_blocks: int = 2
    width: int = 64
    pair: PairConfig = field(default_factory=lambda: PairConfig(transition=2))

    def __post_init__(self) -> None:
        check_ranges(self, [("num_blocks", 0, 1024), ("width", 1, 65536)])


@dataclass(frozen=True)
class MsaConfig:
    """The MSA module (AlphaFold3, algorithm 8).

    Attributes
    ----------
    num_blocks : number of blocks; 0 = no alignment
    width : channels of the MSA representation
    outer_width : channels of each projection of the outer product mean
    num_heads : heads of pair-weighted averaging
    head_width : channels of each of these heads
    transition : hidden channels of the transition as a multiple of its input channels
    dropout : dropout rate of pair-weighted averaging
    pair : sizes of the pair updates
    """

    num_blocks: int = 4
    width: int = 64
    outer_width: int = 32
    num_heads: int = 8
    head_width: int = 8
    transition: int = 4
    dropout: float = 0.15
    pair: PairConfig = field(default_factory=PairConfig)

    def __post_init__(self) -> None:
        sizes = (("width", 1, 65536), ("outer_width", 1, 4096), ("transition", 1, 64))
        check_ranges(self, [*_SIZES, *sizes, ("num_blocks", 0, 1024)])
        check_dropout(self.dropout)


@dataclass(frozen=True)
class PairformerConfig:
    """A stack of Pairformer blocks (AlphaFold3, algorithm 17).

    Attributes
    ----------
    num_blocks : number of blocks
    num_heads : heads of the attention among tokens
    head_width : channels of each of these heads
    transition : hidden channels of the single transition as a multiple of its input channels
    pair : sizes of the pair updates
    """

    num_blocks: int = 48
    num_heads: int = 16
    head_width: int = 24
    transition: int = 4
    pair: PairConfig = field(default_factory=PairConfig)

    def __post_init__(self) -> None:
        check_ranges(self, [*_SIZES, ("num_blocks", 0, 1024), ("transition", 1, 64)])


_SIZES = (("num_heads", 1, 65536), ("head_width", 1, 65536))
