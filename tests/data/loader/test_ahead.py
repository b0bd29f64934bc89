"""Batches that a thread makes ahead, where no number of workers is given."""

import gc
import os
import sys
import threading
import time
from pathlib import Path

import pytest

from bevatron.data import loader as loader_package
from bevatron.data.loader import Loader, ahead
from bevatron.errors import LoaderError

sys.path.insert(0, str(Path(__file__).parent))  # where worker processes find the data set
from loader_fakes import Numbers, batches, collate, leftovers


def test_small_batches_are_made_in_a_thread_epoch_after_epoch(monkeypatch):
    monkeypatch.setattr(ahead, "SPARE_SECONDS", 60.0)  # other processes may keep the cores busy
    with Loader(Numbers(), batches(), collate) as loader:
        for planned in (batches(), batches()[:3], batches()):
            loader.set_batches(planned)
            loaded = list(loader)
            assert [item.position for item in loaded] == list(range(len(planned)))
            assert {item.batch["pid"] for item in loaded} == {os.getpid()}
            assert all(item.waited_seconds < 5 for item in loaded)
        assert [item.position for item in loader] == list(range(10))
        assert not loader.worker_pids


def test_batches_that_take_long_go_to_workers_from_where_the_thread_was():
    with Loader(Numbers(delay=0.004), batches(), collate) as loader:
        loaded = list(loader)
        assert [item.position for item in loaded] == list(range(10))
        for item, (indices, _) in zip(loaded, batches(), strict=True):
            assert item.batch["x"][:, 0].tolist() == indices.tolist()
        here = [item.batch["pid"] == os.getpid() for item in loaded]
        assert here[0]
        assert not here[-1]
        assert here == sorted(here, reverse=True)
        assert os.getpid() not in {item.batch["pid"] for item in loader}
    assert not leftovers()


def test_what_the_thread_cannot_read_is_named_by_workers():
    with Loader(Numbers(bad=18), batches(), collate) as loader:
        iterator = iter(loader)
        assert [next(iterator).position for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(LoaderError, match=r"train\.xyz, frame 18: ValueError"):
            next(iterator)
    with (
        Loader(Numbers(slow={5: 5}), batches(), collate, sample_timeout=0.2) as loader,
        pytest.raises(LoaderError, match=r"train\.xyz, frame 5: reading it took longer"),
    ):
        list(loader)
    with (
        Loader(Numbers(bad=2), batches(), lambda *_: None) as loader,
        pytest.raises(LoaderError, match="cannot be sent to worker processes"),
    ):
        list(loader)


def test_a_loop_after_one_that_was_left_begins_anew():
    """Also if workers have begun meanwhile, from the batch that the thread could not read."""
    with Loader(Numbers(bad=18), batches(), collate) as loader:
        first = iter(loader)
        assert next(first).position == 0
        deadline = time.monotonic() + 20
        while not loader.worker_pids and time.monotonic() < deadline:
            time.sleep(0.01)
        second = iter(loader)
        assert [next(second).position for _ in range(4)] == [0, 1, 2, 3]
        with pytest.raises(LoaderError, match="another loop restarted this loader"):
            list(first)


@pytest.mark.parametrize("more", [{}, {"bad": 18}])
def test_a_loop_whose_batches_were_replaced_is_told(more):
    with Loader(Numbers(**more), batches(), collate) as loader:
        first = iter(loader)
        assert next(first).position == 0
        loader.set_batches(batches())
        with pytest.raises(LoaderError, match="another loop restarted this loader"):
            list(first)


@pytest.mark.parametrize("order", [(5, 4), (4, 5)])
def test_of_two_that_hand_over_at_once_the_one_further_behind_counts(order):
    with Loader(Numbers(), batches(), collate) as loader:
        loader.set_batches(batches())
        for position in order:
            loader._ahead._hand_over(position)
        assert loader._pool.take(loader._generation)[0] == 4


def test_the_thread_ends_with_its_loader_even_within_a_batch():
    """Else it may be within C++ when the interpreter ends, and abort the process."""

    before = {*threading.enumerate()}
    with Loader(Numbers(delay=0.02), batches(), collate) as loader:
        loader.set_batches(batches())
        assert {*threading.enumerate()} > before
    assert {*threading.enumerate()} <= before


def test_whatever_the_thread_fails_of_reaches_the_loop(monkeypatch):
    def no_processes(*_, **__):
        raise OSError("too many open files")

    monkeypatch.setattr(loader_package, "Pool", no_processes)
    with (
        Loader(Numbers(bad=18), batches(), collate, sample_timeout=20) as loader,
        pytest.raises(LoaderError, match="OSError: too many open files"),
    ):
        list(loader)


@pytest.mark.parametrize("more", [{"window": 3}, {"leave_out": True}])
def test_workers_read_what_may_be_slow_or_damaged(more):
    with Loader(Numbers(), batches(8), collate, prefetch=1, **more) as loader:
        assert os.getpid() not in {item.batch["pid"] for item in loader}


def test_batches_set_anew_drop_those_before_and_no_thread_outlives_its_loader():
    before = threading.active_count()
    loader = Loader(Numbers(400), batches(400), collate)
    loader.set_batches(batches(400))
    assert next(iter(loader)).position == 0
    loader.set_batches(batches(12))
    assert [item.batch["x"][0, 0].item() for item in loader] == [0, 4, 8]
    loader.set_batches(batches(400))
    del loader
    gc.collect()
    deadline = time.monotonic() + 20
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert threading.active_count() <= before
