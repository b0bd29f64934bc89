"""While the tests run, wrong types and wrong shapes raise; see shape_checks."""

import gc
import typing
import weakref

import numpy as np
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

import shape_checks
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
    assert shape_checks._mentions_shapes(random_rotation.__annotations__["return"])
    assert shape_checks._mentions_shapes(dict[str, list[typing.Optional["Anything"]]])
    assert not shape_checks._mentions_shapes(dict[str, typing.Callable[[int], torch.Tensor]])


def checked(function):
    return shape_checks._jaxtyped(function, typechecker=shape_checks.checked)


def test_other_shapes_and_types_are_checked_after_right_ones():
    calls = []

    @checked
    def first(x: Float[Tensor, "N C"], rows: list[Float[Tensor, " C"]], by: str = "sum") -> float:
        calls.append(by)
        return float(x[0] @ rows[0])

    x, row = torch.ones(2, 3), torch.ones(3)
    for _ in range(3):
        assert first(x, [row]) == 3.0
    for wrong in ((x[0], [row]), (x, [row[:2]]), (x, [row[:2]] * 40), (x, [row], 1)):
        with pytest.raises(Exception, match=r"checking the parameters of .*first"):
            first(*wrong)
    assert len(calls) == 3
    assert first(x, [row], by="mean") == 3.0


def test_another_shape_of_the_result_is_checked_for_equal_arguments():
    results = [torch.ones(2), torch.ones(2), torch.ones(3), torch.ones(2), None]

    @checked
    def next_of(x: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        return results.pop(0)

    next_of(torch.zeros(2)), next_of(torch.zeros(2))
    with pytest.raises(Exception, match=r"checking the return value of .*next_of"):
        next_of(torch.zeros(2))
    next_of(torch.zeros(2))
    with pytest.raises(Exception, match=r"checking the return value of .*next_of"):
        next_of(torch.zeros(2))
    assert not results


def test_a_function_that_is_defined_again_is_checked_again():
    def make(factor):
        @checked
        def times(x: Float[Tensor, " N"], y: int) -> Float[Tensor, " N"]:
            return factor * y * x if y < 9 else x[:1]

        return times

    for factor in (1, 2):
        assert make(factor)(torch.ones(2), 3)[0] == 3 * factor
        with pytest.raises(Exception, match=r"parameters of .*times"):
            make(factor)(torch.ones(2), "3")
        with pytest.raises(Exception, match=r"return value of .*times"):
            make(factor)(torch.ones(2), 9)


def test_annotations_that_follow_from_an_outer_function_are_its_own():
    def make(kind):
        @checked
        def same(x: kind) -> kind:
            return x

        return same

    assert make(int)(1) == 1
    assert make(str)("1") == "1"
    with pytest.raises(Exception, match=r"parameters of .*same"):
        make(str)(1)


def test_a_length_that_follows_from_a_value_is_checked_in_every_call():
    @checked
    def few(x: Float[Tensor, " {most}"], most: int) -> None:
        pass

    few(torch.ones(2), 2)
    with pytest.raises(Exception, match=r"parameters of .*few"):
        few(torch.ones(2), 3)


def test_checks_keep_nothing_that_a_function_encloses():
    def make(tensor):
        @checked
        def enclosed(by: int) -> bool:
            return bool(tensor.sum() > by)

        return enclosed

    tensor = torch.ones(2)
    known = weakref.ref(tensor)
    assert make(tensor)(1)
    del tensor
    gc.collect()
    assert known() is None
