"""Launches that are prepared once, because Triton's own take longer than many kernels run.

For each launch Triton binds the arguments by name, specialises each of them, formats all that
as a string and looks it up: 30 to 75 us of host time for dozens of arguments. A `Launch` is a
kernel with all its arguments except tensors. Triton launches it once; later launches call the
compiled kernel with the addresses of the tensors. They compare what the compiled kernel depends on
and may change: types, the device, and which addresses are multiples of 16.
"""

import itertools
import logging
from collections.abc import Callable, Sequence
from functools import reduce
from operator import attrgetter, or_
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from bevatron.errors import ran_out_of_memory

log = logging.getLogger("bevatron.kernels")

ALIGNED = 16
"""Bytes; Triton specialises a kernel on which addresses are multiples of it."""
INT32 = 32
"""Bits; Triton passes larger integers as another type."""
MOST_PREPARED = 4096
"""Launches that `launch` caches."""

Direct = tuple[Callable[..., object], Callable[[int], int], int, tuple[Any, ...], tuple[Any, ...]]
"""What launches a compiled kernel: its launcher, the stream of a device, what precedes and what
follows the arguments."""
_address, _type = Tensor.data_ptr, attrgetter("dtype")
_runtime = triton.knobs.runtime
_triton_run = JITFunction.run
_prepared: dict[Any, "Launch"] = {}
_num_free: dict[int, tuple[Any, int]] = {}
_gave_up = False


class Launch:
    """A kernel with its grid and all arguments except tensors.

    Parameters
    ----------
    kernel : a Triton function that takes tensors, then numbers, then constants
    grid : number of programs along each axis; with none nothing is launched
    numbers
        In the order of the kernel's parameters.
    constants : compile-time constants and launch options, by name
    """

    __slots__ = ("_constants", "_grid", "_is_interpreted", "_kernel", "_numbers", "_ready")

    def __init__(
        self, kernel: Any, grid: Sequence[int], numbers: Sequence[float] = (), **constants: Any
    ) -> None:
        self._kernel, self._numbers, self._constants = kernel, tuple(numbers), constants
        self._grid = (*grid, 1, 1)[:3]
        self._is_interpreted = not isinstance(kernel, JITFunction)
        self._ready: dict[Any, Direct | None] = {}

    def __call__(
        self,
        *tensors: Tensor,
        grid: tuple[int, ...] | None = None,
        numbers: Sequence[float] | None = None,
    ) -> None:
        """Launch it on the current device, which must be that of the tensors.

        ``grid`` and ``numbers`` replace its own; Triton must not specialise on what differs.
        """
        grid = self._grid if grid is None else grid
        numbers = self._numbers if numbers is None else numbers
        if 0 in grid:
            return
        if self._is_interpreted:
            self._through_triton(grid, numbers, tensors)
            return
        addresses = [*map(_address, tensors)]
        key = (tensors[0].device, *map(_type, tensors))
        if reduce(or_, addresses) % ALIGNED:
            key += tuple(address % ALIGNED == 0 for address in addresses)
        direct = self._ready.get(key)
        if direct is None or _is_observed():
            compiled = self._through_triton(grid, numbers, tensors)
            if compiled is not None and key not in self._ready and not _is_observed():
                self._ready[key] = self._prepare(compiled, len(tensors))
            return
        run, stream_of, device, before, after = direct
        try:
            run(*grid, stream_of(device), *before, *addresses, *numbers, *after)
        except TypeError as error:  # before anything is launched
            _give_up(error)
            self._ready[key] = None
            self._through_triton(grid, numbers, tensors)

    def _through_triton(
        self, grid: Sequence[int], numbers: Sequence[float], tensors: Sequence[Tensor]
    ) -> Any:
        try:
            return self._kernel[grid](*tensors, *numbers, **self._constants)
        except RuntimeError as error:
            if not ran_out_of_memory(error) or torch.cuda.is_current_stream_capturing():
                raise
        # Loading a kernel needs memory that torch may have cached.
        torch.cuda.empty_cache()
        return self._kernel[grid](*tensors, *numbers, **self._constants)

    def _prepare(self, compiled: Any, num_tensors: int) -> Direct | None:
        """Return what launches the compiled kernel, or None if only Triton can."""
        if _gave_up:
            return None
        parameters = list(self._kernel.signature.parameters.values())
        constants = parameters[num_tensors + len(self._numbers) :]
        after = tuple(self._constants.get(each.name, each.default) for each in constants)
        try:
            # AMD kernels are also specialised on the sizes of tensors.
            if compiled.metadata.target.backend != "cuda":
                return None
            driver = triton.runtime.driver.active
            device, stream_of = driver.get_current_device(), driver.get_current_stream
            # No metadata of the launch, no hooks.
            run, before = compiled.run, (compiled.function, compiled.packed_metadata, *[None] * 3)
        except AttributeError as error:
            _give_up(error)
            return None
        return run, stream_of, device, before, after


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    tensors: Sequence[Tensor],
    numbers: tuple[float, ...] = (),
    **constants: Any,
) -> None:
    """Launch a kernel through a cached `Launch`, whatever its first few numbers are.

    Triton does not specialise on those numbers, such as a number of rows.
    """
    known = _num_free.get(id(kernel))
    if known is None:
        after_tensors = getattr(kernel, "params", [])[len(tensors) :]
        unspecialised = itertools.takewhile(lambda each: each.do_not_specialize, after_tensors)
        # Keep the kernel too, so that no other can reuse its id.
        known = _num_free[id(kernel)] = kernel, len(list(unspecialised))
    free = known[1]
    # By id, because hashing a Triton function hashes its source.
    key: tuple[Any, ...] = (id(kernel), numbers[free:], *constants.items())
    for each in numbers[:free]:
        key += (each.bit_length() < INT32 if type(each) is int else None,)
    found = _prepared.get(key)
    if found is None:
        if len(_prepared) >= MOST_PREPARED:
            _prepared.clear()
        found = _prepared[key] = Launch(kernel, grid, numbers, **constants)
    found(*tensors, grid=(*grid, 1, 1)[:3], numbers=numbers)


def _is_observed() -> bool:
    """Whether a rehearsal or a profiler hooks into Triton's own launches."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    hooked = getattr(enter, "calls", enter) or getattr(leave, "calls", leave)
    return bool(hooked) or JITFunction.run is not _triton_run


def _give_up(error: Exception) -> None:
    """Log once that the launches of this version of Triton are unknown."""
    global _gave_up  # noqa: PLW0603  it is so for the whole process
    if not _gave_up:
        _gave_up = True
        log.warning(
            "Triton %s prepares no launches (%s: %s); each takes more time of the host",
            triton.__version__,
            type(error).__name__,
            error,
        )
