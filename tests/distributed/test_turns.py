"""Processes that share samples make batches in turns: each once, the same for all."""

import errno
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_ranks import fork_ranks, run_ranks

from bevatron.data.loader import Loader, transfer
from bevatron.errors import BevatronError, LoaderError
from bevatron.parallel import failures, turns
from bevatron.parallel.axial import shared
from bevatron.parallel.turns import turns_of

sys.path.insert(0, str(Path(__file__).parents[1] / "data/loader"))
from loader_fakes import Numbers, collate

EPOCHS = [list(range(7)), [5, 3, 0, 1, 6]]
"""Samples of two plans, one a batch; neither can be divided evenly."""


class Noted(Numbers):
    """Samples that note in a file who reads them."""

    def __init__(self, folder, **more):
        super().__init__(**more)
        self.folder = folder

    def __getitem__(self, index):
        with (self.folder / f"read{index}").open("a") as file:
            file.write(f"{os.getpid()}\n")
        return super().__getitem__(index)


def plan(samples):
    return [(np.array([sample]), np.ones(1)) for sample in samples]


def bits(loaded):
    """What a batch holds, but for who made it."""
    tensors = {name: x.tolist() for name, x in loaded.batch.items() if isinstance(x, torch.Tensor)}
    return [loaded.position, loaded.batch["indices"].tolist(), tensors]


def begin(mesh, size, samples, workers, **more):
    with shared(mesh, size) as group:
        return Loader(samples, [], collate, workers=workers, turns=turns_of(group, mesh), **more)


@pytest.mark.parametrize(("size", "workers"), [(2, 0), (3, 0), (2, 1), (3, 2)])
def test_each_batch_is_made_once_and_is_that_of_one_process(tmp_path, size, workers):
    def work(mesh):
        found = []
        with begin(mesh, size, Noted(tmp_path), workers) as loader:
            for samples in EPOCHS:
                if mesh.rank and samples is EPOCHS[1]:
                    time.sleep(0.3)  # the first is at the next plan meanwhile
                loader.set_batches(plan(samples))
                for loaded in loader:
                    found.append(bits(loaded))
                    loaded.batch["x"] += mesh.rank + 1  # nobody else sees it
        return found

    with Loader(Numbers(), [], collate, workers=0) as alone:
        expected = []
        for samples in EPOCHS:
            alone.set_batches(plan(samples))
            expected += [bits(loaded) for loaded in alone]
    assert run_ranks(size, work, tmp_path) == [expected] * size
    readers = {sample: (tmp_path / f"read{sample}").read_text().split() for sample in range(7)}
    times = {sample: sum(samples.count(sample) for samples in EPOCHS) for sample in range(7)}
    assert {sample: len(each) for sample, each in readers.items()} == times
    assert len({reader for each in readers.values() for reader in each}) >= size


def test_batches_that_are_several_plans_early_are_kept(tmp_path):
    """A process makes the only batch of each plan, and so does not wait for the other one."""

    def work(mesh):
        with begin(mesh, 2, Numbers(), 1) as loader:
            found = []
            for samples in ([0], [1], [2], [3]):
                loader.set_batches(plan(samples))
                while mesh.rank and not (tmp_path / "through").exists():
                    time.sleep(0.1)
                found += [bits(loaded)[1] for loaded in loader]
            (tmp_path / "through").touch()
        return found

    assert run_ranks(2, work, tmp_path) == [[[0], [1], [2], [3]]] * 2


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_cannot_be_read_is_the_same_error_on_all(tmp_path, workers):
    def work(mesh):
        with begin(mesh, 2, Numbers(bad=3), workers) as loader:
            loader.set_batches(plan(range(7)))
            found = []
            with pytest.raises(LoaderError) as caught:
                found += [loaded.position for loaded in loader]
        return [str(caught.value), found]

    one, other = run_ranks(2, work, tmp_path)
    assert one == other
    assert one[0].startswith("train.xyz, frame 3: ValueError: a damaged record")


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_is_killed_ends_those_that_wait_for_its_batches(tmp_path, workers):
    def work(mesh):
        with begin(mesh, 2, Numbers(), workers, prefetch=2) as loader:
            loader.set_batches(plan(range(20)))
            for loaded in loader:
                if mesh.rank == 1 and loaded.position == 4:
                    (tmp_path / "killed").touch()
                    os.kill(os.getpid(), signal.SIGKILL)

    codes, output = fork_ranks(2, work, tmp_path)
    took = time.time() - (tmp_path / "killed").stat().st_mtime
    assert codes[1] == -signal.SIGKILL
    assert codes[0] > 0
    assert "rank 1 failed: it ended without a message: killed" in output
    assert took < 30


@pytest.mark.parametrize("workers", [0, 1])
def test_a_process_that_fails_and_takes_long_to_end_is_named_by_the_others(
    tmp_path, workers, monkeypatch
):
    monkeypatch.setattr(failures, "GRACE_SECONDS", 1.0)

    def work(mesh):
        try:
            with begin(mesh, 2, Numbers(), workers, prefetch=2) as loader:
                loader.set_batches(plan(range(20)))
                for loaded in loader:
                    if mesh.rank == 1 and loaded.position == 4:
                        raise BevatronError("the dog ate it")
        finally:
            if mesh.rank == 1:
                time.sleep(4)

    codes, output = fork_ranks(2, work, tmp_path)
    assert 0 not in codes
    assert "rank 1 failed: BevatronError: the dog ate it" in output
    assert "rank 0 failed" not in output


def test_who_cannot_map_a_batch_says_so_and_not_that_the_other_has_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(failures, "GRACE_SECONDS", 1.0)

    def work(mesh):
        if mesh.rank == 1:
            monkeypatch.setattr(transfer.mmap, "mmap", refuse)
        with begin(mesh, 2, Numbers(), mesh.rank) as loader:
            loader.set_batches(plan(range(4)))
            return [loaded.position for loaded in loader]

    def refuse(*_, **__):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    began = time.time()
    codes, output = fork_ranks(2, work, tmp_path)
    assert 0 not in codes
    assert "rank 1 failed: LoaderError: the loader failed: OSError: [Errno 12] Cannot" in output
    assert time.time() - began < failures.CLOSING_SECONDS / 2


def test_processes_of_which_one_cannot_listen_make_all_batches_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "SECONDS", 2.0)

    def work(mesh):
        if mesh.rank == 1:
            monkeypatch.setattr(turns.socket.socket, "bind", refuse, raising=False)
        with begin(mesh, 2, Noted(tmp_path), 0) as loader:
            loader.set_batches(plan(range(5)))
            return [loaded.position for loaded in loader]

    def refuse(*_):
        raise OSError("no sockets here")

    assert run_ranks(2, work, tmp_path) == [[0, 1, 2, 3, 4]] * 2
    assert len((tmp_path / "read3").read_text().split()) == 2


@pytest.mark.parametrize("size", [3, 4])
def test_processes_of_several_machines_take_turns_on_each(tmp_path, size):
    """Processes of a group, two a machine or one on the last: each batch is made once on each."""

    def work(mesh):
        mesh = replace(mesh, local_world=2, local_rank=mesh.rank % 2)
        with begin(mesh, size, Noted(tmp_path), 0) as loader:
            loader.set_batches(plan(range(5)))
            return [loaded.position for loaded in loader]

    assert run_ranks(size, work, tmp_path) == [[0, 1, 2, 3, 4]] * size
    readers = [(tmp_path / f"read{sample}").read_text().split() for sample in range(5)]
    assert [len(set(each)) for each in readers] == [2] * 5


def test_a_window_is_refused_where_processes_take_turns():
    with pytest.raises(LoaderError, match="need the plan's order, but the window is 3"):
        Loader(Numbers(), [], collate, workers=1, window=3, turns=turns.Turns(0, 2, dict))
