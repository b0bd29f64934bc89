"""While the tests run, wrong types and wrong shapes raise; see shape_checks."""

import typing

import numpy as np
import pytest
import torch

from bevatron.data.packing import pack
from bevatron.data.packing.plan import RankPlan
from bevatron.models.mace import MaceConfig
from bevatron.testing import AwkwardGraph, random_rotation


def test_a_wrong_type_is_found_where_no_shape_is_mentioned():
    with pytest.raises(Exception, match="num_ranks"):
        pack([1, 2], 3, "two")
    with pytest.raises(Exception, match="num_ranks"):
        RankPlan(np.zeros(1, int), np.zeros(2, int), "two", 0)
    with pytest.raises(Exception, match="num_channels"):
        MaceConfig(num_channels="many")


def test_a_wrong_shape_is_found():
    with pytest.raises(Exception, match="edges"):
        AwkwardGraph("three rows", 2, torch.zeros(3, 4, dtype=torch.int64))


def test_shapes_are_left_out_only_where_none_are_mentioned():
    import shape_checks

    assert shape_checks._mentions_shapes(random_rotation.__annotations__["return"])
    assert shape_checks._mentions_shapes(dict[str, list[typing.Optional["Anything"]]])
    assert not shape_checks._mentions_shapes(dict[str, typing.Callable[[int], torch.Tensor]])
