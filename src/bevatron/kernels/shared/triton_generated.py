"""Compiles kernels whose source is generated: as Triton for the interpreter, as Gluon for a GPU.

Gluon is the level below Triton and takes the layout of every tensor explicitly. Triton infers the
same layouts, but its pass that looks for better ones (`TritonGPUCoalesce`) visits the whole kernel
for each of its loads and stores, and again from each operation that it finds: minutes for
thousands of unrolled terms. The same text serves both, with or without the layouts.
"""

import linecache
from collections.abc import Sequence
from typing import Any

import triton
import triton.language as tl


def generated(
    source: str, name: str, module: str, layouts: bool, do_not_specialize: Sequence[str] = ()
) -> Any:
    """Return the kernel ``name`` of a source; Triton reads that where a debugger would.

    Parameters
    ----------
    source : defines the function, with the help of ``tl`` and ``jit``
    module : in which it counts as written
    layouts : whether it states layouts, as Gluon requires and Triton does not accept
    do_not_specialize : as `triton.jit` takes it
    """
    jit, language = triton.jit, tl
    if layouts:
        from triton.experimental import gluon

        jit, language = gluon.jit, gluon.language
    operator = module.split(".")[-2]
    file = f"<bevatron {operator} {name} {len(linecache.cache)}>"
    # Without a time of change, nobody looks for the file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"tl": language, "jit": jit, "__name__": module}
    exec(compile(source, file, "exec"), namespace)  # noqa: S102  our own text, written just now
    return jit(do_not_specialize=do_not_specialize)(namespace[name])
