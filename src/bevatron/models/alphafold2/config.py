"""Sizes of an AlphaFold2, frozen and checked, and the published ones by name."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.errors import ConfigError
from bevatron.models.common.folding import AUTOMATIC, Checkpointing
from bevatron.models.common.hyper_parameters import check_dropout, check_ranges, from_preset


class _Sizes:
    """Whole numbers of 1 or more, a rate of dropout, and lengths above 0."""

    fewest_blocks: ClassVar[int] = 1

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "dropout":
                check_dropout(value)
            elif isinstance(value, int) and not isinstance(value, bool):
                least = self.fewest_blocks if name == "num_blocks" else 1
                check_ranges(self, [(name, least, float("inf"))])
            elif isinstance(value, float) and not 0 < value < float("inf"):
                raise ConfigError(f"{name}: expected a number above 0, got {value}")


@dataclass(frozen=True)
class TriangleConfig(_Sizes):
    """Sizes of the updates of a pair representation from itself.

    Attributes
    ----------
    hidden : channels of the projections of triangle multiplication
    num_heads : heads of triangle attention
    head_width : channels of each of these heads
    transition_factor : hidden channels of the pair transition as a multiple of its input channels
    dropout : dropout rate of the triangle updates
    """

    hidden: int = 128
    num_heads: int = 4
    head_width: int = 32
    transition_factor: int = 4
    dropout: float = 0.25


@dataclass(frozen=True)
class EvoformerConfig(_Sizes):
    """Sizes of a stack of Evoformer blocks (algorithm 6) or of extra-MSA blocks (18).

    Attributes
    ----------
    num_blocks : number of blocks
    num_heads : heads of row and column attention
    head_width : channels of each of these heads
    transition_factor : hidden channels of the MSA transition as a multiple of its input channels
    outer_width : channels of each projection of the outer product mean
    dropout : dropout rate of row attention
    triangles : updates of the pair representation
    """

    num_blocks: int = 48
    num_heads: int = 8
    head_width: int = 32
    transition_factor: int = 4
    outer_width: int = 32
    dropout: float = 0.15
    triangles: TriangleConfig = TriangleConfig()


@dataclass(frozen=True)
class TemplateConfig(_Sizes):
    """Sizes of the template embedder (algorithms 16 and 17).

    Attributes
    ----------
    num_blocks : blocks of the pair stack; 0 = no templates, as in DeepMind's models 3 to 5
    num_heads : heads of template pointwise attention
    head_width : channels of each of these heads
    unit_vectors
        Whether the pair features hold the unit vectors between residues; published models were
        trained with zeros in their place.
    triangles : updates of a template's pair representation
    """

    fewest_blocks: ClassVar[int] = 0

    num_blocks: int = 2
    num_heads: int = 4
    head_width: int = 16
    unit_vectors: bool = False
    triangles: TriangleConfig = TriangleConfig(
        hidden=64, num_heads=4, head_width=16, transition_factor=2
    )


@dataclass(frozen=True)
class StructureConfig(_Sizes):
    """Sizes of the structure module (algorithm 20).

    Attributes
    ----------
    num_blocks : iterations of the block, which share their weights
    num_heads : heads of invariant point attention (algorithm 22)
    head_width : channels of each head
    num_query_points : points of the queries and of the keys of each head
    num_value_points : points of the values of each head
    num_transition_layers : transitions of three layers after each attention
    angle_width : hidden channels of the torsion-angle network
    num_angle_blocks : residual blocks of the torsion-angle network
    position_scale : Å per internal unit of translation
    dropout : dropout rate after attention and transition
    """

    num_blocks: int = 8
    num_heads: int = 12
    head_width: int = 16
    num_query_points: int = 4
    num_value_points: int = 8
    num_transition_layers: int = 1
    angle_width: int = 128
    num_angle_blocks: int = 2
    position_scale: float = 10.0
    dropout: float = 0.1


EXTRA_MSA = EvoformerConfig(num_blocks=4, head_width=8)
"""The published stack of the extra alignment: heads of 8, otherwise like the Evoformer."""


@dataclass(frozen=True)
class AlphaFold2Config(_Sizes):
    """Everything that defines an AlphaFold2 apart from its weights; the defaults are published.

    Attributes
    ----------
    c_m : channels of the MSA representation
    c_z : channels of the pair representation
    c_s : channels of the single representation
    c_t : channels of the pair representation of a template
    c_e : channels of the extra-MSA representation
    max_offset : clip value of relative positions along the chain (algorithm 4)
    evoformer : sizes of the Evoformer
    extra_msa : sizes of the stack of the extra alignment
    templates : sizes of the template embedder
    structure : sizes of the structure module
    lddt_width : hidden channels of the head that predicts lDDT
    aligned_error : whether there is a head for the predicted aligned error, as in the "ptm" models
    checkpointing : what the backward pass recomputes; by default as little as fits the GPU
    """

    c_m: int = 256
    c_z: int = 128
    c_s: int = 384
    c_t: int = 64
    c_e: int = 64
    max_offset: int = 32
    evoformer: EvoformerConfig = EvoformerConfig()
    extra_msa: EvoformerConfig = EXTRA_MSA
    templates: TemplateConfig = TemplateConfig()
    structure: StructureConfig = StructureConfig()
    lddt_width: int = 128
    aligned_error: bool = False
    checkpointing: Checkpointing = AUTOMATIC

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return a configuration by its name, with changes.

        ``alphafold2`` is the published model (93,229,082 parameters), ``alphafold2-ptm`` the one
        with a head for the aligned error (93,237,338), ``small`` one for a CPU. Raises ConfigError
        if there is no such preset, or no such entry.

        Examples
        --------
        >>> AlphaFold2Config.preset("small").evoformer.num_blocks
        4
        """
        return from_preset(cls, PRESETS, name, changes)


_small_stack = EvoformerConfig(
    num_blocks=4, num_heads=4, head_width=16, transition_factor=2, outer_width=8,
    triangles=TriangleConfig(hidden=32, num_heads=2, head_width=16, transition_factor=2),
)  # fmt: skip

PRESETS: Mapping[str, Mapping[str, Any]] = {
    "alphafold2": {},
    "alphafold2-ptm": {"aligned_error": True},
    "small": {
        "c_m": 64,
        "c_z": 32,
        "c_s": 64,
        "c_t": 16,
        "c_e": 16,
        "evoformer": _small_stack,
        "extra_msa": replace(_small_stack, num_blocks=1, num_heads=2, head_width=8),
        "templates": TemplateConfig(
            num_blocks=1,
            num_heads=2,
            head_width=8,
            triangles=TriangleConfig(hidden=16, num_heads=2, head_width=8, transition_factor=2),
        ),
        "structure": StructureConfig(
            num_blocks=4, num_heads=4, head_width=8, angle_width=32, num_value_points=4
        ),
        "lddt_width": 32,
    },
}
"""The configurations that `AlphaFold2Config.preset` knows."""

FINE_TUNING_SIZES = ChainSizes(residues=384, msa_rows=508, extra_rows=5120)
"""Of samples in fine-tuning; the defaults are those of initial training."""


def whole_chains(longest: int) -> ChainSizes:
    """Return the sizes of predictions: no crop, and as many rows as in fine-tuning."""
    return replace(FINE_TUNING_SIZES, residues=longest, best_templates=True)
