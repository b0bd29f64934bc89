"""Old names of public modules, which work with a warning for one release."""

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

FAMILIES = {
    "equivariant": (
        *("channelwise_tensor_product", "edge_vectors", "equivariant_linear", "radial_basis"),
        *("radial_network", "radial_tensor_product", "scatter_sum", "silu", "silu_linear"),
        *("spherical_harmonics",),
    ),
    "graph": ("csr", "dot_attention", "graph_attention", "graph_blocks", "spmm"),
    "molecule": (
        *("bond_norm_gelu", "gaussian_basis", "linear", "molecule_attention", "neighbour_sums"),
        *("norm_gelu", "residual_norm", "scaled_residual", "segment_sum"),
    ),
    "optim": ("fused_adam_ema",),
    "pair": (
        *("conditioned_transition", "global_attention", "layer_norm", "layer_norm_linear"),
        *("outer_product_mean", "pair_attention", "qkvg", "swiglu", "transition"),
        *("triangle_multiply",),
    ),
}
"""Operators whose package was `bevatron.kernels.NAME`."""

MOVED = {
    **{
        f"bevatron.kernels.{name}": f"bevatron.kernels.{family}.{name}"
        for family, names in FAMILIES.items()
        for name in names
    },
    "bevatron.kernels.dot_attention.partial": "bevatron.kernels.graph.dot_attention.partial",
    "bevatron.kernels.graph_attention.partial": "bevatron.kernels.graph.graph_attention.partial",
    "bevatron.models.graph_attention.expression": (
        "bevatron.models.graph_attention.formula.expression"
    ),
    "bevatron.recipes.evaluation": "bevatron.recipes.mace.evaluate",
    "bevatron.recipes.gpspp_use": "bevatron.recipes.gpspp.predictor",
    "bevatron.recipes.benchmarks": "bevatron.recipes.bench",
    "bevatron.recipes.graph_use": "bevatron.recipes.graph.predict",
    "bevatron.recipes.profiling": "bevatron.recipes.bench_profile",
    "bevatron.train.plots": "bevatron.train.report.plots",
}
"""Old name -> new name."""

SPLIT = {"bevatron.recipes.graph_use": "bevatron.recipes.graph.evaluate"}
"""Old name -> a second module, for names that the one in `MOVED` lacks."""


class _Moved(ModuleType):
    """A module under its old name; the module itself is imported on first use."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old, f"Moved to `{new}`.")
        self._new = new

    def __getattr__(self, name: str) -> Any:
        # Import machinery and debuggers ask every module for dunders.
        if name.startswith("__"):
            raise AttributeError(name)
        warnings.warn(f"{self.__name__} has moved to {self._new}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(self._new)
        if not hasattr(module, name) and self.__name__ in SPLIT:
            module = importlib.import_module(SPLIT[self.__name__])
        return getattr(module, name)


def keep_old_names() -> None:
    """Make the old names importable.

    They are entries of `sys.modules` rather than an import hook: an import by hook would also bind
    the module to its parent, where `bevatron.kernels.NAME` is the operator itself.
    """
    for old, new in MOVED.items():
        sys.modules.setdefault(old, _Moved(old, new))
