"""The registry of what `run` measures: operators, and of each the cases, sizes to time it at.

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
    """What cases are made for.

    Attributes
    ----------
    dtype
        Of the inputs.
    device
        Of the inputs.
    tiny
        Make sizes that the reference computes on a CPU in a moment, for dry runs and tests.
    """

    dtype: torch.dtype
    device: str = "cuda"
    tiny: bool = False


class Work(NamedTuple):
    """Bytes, operations of matmuls and exponentials that a pass needs at least."""

    bytes: float = 0.0
    operations: float = 0.0
    exponentials: float = 0.0

    def floor_ms(self, copy_rate: float, matmul_rate: float) -> float:
        """Return the time that the device needs at least."""
        times = (self.bytes / copy_rate, self.operations / matmul_rate)
        return 1e3 * max(*times, self.exponentials / EXPONENTIALS)


class Step(NamedTuple):
    """What is timed.

    Attributes
    ----------
    run
        A call as it is launched from Python; none of what is only captured.
    before
        Precedes each of these calls, outside the time.
    capture
        Captures the call, where `timing.captured` does not do.
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
        Draws the inputs, by name, from a seed; gradients are taken by every floating-point tensor.
    ours
        The operator.
    least
        Pass of `PASSES` -> the least work for it.
    check
        Compares with something exact and raises if it is off; returns what the row says of it.
    plain
        Plain PyTorch, the peer "eager" and, compiled, "compile"; without it the operator's own
        reference is timed.
    peers
        More peers by name.
    usual
        Measured where no case is named.
    groups
        Names by which several cases are chosen at once.
    tolerance
        Of the comparison with the reference: of the result, and of derivatives. A sum over 120
        thousand edges in another order differs more than one over a few.
    inner
        Inputs by which "training" takes the first derivatives, as forces are taken: all if none.
    few
        Axis and number of rows to which the check in float64 cuts the inputs.
    to_reach
        Target for the time in ms.
    labels
        More columns of the row.
    floor
        Measures the floor of a pass in ms, where no rate of the device gives it.
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
        """Make what is timed of a pass, by our operator or a peer."""
        return PASSES[which](self, operator or self.ours, self.draw(0))


@dataclass(frozen=True)
class Family:
    """Operators that are measured alike and share a result.

    Attributes
    ----------
    name
        Of the family, an argument of ``--op``.
    result
        Area and name of the result of all its operators.
    notes
        Under the table; takes the type, TB/s of a copy and TFLOP/s of a matmul by name.
    dtype, matmul_dtype
        Default type of the inputs, and that of the matmul whose rate gives the floor.
    by_operator
        Whether some of the operators have a result of their own.
    flush
        Overwrite the L2 cache before each call.
    capture_below_ms
        Calls that take longer are not captured.
    capture_peers
        Whether peers are captured, too.
    host
        Measure the time until a call returns in place of peak memory.
    reference
        Time the operator's reference, too.
    table
        Makes the table's rows of those that were measured.
    tiles
        Sets the tile of all its operators, given as text, for ``--tiles``.
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
    """Yield the cases of an operator that are named, or are in a group that is, or the usual."""
    for case in OPERATORS[op].make(setup):
        if {case.name, *case.groups} & set(chosen) if chosen else case.usual:
            yield case


def leaves_of(inputs: Inputs) -> dict[str, Tensor]:
    """Return the inputs by which gradients are taken."""
    return {
        name: value
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
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
        # What is linear has no second derivative by its input.
        return torch.autograd.grad(first, [g, *wanted], along, allow_unused=True)

    return Step(run)


PASSES: Mapping[str, Callable[[Case, Operator, Inputs], Step]] = {
    "forward": _forward,
    "backward": _backward,
    "forward+backward": _backward,
    "training": _training,
    "step": lambda _case, operator, inputs: operator(**inputs),
}
"""What is timed: the operator alone; with the gradients by all inputs; with the gradients of those,
as a step on forces needs them; a step that the operator makes."""
