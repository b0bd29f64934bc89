"""What a case must pass before it is timed, at its very shapes and type."""

import functools
from collections.abc import Mapping, Sequence

import torch
from benchmarks.kernels.cases import Case, Inputs, Operator, direction, leaves_of
from torch import Tensor

from bevatron import kernels
from bevatron.testing import assert_close, derivatives

ROUNDING = 2.0**-8
"""Of bfloat16."""
NOTHING = 2.0**-40
DRAWS = 8
"""Of all inputs, where one leaves doubt about the error of a weight's or bias's gradient."""


def against_reference(case: Case) -> dict[str, float]:
    """Compare result, gradients and their gradients with the reference in float64."""
    inputs = case.draw(0)
    exact = {name: value.detach().double().requires_grad_() for name, value in inputs.items()}
    with kernels.use("reference"):
        expected = {k: v.detach().cpu() for k, v in derivatives(case.ours, exact).items()}
    given = {name: value.detach().requires_grad_() for name, value in inputs.items()}
    actual = derivatives(case.ours, given)
    for name, value in expected.items():
        assert_close(actual[name], value, case.tolerance[name != "result"], name)
    return {}


def no_worse_than_plain(case: Case) -> dict[str, float]:
    """Compare with float64, and two runs with each other; exit if anything is off.

    The gradient of a weight or bias is a sum over all rows of errors that rows share, those of a
    few channels most of all: one draw may show ours larger than plain PyTorch's though in the mean
    it is smaller, or the other way round. Where one draw leaves doubt about one of them, `DRAWS`
    draws decide, and theirs is the ratio that is returned.

    Returns
    -------
    dict
        "worst error": our largest error over that of plain PyTorch in this type.
    """
    inputs = case.draw(0)
    along = direction(case, inputs)
    runs = [gradients(case.ours, inputs, along) for _ in range(2)]
    if not all(map(torch.equal, *runs)):
        raise SystemExit(f"{case.op} {case.name}: a second run gave other bits")
    found, doubtful = errors(case, inputs, along), []
    exact = along.dtype in {torch.float32, torch.float64}
    for name, (error, theirs, size) in found.items():
        summed = name.endswith(("weight", "_bias"))
        # The error of a few numbers is left to chance.
        share = 1.05 if summed or size > 10_000 else 1.3
        if error <= (2e-5 if exact else theirs * share):
            continue
        if exact or not summed:
            raise _failed(case, name, error, theirs)
        doubtful.append(name)
    ratios = {name: error / max(theirs, 1e-30) for name, (error, theirs, _) in found.items()}
    del inputs, along, runs
    for name, (ours, theirs) in over_draws(case, doubtful).items():
        if not ours <= theirs:
            raise _failed(case, f"{name} over {DRAWS} draws", ours, theirs)
        ratios[name] = ours / theirs
    return {"worst error": max(ratios.values())}


def gradients(operator: Operator, inputs: Inputs, along: Tensor) -> list[Tensor]:
    """Return the result and its gradients by all inputs."""
    leaves = [leaf.requires_grad_() for leaf in leaves_of(inputs).values()]
    result = operator(**inputs)
    return [result.detach(), *torch.autograd.grad(result, leaves, along)]


def errors(
    case: Case, inputs: Inputs, along: Tensor, usual: Mapping[str, float] | None = None
) -> dict[str, tuple[float, float, int]]:
    """Compare the result and all gradients with those in float64.

    16-bit types are compared with float32, whose errors are a thousandth of theirs, where float64
    does not fit into memory.

    Parameters
    ----------
    case, inputs, along
        What is computed, of which inputs, and the gradient of the result.
    usual
        Sizes of these tensors for other inputs: one that is `NOTHING` beside it is exactly zero,
        and what is left of a difference is measured by `ROUNDING` of the usual size.

    Returns
    -------
    dict
        Our error, that of plain PyTorch in this type and the number of elements, by tensor; errors
        are norms over that of the exact tensor, in float32 largest elements.
    """
    if case.few is not None:
        axis, number = case.few
        rows = along.shape[axis]
        cut = functools.partial(_few, axis=axis, rows=rows, number=number)
        inputs, along = {name: cut(value) for name, value in inputs.items()}, cut(along)
    try:
        return _errors(case, inputs, along, torch.float64, usual or {})
    except torch.OutOfMemoryError:
        if along.dtype == torch.float32:
            raise
    torch.cuda.empty_cache()  # after the handler, which holds the tensors
    return _errors(case, inputs, along, torch.float32, usual or {})


def _errors(
    case: Case, inputs: Inputs, along: Tensor, exact: torch.dtype, usual: Mapping[str, float]
) -> dict[str, tuple[float, float, int]]:
    assert case.plain is not None
    leaves = leaves_of(inputs)
    exactly = inputs | {name: leaf.detach().to(exact) for name, leaf in leaves.items()}
    want = gradients(case.plain, exactly, along.to(exact))
    ours, plain = (gradients(f, inputs, along) for f in (case.ours, case.plain))
    largest = along.dtype == torch.float32

    def size(tensor: Tensor) -> float:
        return float(tensor.abs().max() if largest else tensor.norm())

    found = {}
    for name, got, eager, e in zip(["result", *leaves], ours, plain, want, strict=True):
        norm = max(size(e), 1e-30)
        if norm < NOTHING * usual.get(name, 0.0):
            norm = ROUNDING * usual[name]
        off, plain_off = (size(t.to(exact) - e) / norm for t in (got, eager))
        found[name] = (off, plain_off, e.numel())
    return found


def _few(value: Tensor | None, axis: int, rows: int, number: int) -> Tensor | None:
    """Cut a tensor whose axis is that of the result's rows."""
    if value is None or value.dim() <= axis or value.shape[axis] != rows:
        return value
    return value.detach().narrow(axis, 0, min(number, rows)).contiguous()


def over_draws(case: Case, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return our error and plain PyTorch's of some tensors, both root mean squares over draws."""
    if not names:
        return {}
    squares = {name: [0.0, 0.0] for name in names}
    for seed in range(0, 2 * DRAWS, 2):
        inputs = case.draw(seed)
        found = errors(case, inputs, direction(case, inputs, seed + 1))
        for name in names:
            for i in range(2):
                squares[name][i] += found[name][i] ** 2 / DRAWS
    return {name: (ours**0.5, theirs**0.5) for name, (ours, theirs) in squares.items()}


def _failed(case: Case, name: str, error: float, theirs: float) -> SystemExit:
    return SystemExit(
        f"{case.op} {case.name}: the error of {name} is {error:.2e}, plain PyTorch's {theirs:.2e}"
    )
