"""GPU time of a training step of AlphaFold3 by class of kernel, told apart by their names."""

import re
from collections import Counter
from typing import Any

from benchmarks.common.trace import KernelRow, by_kernel, summary
from torch.profiler import profile

CLASSES = {
    "compiled by inductor": r"triton_(poi|red|per|tem)_",
    "matrix products of libraries": r"nvjet|gemm|cutlass|cublas|splitKreduce|gemv",
    "copies, casts, concatenation": r"copy|Memcpy|Memset|CatArray|FillFunctor|transpose",
    "optimiser": r"adam|multi_tensor|lerp",
    "softmax and norms": r"softmax|layer_norm|LayerNorm|GammaBeta",
    "sums": r"reduce_kernel|scan|sort|Sort|cub::",
    "gather and scatter": r"index|gather|scatter|unfold",
    "elementwise": r"elementwise",
}
"""Name of a class -> names of its kernels; the first that fits."""
OURS = "fused kernels"
NAMED_BY_US = re.compile(r"(?!triton_(poi|red|per|tem)_)\w+_kernel|_adam|kernel")


def class_of(kernel: str) -> str:
    """Return the class of a kernel by its name: ours have the bare name of a function."""
    if kernel != "_adam" and NAMED_BY_US.fullmatch(kernel):
        return OURS
    found = (name for name, names in CLASSES.items() if re.search(names, kernel))
    return next(found, "other")


def by_class(kernels: list[KernelRow]) -> dict[str, tuple[float, float]]:
    """Add up ms and launches of every class, the longest first."""
    spent: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for row in kernels:
        name = class_of(str(row["kernel"]))
        spent[name] += float(row["ms"])  # type: ignore[assignment]
        count[name] += float(row["launches"])  # type: ignore[assignment]
    return {name: (ms, count[name]) for name, ms in spent.most_common()}


def rows_of(profiler: profile) -> list[dict[str, Any]]:
    """Return the classes of one traced step, after the union of the device's intervals."""
    whole = summary(profiler, 1)
    classes = by_class(by_kernel(profiler, 1))
    return [
        {"kernels": "all", "ms": whole["busy ms"], "launches": whole["kernels"]},
        *({"kernels": kind, "ms": ms, "launches": n} for kind, (ms, n) in classes.items()),
    ]
