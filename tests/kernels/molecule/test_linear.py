"""A linear layer: the reference everywhere, the kernels interpreted or compiled."""

import threading

import pytest
import torch
from molecule_inputs import DEVICE, HALF, TOLERANCES, draw

from bevatron.kernels import linear, use
from bevatron.kernels.molecule.linear import linear_with_input
from bevatron.testing import assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")


def make(rows, width, out, *, bias=True, dtype=torch.float32):
    inputs = {"x": draw(rows, width, dtype=dtype), "weight": draw(out, width, dtype=dtype, seed=8)}
    return inputs | ({"bias": draw(out, dtype=dtype, seed=9)} if bias else {})


def check(inputs, **options):
    check_op(
        *(linear, linear, inputs),
        order=1,
        tolerance=TOLERANCES.get(inputs["x"].dtype),
        ran=("linear", "triton"),
        **options,
    )


@pytest.mark.parametrize("rows", [0, 1, 9, 70])
@pytest.mark.parametrize("bias", [False, True])
def test_any_number_of_rows_is_right(rows, bias):
    check(make(rows, 24, 20, bias=bias))


@pytest.mark.parametrize(
    ("shape", "out"), [((24,), 20), ((2, 0, 24), 20), ((2, 5, 24), 0), ((2, 5, 0), 20)]
)
def test_rows_of_any_rank_are_right(shape, out):
    inputs = make(1, shape[-1], out) | {"x": draw(*shape)}
    check(inputs)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_gradients_of_returned_inputs_are_added(dtype):
    def both(x, weight, bias):
        y, x = linear_with_input(x, weight, bias)
        return torch.cat([y, x.square()], 1)

    tolerance = TOLERANCES[dtype]
    ran = ("linear", "triton")
    check_op(both, both, make(9, 24, 20, dtype=dtype), order=1, tolerance=tolerance, ran=ran)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_a_shared_gradient_is_not_overwritten(dtype):
    """All three terms of a sum get one and the same gradient."""

    def both(x, weight, more):
        y, x = linear_with_input(x, weight)
        return y + x + more

    inputs = {
        "x": draw(9, 16, dtype=dtype), "weight": draw(16, 16, dtype=dtype, seed=8),
        "more": draw(9, 16, dtype=dtype, seed=9),
    }  # fmt: skip
    ran = ("linear", "triton")
    check_op(both, both, inputs, order=1, tolerance=TOLERANCES[dtype], ran=ran)


def test_rows_that_are_only_returned_get_their_gradient():
    x, weight = draw(3, 4).requires_grad_(), draw(2, 4).requires_grad_()
    with use("triton"):
        total = linear_with_input(x, weight)[1].sum()
    found = torch.autograd.grad(total, (x, weight), allow_unused=True)
    assert torch.equal(found[0], torch.ones_like(x))
    assert found[1] is None


@pytest.mark.parametrize("dtype", [torch.float64, HALF])
def test_other_types_and_widths_are_right(dtype):
    check(make(40, 16, 300, dtype=dtype))


def test_strided_inputs_are_right():
    check(make(9, 8, 12), strided=True)


def test_under_autocast_gradients_keep_the_type_of_the_weights():
    inputs = make(30, 16, 24)
    leaves = [tensor.requires_grad_() for tensor in inputs.values()]
    with use(linear="triton"), torch.autocast(DEVICE, torch.bfloat16):
        y = linear(*leaves)
    found = torch.autograd.grad(y.float().square().sum(), leaves)
    with use("reference"), torch.autocast(DEVICE, torch.bfloat16):
        z = linear(*leaves)
    expected = torch.autograd.grad(z.float().square().sum(), leaves)
    assert y.dtype == torch.bfloat16
    for ours, theirs, leaf in zip(found, expected, leaves, strict=True):
        assert ours.dtype == leaf.dtype
        assert_close(ours, theirs, 2e-2)


def test_weights_rounded_together_are_those_rounded_one_by_one():
    from bevatron.kernels.molecule.linear.rounding import round_all, rounded

    weights = [draw(7, 5), draw(12, 6, seed=3)]
    before = [rounded(weights[0], HALF), rounded(weights[1][:, 2:4], HALF)]
    with round_all(weights, HALF):
        weights[0].zero_()
        weights[1].zero_()
        found = [rounded(weights[0], HALF), rounded(weights[1][:, 2:4], HALF)]
        assert not rounded(weights[0], torch.float64).any()
    assert all(map(torch.equal, found, before))
    assert not rounded(weights[0], HALF).any()


def test_parameters_that_share_memory_are_rounded_where_they_are_used(monkeypatch):
    from bevatron.kernels.molecule.linear import rounding

    monkeypatch.setattr(torch, "is_autocast_enabled", lambda _: True)
    monkeypatch.setattr(rounding, "GPUS", (DEVICE,))
    whole, alone = draw(20), draw(4, 3, seed=5)
    parts = [whole[:10].view(5, 2), whole[10:].view(5, 2)]
    narrow = torch.get_autocast_dtype(DEVICE)
    with rounding.rounded_together([*parts, alone]):
        for weight in (*parts, alone):
            copied = weight.to(narrow)
            weight.zero_()
            found = rounding.rounded(weight, narrow)
            assert torch.equal(found, copied if weight is alone else torch.zeros_like(copied))


def test_blocks_of_rounded_weights_may_be_nested():
    from bevatron.kernels.molecule.linear.rounding import round_all, rounded

    outer, inner = draw(4, 3), draw(2, 5, seed=3)
    copies = [weight.to(HALF) for weight in (outer, inner)]
    with round_all([outer], HALF):
        with round_all([inner], HALF):
            for weight in (outer, inner):
                weight.zero_()
            assert torch.equal(rounded(inner, HALF), copies[1])
        assert torch.equal(rounded(outer, HALF), copies[0])
        assert not rounded(inner, HALF).any()


def test_blocks_of_two_threads_may_overlap():
    from bevatron.kernels.molecule.linear.rounding import round_all, rounded

    one, other = draw(4, 3), draw(2, 5, seed=3)
    copy = other.to(HALF)
    blocks = round_all([one], HALF), round_all([other], HALF)
    for block in blocks:
        block.__enter__()
    one.zero_()
    other.zero_()
    blocks[0].__exit__(None, None, None)
    assert torch.equal(rounded(other, HALF), copy)
    blocks[1].__exit__(None, None, None)
    assert not rounded(one, HALF).any()


def test_a_thread_that_leaves_its_block_last_leaves_no_copies():
    from bevatron.kernels.molecule.linear.rounding import round_all, rounded

    weight = draw(4, 3)
    entered, leave = threading.Event(), threading.Event()

    def other():
        with round_all([weight], HALF):
            entered.set()
            leave.wait(60)

    thread = threading.Thread(target=other)
    with round_all([weight], HALF):
        thread.start()
        assert entered.wait(60)
    leave.set()
    thread.join()
    weight.zero_()
    assert not rounded(weight, HALF).any()


def test_wrong_shapes_are_refused():
    with pytest.raises((ValueError, TypeError), match=r"linear|weight"):
        linear(torch.zeros(3, 4), torch.zeros(2, 5))
