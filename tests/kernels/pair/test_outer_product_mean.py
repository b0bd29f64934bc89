"""The outer product mean: the reference everywhere, the kernels interpreted or compiled."""

from functools import partial

import pytest
import torch
from pair_operators import DEVICE, HALF, check_kernels
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks

from bevatron.kernels import outer_product_mean, use
from bevatron.kernels.pair.outer_product_mean import layer_of_products
from bevatron.kernels.shared import chunked_linear as products
from bevatron.testing import Tolerance, assert_close, check_op
from half_precision import check_no_worse

pytest.importorskip("triton", reason="the kernels need the package triton")

TOLERANCES = {torch.float32: Tolerance(4e-6, 2e-5), HALF: Tolerance(2e-2, 4e-2)}
BIASES = ("a_bias", "b_bias", "out_bias")


def make(rows, length, width, hidden, out, biases=BIASES, batch=(), dtype=torch.float32):
    generator = torch.Generator().manual_seed(7)
    shapes = {
        "m": (*batch, rows, length, width),
        "norm_weight": (width,),
        "norm_bias": (width,),
        "a_weight": (hidden, width),
        "b_weight": (hidden, width),
        "out_weight": (out, hidden**2),
    } | {name: (out if name == "out_bias" else hidden,) for name in biases}
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name in ("a_weight", "b_weight", "out_weight"):
        drawn[name] /= drawn[name].shape[1] ** 0.5
    mask = torch.rand(shapes["m"][:-1], generator=generator) > 0.3
    mask[..., 0, :] = True
    inputs = {name: value.to(DEVICE, dtype) for name, value in drawn.items()}
    return inputs | {"mask": mask.to(DEVICE)}


def check(inputs, **options):
    check_kernels(outer_product_mean, inputs, TOLERANCES[inputs["m"].dtype], **options)


@pytest.fixture(autouse=True, params=["kept", "made again"])
def _small_chunks(monkeypatch, request):
    """Cut even a few lines of the pair, and rows into more blocks than programs."""
    from bevatron.kernels.pair.outer_product_mean import triton

    if request.param == "made again":
        monkeypatch.setattr(triton, "KEPT_BYTES", -1)
    monkeypatch.setattr(products, "CHUNK_BYTES", 0)
    monkeypatch.setattr(triton, "ELEMENTS", 64)
    monkeypatch.setattr(triton, "PER_SM", 2)
    monkeypatch.setattr(triton, "num_sms", lambda _: 1)


@pytest.mark.parametrize("biases", [(), BIASES, ("b_bias",)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_result_and_gradients_are_right(biases, dtype):
    check(make(7, 9, 12, 5, 6, biases, dtype=dtype))


@pytest.mark.parametrize(("rows", "length", "batch"), [(1, 1, ()), (3, 5, (2,)), (2, 0, ())])
def test_any_size_is_right(rows, length, batch):
    check(make(rows, length, 6, 3, 4, batch=batch), strided=True)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("layout", ["transposed", "one column for all residues"])
def test_a_mask_may_have_any_strides(layout, batch):
    inputs = make(7, 9, 6, 3, 4, batch=batch)
    mask = inputs["mask"].float()
    if layout == "transposed":
        inputs["mask"] = mask.mT.contiguous().mT
    else:
        inputs["mask"] = mask[..., 1:2].expand(mask.shape)
    assert not inputs["mask"].is_contiguous()
    kept = inputs.pop("mask")
    run = partial(outer_product_mean, mask=kept)
    ran = ("outer_product_mean", "triton")
    check_op(run, run, inputs, order=1, tolerance=TOLERANCES[torch.float32], ran=ran)


def test_a_second_backward_pass_gives_the_same_bits():
    inputs = make(4, 8, 6, 5, 3, biases=())
    mask = inputs.pop("mask")
    leaves = [value.requires_grad_() for value in inputs.values()]
    with use(outer_product_mean="triton"):
        y = outer_product_mean(**inputs, mask=mask)
    first, second = (
        torch.autograd.grad(y.square().sum(), leaves, retain_graph=True) for _ in range(2)
    )
    assert all(map(torch.equal, first, second))


def test_against_an_explicit_sum():
    t = {n: v.double() if n != "mask" else v for n, v in make(4, 3, 5, 2, 3).items()}
    with use("reference"):
        actual = outer_product_mean(**t)
    n = torch.nn.functional.layer_norm(t["m"], (5,), t["norm_weight"], t["norm_bias"])
    a, b = (n @ t[f"{k}_weight"].T + t[f"{k}_bias"] for k in "ab")
    for i in range(3):
        for j in range(3):
            both = t["mask"][:, i] & t["mask"][:, j]
            outer = sum(torch.outer(a[s, i], b[s, j]) for s in range(4) if both[s])
            y = t["out_weight"] @ outer.flatten() + t["out_bias"]
            assert_close(actual[i, j], y / (1e-3 + both.sum().item()), 1e-12)


def test_a_pair_without_a_common_row_gets_the_bias_over_epsilon():
    inputs = make(2, 3, 6, 3, 4)
    inputs["mask"][:] = torch.tensor([[True, False, True], [False, True, True]])
    for choice in ("reference", "triton"):
        with use(outer_product_mean=choice):
            y = outer_product_mean(**inputs)
        assert_close(y[0, 1], inputs["out_bias"] * 1e3, 1e-6)


def test_sixteen_bits_are_no_worse_than_the_reference():
    inputs = make(24, 20, 32, 8, 16, dtype=HALF)
    mask = inputs.pop("mask")
    check_no_worse("outer_product_mean", partial(outer_product_mean, mask=mask), inputs)


@pytest.mark.parametrize("most", [0, 2**20])
def test_few_outer_products_are_saved(most, monkeypatch):
    from bevatron.kernels.pair.outer_product_mean import triton

    monkeypatch.setattr(triton, "KEPT_BYTES", most)
    inputs = make(4, 8, 6, 5, 3, biases=())
    mask = inputs.pop("mask").float()
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    kept = []
    hooks = saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, use(outer_product_mean="triton"):
        outer_product_mean(**inputs, mask=mask)
    given = {value.data_ptr() for value in (*inputs.values(), mask)}
    weights = 2 * 5 * 6  # of a and b, packed
    products = (8 * 5) ** 2 if most else 0
    assert (
        sum(t.numel() for t in kept if t.data_ptr() not in given) == 2 * 4 * 8 + weights + products
    )


@pytest.mark.parametrize("_small_chunks", ["kept"], indirect=True)
@pytest.mark.parametrize("trained", ["m", "b_bias", None])
def test_outer_products_are_saved_if_any_input_requires_a_gradient(trained, monkeypatch):
    from bevatron.kernels.pair.outer_product_mean import triton

    keeps, run = [], triton.mean_of_products
    monkeypatch.setattr(
        triton, "mean_of_products", lambda *given: keeps.append(given[-1]) or run(*given)
    )
    inputs = make(4, 8, 6, 5, 3)
    mask = inputs.pop("mask").float()
    for name, value in inputs.items():
        value.requires_grad_(name == trained)
    with use(outer_product_mean="triton"):
        outer_product_mean(**inputs, mask=mask)
    assert keeps == [trained is not None]


@pytest.mark.parametrize("_small_chunks", ["kept"], indirect=True)
@pytest.mark.parametrize(
    ("length", "batch", "dtype", "kept"),
    [
        (768, (), torch.bfloat16, True),
        (1024, (), torch.bfloat16, False),
        (768, (2,), torch.bfloat16, False),
        (768, (), torch.float32, False),
    ],
)
def test_outer_products_of_768_residues_are_saved_and_no_larger_ones(length, batch, dtype, kept):
    weights = ((256,), (256,), (32, 256), (32, 256), (128, 32**2))
    found = []
    with FakeTensorMode():
        m, *others = (
            torch.empty(shape, dtype=dtype, device=DEVICE, requires_grad=True)
            for shape in ((*batch, 128, length, 256), *weights)
        )
        hooks = saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t)
        with hooks, use(outer_product_mean="triton"):
            outer_product_mean(m, torch.ones(m.shape[:-1], device=DEVICE), *others)
    products = [t for t in found if t.shape[1:] == (length, 32, length * 32)]
    assert [len(t) for t in products] == [1 if kept else 0]


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.pair.outer_product_mean.triton import mean_of_products

    t = {k: v.requires_grad_() for k, v in make(3, 4, 6, 2, 3).items() if k != "mask"}
    joint = torch.cat([t["a_weight"], t["b_weight"]]).detach().requires_grad_()
    joint_bias = torch.cat([t["a_bias"], t["b_bias"]]).detach().requires_grad_()
    arguments = (t["m"], torch.ones(3, 4, device=DEVICE), t["norm_weight"], t["norm_bias"])
    outs = (joint, joint_bias, t["out_weight"], t["out_bias"], 1e-5, 1e-3)
    for keeps in (False, True):
        torch.library.opcheck(mean_of_products.op, (*arguments, *outs, keeps))


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("bias", [True, False])
def test_the_last_layer_of_some_residues_with_all_is_right(batch, dtype, bias):
    """As a process computes it that has 5 of 9 residues; projections lie as they come to it."""
    generator = torch.Generator().manual_seed(7)
    drawn = {
        "a": torch.randn(*batch, 5, 7, 3, generator=generator),
        "b": torch.randn(*batch, 7, 9, 3, generator=generator),
        "out_weight": torch.randn(6, 9, generator=generator) / 3,
    } | ({"out_bias": torch.randn(6, generator=generator)} if bias else {})
    inputs = {name: value.to(DEVICE, dtype) for name, value in drawn.items()}
    count = 1.0 + torch.rand(*batch, 9, 5, generator=generator).to(DEVICE).mT

    def run(a, **others):
        return layer_of_products(a.transpose(-2, -3), count=count.to(a.dtype), **others)

    check_op(
        *(run, run, inputs), order=1, tolerance=TOLERANCES[dtype],
        ran=("layer_of_products", "triton"),
    )  # fmt: skip
