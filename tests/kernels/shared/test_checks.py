"""Operators refuse features and weights of several types, which a kernel would round."""

import pytest
import torch

from bevatron.kernels import (
    channelwise_tensor_product,
    equivariant_linear,
    indexed_linear,
    radial_network,
    radial_tensor_product,
    silu_linear,
    symmetric_contraction,
)
from bevatron.kernels.shared.checks import check_float64, check_index

ONES = torch.ones
EDGES, ELEMENTS = torch.tensor([[0], [1]]), torch.tensor([0, 0])
IRREPS = ("2x0e", "0e", "0e")


def one(*shape):
    return torch.ones(*shape, dtype=torch.float64)


@pytest.mark.parametrize(
    ("operator", "arguments", "names"),
    [
        (silu_linear, (ONES(2, 3), one(3, 1)), "x weight"),
        (
            radial_network,
            (ONES(2), ONES(1), ONES(()), ONES(()), 5, [ONES(1, 2), one(2, 2)]),
            "lengths weights",
        ),
        (equivariant_linear, (ONES(2, 4), [ONES(1, 1), one(1, 1)]), "x weights"),
        (indexed_linear, (ONES(2, 3, 1), one(1, 3, 3), ELEMENTS), "x weights"),
        (
            symmetric_contraction,
            (ONES(2, 3, 1), {0: [ONES(1, 1, 3), one(1, 1, 3)]}, ELEMENTS, "3x0e", 2),
            "a weights",
        ),
        (
            channelwise_tensor_product,
            (ONES(2, 2), ONES(1, 1), one(1, 2), EDGES, *IRREPS),
            "x weights",
        ),
        (
            channelwise_tensor_product,
            (ONES(2, 2), one(1, 1), ONES(1, 2), EDGES, *IRREPS),
            "x harmonics",
        ),
        (
            radial_tensor_product,
            (ONES(2, 2), ONES(1, 1), ONES(1, 3), one(3, 2), EDGES, *IRREPS),
            "x last_weight",
        ),
        (
            radial_tensor_product,
            (ONES(2, 2), ONES(1, 1), one(1, 3), one(3, 2), EDGES, *IRREPS),
            "x hidden",
        ),
    ],
)
def test_features_and_weights_of_several_types_are_refused(operator, arguments, names):
    first, other = names.split()
    sentence = f"{operator.__name__}: {first} is float32, but {other} is float64; make them"
    with pytest.raises(ValueError, match=sentence):
        operator(*arguments)


def test_autocast_may_mix_types():
    with torch.autocast("cpu", torch.bfloat16):
        assert silu_linear(ONES(2, 3).bfloat16(), ONES(3, 1)).dtype == torch.bfloat16


def test_float64_is_blamed_and_not_a_16_bit_type_that_may_be_there():
    tensors = {"x": ONES(1), "query": ONES(1).bfloat16(), "weight": None}
    check_float64("product", **tensors)
    with pytest.raises(ValueError, match="x is float32, but value is float64; make them one"):
        check_float64("product", **tensors, value=one(1))


def test_the_types_of_an_index_are_named():
    for taken in (torch.int64, torch.int32):
        check_index("sums", "index", torch.zeros(3, dtype=taken), (3,))
    with pytest.raises(ValueError, match="index is int16, expected int64 or int32"):
        check_index("sums", "index", torch.zeros(3, dtype=torch.int16), (3,))
