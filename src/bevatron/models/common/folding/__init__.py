"""Modules shared by AlphaFold2 and AlphaFold3, built on the fused operators.

Triangle multiplication, triangle attention and the transition return what they have updated; other
modules return an update, which the caller adds, with `add_dropped` if there is dropout. Masks are
True for what exists. In shapes N counts residues or tokens, S rows of an alignment (or of a pair,
as rows of an attention), C channels, H heads, D channels of a head; leading axes are arbitrary. If
several processes share a sample, pairs and alignments hold R own rows and masks are whole; see
`bevatron.parallel.axial`.
"""

from bevatron.models.common.folding.attention import GatedAttention, PairBias
from bevatron.models.common.folding.checkpointing import (
    AUTOMATIC,
    Checkpointing,
    checkpointed,
    recomputed,
    recomputed_if_large,
    recomputing,
    run_stack,
)
from bevatron.models.common.folding.distances import distance_bins
from bevatron.models.common.folding.dropout import add_dropped, keep_masks
from bevatron.models.common.folding.layer_norm import LayerNorm
from bevatron.models.common.folding.linear import Linear
from bevatron.models.common.folding.outer_product_mean import OuterProductMean
from bevatron.models.common.folding.transition import Transition
from bevatron.models.common.folding.triangles import TriangleAttention, TriangleMultiplication

__all__ = [
    "AUTOMATIC",
    "Checkpointing",
    "GatedAttention",
    "LayerNorm",
    "Linear",
    "OuterProductMean",
    "PairBias",
    "Transition",
    "TriangleAttention",
    "TriangleMultiplication",
    "add_dropped",
    "checkpointed",
    "distance_bins",
    "keep_masks",
    "recomputed",
    "recomputed_if_large",
    "recomputing",
    "run_stack",
]
