"""A residual and a norm in one: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from molecule_inputs import DEVICE, HALF, TOLERANCES, draw

from bevatron.kernels import residual_norm, use
from bevatron.testing import assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")


def make(rows, width, branches=1, scaled=(), dtype=torch.float32):
    inputs = {"x": draw(rows, width, dtype=dtype)}
    for k in range(branches):
        inputs[f"branch_{k}"] = draw(rows, width, dtype=dtype, seed=10 + k)
        inputs[f"weight_{k}"] = draw(width, dtype=dtype, seed=20 + k)
        inputs[f"bias_{k}"] = draw(width, dtype=dtype, seed=30 + k)
        if k in scaled:
            inputs[f"scale_{k}"] = draw(rows, dtype=dtype, seed=40 + k).relu()
    return inputs


def run(x, **tensors):
    def of(kind):
        found = (tensors.get(f"{kind}_{k}") for k in range(2))
        return [tensor for k, tensor in enumerate(found) if f"branch_{k}" in tensors]

    scales = [None if scale is None else scale.detach() for scale in of("scale")]
    return residual_norm(x, of("branch"), of("weight"), of("bias"), scales=scales)


def check(inputs, **options):
    check_op(
        *(run, run, inputs),
        order=1,
        tolerance=TOLERANCES.get(inputs["x"].dtype),
        ran=("residual_norm", "triton"),
        **options,
    )


@pytest.mark.parametrize("branches", [1, 2])
@pytest.mark.parametrize("width", [5, 20, 256])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_any_width_is_right(branches, width, dtype):
    check(make(5, width, branches, dtype=dtype))


@pytest.mark.parametrize("rows", [0, 1, 70])
@pytest.mark.parametrize("scaled", [(), (0,), (1,), (0, 1)])
def test_rows_may_be_dropped(rows, scaled):
    check(make(rows, 64, 2, scaled))


def test_float64_and_strided_inputs_are_right():
    check(make(9, 24, 2, (0, 1), torch.float64))
    check(make(9, 24, 2, (0, 1)), strided=True)


def test_an_in_place_change_of_one_gradient_reaches_no_other():
    """Gradients are clipped and scaled in place, and both biases have the same one."""
    leaves = {name: leaf.requires_grad_() for name, leaf in make(4, 16, 2).items()}
    with use("triton"):
        run(**leaves).square().sum().backward()
    assert_close(leaves["bias_0"].grad, leaves["bias_1"].grad, 0.0)
    for name, leaf in leaves.items():
        others = {other: leaves[other].grad.clone() for other in leaves if other != name}
        leaf.grad.mul_(0.5)
        for other, before in others.items():
            assert torch.equal(leaves[other].grad, before), (name, other)


def test_a_dropped_branch_leaves_the_norm_of_the_input():
    inputs = make(4, 16, scaled=(0,))
    inputs["scale_0"].zero_()
    with use("reference"):
        found = run(**inputs)
    norm = torch.nn.functional.layer_norm
    assert_close(found, norm(inputs["x"], (16,), inputs["weight_0"], inputs["bias_0"], 1e-3), 1e-6)


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.molecule.residual_norm.triton import merge

    inputs = make(4, 8, 2, (0,))
    names = ("x", "branch_0", "branch_1", "scale_0", None, "weight_0", "weight_1", "bias_0")
    leaves = [None if name is None else inputs[name] for name in (*names, "bias_1")]
    for name, leaf in zip(names, leaves, strict=False):
        if name is not None and "scale" not in name:
            leaf.requires_grad_()
    torch.library.opcheck(merge.op, (*leaves, 1e-3))


def test_mismatched_arguments_are_reported():
    x, one = torch.zeros(3, 8, device=DEVICE), torch.ones(8, device=DEVICE)
    with pytest.raises(ValueError, match="2 biases"):
        residual_norm(x, [x], [one], [one, one])
    with pytest.raises((ValueError, TypeError), match="branch"):
        residual_norm(x, [x.double()], [one], [one])
