"""Sums of consecutive rows: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from molecule_inputs import EXACT, HALF, TOLERANCES, draw, pointers

from bevatron.kernels import segment_sum, use
from bevatron.kernels.molecule.segment_sum import segment_sum_with_input
from bevatron.testing import assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")


def sums(values, ptr, scale=None):
    return segment_sum(values, ptr, None if scale is None else scale.detach())


def check(inputs, **options):
    check_op(
        *(sums, sums, inputs),
        order=1,
        tolerance=TOLERANCES.get(inputs["values"].dtype),
        ran=("segment_sum", "triton"),
        **options,
    )


@pytest.mark.parametrize("counts", [[], [0], [5], [1, 0, 17, 33], [0, 3, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_segments_of_any_length_are_right(counts, dtype):
    check({"values": draw(sum(counts), 20, dtype=dtype), "ptr": pointers(*counts)})


def test_rows_may_have_factors():
    scaled = {"scale": draw(40, seed=4).relu()}
    check({"values": draw(40, 3), "ptr": pointers(5, 12) + 2} | scaled)


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_returned_values_are_added(scaled):
    scale = draw(40, seed=4).relu() if scaled else None

    def both(values, ptr):
        factor = None if scale is None else scale.to(values)
        found, values = segment_sum_with_input(values, ptr, factor)
        return torch.cat([found, values.square()])

    inputs = {"values": draw(40, 20), "ptr": pointers(5, 12, 0) + 2}
    check_op(both, both, inputs, order=1, tolerance=EXACT, ran=("segment_sum", "triton"))


def test_rows_of_no_segment_are_ignored():
    check({"values": draw(40, 3), "ptr": pointers(5, 12) + 2})


def test_wide_strided_and_sixteen_bit_rows_are_right():
    check({"values": draw(20, 300), "ptr": pointers(3, 17)}, strided=True)
    check({"values": draw(20, 64, dtype=HALF), "ptr": pointers(3, 17)})


def test_a_slice_of_a_wider_tensor_is_read_in_place():
    wide = draw(9, 12)
    with use(segment_sum="triton"):
        found = segment_sum(wide[:, 3:7], pointers(4, 5))
    assert_close(found[1], wide[4:, 3:7].sum(0), 1e-6)


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.molecule.segment_sum.triton import add_segments

    torch.library.opcheck(add_segments.op, (draw(5, 4), pointers(2, 3), draw(5)))


def test_wrong_shapes_are_refused():
    with pytest.raises((ValueError, TypeError), match="segment_sum"):
        segment_sum(torch.zeros(3), pointers(3))
