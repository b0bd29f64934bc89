"""Custom operators: gradients by name, fakes, and calls with and without the dispatcher."""

import contextlib

import pytest
import torch
from torch import Tensor

from bevatron.kernels.shared import custom_op as module
from bevatron.kernels.shared.custom_op import custom_op
from dispatched import Operators


@custom_op("test_mix", outputs="y square unused", fake="x x weight")
def mix(
    x: Tensor, weight: Tensor | None, lists: list[Tensor], factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return factor x^2 w l, x^2 and a copy of w."""
    w = x.new_ones(x.shape) if weight is None else weight
    kept = x.new_empty(0) if weight is None else weight.clone()
    return factor * x * x * w * lists[0], x * x, kept


calls = []


def mix_gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    square: Tensor,
    lists: list[Tensor],
    factor: float,
    needs: list[bool],
) -> tuple[Tensor | None, ...]:
    calls.append(needs)
    w = 1.0 if weight is None else weight
    dx = 2 * factor * dy * x * w * lists[0] if needs[0] else None
    return dx, factor * dy * square * lists[0] if needs[1] else None


mix.gradients("x weight", mix_gradients)


@custom_op("test_cube", fake="x")
def cube(x: Tensor) -> Tensor:
    """Return x^3."""
    return x**3


@cube.backward()
def cube_backward(dy: Tensor, x: Tensor) -> Tensor:
    return 3 * dy * x**2


@custom_op("test_gram", fake="x")
def gram(x: Tensor) -> Tensor:
    """Return x^T x of a square x."""
    return x.t() @ x


@custom_op("test_steps", fake="x")
def steps(x: Tensor, y: Tensor) -> Tensor:
    """Return where x is above y, which has no gradients."""
    return (x > y).to(x.dtype)


steps.gradients("x y", lambda dz, x: None)


@custom_op("test_powers", fake="x x")
def powers(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return x^2 and x^3."""
    return x**2, x**3


@powers.backward()
def powers_backward(dsquare: Tensor | None, dcube: Tensor | None, x: Tensor) -> Tensor:
    calls.append([dsquare is not None, dcube is not None])
    of_square = torch.zeros_like(x) if dsquare is None else 2 * x * dsquare
    return of_square if dcube is None else of_square + 3 * x**2 * dcube


def leaves():
    x, w, m = torch.rand(3, 4, dtype=torch.float64).add(0.5).unbind(0)
    return x.clone().requires_grad_(), w.clone().requires_grad_(), m.clone()


@pytest.fixture(params=[False, True], ids=["directly", "dispatched"])
def watched(request, monkeypatch):
    """Whether calls go through the dispatcher."""
    monkeypatch.setattr(module, "is_watched", lambda _: request.param)
    return request.param


def test_gradients_find_their_inputs_by_name(watched):
    x, w, m = leaves()
    y, square, unused = mix(x, w, [m], 3.0)
    assert y.requires_grad
    assert not square.requires_grad
    assert not unused.requires_grad
    dx, dw = torch.autograd.grad(y.sum(), (x, w))
    torch.testing.assert_close(dx, 6 * x * w * m)
    torch.testing.assert_close(dw, 3 * x * x * m)


def test_any_result_alone_has_gradients(watched):
    x, _, _ = leaves()
    for place, wanted in enumerate((2 * x, 3 * x**2)):
        torch.testing.assert_close(torch.autograd.grad(powers(x)[place].sum(), x)[0], wanted)
        assert calls[-1] == [place == 0, place == 1]  # and no zeros for the other


def test_a_formula_may_return_none_for_all_gradients(watched):
    x, w, _ = leaves()
    assert torch.autograd.grad(steps(x, w).sum(), (x, w), allow_unused=True) == (None, None)


def test_an_argument_that_is_none_has_no_gradient(watched):
    x, _, m = leaves()
    (dx,) = torch.autograd.grad(mix(x, None, [m], 1.0)[0].sum(), x)
    torch.testing.assert_close(dx, 2 * x * m)
    assert calls[-1] == [True, False]


def test_only_gradients_that_the_backward_pass_uses_are_requested(watched):
    x, w, m = leaves()
    inner = 1.0 * x
    torch.autograd.grad(mix(inner, 1.0 * w, [m], 1.0)[0].sum(), inner)
    assert calls[-1] == [True, False]


@custom_op("test_masked", fake="x")
def masked(mask: Tensor, x: Tensor, by: Tensor) -> Tensor:
    """Return mask x by; the mask has no gradient."""
    return mask * x * by


def masked_gradients(
    dy: Tensor, mask: Tensor, x: Tensor, by: Tensor, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    calls.append(needs)
    return dy * mask * by if needs[0] else None, dy * mask * x if needs[1] else None


masked.gradients("x by", masked_gradients)


def test_what_is_requested_does_not_depend_on_arguments_without_gradients(watched):
    x, w, m = leaves()
    for place in (0, 1):
        inner = 1.0 * x, 1.0 * w
        (found,) = torch.autograd.grad(masked(m, *inner).sum(), inner[place])
        torch.testing.assert_close(found, m * (w, x)[place])
        assert calls[-1] == [place == 0, place == 1]


@custom_op("test_scaled", fake="x", outputs="y")
def scaled(x: Tensor, by: Tensor, needs: list[bool]) -> Tensor:
    """Return x by; the last argument has the name of what formulas receive."""
    return x * by


def scaled_gradients(
    dy: Tensor, x: Tensor, by: Tensor, needs: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    return dy * by if needs[0] else None, dy * x if needs[1] else None


scaled.gradients("x by", scaled_gradients)


def test_a_formula_receives_the_needs_of_the_backward_pass_not_an_argument_of_that_name(watched):
    x, w, _ = leaves()
    found = torch.autograd.grad(scaled(x, w, [False, False]).sum(), (x, w))
    assert found[0].equal(w)
    assert found[1].equal(x)


def test_second_derivatives_are_refused_in_one_sentence(monkeypatch):
    x, _, _ = leaves()
    (dx,) = torch.autograd.grad(cube(x).sum(), x, create_graph=True)
    torch.testing.assert_close(dx, 3 * x * x)
    with pytest.raises(RuntimeError, match=r"test_cube_backward: .* only once, .*'reference'"):
        dx.sum().backward()


def test_the_dispatcher_is_used_under_a_mode():
    x = torch.ones(2)
    with Operators() as called:
        cube(x)
    assert called.names[0] == "bevatron::test_cube"


def test_a_subclass_sees_the_operator():
    seen = []

    class Seen(Tensor):
        @classmethod
        def __torch_function__(cls, function, types, arguments=(), options=None):
            seen.append(str(function))
            return super().__torch_function__(function, types, arguments, options or {})

    cube(torch.ones(2).as_subclass(Seen))
    assert any("test_cube" in each for each in seen)


def test_kernels_see_no_tensors_of_transformations():
    seen = []

    @custom_op("test_seen", fake="x")
    def copied(x: Tensor) -> Tensor:
        seen.append(torch._is_functional_tensor(x))
        return x.clone()

    assert torch.func.functionalize(copied)(torch.ones(2)).equal(torch.ones(2))
    assert seen == [False]


def test_operators_are_well_formed():
    x, w, m = leaves()
    torch.library.opcheck(mix.op, (x, w, [m], 2.0))
    torch.library.opcheck(mix.op, (x, None, [m], 2.0))
    torch.library.opcheck(cube.op, (x,))
    torch.library.opcheck(gram.op, (torch.rand(3, 3).t(),))


def test_an_unknown_name_is_reported():
    with pytest.raises(TypeError, match="test_cube: a gradient takes absent, which is neither"):
        cube.gradients("x", lambda dy, x, absent: dy)
    with pytest.raises(TypeError, match="test_cube: a gradient takes weight"):
        cube.gradients("weight", lambda dy, x: dy)


@pytest.mark.parametrize("autocast", [False, True])
def test_kernels_launch_on_the_device_of_the_first_tensor(watched, autocast, monkeypatch):
    entered = []

    def on_device(tensor):
        entered.append(tensor)
        return contextlib.nullcontext()

    monkeypatch.setattr(module, "on_device", on_device)
    x, w, m = leaves()
    with torch.autocast("cpu", enabled=autocast):
        mix(x.detach(), w.detach(), [m], 1.0)
    assert [tensor.shape for tensor in entered] == [x.shape]
    assert torch.equal(entered[0], x)


def test_autocast_does_not_change_types_inside(watched):
    x = torch.rand(3, 3)
    with torch.autocast("cpu"):
        found = gram(x)
    assert found.equal(x.t() @ x)
