"""Compiles kernels whose source is generated: as Triton for the interpreter, as Gluon for a GPU.

Gluon is the level below Triton and takes the layout of every tensor explicitly. Triton infers the
same layouts, but its pass that looks for better ones (`TritonGPUCoalesce`) visits the whole kernel
for each load and store, and again from each operation it finds: minutes for
thousands of unrolled terms. The same text serves both, with or without layouts.
"""

import hashlib
import inspect
import itertools
import linecache
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import triton
import triton.language as tl

_one_thread = threading.Lock()
_numbers = itertools.count()


def generated(
    source: str, name: str, module: str, layouts: bool, do_not_specialize: Sequence[str] = ()
) -> Any:
    """Return the kernel ``name`` of a source; Triton reads the source through `linecache`.

    Parameters
    ----------
    source : defines the function and those it calls, in terms of ``tl`` and ``jit``
    module : reported as the module of the kernel
    layouts : whether the source states layouts, which Gluon requires and Triton rejects
    do_not_specialize : see `triton.jit`
    """
    jit, language = triton.jit, tl
    if layouts:
        from triton.experimental import gluon

        jit, language = gluon.jit, gluon.language
    operator = module.split(".")[-2]
    # A number of its own: of two threads that took one name, one would compile the other's source.
    file = f"<bevatron {operator} {name} {next(_numbers)}>"
    # Without a modification time, nothing looks for the file.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"tl": language, "jit": jit, "__name__": module}
    with quick_blocks():
        exec(compile(source, file, "exec"), namespace)  # noqa: S102  our own text, written just now
        kernel = jit(do_not_specialize=do_not_specialize)(namespace[name])
    # Triton would walk the whole syntax tree to find the kernel's dependencies.
    kernel.hash = hashlib.sha256(f"{language.__name__} {name}\n{source}".encode()).hexdigest()
    return kernel


@contextmanager
def quick_blocks() -> Iterator[None]:
    """Let `inspect` extract functions from generated text without tokenizing it.

    This affects the current thread alone, and one thread at a time: a validation that runs during
    training generates kernels too.
    """
    module: Any = inspect
    with _one_thread:
        owner, before = threading.get_ident(), module.getblock

        def quick(lines: Sequence[str]) -> Sequence[str]:
            found: Sequence[str] = (block if threading.get_ident() == owner else before)(lines)
            return found

        module.getblock = quick
        try:
            yield
        finally:
            module.getblock = before


def block(lines: Sequence[str]) -> Sequence[str]:
    """Return the lines of the first function, up to the next one at the margin.

    Examples
    --------
    >>> block(["@jit", "def f(", "):", "    pass", "", "def g():", "    pass"])
    ['@jit', 'def f(', '):', '    pass']
    """
    begins = [i for i, line in enumerate(lines) if line.startswith("def ")]
    end = begins[1] if len(begins) > 1 else len(lines)
    while lines[end - 1].startswith("@") or not lines[end - 1].strip():
        end -= 1
    return lines[:end]
