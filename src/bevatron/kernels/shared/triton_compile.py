"""Ahead-of-time, parallel compilation of the kernels that some work will launch.

Triton compiles a kernel at its first launch, one after the other: a minute or two for the hundred
kernels of a training step. Here the work is first rehearsed without launching a kernel, to collect
what it needs. Processes forked from this one then compile that into Triton's cache on disk, where
the first launches find it.

A forked process inherits the kernels, generated ones included, and never uses the GPU. One
that dies or hangs costs only time: the launch compiles what is missing.
"""

import ctypes
import hashlib
import json
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import triton
from triton._C.libtriton import get_cache_invalidating_env_vars
from triton.compiler import make_backend
from triton.runtime import cache
from triton.runtime.cache import get_cache_key, get_cache_manager
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from bevatron.garbage import no_garbage_collection

# Imported before `run` is replaced below: prepared launches compare it with its present value.
from bevatron.kernels.shared import triton_launch  # noqa: F401

log = logging.getLogger(__name__)

QUIET_SECONDS = 2.0
"""Longer waits are logged."""

MOST_SECONDS = 300.0
"""Time limit in seconds; launches compile the rest."""

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux, for which Python has no name."""


@dataclass(frozen=True)
class Compilation:
    """What Triton compiles for a launch: a function with types, constants and options."""

    kernel: Any
    signature: dict[str, Any]
    constants: dict[Any, Any]
    attributes: dict[Any, Any]
    options: dict[str, Any]

    @property
    def source(self) -> Any:
        """The argument of `triton.compile`."""
        return self.kernel.ASTSource(self.kernel, self.signature, self.constants, self.attributes)


def start() -> None:
    """Do what Triton does once per process: find the GPU and ptxas, hash its own sources."""
    with suppress(Exception):  # this only saves time later; the first kernel reports what is wrong
        make_backend(triton.runtime.driver.active.get_current_target()).hash()
        cache.triton_key()


def compile_ahead(
    work: Callable[[], object], processes: int, say: Callable[[str], None] = log.info
) -> int:
    """Compile what some work will launch, in parallel.

    Parameters
    ----------
    work
        Runs once without launching a Triton kernel, so whatever kernels would write is
        uninitialised memory. It must not depend on such values, like any work that a CUDA graph
        can capture.
    processes : number of compiling processes; fewer than two do nothing
    say : receives a line for the log before a long wait

    Returns
    -------
    int
        Number of kernels that were not in the cache.
    """
    if processes < 2:
        return 0
    try:
        target = triton.runtime.driver.active.get_current_target()
        found = [one for one in rehearse(work) if not _is_cached(one, target)]
    except Exception as error:  # noqa: BLE001  it only saves time: the work itself meets it again
        why = f"{type(error).__name__}: {error}"
        say(f"kernels are compiled one by one as they are launched ({why})")
        return 0
    if len(found) < 2:
        return 0
    # Longest sources first: one may take as long as all others together.
    found.sort(key=lambda one: len(one.kernel.src), reverse=True)
    return _compile_all(found, target, min(processes, len(found)), say)


def rehearse(work: Callable[[], object]) -> list[Compilation]:
    """Run some work without launching a kernel; return what it would have compiled."""
    found: dict[tuple[int, str], Compilation] = {}

    def note(*, key: Any, fn: Any, compile: dict[str, Any], **_: object) -> bool:  # noqa: A002
        listed = json.loads(compile["specialization_data"])["options"].items()
        options = {name: tuple(v) if isinstance(v, list) else v for name, v in listed}  # hashable
        kernel, attributes = fn.jit_function, compile["configs"][0]
        found.setdefault(
            (id(kernel), str(key)),
            Compilation(kernel, compile["signature"], compile["constants"], attributes, options),
        )
        return True  # tells Triton not to compile it

    with _without_launches(note):
        work()
    return list(found.values())


@contextmanager
def _without_launches(note: Callable[..., bool]) -> Iterator[None]:
    """Let Triton look up each kernel but launch none; pass ``note`` those not yet compiled."""
    run, hook = JITFunction.run, triton.knobs.runtime.jit_cache_hook

    def look_up(kernel: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
        del warmup
        return run(kernel, *args, warmup=True, **kwargs)

    JITFunction.run, triton.knobs.runtime.jit_cache_hook = look_up, note
    try:
        yield
    finally:
        JITFunction.run, triton.knobs.runtime.jit_cache_hook = run, hook


@contextmanager
def nothing_launched() -> Iterator[None]:
    """Neither launch nor look up kernels: only the code around the launches runs."""
    kinds = (JITFunction, InterpretedFunction)
    before = [kind.run for kind in kinds]
    for kind in kinds:
        kind.run = lambda *_, **__: None
    try:
        yield
    finally:
        for kind, run in zip(kinds, before, strict=True):
            kind.run = run


def _is_cached(one: Compilation, target: Any) -> bool:
    """Whether Triton has compiled it before; False is a safe answer."""
    source, backend = one.source, make_backend(target)
    options = backend.parse_options({**one.options, **source.parse_options()})
    key = get_cache_key(source, backend, options, env_vars=get_cache_invalidating_env_vars())
    folder = get_cache_manager(hashlib.sha256(key.encode()).hexdigest())
    return folder.get_group(f"{source.name[:150]}.json") is not None


def _compile_all(
    found: Sequence[Compilation], target: Any, processes: int, say: Callable[[str], None]
) -> int:
    fork = multiprocessing.get_context("fork")
    following, compiled = fork.Value("i", 0), fork.Value("i", 0)
    given = (found, target, following, compiled, os.getpid())
    started = [
        fork.Process(target=_compile_some, args=given, daemon=True) for _ in range(processes)
    ]
    began = time.monotonic()
    # Forked processes inherit CUDA objects, and freeing one would abort them.
    with no_garbage_collection():
        for process in started:
            process.start()
    _join(started, began + QUIET_SECONDS)
    if any(process.is_alive() for process in started):
        say(f"compiling {len(found)} kernels with {processes} processes; later runs reuse them")
    _join(started, began + MOST_SECONDS)
    for process in started:
        process.kill()
        process.join()
    return int(compiled.get_obj().value)  # one that was killed may hold the lock


def _join(processes: Sequence[Any], until: float) -> None:
    for process in processes:
        process.join(max(until - time.monotonic(), 0.0))


def _compile_some(
    found: Sequence[Compilation], target: Any, following: Any, compiled: Any, parent: int
) -> None:
    """Compile kernels one by one; the processes share the list."""
    # It holds what the parent has open: locks that others wait for, and the connections by whose
    # end other ranks notice that the parent was killed.
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    # Signals that stop a run are meant for the parent process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    while True:
        with following.get_lock():
            number = following.value
            following.value += 1
        if number >= len(found):
            os._exit(0)  # runs no destructor
        if _is_new(found[number], target):
            with compiled.get_lock():
                compiled.value += 1


def _is_new(one: Compilation, target: Any) -> bool:
    """Compile a kernel; return whether it was not in the cache."""
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
    try:
        kernel = triton.compile(one.source, target=target, options=one.options)
        # Triton 3.6 compiles a C launcher with gcc for each signature.
        triton.runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)
    except Exception:
        log.debug("%s was not compiled ahead", one.kernel, exc_info=True)
    return hits == [False]
