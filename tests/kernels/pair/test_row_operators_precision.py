"""Operators on rows and alignments: 16 bits beside plain PyTorch, TF32, offsets behind 2^31."""

import math

import pytest
import torch

from bevatron import kernels
from bevatron.testing import assert_close

pytest.importorskip("triton", reason="the kernels need the package triton")

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
C, D, H = 32, 24, 64
NORM = [(C,), (C,)]
CONDITIONED = [(D,), (C, D), (C,), (C, D), (H, C), (H, C), (C, H), (C, D), (C,)]
SHAPES = {
    "layer_norm": [(40, C), *NORM],
    "layer_norm_linear": [(40, C), *NORM, (H, C)],
    "swiglu": [(40, C), (40, C)],
    "transition": [(40, C), *NORM, (H, C), (C, H), (H, C)],
    "conditioned_transition": [(40, C), (40, D), *CONDITIONED],
    # Wide enough for the products that end in the gated unit and in the norm.
    "conditioned_transition, wide": [
        *((40, 128), (40, 64), (64,), (128, 64), (128,), (128, 64)),
        *((128, 128), (128, 128), (128, 128), (128, 64), (128,)),
    ],
    "qkvg": [(40, C), *[(H, C)] * 4],
    "outer_product_mean": [(5, 8, C), (5, 8), *NORM, (16, C), (16, C), (C, 256)],
    "global_attention": [
        *((20, 3, C), (20, 3), *NORM, (C, C), (16, C), (16, C), (C, C), (C,), (C, C), (C,)),
    ],
}
MASKED = ("outer_product_mean", "global_attention")
MULTIPLIES = [name for name in SHAPES if name not in {"layer_norm", "swiglu"}]
"""Those with matrix products."""


def draw(name, dtype):
    generator = torch.Generator().manual_seed(11)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES[name]]
    # Weights, which come behind the rows, keep all channels of order one.
    drawn = [t / t.shape[-1] ** 0.5 if i > 1 and t.ndim > 1 else t for i, t in enumerate(drawn)]
    if name in MASKED:
        drawn[1] = (drawn[1] > -0.5).float()
    return [t.to(DEVICE, dtype) for t in drawn]


@pytest.fixture(autouse=True)
def _few_sms(monkeypatch):
    """Let a few rows be enough for the products with something at their end."""
    from bevatron.kernels.pair.swiglu import triton_products

    monkeypatch.setattr(triton_products, "num_sms", lambda _device: 1)


def run(name, choice, tensors, along=None):
    """Result and all gradients, the parts of the result side by side."""
    name = name.split(",")[0]
    leaves = [
        t.detach().requires_grad_(i != 1 or name not in MASKED) for i, t in enumerate(tensors)
    ]
    with kernels.use(**{name: choice}):
        y = getattr(kernels, name)(*leaves)
        y = torch.cat(y, dim=-1) if isinstance(y, tuple) else y
        if along is None:
            generator = torch.Generator().manual_seed(12)
            along = torch.randn(y.shape, generator=generator).to(y)
        found = torch.autograd.grad(y, [t for t in leaves if t.requires_grad], along)
    return [y, *found]


@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("dtype", [torch.float16] + ([torch.bfloat16] if GPU else []))
def test_sixteen_bits_err_no_more_than_plain_pytorch(name, dtype):
    inputs = draw(name, dtype)
    exact = run(name, "reference", [t.double() for t in inputs])
    plain, ours = run(name, "reference", inputs), run(name, "triton", inputs)
    for i, (want, theirs, got) in enumerate(zip(exact, plain, ours, strict=True)):
        assert got.dtype == dtype
        error, limit = ((t.double() - want).square().mean().sqrt() for t in (got, theirs))
        # An error of few numbers is chance: by the number of them, how much more may be one.
        assert error <= (1.1 + 4.0 / math.sqrt(want.numel())) * limit, (i, error, limit)


@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("name", list(SHAPES))
@pytest.mark.parametrize("allowed", [False, True])
def test_single_precision_is_rounded_to_tf32_only_where_torch_allows_it(name, allowed):
    inputs = draw(name, torch.float32)
    exact = run(name, "reference", [t.double() for t in inputs])
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32" if allowed else "ieee"
    try:
        found = run(name, "triton", inputs)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    errors = [
        (a.double() - b).abs().max() / b.abs().max() for a, b in zip(found, exact, strict=True)
    ]
    worst = float(torch.stack(errors).max())
    if allowed and name in MULTIPLIES:
        assert 3e-5 < worst < 5e-3
    else:
        assert worst < 2e-5


STEP = 2**30 + 64
"""Two of it are more numbers than 32 bits count."""


def far_apart(tensor):
    """Lay out the first axis of a tensor so that its third entry begins behind 2^31 numbers.

    The system gives memory only to what is written.
    """
    entries, rest = tensor.shape[0], tensor[0]
    assert entries == 3
    assert rest.numel() <= STEP
    room = torch.empty(2 * STEP + rest.numel(), dtype=tensor.dtype, device=tensor.device)
    view = room.as_strided(tensor.shape, (STEP, *rest.contiguous().stride()))
    return view.copy_(tensor)


@pytest.mark.own_process(when=GPU)  # a wrong address would spoil all later tests
@pytest.mark.parametrize("name", list(SHAPES))
def test_rows_may_be_more_than_2_to_the_31_elements_apart(name):
    if GPU and torch.cuda.mem_get_info()[0] < 20 * 2**30:
        pytest.skip("needs a CUDA device with 20 GB of free memory")
    inputs = draw(name, torch.float16)
    of_rows = 2 if name.startswith(("swiglu", "conditioned_transition")) else 1
    near = [
        t[:3] if i < of_rows or (i == 1 and name in MASKED) else t for i, t in enumerate(inputs)
    ]
    far = [far_apart(t) if i < of_rows else t for i, t in enumerate(near)]
    want = run(name, "triton", near)
    along = torch.randn(want[0].shape, device=DEVICE).to(want[0])
    want = run(name, "triton", near, along)
    found = run(name, "triton", far, far_apart(along) if along.shape[0] == 3 else along)
    assert all(map(torch.equal, found, want))


WITH_EPSILON = [name for name in SHAPES if name != "swiglu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", [*WITH_EPSILON, "layer_norm_linear, narrow"])
def test_the_epsilon_of_the_call_is_used(name, dtype):
    operator, _, size = name.partition(", ")
    drawn = draw(operator if size == "narrow" else name, torch.float32)
    if size == "narrow":
        drawn[-1] = drawn[-1][:4]
    options = {"eps": 0.5} | ({"norm": (None, None)} if operator == "qkvg" else {})
    if name in MASKED:
        options["mask_eps"] = 0.5
    results = []
    for choice, kind in (("triton", dtype), ("reference", torch.float64)):
        x, *others = [each.detach().to(DEVICE, dtype).to(kind) for each in drawn]
        x = (x / 8).requires_grad_()
        with kernels.use(choice):
            y = getattr(kernels, operator)(x, *others, **options)
        y = torch.cat(y, -1) if isinstance(y, tuple) else y
        results.append(
            (y, *torch.autograd.grad(y, x, torch.linspace(-1, 1, y.numel()).to(y).view(y.shape)))
        )
    for got, want in zip(*results, strict=True):
        assert_close(got, want, 2e-2 if dtype == torch.float16 else 2e-5)
