"""Layers on chunks of rows: where they are cut, and gradients whatever the chunks."""

from itertools import pairwise

import pytest
import torch

from bevatron.kernels.shared import chunked_linear as products
from bevatron.kernels.shared.chunked_linear import BiasGradient, Linear, chunks, wide_product
from bevatron.kernels.shared.standing_weights import standing_weights
from bevatron.testing import assert_close


@pytest.mark.parametrize("rows", [0, 1, 100, 101, 1234])
@pytest.mark.parametrize("bytes_per_row", [0, 10, 300])
def test_chunks_cover_all_rows_evenly_and_fit_in_a_buffer(rows, bytes_per_row, monkeypatch):
    monkeypatch.setattr(products, "CHUNK_BYTES", 1000)
    found = [(each.start, each.stop) for each in chunks(rows, bytes_per_row, multiple=10)]
    edges = [0, *(stop for _, stop in found)]
    assert found == list(pairwise(edges))
    assert edges[-1] == rows
    for start, stop in found:
        assert start % 10 == 0
        assert stop - start <= max(10, 1000 // max(1, bytes_per_row))
        assert stop - start < rows / len(found) + 10


F16, F32, F64 = torch.float16, torch.float32, torch.float64


@pytest.mark.parametrize("dtypes", [(F32, F32), (F64, F32), (F16, F16)])
@pytest.mark.parametrize("biased", [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize(("cuts", "many_rows"), [((0, 9), 9), ((0, 9), 10), ((0, 4, 9), 10)])
def test_gradients_are_right_and_share_no_memory(dtypes, biased, cuts, many_rows, monkeypatch):
    monkeypatch.setattr(products, "MANY_ROWS", many_rows)
    weights = [torch.randn(n, 3, dtype=dtype) for n, dtype in zip((2, 4), dtypes, strict=True)]
    biases = [w[:, 0].clone() if has else None for w, has in zip(weights, biased, strict=True)]
    x, dy = torch.randn(9, 3, dtype=dtypes[1]), torch.randn(9, 6, dtype=dtypes[1])
    tolerance = 1e-3 if x.dtype == F16 else 1e-6
    layer = Linear(x.dtype, weights, biases)
    for start, stop in pairwise(cuts):
        layer.keep(dy[start:stop], x[start:stop], only=len(cuts) == 2)
    dweights, dbiases = layer.gradients()
    assert layer.matrix.equal(torch.cat(weights).to(x.dtype))
    each = zip(dy.split([2, 4], 1), weights, biases, dweights, dbiases, strict=True)
    for part, weight, bias, dweight, dbias in each:
        assert dweight.dtype == weight.dtype
        assert_close(dweight, (part.t().double() @ x.double()).to(weight.dtype), tolerance)
        assert dbias.shape == (0,) if bias is None else dbias.dtype == bias.dtype
        if bias is not None:
            assert_close(dbias, part.double().sum(0).to(bias.dtype), tolerance)
    assert len({each.untyped_storage()._cdata for each in dweights}) == 2


def test_sums_of_sixteen_bits_are_not_rounded_to_them():
    a, b = torch.randn(5, 30, dtype=F16), torch.randn(30, 4, dtype=F16)
    wanted, bias = a.double() @ b.double(), BiasGradient(torch.zeros(4), b)
    assert_close(wide_product(a, b), wanted.float(), 1e-6)
    assert_close(wide_product(a, b, torch.ones(5, 4)), wanted.float() + 1, 1e-6)
    bias.add(b)
    assert_close(bias.result(), b.double().sum(0).float(), 1e-6)


def test_one_bias_beside_absent_ones_of_other_lengths_has_its_place():
    bias, (one, two) = torch.ones(2), torch.zeros(2, 3, 4)
    with standing_weights(), torch.no_grad():
        assert Linear(F32, [one[:1], two[:2]], [None, bias]).bias.tolist() == [0, 1, 1]
        assert Linear(F32, [one[:2], two[:2]], [None, bias]).bias.tolist() == [0, 0, 1, 1]


@pytest.mark.parametrize("count", [1, 2])
def test_joined_weights_are_contiguous_rows_whatever_their_strides(count):
    weights = [torch.randn(3, 4).t() for _ in range(count)]
    layer = Linear(F32, weights)
    assert layer.matrix.is_contiguous()
    assert layer.matrix.equal(torch.cat(weights))
