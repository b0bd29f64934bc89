"""Layer normalisation: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
import torch.nn.functional as F
from pair_operators import DEVICE, DTYPES, GPU

from bevatron.errors import KernelError
from bevatron.kernels import add_norm, launches, layer_norm, use
from bevatron.kernels.shared.rows import as_rows
from bevatron.testing import Tolerance, assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")

WIDTHS = (1, 8, 9, 23, 64, 100, 128, 256, 384, 768, 1000, 2048)
EXACT = Tolerance(2e-6, 2e-5)
TOLERANCES = {torch.float32: EXACT}


def make(shape, dtype, *names, seed=7):
    """Random inputs; ``scale`` and ``shift`` are for every row."""
    generator = torch.Generator().manual_seed(seed)
    shapes = dict.fromkeys(("x", "update", "gate", "scale", "shift"), shape)
    drawn = {
        name: torch.randn(shapes.get(name, shape[-1:]), generator=generator)
        for name in ("x", *names)
    }
    return {name: value.to(DEVICE, dtype) for name, value in drawn.items()}


def check(inputs, **options):
    """Compare with the reference: result and every first gradient."""
    fixed = {name: options.pop(name) for name in ("eps", "sigmoid") if name in options}

    def norm(**tensors):
        return layer_norm(**tensors, **fixed)

    tolerance = TOLERANCES.get(inputs["x"].dtype)
    check_op(
        norm, norm, inputs, order=1, tolerance=tolerance, ran=("layer_norm", "triton"), **options
    )


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_width_is_right(width, dtype):
    check(make((5, width), dtype, "weight", "bias"))


@pytest.mark.parametrize("names", [(), ("weight",), ("bias",), ("scale",), ("shift",)])
def test_every_part_may_be_left_out(names):
    check(make((3, 4, 24), torch.float32, *names))


@pytest.mark.parametrize("sigmoid", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_have_their_own_scales_and_shifts(sigmoid, dtype):
    check(make((6, 20), dtype, "weight", "bias", "scale", "shift"), sigmoid=sigmoid)


def test_a_scale_shared_by_copies_is_not_copied_and_its_gradient_is_summed():
    inputs = make((2, 3, 16), torch.float32)
    inputs |= {"scale": torch.randn(3, 16).to(DEVICE), "shift": torch.randn(16).to(DEVICE)}
    check(inputs, sigmoid=True)


SUM = ("update", "gate", "scale", "shift")


def check_sum(inputs, **options):
    """Compare a sum and its norm with the reference: results and every first gradient."""

    def both(**tensors):
        return torch.stack(add_norm(**tensors))

    options |= {"tolerance": TOLERANCES.get(inputs["x"].dtype), "ran": ("add_norm", "triton")}
    check_op(both, both, inputs, order=1, **options)


@pytest.mark.parametrize("width", [1, 9, 100, 128, 768])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sum_is_normalised(width, dtype):
    check_sum(make((5, width), dtype, *SUM))


@pytest.mark.parametrize("shape", [(0, 16), (33, 128), (2, 3, 5, 24)])
def test_a_sum_may_have_any_rows(shape):
    check_sum(make(shape, torch.float32, *SUM), strided=True)


def test_copies_share_the_gate_scale_and_shift_of_a_sum():
    inputs = make((2, 3, 16), torch.float32, *SUM)
    given = make((3, 40), torch.float32)["x"]  # as of one matmul for many layers
    check_sum(inputs | {"gate": given[:, 2:18], "scale": given[:, 20:36], "shift": given[0, :16]})


def test_more_axes_of_a_sum_than_the_kernel_steps_through_are_copied():
    x, *others = torch.randn(5, 2, 3, 2, 3, 2, 8).to(DEVICE).permute(0, 5, 2, 3, 4, 1, 6)[:, :, ::2]
    with use(add_norm="triton"):
        found = add_norm(x, *others)
    with use("reference"):
        for got, want in zip(found, add_norm(*(t.double() for t in (x, *others))), strict=True):
            assert_close(got, want, 2e-6)


@pytest.mark.parametrize("place", [0, 1])
def test_either_result_of_a_sum_may_go_unused(place):
    inputs = make((4, 24), torch.float32, *SUM)
    found = {}
    for choice in ("reference", "triton"):
        leaves = {name: value.clone().requires_grad_() for name, value in inputs.items()}
        with use(choice):
            loss = add_norm(**leaves)[place].square().sum()
        found[choice] = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    for got, want in zip(found["triton"], found["reference"], strict=True):
        assert_close(got, torch.zeros_like(got) if want is None else want, 2e-5)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_sum_is_normalised_as_it_is_rounded(dtype):
    inputs = make((40, 128), dtype, *SUM)
    inputs["x"].fill_(2 / torch.finfo(dtype).eps)  # the sum is rounded to even numbers
    with use("triton"):
        total, y = add_norm(**inputs)
        again = layer_norm(total, scale=inputs["scale"], shift=inputs["shift"], sigmoid=True)
    assert len(total.unique()) < 20
    assert_close(y, again, Tolerance.of(dtype).forward)


@pytest.mark.parametrize("rows", [0, 1, 31, 33, 600])
def test_any_number_of_rows_is_right(rows):
    check(make((rows, 128), torch.float32, "weight", "bias"))


def test_channels_may_have_gaps_between_them():
    check(make((4, 5, 12), torch.float32, "weight", "scale"), strided=True)


def test_more_axes_than_the_kernel_steps_through_are_copied():
    x = torch.randn(2, 3, 2, 3, 2, 8).to(DEVICE)
    strange = x.permute(4, 1, 2, 3, 0, 5)[:, ::2]
    with use(layer_norm="triton"):
        actual = layer_norm(strange)
    assert_close(actual, F.layer_norm(strange.double(), (8,)), 2e-6)


@pytest.mark.parametrize(
    ("view", "axes"),
    [
        (lambda z: z.transpose(0, 1), 2),
        (lambda z: z[None].transpose(1, 2), 2),
        (lambda z: z[:, 1:4], 2),
        (lambda z: z[::2], 1),
        (lambda z: z[..., 8:], 1),
        (lambda z: z.expand(2, 6, 6, 32).transpose(1, 2), 3),
    ],
    ids=["transposed", "of a batch", "columns", "rows", "channels", "copies"],
)
def test_views_are_read_in_place(view, axes):
    z = torch.randn(6, 6, 32).to(DEVICE).requires_grad_()
    assert as_rows(view(z)).axes == (axes if axes != 1 or view(z).shape[-1] == 24 else 2)
    assert as_rows(view(z)).tensors[0].data_ptr() == view(z).data_ptr()
    exact = z.detach().double().requires_grad_()
    expected = F.layer_norm(view(exact), view(exact).shape[-1:])
    with use(layer_norm="triton"):
        actual = layer_norm(view(z))
        cotangent = torch.randn_like(actual.transpose(0, 1)).transpose(0, 1)
        (found,) = torch.autograd.grad(actual, z, cotangent)
    assert_close(actual, expected, 2e-6)
    assert_close(found, torch.autograd.grad(expected, exact, cotangent.double())[0], 2e-5)


@pytest.mark.parametrize("width", [24, 128, 384])
def test_a_mean_far_from_zero_does_not_cost_the_variance(width):
    inputs = make((4, width), torch.float32, "weight", "bias")
    inputs["x"] += 100.0
    # The input itself holds only so many digits after the point.
    exact = F.layer_norm(inputs["x"].double(), (width,))
    with use(layer_norm="triton"):
        assert_close(layer_norm(inputs["x"]), exact, 2e-5)


@pytest.mark.parametrize("width", [8, 100, 256, 768])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sixteen_bits_are_as_good_as_torch_for_every_width(width, dtype):
    """Published kernels that trained badly kept statistics or gradients in 16 bits."""
    if dtype == torch.bfloat16 and not GPU:
        pytest.skip("the interpreter's bfloat16 does not round as a device does")
    inputs = make((600 if GPU else 40, width), dtype, "weight", "bias")
    inputs["x"] += 3.0
    cotangent = torch.randn(inputs["x"].shape).to(DEVICE, dtype)
    wide = {name: value.double() for name, value in inputs.items()}

    def run(function, tensors):
        leaves = {name: value.detach().requires_grad_() for name, value in tensors.items()}
        y = function(**leaves)
        return [y, *torch.autograd.grad(y, list(leaves.values()), cotangent.to(y.dtype))]

    exact = run(lambda x, weight, bias: F.layer_norm(x, (width,), weight, bias), wide)
    eager = run(lambda x, weight, bias: F.layer_norm(x, (width,), weight, bias), inputs)
    with use(layer_norm="triton"):
        ours = run(layer_norm, inputs)
    for name, a, b, c in zip(("y", "dx", "dweight", "dbias"), ours, eager, exact, strict=True):
        error, theirs = ((t.double() - c).abs().mean() for t in (a, b))
        assert error <= 1.05 * theirs + 1e-12, f"{name}: mean error {error}, torch {theirs}"


def test_weights_may_be_of_a_wider_type_and_their_gradients_keep_it():
    inputs = make((40, 32), torch.float16)
    vectors = make((32,), torch.float32, "weight", "bias")
    leaves = [vectors[name].requires_grad_() for name in ("weight", "bias")]
    with use(layer_norm="triton"):
        y = layer_norm(inputs["x"], *leaves)
        dweight, dbias = torch.autograd.grad(y.float().square().sum(), leaves)
    exact = [leaf.detach().double().requires_grad_() for leaf in leaves]
    z = F.layer_norm(inputs["x"].double(), (32,), *exact)
    wanted = torch.autograd.grad(z.square().sum(), exact)
    assert y.dtype == torch.float16
    assert dweight.dtype == torch.float32
    assert_close(dweight, wanted[0], 2e-3)
    assert_close(dbias, wanted[1], 2e-3)


def test_the_reference_equals_pytorch_in_float64():
    x, weight, bias = torch.randn(7, 13), torch.randn(13), torch.randn(13)
    x, weight, bias = x.double(), weight.double(), bias.double()
    with use("reference"):
        actual = layer_norm(x, weight, bias, eps=1e-3)
    assert_close(actual, F.layer_norm(x, (13,), weight, bias, 1e-3), 1e-14)


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.layer_norm.triton import add_and_normalise, normalise

    tensors = make((4, 16), torch.float32, "weight", "bias", "scale", "shift")
    leaves = [value.requires_grad_() for value in tensors.values()]
    torch.library.opcheck(normalise.op, (*leaves, 1e-5, True))
    leaves = [value.requires_grad_() for value in make((4, 16), torch.float32, *SUM).values()]
    torch.library.opcheck(add_and_normalise.op, (*leaves, 1e-5))


def test_wrong_shapes_are_named():
    x = torch.zeros(3, 8)
    with pytest.raises(ValueError, match="shift has shape"):
        layer_norm(x, shift=torch.ones(2, 8))
    with pytest.raises(ValueError, match="add_norm: gate has shape"):
        add_norm(x, x, torch.ones(2, 8), x, x)
    with pytest.raises((ValueError, TypeError), match="update"):
        add_norm(x, x[:2], x, x, x)


def test_rows_too_wide_for_the_kernel_are_refused():
    with use(layer_norm="triton"), pytest.raises(KernelError, match="8192"):
        layer_norm(torch.zeros(1, 8200, device=DEVICE))
    with use(add_norm="triton"), pytest.raises(KernelError, match="8192"):
        add_norm(*[torch.zeros(1, 8200, device=DEVICE)] * 5)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_it_is_captured_in_a_graph_and_compiled():
    # Without the shape checks of the tests, which the compiler cannot follow.
    from bevatron.kernels.pair.layer_norm import triton

    def doubled(x, weight, bias):
        return triton.layer_norm(x, weight, bias, None, None, 1e-5, False) * 2

    tensors = make((300, 128), torch.bfloat16, "weight", "bias")
    with use(layer_norm="triton"):
        expected = layer_norm(**tensors)
        compiled = torch.compile(doubled)
        assert torch.equal(compiled(**tensors), expected * 2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layer_norm(**tensors)
        graph.replay()
    assert torch.equal(captured, expected)
    assert launches()["layer_norm", "triton"] > 0
