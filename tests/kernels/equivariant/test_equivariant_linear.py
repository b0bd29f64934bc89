"""The equivariant linear map against its equation; Triton compiled on a GPU, else interpreted."""

import pytest
import torch

from bevatron import kernels
from bevatron.kernels import equivariant_linear
from bevatron.testing import check_op

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {
    "one scalar": ([1], [(1, 1)]),
    "several blocks": ([2, 3], [(6, 5), (9, 4)]),
    "three degrees": ([1, 2, 1], [(3, 70), (66, 2), (5, 3)]),
    "more than a tile": ([1, 1], [(65, 66), (33, 3)]),
}


@pytest.fixture(params=["reference", "triton"])
def implementation(request):
    if request.param == "triton":
        pytest.importorskip("triton")
    return request.param


def make(shapes, atoms=3, dtype=torch.float64):
    width = sum((2 * degree + 1) * k for degree, (k, _) in enumerate(shapes))
    inputs = {"x": torch.randn(atoms, width, dtype=dtype)}
    inputs |= {f"w{i}": torch.randn(shape, dtype=dtype) for i, shape in enumerate(shapes)}
    return {name: value.to(DEVICE) for name, value in inputs.items()}


def operator(blocks):
    return lambda x, **w: equivariant_linear(x, list(w.values()), blocks, 0.7)


def equation(blocks):
    """One component of one degree after the other."""

    def call(x, **weights):
        found, start = [], 0
        for degree, weight in enumerate(weights.values()):
            dim, k = 2 * degree + 1, len(weight)
            number = blocks[degree]
            part = x[:, start : start + dim * k].reshape(len(x), number, dim, k // number)
            y = torch.einsum("nbmk,bkj->nmj", part, weight.unflatten(0, (number, k // number)))
            found.append(0.7 / k**0.5 * y.flatten(1))
            start += dim * k
        return torch.cat(found, dim=1)

    return call


@pytest.mark.parametrize(("blocks", "shapes"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_result_and_derivatives_are_those_of_the_equation(blocks, shapes, dtype, implementation):
    check_op(
        operator(blocks),
        equation(blocks),
        make(shapes, dtype=dtype),
        ran=("equivariant_linear", implementation),
        strided=dtype == torch.float32,
    )


@pytest.mark.parametrize("atoms", [0, 1, 70])
def test_any_number_of_atoms(atoms, implementation):
    blocks, shapes = SHAPES["several blocks"]
    inputs = make(shapes, atoms)
    ran = ("equivariant_linear", implementation)
    check_op(operator(blocks), equation(blocks), inputs, ran=ran)


def test_derivatives_agree_with_finite_differences_for_every_pair_of_inputs(implementation):
    blocks, shapes = SHAPES["several blocks"]
    names, tensors = zip(*make(shapes, 2).items(), strict=True)
    call = operator(blocks)

    def by_place(*given):
        return call(**dict(zip(names, given, strict=True)))

    tensors = [tensor.requires_grad_() for tensor in tensors]
    with kernels.use(equivariant_linear=implementation):
        assert torch.autograd.gradcheck(by_place, tensors, fast_mode=True)
        assert torch.autograd.gradgradcheck(by_place, tensors, fast_mode=True)


@pytest.mark.parametrize(
    ("blocks", "shapes", "message"),
    [
        ([1], [(3, 2), (2, 2)], "do not go with weights"),
        ([2, 1], [(3, 2), (2, 2)], "cannot be in"),
    ],
)
def test_shapes_that_do_not_fit_are_named(blocks, shapes, message):
    with pytest.raises(ValueError, match=message):
        operator(blocks)(**make(shapes))
