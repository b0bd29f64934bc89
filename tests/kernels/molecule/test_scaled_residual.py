"""A residual stream: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from molecule_inputs import HALF, TOLERANCES, draw

from bevatron.kernels import scaled_residual
from bevatron.testing import assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")


def both(stream, update, scale=None):
    scale = None if scale is None else scale.detach()
    wide, narrow = scaled_residual(stream, update, scale)
    return torch.cat([wide, 3 * narrow.to(wide.dtype)])


def check(inputs, **options):
    check_op(
        *(both, both, inputs),
        order=1,
        tolerance=TOLERANCES.get(inputs["update"].dtype),
        ran=("scaled_residual", "triton"),
        **options,
    )


@pytest.mark.parametrize("shape", [(0, 8), (1, 3), (30, 40)])
@pytest.mark.parametrize("scaled", [False, True])
def test_any_size_is_right(shape, scaled):
    inputs = {"stream": draw(*shape), "update": draw(*shape, seed=8)}
    check(inputs | ({"scale": draw(shape[0]).relu()} if scaled else {}))


def test_other_types_are_right():
    check({"stream": draw(9, 8).double(), "update": draw(9, 8, seed=8).double()}, strided=True)
    check({"stream": draw(9, 8), "update": draw(9, 8, dtype=HALF), "scale": draw(9).relu()})


def test_the_sum_keeps_the_precision_of_its_own_type():
    stream = draw(9, 8)
    wide, narrow = scaled_residual(stream, torch.full_like(stream, 1e-3, dtype=HALF))
    assert wide.dtype == torch.float32
    assert_close(wide - stream, torch.full_like(stream, 1e-3), 1e-3)
    assert torch.equal(narrow, wide.to(HALF))


def test_gradients_of_either_result_arrive():
    for which in (0, 1):
        leaves = [draw(4, 8).requires_grad_(), draw(4, 8, dtype=HALF).requires_grad_()]
        found = torch.autograd.grad(scaled_residual(*leaves)[which].sum(), leaves)
        assert all(bool((g == 1).all()) for g in found)


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.molecule.scaled_residual.triton import add

    leaves = (draw(4, 8).requires_grad_(), draw(4, 8, dtype=HALF).requires_grad_())
    torch.library.opcheck(add.op, (*leaves, draw(4)))
