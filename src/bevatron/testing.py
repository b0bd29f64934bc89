"""A kit to test operators and models with: for this package and for anybody who adds to it.

- `assert_close` says by how much and where two tensors differ.
- `check_op` compares an operator with its float64 reference: result, all gradients, all second
  derivatives, from inputs that lie between NaNs, with the registry's proof of what ran.
- `check_equivariant` and `check_permutation` turn, mirror and reorder the inputs of a function.
- `awkward_graphs`, `poisoned`, `guarded_allocations`: where kernels break.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bevatron import kernels
from bevatron.maths.irreps import Irreps
from bevatron.maths.so3 import rotate

SENTINEL = -6.1e4
"""Value of the margins around guarded outputs; every type represents it."""

MARGIN = 64
"""Elements before and after a poisoned or guarded tensor."""


@dataclass(frozen=True)
class Tolerance:
    """Largest error, relative to the largest magnitude of what is expected.

    Attributes
    ----------
    forward : limit for the result
    gradients : limit for first and second derivatives
    """

    forward: float
    gradients: float

    @classmethod
    def of(cls, dtype: torch.dtype) -> "Tolerance":
        """Return the tolerance that every kernel of this package keeps."""
        if dtype == torch.float64:
            return cls(1e-12, 1e-12)
        if dtype == torch.float32:
            return cls(1e-6, 1e-5)
        return cls(2.0 * torch.finfo(dtype).eps, 8.0 * torch.finfo(dtype).eps)


def assert_close(
    actual: Tensor, expected: Tensor, tolerance: float = 1e-12, name: str = "tensor"
) -> None:
    """Compare two tensors, in float64, relative to the largest magnitude of ``expected``.

    Where all of ``expected`` is smaller than 1e-30 the error is absolute. Infinities and NaN must
    stand in the same positions. Raises AssertionError with the shapes, or the largest error, where
    it is and both values there.

    Parameters
    ----------
    actual, expected : tensors of one shape, on any device
    tolerance : largest error, as a share of the largest magnitude of ``expected``
    name : for the message

    Examples
    --------
    >>> assert_close(torch.ones(2), torch.ones(2))
    """
    if actual.shape != expected.shape:
        raise AssertionError(
            f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
        )
    if actual.numel() == 0:
        return
    got, want = actual.detach().cpu().double(), expected.detach().cpu().double()
    odd = got.isfinite() != want.isfinite()
    if odd.any():
        where = tuple(odd.nonzero()[0].tolist())
        raise AssertionError(
            f"{name}: {int(odd.sum())} of {odd.numel()} entries are finite in one only, first "
            f"{where}: {got[where].item()}, expected {want[where].item()}"
        )
    finite = want.isfinite()
    error = torch.where(finite, got - want, torch.zeros_like(want)).abs()
    scale = torch.where(finite, want, torch.zeros_like(want)).abs().max().item()
    limit = tolerance * (scale if scale > 1e-30 else 1.0)
    if error.max().item() > limit:
        where = tuple(index.item() for index in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{name}: error {error.max().item():.3e} exceeds {limit:.3e} (= {tolerance:.0e} of the "
            f"largest magnitude {scale:.3e}) at {where}: {got[where].item()!r}, expected "
            f"{want[where].item()!r}; {int((error > limit).sum())} of {error.numel()} are off"
        )


def poisoned(tensor: Tensor, strided: bool = False) -> Tensor:
    """Copy a tensor into the middle of a larger buffer of NaN (integers: of a huge number).

    Reading past an end then shows in the result, which an interpreter of kernels would not notice.

    Parameters
    ----------
    tensor
        What to copy; a floating-point copy is a leaf that requires gradients if ``tensor`` does.
    strided : leave gaps between the elements of the last axis too: the view is not contiguous
    """
    poison = float("nan") if tensor.is_floating_point() else torch.iinfo(torch.int32).max
    step = 2 if strided else 1
    buffer = torch.full(
        (tensor.numel() * step + 2 * MARGIN,), poison, dtype=tensor.dtype, device=tensor.device
    )
    inside = buffer[MARGIN : MARGIN + tensor.numel() * step : step]
    view = inside.view(tensor.shape)
    view.copy_(tensor.detach())
    return view.detach().requires_grad_(tensor.requires_grad)


@contextmanager
def guarded_allocations() -> Iterator[None]:
    """Give every new empty tensor margins, and check at the end that nobody wrote into them.

    Within, `torch.empty`, `torch.empty_like` and `Tensor.new_empty` return the middle of a larger
    buffer. The middle holds NaN, so an element that a kernel forgets to write shows too. Raises
    AssertionError if a margin has changed.
    """
    buffers: list[tuple[Tensor, int]] = []
    empty = torch.empty

    def guarded(*shape: Any, **options: Any) -> Tensor:
        plain = empty(*shape, **options)
        if not plain.is_floating_point() or not plain.is_contiguous():
            return plain
        count = plain.numel()
        buffer = torch.full((count + 2 * MARGIN,), SENTINEL, dtype=plain.dtype, device=plain.device)
        buffer[MARGIN : MARGIN + count] = float("nan")
        buffers.append((buffer, count))
        return buffer[MARGIN : MARGIN + count].view(plain.shape)

    def like(tensor: Tensor, **options: Any) -> Tensor:
        return new(tensor, tensor.shape, **options)

    def new(tensor: Tensor, *shape: Any, **options: Any) -> Tensor:
        return guarded(*shape, **{"dtype": tensor.dtype, "device": tensor.device, **options})

    with (
        mock.patch.object(torch, "empty", guarded),
        mock.patch.object(torch, "empty_like", like),
        mock.patch.object(torch.Tensor, "new_empty", new),
    ):
        yield
    for buffer, count in buffers:
        expected = torch.full_like(buffer[:MARGIN], SENTINEL)
        for place, margin in (("before", buffer[:MARGIN]), ("after", buffer[MARGIN + count :])):
            if not torch.equal(margin, expected):
                raise AssertionError(f"something was written {place} a tensor of {count} elements")


def derivatives(
    function: Callable[..., Tensor], inputs: Mapping[str, Any], order: int = 2, seed: int = 0
) -> dict[str, Tensor]:
    """Compute a function's result and its derivatives along random directions.

    Parameters
    ----------
    function : called with ``inputs`` by name
    inputs : derivatives are taken by the tensors that require gradients
    order
        0, 1 or 2. The second order is taken by the inputs and by the incoming gradient.
    seed : seed of the directions, which are the same for any type and device

    Returns
    -------
    dict
        ``result``, ``d/dx`` and ``d2/dx`` for every input x, ``d2/d(result)``.
    """
    result = function(**inputs)
    found = {"result": result}
    wanted = {k: v for k, v in inputs.items() if isinstance(v, Tensor) and v.requires_grad}
    if order == 0 or not wanted:
        return found
    cotangent = _direction(result, seed).requires_grad_(order > 1)
    first = _gradients((result * cotangent).sum(), wanted, create_graph=order > 1)
    found |= {f"d/d{name}": gradient for name, gradient in first.items()}
    if order > 1:
        along = sum((g * _direction(g, seed + 1 + i)).sum() for i, g in enumerate(first.values()))
        assert isinstance(along, Tensor)
        second = _gradients(along, {**wanted, "(result)": cotangent})
        found |= {f"d2/d{name}": gradient for name, gradient in second.items()}
    return found


def check_op(
    function: Callable[..., Tensor],
    reference: Callable[..., Tensor],
    inputs: Mapping[str, Any],
    *,
    order: int = 2,
    tolerance: Tolerance | None = None,
    ran: tuple[str, str] | None = None,
    strided: bool = False,
) -> None:
    """Compare an operator with its float64 reference: result, gradients, second derivatives.

    Inputs are poisoned, new outputs guarded, and the operator runs twice: the same input must give
    the same bits. Raises AssertionError naming the derivative that differs.

    Parameters
    ----------
    function, reference : called with ``inputs`` by name
    inputs
        Derivatives are taken by every floating-point tensor. For the reference they are float64.
    order : highest derivative that is compared, 0 to 2
    tolerance : `Tolerance.of` the inputs' type if not given
    ran : (operator, implementation): chosen for the test, and its launch counter must rise
    strided : make the inputs not contiguous
    """
    floating = [v for v in inputs.values() if isinstance(v, Tensor) and v.is_floating_point()]
    limits = tolerance or Tolerance.of(floating[0].dtype)
    exact = {
        name: value.detach().double().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in inputs.items()
    }
    with kernels.use("reference"):
        expected = derivatives(reference, exact, order)
    with kernels.use(**{ran[0]: ran[1]} if ran else {}):
        before = kernels.launches().get(ran, 0) if ran else 0
        actual = _poisoned_run(function, inputs, order, strided)
        if ran and kernels.launches().get(ran, 0) <= before:
            raise AssertionError(f"{ran[0]}: the implementation '{ran[1]}' was not launched")
        again = _poisoned_run(function, inputs, order, strided)
    for name, value in expected.items():
        limit = limits.forward if name == "result" else limits.gradients
        assert_close(actual[name], value, limit, name)
        if not torch.equal(actual[name].nan_to_num(), again[name].nan_to_num()):
            raise AssertionError(f"{name}: a second run gave other bits")


def check_equivariant(
    function: Callable[..., Any],
    inputs: Mapping[str, Any],
    turns: Mapping[str, str | Irreps],
    result_turns: str | Irreps | Mapping[str, str | Irreps],
    *,
    tolerance: float = 1e-10,
    seed: int = 0,
) -> None:
    """Turn and mirror the inputs of a function and compare with its turned and mirrored result.

    Raises AssertionError naming the result and the operation: rotation, reflection or inversion.

    Parameters
    ----------
    function : called with ``inputs`` by name; returns a tensor or tensors by name
    inputs : Float64 tensors and whatever else the function takes
    turns
        The irreps of the last axis of those inputs that turn; positions, cells and other rows of
        vectors are ``1o``. The others stay.
    result_turns
        The irreps of the result, or of the results by name: ``0e`` for what stays,
        ``tensor`` for a 3x3 tensor such as the stress. Results that are not named are not compared.
    """
    expected = _by_name(function(**inputs))
    kinds = result_turns if isinstance(result_turns, Mapping) else {"result": result_turns}
    for operation, matrix in _orthogonal(seed):
        turned = {
            name: _turn(value, turns[name], matrix) if name in turns else value
            for name, value in inputs.items()
        }
        actual = _by_name(function(**turned))
        for name, kind in kinds.items():
            want = _turn(expected[name], kind, matrix)
            assert_close(actual[name], want, tolerance, f"{name} after {operation}")


def check_permutation(
    function: Callable[..., Any],
    inputs: Mapping[str, Any],
    rows: Sequence[str],
    pointers: Sequence[str] = (),
    result_rows: Sequence[str] = ("result",),
    *,
    tolerance: float = 1e-12,
    seed: int = 0,
) -> None:
    """Reorder the nodes of a function's input and compare with its reordered result.

    Parameters
    ----------
    function : called with ``inputs`` by name; returns a tensor or tensors by name
    inputs : tensors and whatever else the function takes
    rows : inputs whose first axis are the nodes
    pointers : inputs that hold numbers of nodes, such as edges
    result_rows : results whose first axis are the nodes; all others must stay as they are
    """
    expected = _by_name(function(**inputs))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(inputs[rows[0]]), generator=generator)
    place = torch.argsort(order)
    changed = dict(inputs)
    changed |= {name: inputs[name][order] for name in rows}
    changed |= {name: place[inputs[name]].to(inputs[name].dtype) for name in pointers}
    actual = _by_name(function(**changed))
    for name, value in expected.items():
        want = value[order] if name in result_rows else value
        assert_close(actual[name], want, tolerance, f"{name} after reordering")


@dataclass(frozen=True)
class AwkwardGraph:
    """A graph that finds mistakes; edges are sorted by receiver.

    Attributes
    ----------
    name : what is awkward about it
    num_nodes : number of nodes
    edges : senders and receivers
    """

    name: str
    num_nodes: int
    edges: Int[Tensor, "2 E"]


def awkward_graphs(hub: int = 300, seed: int = 0) -> list[AwkwardGraph]:
    """Build small graphs with every trait that a kernel over edges may get wrong.

    Parameters
    ----------
    hub : number of edges into the node that has most
    seed : seed of the random edges
    """
    generator = torch.Generator().manual_seed(seed)

    def draw(nodes: int, count: int) -> Tensor:
        return torch.randint(0, nodes, (count,), generator=generator)

    first_and_last_empty = 1 + draw(3, 7)
    hubbed = torch.cat([torch.full((hub,), 2), draw(5, 9)])
    cases = {
        "no edges": (3, draw(3, 0), draw(3, 0)),
        "one edge": (2, torch.tensor([0]), torch.tensor([1])),
        "one node with an edge to itself": (1, torch.tensor([0]), torch.tensor([0])),
        "the same edge three times": (2, torch.ones(3, dtype=torch.int64), draw(1, 3)),
        "first and last node without edges": (5, draw(5, 7), first_and_last_empty),
        "a hub": (5, draw(5, hub + 9), hubbed),
        "63 edges": (4, draw(4, 63), draw(4, 63)),
        "65 edges into 65 nodes": (65, draw(65, 65), draw(65, 65)),
    }
    return [
        AwkwardGraph(name, nodes, torch.stack([senders, receivers.sort().values]))
        for name, (nodes, senders, receivers) in cases.items()
    ]


def random_rotation(seed: int = 0) -> Float[Tensor, "3 3"]:
    """Draw a rotation evenly from all rotations, float64."""
    generator = torch.Generator().manual_seed(seed)
    q, r = torch.linalg.qr(torch.randn(3, 3, generator=generator, dtype=torch.float64))
    q *= torch.diagonal(r).sign()
    rotation: Tensor = q * torch.linalg.det(q).sign()
    return rotation


def _orthogonal(seed: int) -> list[tuple[str, Tensor]]:
    mirror = torch.diag(torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64))
    return [
        ("rotation", random_rotation(seed)),
        ("reflection", random_rotation(seed + 1) @ mirror),
        ("inversion", -torch.eye(3, dtype=torch.float64)),
    ]


def _turn(value: Tensor, kind: str | Irreps, matrix: Tensor) -> Tensor:
    if kind == "tensor":
        return matrix @ value @ matrix.T
    irreps = Irreps.parse(kind)
    if all(block.l == 0 and block.parity == 1 for block in irreps):
        return value
    return rotate(value, irreps, matrix)


def _by_name(result: Any) -> Mapping[str, Tensor]:
    return result if isinstance(result, Mapping) else {"result": result}


def _poisoned_run(
    function: Callable[..., Tensor], inputs: Mapping[str, Any], order: int, strided: bool
) -> dict[str, Tensor]:
    prepared = {}
    for name, value in inputs.items():
        prepared[name] = poisoned(value, strided) if isinstance(value, Tensor) else value
        if isinstance(value, Tensor) and value.is_floating_point():
            prepared[name].requires_grad_()
    with guarded_allocations():
        return derivatives(function, prepared, order)


def _gradients(
    scalar: Tensor, by: Mapping[str, Tensor], create_graph: bool = False
) -> dict[str, Tensor]:
    """Take gradients, zero where the scalar does not depend on an input."""
    if not scalar.requires_grad:
        return {name: torch.zeros_like(value) for name, value in by.items()}
    found = torch.autograd.grad(
        scalar, list(by.values()), create_graph=create_graph, allow_unused=True
    )
    return {
        name: torch.zeros_like(value) if gradient is None else gradient
        for (name, value), gradient in zip(by.items(), found, strict=True)
    }


def _direction(like: Tensor, seed: int) -> Tensor:
    """Draw a random tensor, the same for any type and device: every type holds its few digits."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(like.shape, generator=generator, dtype=torch.float32)
    return drawn.bfloat16().to(like.device, like.dtype)
