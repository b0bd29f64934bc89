"""Irreps: notation, layout, refusals."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.errors import ConfigError
from bevatron.maths.irreps import Irrep, Irreps

blocks = st.builds(Irrep, st.integers(1, 200), st.integers(0, 6), st.sampled_from([1, -1]))


@given(st.lists(blocks, max_size=5).map(tuple))
def test_what_is_written_is_read_back(parts):
    irreps = Irreps(parts)
    assert Irreps.parse(str(irreps)) == irreps
    assert Irreps.parse(list(irreps)) == irreps
    assert irreps.dim == sum(part.stop - part.start for part in irreps.slices)


def test_spaces_and_missing_numbers_of_copies_are_read():
    assert Irreps.parse(" 2x0e +1o ") == Irreps((Irrep(2, 0, 1), Irrep(1, 1, -1)))
    assert len(Irreps.parse("")) == 0


@pytest.mark.parametrize("text", ["128", "0x", "2x1", "1ox2", "2*1o", "0e++1o", "-1x0e"])
def test_what_is_no_block_is_refused_by_name(text):
    with pytest.raises(ConfigError, match="is not of the form 128x1o"):
        Irreps.parse(text)


def test_neighbouring_blocks_of_one_kind_merge():
    assert str(Irreps.parse("4x0e+4x0e+4x1o+2x0e").simplify()) == "8x0e+4x1o+2x0e"


def test_irreps_of_the_harmonics_have_their_parity():
    assert str(Irreps.harmonics(2)) == "1x0e+1x1o+1x2e"
    assert Irreps.harmonics(2).l_max == 2
    assert str(Irreps.parse("8x0e+8x1o+8x2e+8x3o")[1:3]) == "8x1o+8x2e"
