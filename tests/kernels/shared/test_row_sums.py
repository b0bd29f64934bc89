"""Sums of rows: whole matrices and parts of wider ones."""

import pytest
import torch

pytest.importorskip("triton", reason="the kernel needs the package triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("count", [0, 1, 9, 300])
@pytest.mark.parametrize("columns", [slice(0, 300), slice(16, 36), slice(0, 300, 3)])
def test_sums_are_those_of_the_rows_alone(count, columns):
    from bevatron.kernels.shared.triton_row_sums import sum_rows

    wider = torch.full((count + 2, 300), torch.nan, device=DEVICE)
    rows = wider[1:-1, columns]
    rows.copy_(torch.randn(rows.shape))
    found = sum_rows(rows)
    assert found.shape == rows.shape[1:]
    torch.testing.assert_close(found, rows.double().sum(0).float())


@pytest.mark.parametrize("programs", [1, 1024, 1025, 3000])
def test_many_partial_sums_are_added_in_groups(programs):
    from bevatron.kernels.shared.triton_partial_sums import sum_partials

    parts = torch.randn(programs, 2, 11, device=DEVICE)
    found = parts.new_full((2, 11), torch.nan)
    sum_partials(parts, found)
    torch.testing.assert_close(found, parts.double().sum(0).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("programs", [3, 513, 1025])
def test_a_layer_and_its_norm_are_finished_from_any_number_of_partial_sums(programs):
    from bevatron.kernels.shared.triton_partial_sums import (
        finish_normed_layer,
        sum_weight_and_bias_partials,
    )

    K, C = 2, 35
    parts = torch.randn(programs, K * C + K, device=DEVICE)
    weight, (scale, shift) = torch.randn(K, C, device=DEVICE), torch.randn(2, C, device=DEVICE)
    dweight, dbias = torch.empty_like(weight), weight.new_empty(K)
    shares, dnorm = weight.new_empty(K, 2, C), torch.empty_like(torch.stack([scale, shift]))
    finish_normed_layer(parts, weight, scale, shift, dweight, dbias, shares)
    x, s = parts.double().sum(0).split([K * C, K])
    x = x.view(K, C)
    wanted = [x * scale + s[:, None] * shift, s]
    found = [dweight, dbias]
    for many in (shares, torch.cat([parts[:, : 2 * C].view(-1, 2, C), shares])):
        sum_weight_and_bias_partials(many, scale, shift, *dnorm)
        found.append(dnorm.clone())
        wanted.append(many.double().sum(0))
    wanted[2] = torch.stack([(weight * x).sum(0), (weight * s[:, None]).sum(0)])
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-3)


def test_the_custom_operator_passes_opcheck():
    from bevatron.kernels.shared.triton_row_sums import sum_rows

    torch.library.opcheck(sum_rows.op, (torch.randn(30, 5, device=DEVICE),))
