"""Fused operators, each with an exact reference; `use` chooses which implementation runs.

A function here has the name of the package that holds it; `from bevatron.kernels.NAME import ...`
reaches what else is inside. The building blocks of attention on graphs share one, `graph_blocks`.
"""

from bevatron.kernels.equivariant.channelwise_tensor_product import channelwise_tensor_product
from bevatron.kernels.equivariant.edge_vectors import edge_vectors
from bevatron.kernels.equivariant.equivariant_linear import equivariant_linear
from bevatron.kernels.equivariant.indexed_linear import indexed_linear
from bevatron.kernels.equivariant.radial_basis import radial_basis
from bevatron.kernels.equivariant.radial_network import radial_network
from bevatron.kernels.equivariant.radial_tensor_product import radial_tensor_product
from bevatron.kernels.equivariant.scatter_sum import scatter_sum
from bevatron.kernels.equivariant.silu import silu
from bevatron.kernels.equivariant.silu_linear import silu_linear
from bevatron.kernels.equivariant.spherical_harmonics import spherical_harmonics
from bevatron.kernels.equivariant.symmetric_contraction import symmetric_contraction
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.dot_attention import dot_attention
from bevatron.kernels.graph.graph_attention import graph_attention, graph_attention_v2
from bevatron.kernels.graph.graph_blocks import (
    column_sum,
    graph_softmax,
    mspmm,
    replicate,
    row_sum,
    sddmm,
    spmmm,
)
from bevatron.kernels.graph.spmm import spmm
from bevatron.kernels.molecule.bond_norm_gelu import bond_norm_gelu
from bevatron.kernels.molecule.bonds import Bonds, index_bonds
from bevatron.kernels.molecule.gaussian_basis import gaussian_basis
from bevatron.kernels.molecule.linear import linear
from bevatron.kernels.molecule.molecule_attention import molecule_attention
from bevatron.kernels.molecule.neighbour_sums import neighbour_sums
from bevatron.kernels.molecule.norm_gelu import norm_gelu
from bevatron.kernels.molecule.residual_norm import residual_norm
from bevatron.kernels.molecule.scaled_residual import scaled_residual
from bevatron.kernels.molecule.segment_sum import segment_sum
from bevatron.kernels.optim.fused_adam_ema import fused_adam_ema
from bevatron.kernels.pair.add_dropped import add_dropped
from bevatron.kernels.pair.conditioned_transition import conditioned_transition
from bevatron.kernels.pair.global_attention import global_attention
from bevatron.kernels.pair.invariant_point_attention import invariant_point_attention
from bevatron.kernels.pair.layer_norm import add_norm, layer_norm
from bevatron.kernels.pair.layer_norm_linear import layer_norm_linear
from bevatron.kernels.pair.outer_product_mean import outer_product_mean
from bevatron.kernels.pair.pair_attention import pair_attention
from bevatron.kernels.pair.pair_weighted_averaging import pair_weighted_averaging
from bevatron.kernels.pair.qkvg import qkvg
from bevatron.kernels.pair.smooth_lddt import smooth_lddt
from bevatron.kernels.pair.swiglu import swiglu
from bevatron.kernels.pair.transition import transition
from bevatron.kernels.pair.triangle_multiply import triangle_multiply
from bevatron.kernels.pair.window_attention import window_attention
from bevatron.kernels.registry import (
    KernelConfig,
    current,
    explain,
    implementations,
    launches,
    reset_launches,
    too_large_for_this_gpu,
    use,
)

__all__ = [
    "Bonds",
    "Csr",
    "KernelConfig",
    "add_dropped",
    "add_norm",
    "bond_norm_gelu",
    "channelwise_tensor_product",
    "column_sum",
    "conditioned_transition",
    "current",
    "dot_attention",
    "edge_vectors",
    "equivariant_linear",
    "explain",
    "fused_adam_ema",
    "gaussian_basis",
    "global_attention",
    "graph_attention",
    "graph_attention_v2",
    "graph_softmax",
    "implementations",
    "index_bonds",
    "indexed_linear",
    "invariant_point_attention",
    "launches",
    "layer_norm",
    "layer_norm_linear",
    "linear",
    "molecule_attention",
    "mspmm",
    "neighbour_sums",
    "norm_gelu",
    "outer_product_mean",
    "pair_attention",
    "pair_weighted_averaging",
    "qkvg",
    "radial_basis",
    "radial_network",
    "radial_tensor_product",
    "replicate",
    "reset_launches",
    "residual_norm",
    "row_sum",
    "scaled_residual",
    "scatter_sum",
    "sddmm",
    "segment_sum",
    "silu",
    "silu_linear",
    "smooth_lddt",
    "spherical_harmonics",
    "spmm",
    "spmmm",
    "swiglu",
    "symmetric_contraction",
    "too_large_for_this_gpu",
    "transition",
    "triangle_multiply",
    "use",
    "window_attention",
]
