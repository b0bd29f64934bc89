"""The registry of what `run` measures: operators and, for each, its cases: sizes to time it at.

An operator is registered by a function that returns its cases::

    @cases("silu", EQUIVARIANT)
    def silu_cases(setup: Setup) -> list[Case]: ...
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from benchmarks.common.timing import Call
from torch import Tensor

Operator = Callable[..., Any]
Inputs = dict[str, Any]
Row = dict[str, Any]
EXPONENTIALS = 16 * 132 * 1.75e9
"""A second, on an H200."""


@dataclass(frozen=True)
class Setup:
    """The setting for which cases are made.

    Attributes
    ----------
    dtype
        Type of the inputs.
    device
        Device of the inputs.
    tiny
        Use sizes that the reference computes quickly on a CPU, for dry runs and tests.
    """

    dtype: torch.dtype
    device: str = "cuda"
    tiny: bool = False


class Work(NamedTuple):
    """Minimum bytes, matmul operations and exponentials of a pass."""

    bytes: float = 0.0
    operations: float = 0.0
    exponentials: float = 0.0

    def floor_ms(self, copy_rate: float, matmul_rate: float) -> float:
        """Return the minimum time on the device."""
        times = (self.bytes / copy_rate, self.operations / matmul_rate)
        return 1e3 * max(*times, self.exponentials / EXPONENTIALS)


class Step(NamedTuple):
    """A timed call.

    Attributes
    ----------
    run
        The call as launched from Python; None if it is only captured.
    before
        Runs before each of these calls, outside the timed region.
    capture
        Captures the call, if `timing.captured` does not suffice.
    launch_only
        Whether it is not captured.
    """

    run: Call | None
    before: Call | None = None
    capture: Callable[[], Call] | None = None
    launch_only: bool = False


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes
    ----------
    op, name
        Operator and size.
    draw
        Draws the inputs, by name, from a seed; all floating-point tensors get gradients.
    ours
        The operator.
    least
        Pass of `PASSES` -> minimum work.
    check
        Compares with an exact result and raises if it is off; returns columns for the row.
    plain
        Plain PyTorch, the peer "eager" and, compiled, "compile"; by default the operator's own
        reference.
    peers
        More peers by name.
    usual
        Whether it is measured by default, if no case is named.
    groups
        Names that select several cases at once.
    tolerance
        Tolerance of the result and of derivatives. A sum over 120 thousand edges in another order
        differs more than one over a few.
    inner
        Inputs of the first derivatives of "training", like positions for forces; all by default.
    few
        Axis and number of rows to which the float64 check cuts the inputs.
    to_reach
        Target for the time in ms.
    labels
        Additional columns of the row.
    floor
        Measures the floor of a pass in ms, if it does not follow from a rate of the device.
    """

    op: str
    name: str
    draw: Callable[[int], Inputs]
    ours: Operator
    least: Mapping[str, Work]
    check: Callable[["Case"], Mapping[str, float]]
    plain: Operator | None = None
    peers: Mapping[str, Operator] = field(default_factory=dict)
    usual: bool = True
    groups: tuple[str, ...] = ()
    tolerance: tuple[float, float] = (1e-6, 1e-5)
    inner: tuple[str, ...] = ()
    few: tuple[int, int] | None = None
    to_reach: float | str = ""
    labels: Mapping[str, Any] = field(default_factory=dict)
    floor: Callable[[str], float | None] | None = None

    def step(self, which: str, operator: Operator | None = None) -> Step:
        """Make the timed call of a pass, for our operator or a peer."""
        return PASSES[which](self, operator or self.ours, self.draw(0))


@dataclass(frozen=True)
class Family:
    """Operators that are measured in the same way and share a result.

    Attributes
    ----------
    name
        Name of the family, an argument of ``--op``.
    result
        Area and name of the result of all its operators.
    notes
        Text under the table; formatted with the type, TB/s of a copy and TFLOP/s of a matmul.
    dtype, matmul_dtype
        Default type of the inputs, and of the matmul whose rate defines the floor.
    by_operator
        Whether some of the operators have their own results.
    flush
        Flush the L2 cache before each call.
    capture_below_ms
        Longer calls are not captured.
    capture_peers
        Whether peers are captured too.
    host
        Measure the time until a call returns instead of peak memory.
    reference
        Time the operator's reference too.
    table
        Turns measured rows into rows of the table.
    tiles
        Sets the tile of all its operators from text, for ``--tiles``.
    """

    name: str
    result: str
    notes: str
    dtype: str = "float32"
    matmul_dtype: torch.dtype = torch.float32
    by_operator: bool = True
    flush: bool = False
    capture_below_ms: float = float("inf")
    capture_peers: bool = True
    host: bool = False
    reference: bool = False
    table: Callable[[list[Row]], list[Row]] = list
    tiles: Callable[[str], AbstractContextManager[Any]] | None = None


Maker = Callable[[Setup], Iterable[Case]]


class Registered(NamedTuple):
    """How an operator is registered."""

    family: Family
    make: Maker
    default: bool


OPERATORS: dict[str, Registered] = {}
"""Name -> how it is measured."""


def cases(op: str, family: Family, *, default: bool = True) -> Callable[[Maker], Maker]:
    """Register the cases of an operator; without ``default`` it is measured only when named."""

    def add(make: Maker) -> Maker:
        OPERATORS[op] = Registered(family, make, default)
        return make

    return add


def cases_of(op: str, setup: Setup, chosen: tuple[str, ...] = ()) -> Iterator[Case]:
    """Yield the named cases of an operator, those of named groups, or by default the usual ones."""
    for case in OPERATORS[op].make(setup):
        if {case.name, *case.groups} & set(chosen) if chosen else case.usual:
            yield case


def leaves_of(inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs that get gradients; a mask, of whatever type, gets none."""
    return {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point() and name != "mask"
    }


def direction(case: Case, inputs: Inputs, seed: int = 1) -> Tensor:
    """Draw a gradient of the result."""
    with torch.no_grad():
        like = case.ours(**inputs)
    generator = torch.Generator(device=like.device).manual_seed(seed)
    return torch.empty_like(like).normal_(generator=generator)


def _forward(_case: Case, operator: Operator, inputs: Inputs) -> Step:
    def run() -> Any:
        with torch.no_grad():
            return operator(**inputs)

    return Step(run)


def _backward(case: Case, operator: Operator, inputs: Inputs) -> Step:
    leaves = [leaf.requires_grad_() for leaf in leaves_of(inputs).values()]
    along = direction(case, inputs)

    def run() -> list[Tensor]:
        result = operator(**inputs)
        return [result.detach(), *torch.autograd.grad(result, leaves, along)]

    return Step(run)


def _training(case: Case, operator: Operator, inputs: Inputs) -> Step:
    by_name = {name: leaf.requires_grad_() for name, leaf in leaves_of(inputs).items()}
    wanted, inner = list(by_name.values()), [by_name[name] for name in case.inner or by_name]
    g = direction(case, inputs).requires_grad_()
    generator = torch.Generator(device=g.device).manual_seed(0)
    along = [torch.empty_like(leaf).normal_(generator=generator) for leaf in inner]

    def run() -> Any:
        first = torch.autograd.grad(operator(**inputs), inner, g, create_graph=True)
        # A linear operator has no second derivative with respect to its input.
        return torch.autograd.grad(first, [g, *wanted], along, allow_unused=True)

    return Step(run)


PASSES: Mapping[str, Callable[[Case, Operator, Inputs], Step]] = {
    "forward": _forward,
    "backward": _backward,
    "forward+backward": _backward,
    "training": _training,
    "step": lambda _case, operator, inputs: operator(**inputs),
}
"""Timed passes: the operator alone; with the gradients of all inputs; with the gradients of these,
as a step on forces needs them; a whole step of the operator."""
