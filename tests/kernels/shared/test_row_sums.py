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


def test_the_custom_operator_passes_opcheck():
    from bevatron.kernels.shared.triton_row_sums import sum_rows

    torch.library.opcheck(sum_rows.op, (torch.randn(30, 5, device=DEVICE),))
