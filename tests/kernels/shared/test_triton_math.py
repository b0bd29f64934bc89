"""Products of split float32 numbers in Triton, interpreted on a CPU or compiled on a GPU."""

import importlib

import pytest
import torch

pytest.importorskip("triton")

from bevatron import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=[False, True], ids=["split", "tf32"])
def tf32(request):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = request.param
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def by_layer(x, weight):
    """The product of the radial network's last layer."""
    matmul = importlib.import_module(
        "bevatron.kernels.equivariant.radial_tensor_product.triton_matmul"
    )
    out = x.new_zeros(len(x), weight.shape[1])
    matmul.Layer(weight).expand(x, out)
    return out


def by_outer_sum(x, weight):
    """The product of its gradient by weights."""
    matmul = importlib.import_module(
        "bevatron.kernels.equivariant.radial_tensor_product.triton_matmul"
    )
    out = x.new_zeros(len(x), weight.shape[1])
    total = matmul.OuterSum(out)
    total.add(x.mT.contiguous(), weight)
    total.finish()
    return out


def by_element(x, weight):
    """The product with the matrix of an atom's element, here of one."""
    elements = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    return kernels.indexed_linear(x.unsqueeze(2), weight.unsqueeze(0), elements).squeeze(2)


PRODUCTS = {
    "equivariant_linear": lambda x, w: kernels.equivariant_linear(x, [w]),
    "silu_linear": kernels.silu_linear,
    "layer": by_layer,
    "outer sum": by_outer_sum,
}


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FC00000], ids=["CUDA's", "negative", "plain"])
@pytest.mark.parametrize("product", PRODUCTS.values(), ids=PRODUCTS)
@pytest.mark.usefixtures("tf32")
def test_nan_stays_nan(product, bits):
    # Rounded as if they were numbers, those of CUDA's arithmetic would overflow to zeros.
    none = torch.tensor(bits, dtype=torch.int32).view(torch.float32).to(DEVICE)
    x, weight = torch.ones(3, 16, device=DEVICE), torch.ones(16, 5, device=DEVICE)
    spoilt_x, spoilt_weight = x.clone(), weight.clone()
    spoilt_x[1, 2], spoilt_weight[2, 4] = none, none
    with kernels.use("triton"):
        y, z = product(spoilt_x, weight), product(x, spoilt_weight)
    assert y.isnan().tolist() == [[row == 1] * 5 for row in range(3)]
    assert z.isnan().tolist() == [[column == 4 for column in range(5)]] * 3


@pytest.mark.parametrize("told", ["tf32", "ieee"])
@pytest.mark.parametrize("product", [*PRODUCTS.values(), by_element], ids=[*PRODUCTS, "by element"])
def test_the_precision_may_be_set_by_its_newer_name(product, told):
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = told
    try:
        with kernels.use("triton"):
            y = product(torch.ones(3, 16, device=DEVICE), torch.ones(16, 5, device=DEVICE))
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    assert y.shape == (3, 5)
    assert (y == y[0, 0]).all()
