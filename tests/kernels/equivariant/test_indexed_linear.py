"""The indexed linear map against its equation; Triton compiled on a GPU, else interpreted."""

import inspect

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron import kernels
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.kernels.equivariant.indexed_linear import indexed_linear
from bevatron.testing import check_op
from replayed import check_replay

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ELEMENTS = torch.tensor([2, 0, 2, 3, 0, 2, 2])


@pytest.fixture(params=["reference", "triton"])
def implementation(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def make(channels_in, channels_out, components, elements=ELEMENTS, dtype=torch.float64):
    inputs = {
        "x": torch.randn(len(elements), channels_in, components, dtype=dtype),
        "weights": torch.randn(5, channels_in, channels_out, dtype=dtype),
        "elements": elements.clone(),
    }
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def scaled(x, weights, elements):
    return indexed_linear(x, weights, elements, 0.3)


def equation(x, weights, elements):
    return 0.3 * torch.einsum("nkj,nkm->njm", weights[elements], x)


@pytest.mark.parametrize(
    ("channels_in", "channels_out", "components", "dtype"),
    [
        (3, 5, 1, torch.float64),
        (33, 17, 3, torch.float32),
        (64, 70, 5, torch.float64),
        (1, 1, 7, torch.float32),
    ],
)
def test_result_and_derivatives_are_those_of_the_equation(
    channels_in, channels_out, components, dtype, implementation
):
    check_op(
        scaled,
        equation,
        make(channels_in, channels_out, components, dtype=dtype),
        ran=("indexed_linear", implementation),
        strided=dtype == torch.float32,
    )


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(0, 4), max_size=9), st.sampled_from(["reference", "triton"]))
def test_any_number_of_atoms_of_any_elements(elements, implementation):
    if implementation == "triton":
        pytest.importorskip("triton")
    inputs = make(3, 2, 3, torch.tensor(elements, dtype=torch.int64))
    check_op(scaled, equation, inputs, ran=("indexed_linear", implementation))


def test_more_rows_of_an_element_than_are_summed_at_once(implementation):
    elements = torch.tensor([3] * 200 + [1] * 3 + [3] * 100)
    inputs = make(3, 2, 3, elements)
    check_op(scaled, equation, inputs, ran=("indexed_linear", implementation))


def test_channels_last_features_stay_channels_last():
    pytest.importorskip("triton")
    inputs = make(4, 4, 3)
    x = inputs["x"].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    with kernels.use(indexed_linear="triton"):
        result = scaled(**{**inputs, "x": x})
        (gradient,) = torch.autograd.grad(result.square().sum(), x)
    assert result.transpose(1, 2).is_contiguous()
    assert gradient.stride() == x.stride()
    torch.testing.assert_close(result, equation(**{**inputs, "x": x}))


@pytest.mark.parametrize("copies", [1, 40])
def test_atoms_of_unknown_elements_get_nan_in_triton_and_an_error_in_the_reference(copies):
    pytest.importorskip("triton")
    inputs = make(3, 2, 3, torch.tensor([2, 5, 2, 3, -1, 2, 2]).repeat(copies))
    with kernels.use(indexed_linear="triton"):
        result = scaled(**inputs).cpu()
    unknown = torch.tensor([i % 7 in (1, 4) for i in range(7 * copies)])
    assert result[unknown].isnan().all()
    known = {**inputs, "x": inputs["x"].cpu(), "weights": inputs["weights"].cpu()}
    known["elements"] = inputs["elements"].cpu().clamp(0, 4)
    torch.testing.assert_close(result[~unknown], equation(**known)[~unknown])
    with kernels.use("reference"), pytest.raises(RuntimeError, match="split"):
        scaled(**inputs)


def test_groups_are_cut_into_tiles_once_for_all_operators():
    tiles = pytest.importorskip("bevatron.kernels.equivariant.triton_element_tiles")
    ptr = ElementOrder(ELEMENTS.to(DEVICE), 5).ptr
    table = tiles.tile_table(ptr, 7, 2)
    assert tiles.tile_table(ptr, 7, 2) is table
    assert tiles.tile_table(ptr, 21, 2, 3) is not table
    other = tiles.tile_table(ptr.clone(), 7, 2)
    assert other is not table
    assert torch.equal(other, table)


def test_derivatives_agree_with_finite_differences_for_every_pair_of_inputs(implementation):
    inputs = make(2, 3, 2, torch.tensor([1, 0, 1]))
    order = ElementOrder(inputs["elements"], 5)
    tensors = [inputs[name].requires_grad_() for name in ("x", "weights")]

    def call(x, weights):
        return scaled(x, weights, order)

    with kernels.use(indexed_linear=implementation):
        assert torch.autograd.gradcheck(call, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(call, tensors, fast_mode=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(7, 4, 1)}, r"\(7, 4, 1\) do not go with weights \(5, 3, 2\)"),
        ({"elements": torch.zeros(6).long()}, r"\(6,\) elements for 7 atoms"),
        (
            {"elements": ElementOrder(ELEMENTS.to(DEVICE), 4)},
            "the order is of 4 elements, the weights of 5",
        ),
    ],
)
def test_a_wrong_shape_is_named(change, message):
    inputs = {**make(3, 2, 1, dtype=torch.float32), **change}
    # What a user meets, who does not check annotations.
    with pytest.raises(ValueError, match=message):
        inspect.unwrap(indexed_linear)(**inputs)


def test_operators_pass_opcheck():
    pytest.importorskip("triton")
    from bevatron.kernels.equivariant.indexed_linear import triton as ours

    inputs = make(3, 2, 3)
    order = ElementOrder(inputs["elements"], 5)
    x, weights = inputs["x"].requires_grad_(), inputs["weights"].requires_grad_()
    rest = (order.order, order.ptr, 0.3)
    g = torch.randn_like(ours.mix(x, weights, *rest)).requires_grad_()
    torch.library.opcheck(ours.mix.op, (x, weights, *rest))
    torch.library.opcheck(ours.outer.op, (x, g, *rest))


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_captured_step_follows_new_elements():
    """Atoms are sorted by element inside the graph: nothing of the first batch remains."""
    first, second = (make(40, 72, 3, torch.randint(0, 5, (300,)), torch.float32) for _ in range(2))
    static = {name: value.clone() for name, value in first.items()}

    def step():
        wanted = [static[name].detach().requires_grad_() for name in ("x", "weights")]
        out = scaled(*wanted, ElementOrder(static["elements"], 5))
        grads = torch.autograd.grad(out.square().sum(), wanted, create_graph=True)
        return [out, *grads, *torch.autograd.grad(sum(g.square().sum() for g in grads), wanted)]

    with kernels.use(indexed_linear="triton"):
        check_replay(step, lambda: [static[name].copy_(value) for name, value in second.items()])
