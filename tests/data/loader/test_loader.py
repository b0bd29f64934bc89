"""The loader: plan order, workers that die or hang, exceptions by name, nothing left behind."""

import errno
import gc
import inspect
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from bevatron.data.loader import LeftOut, Loader, default_workers
from bevatron.data.loader.pool import Pool
from bevatron.data.packing import pack
from bevatron.data.samples import STRUCTURE_FIELDS, collate_structures
from bevatron.errors import LoaderError

# Worker processes import the module that defines a data set; that one is found and quick to import.
sys.path.insert(0, str(Path(__file__).parent))
from loader_fakes import (
    Counted,
    FailsOnce,
    KilledOnce,
    Numbers,
    Replaced,
    SlowToOpen,
    Structures,
    Unopenable,
    batches,
    collate,
    collate_badly,
    collate_unpicklable,
    leftovers,
)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_batches_arrive_complete_in_plan_order(workers):
    with Loader(Numbers(), batches(), collate, workers=workers) as loader:
        assert len(loader) == 10
        loaded = list(loader)
    assert [item.position for item in loaded] == list(range(10))
    for item, (indices, _) in zip(loaded, batches(), strict=True):
        batch = item.batch
        assert batch["x"][:, 0].tolist() == indices.tolist()
        assert batch["indices"].tolist() == indices.tolist()
        assert batch["weights"].dtype == torch.float64
        assert batch["half"].dtype == torch.bfloat16
        assert batch["half"].shape == (2, 3)
        assert bool((batch["half"] == 1).all())
        assert batch["empty"].shape == (0, 3)
        assert batch["scalar"].item() == 2.5
        assert item.waited_seconds >= 0
        batch["x"] += 1  # the memory is the receiver's own
        if workers:
            assert batch["pid"] != os.getpid()
            assert batch["threads"] == 1
    assert not leftovers()


def test_workers_stay_from_epoch_to_epoch():
    with Loader(Numbers(), batches(), collate, workers=1) as loader:
        first = {item.batch["pid"] for item in loader}
        loader.set_batches(batches()[5:])
        second = list(loader)
        assert {item.batch["pid"] for item in second} == first
        assert [item.position for item in second] == list(range(5))
        for _ in loader:  # left early: what was under way is dropped
            break
        assert [item.batch["x"][0, 0].item() for item in loader] == [20, 24, 28, 32, 36]


def test_a_plan_is_carried_out():
    plan = pack(np.arange(1, 41), 100, 2, seed=1)
    seen = []
    with Loader(Numbers(), plan.flat(0), collate, workers=2) as loader:
        for rank in range(2):
            loader.set_batches(plan.flat(rank))
            for item in loader:
                weights = item.batch["weights"].numpy()
                np.testing.assert_array_equal(weights, plan.weights(rank, item.position))
                seen += item.batch["indices"][weights == 1].tolist()
    assert sorted(seen) == list(range(40))


def test_a_window_lets_ready_batches_overtake_a_slow_one_by_at_most_that_many():
    dataset = Numbers(slow={4: 0.8})
    with Loader(dataset, batches(), collate, workers=2, window=3) as loader:
        order = [item.position for item in loader]
    assert sorted(order) == list(range(10))
    assert order != sorted(order)
    assert order[:4] == [0, 2, 3, 1]
    oldest = 0
    for place, position in enumerate(order):
        oldest = min(set(range(10)) - set(order[:place]))
        assert position - oldest < 3


def test_one_place_of_window_keeps_the_order_whatever_is_slow():
    dataset = Numbers(slow={4: 0.3, 20: 0.2})
    with Loader(dataset, batches(), collate, workers=2) as loader:
        assert [item.position for item in loader] == list(range(10))


@pytest.mark.parametrize("workers", [0, 2])
def test_an_exception_names_the_sample_and_brings_its_traceback(workers):
    with (
        Loader(Numbers(bad=18), batches(), collate, workers=workers) as loader,
        pytest.raises(
            LoaderError, match=r"train\.xyz, frame 18: ValueError: a damaged rec"
        ) as info,
    ):
        list(loader)
    assert "\n" not in str(info.value)
    assert "in __getitem__" in info.value.__notes__[0]
    assert not leftovers()


def test_batches_before_a_bad_one_are_delivered():
    positions = []
    with Loader(Numbers(bad=18), batches(), collate, workers=2) as loader:
        iterator = iter(loader)
        with pytest.raises(LoaderError):  # noqa: PT012  the last call raises
            while True:
                positions.append(next(iterator).position)
    assert positions == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_cannot_be_put_together_names_its_samples(workers):
    with Loader(Numbers(), batches(), collate_badly, workers=workers) as loader:
        message = r"batch 0 could not.*shapes differ.*train\.xyz, frame 0; train\.xyz, frame 1"
        with pytest.raises(LoaderError, match=message):
            next(iter(loader))


def test_what_cannot_be_sent_is_said():
    with (
        Loader(Numbers(), batches(), collate_unpicklable, workers=1) as loader,
        pytest.raises(LoaderError, match=r"batch 0 could not be put together.*pickle"),
    ):
        next(iter(loader))
    with (
        Loader(Numbers(), batches(), lambda *_: None, workers=1) as loader,
        pytest.raises(LoaderError, match="cannot be sent to worker processes"),
    ):
        next(iter(loader))
    with (
        Loader(Unopenable(), batches(), collate, workers=1) as loader,
        pytest.raises(LoaderError, match="the store moved"),
    ):
        next(iter(loader))


def test_a_worker_that_dies_is_replaced_once_for_the_same_batch(tmp_path, caplog):
    with Loader(KilledOnce(tmp_path), batches(), collate, workers=2) as loader:
        loaded = list(loader)
    assert [item.position for item in loaded] == list(range(10))
    assert loaded[2].batch["x"][:, 0].tolist() == [8, 9, 10, 11]
    assert "SIGKILL" in caplog.text
    assert "train.xyz, frame 9" in caplog.text


def test_workers_killed_before_they_begin_are_not_put_down_to_the_batch():
    """Three fresh workers are killed while they open the data set."""
    with Loader(SlowToOpen(), batches(), collate, workers=1) as loader:
        iterator = iter(loader)
        assert next(iterator).position == 0
        for _ in range(3):
            (before,) = loader.worker_pids
            os.kill(before, signal.SIGKILL)
            deadline = time.monotonic() + 20
            while loader.worker_pids in ([before], []) and time.monotonic() < deadline:
                time.sleep(0.001)
        assert [loaded.position for loaded in iterator] == list(range(1, 10))


def test_a_killed_fork_server_is_started_again_with_its_workers():
    with Loader(Numbers(delay=0.003), batches(), collate, workers=2) as loader:
        iterator = iter(loader)
        assert next(iterator).position == 0
        os.kill(psutil.Process(loader.worker_pids[0]).ppid(), signal.SIGKILL)
        assert [loaded.position for loaded in iterator] == list(range(1, 10))


@pytest.mark.parametrize("window", [1, 4])
def test_slow_samples_and_killed_workers_lose_and_double_nothing(window):
    """A sample 100 times slower than the others; every sixth batch a worker is killed.

    Not more often: a batch that two kills hit at the same sample would be blamed.
    """
    data = Numbers(80, slow={21: 0.3}, delay=0.003)
    with Loader(data, batches(80), collate, workers=2, window=window) as loader:
        order, samples, waited = [], [], []
        for loaded in loader:
            order.append(loaded.position)
            samples += loaded.batch["x"][:, 0].tolist()
            waited.append(loaded.waited_seconds)
            if len(order) % 6 == 0 and loader.worker_pids:
                os.kill(loader.worker_pids[-1], signal.SIGKILL)
    assert sorted(samples) == list(range(80))
    assert sorted(order) == list(range(20))
    early = [place - order.index(place) for place in order]
    assert max(early) == 0 if window == 1 else max(early) < window
    if window == 1:
        assert order == list(range(20))


def test_a_batch_that_ends_two_workers_stops_the_run_and_names_its_samples():
    with Loader(Numbers(kill=9), batches(), collate, workers=2) as loader:
        iterator = iter(loader)
        assert next(iterator).position == 0
        assert next(iterator).position == 1
        message = (
            r"batch 2 ended two worker.*SIGKILL.*reading train\.xyz, frame 9.*frame 8;.*frame 11"
        )
        with pytest.raises(LoaderError, match=message):
            next(iterator)
    assert not leftovers()


def test_a_worker_killed_from_outside_is_noticed_within_a_second():
    def seconds_to_notice():
        with Loader(Numbers(slow={4: 1.5}), batches(), collate, workers=1) as loader:
            iterator = iter(loader)
            next(iterator)
            (before,) = loader.worker_pids
            time.sleep(0.3)
            os.kill(before, signal.SIGKILL)
            begin = time.monotonic()
            while (loader.worker_pids in ([before], [])) and time.monotonic() < begin + 30:
                time.sleep(0.01)
            seconds = time.monotonic() - begin
            assert loader.worker_pids not in ([before], [])
            assert [item.position for item in iterator] == list(range(1, 10))
            return seconds

    # On a busy machine starting the next worker alone may take longer: once in five is enough.
    assert any(seconds_to_notice() < 1 for _ in range(5))


def test_signals_of_a_scheduler_are_left_to_the_main_process():
    with Loader(Numbers(delay=0.005), batches(), collate, workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        (worker,) = loader.worker_pids
        server = psutil.Process(worker).ppid()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(worker, number)
        os.kill(server, signal.SIGUSR1)
        assert {item.batch["pid"] for item in iterator} == {worker}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_pinned(workers):
    dataset = Structures(structure())
    with Loader(
        dataset, batches(8, 4), collate_structures, workers=workers, pin_memory=True
    ) as loader:
        assert all(item.batch.positions.is_pinned() for item in loader)


def test_a_sample_that_takes_too_long_is_named():
    begin = time.monotonic()
    with (
        Loader(Numbers(slow={5: 60}), batches(), collate, workers=1, sample_timeout=0.3) as loader,
        pytest.raises(
            LoaderError, match=r"train\.xyz, frame 5: reading it took longer than 0\.3 s"
        ),
    ):
        list(loader)
    assert time.monotonic() - begin < 50  # the sample takes 60 s
    assert not leftovers()


def test_a_slow_sample_is_noticed_without_workers_too():
    with (
        Loader(
            Numbers(slow={5: 0.2}), batches(), collate, workers=0, sample_timeout=0.05
        ) as loader,
        pytest.raises(LoaderError, match=r"train\.xyz, frame 5: reading it took .* longer"),
    ):
        list(loader)


# ---- samples that are left out ----


@pytest.mark.parametrize("workers", [0, 2])
def test_a_damaged_sample_is_left_out_and_named_and_all_others_arrive(workers):
    with Loader(Numbers(bad=18), batches(), collate, workers=workers, leave_out=True) as loader:
        loaded = list(loader)
    assert [item.position for item in loaded] == list(range(10))
    found = np.concatenate([item.batch["indices"] for item in loaded])
    assert found.tolist() == [i for i in range(40) if i != 18]
    assert loaded[4].batch["x"][:, 0].tolist() == [16, 17, 19]
    assert loaded[4].batch["weights"].tolist() == [1.0] * 3
    assert loaded[4].left_out == [
        LeftOut(18, "train.xyz, frame 18", "ValueError: a damaged record")
    ]
    assert not any(item.left_out for item in loaded if item.position != 4)


def test_a_sample_that_fails_once_is_not_left_out(tmp_path):
    with Loader(FailsOnce(tmp_path), batches(), collate, workers=0, leave_out=True) as loader:
        loaded = list(loader)
    assert [item.left_out for item in loaded] == [[]] * 10
    assert loaded[2].batch["x"][:, 0].tolist() == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("dataset", "reason"),
    [
        (Numbers(slow={5: 60}), "reading it took over 0.3 s"),
        (Numbers(kill=5), "killed by SIGKILL, perhaps out of memory"),
    ],
)
def test_a_slow_or_deadly_sample_is_left_out_after_the_second_worker(dataset, reason):
    begin = time.monotonic()
    with Loader(
        dataset, batches(), collate, workers=1, sample_timeout=0.3, leave_out=True
    ) as loader:
        loaded = list(loader)
    assert loaded[1].batch["x"][:, 0].tolist() == [4, 6, 7]
    assert loaded[1].left_out == [LeftOut(5, "train.xyz, frame 5", reason)]
    assert sum(len(item.batch["indices"]) for item in loaded) == 39
    assert time.monotonic() - begin < 50  # the sample takes 60 s
    assert not leftovers()


@pytest.mark.parametrize("workers", [0, 1])
def test_another_sample_stands_in_where_the_data_set_has_one(workers):
    dataset = Replaced(bad=7)
    with Loader(dataset, batches(8, 1), collate, workers=workers, leave_out=True) as loader:
        loaded = list(loader)
    assert [item.batch["indices"].tolist() for item in loaded] == [[i] for i in range(7)] + [[1007]]
    assert loaded[7].batch["x"][0, 0] == 1007
    assert [one.sample for one in loaded[7].left_out] == [7]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_without_a_readable_sample_stops_the_run(workers):
    with (
        Loader(Numbers(bad=3), batches(8, 1), collate, workers=workers, leave_out=True) as loader,
        pytest.raises(LoaderError, match=r"frame 3: .*a damaged record; no sample of the batch"),
    ):
        list(loader)


def test_prefetch_bounds_what_is_made_ahead(tmp_path):
    with Loader(Counted(tmp_path), batches(), collate, workers=2, prefetch=3) as loader:
        iterator = iter(loader)
        next(iterator)
        deadline = time.monotonic() + 30
        while len(list(tmp_path.iterdir())) < 4 * 4 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.3)  # for one more, if there were no bound
        assert len(list(tmp_path.iterdir())) == 4 * 4
        assert len(list(iterator)) == 9


def test_memory_stays_flat_and_nothing_is_left_behind():
    process = psutil.Process()
    memory_files = Path("/dev/shm")
    files_before = set(memory_files.glob("*"))
    many = [(np.arange(40), np.ones(40))] * 150
    with Loader(Numbers(), many, collate, workers=1) as loader:
        for _ in loader:
            pass
        gc.collect()
        memory, files = process.memory_info().rss, process.num_fds()
        for _ in loader:
            pass
        gc.collect()
        # 150 batches of 320 kB would be 48 MB.
        assert process.memory_info().rss - memory < 10e6
        assert process.num_fds() <= files
    # Semaphores belong to multiprocessing itself and end with this process.
    assert {
        path for path in set(memory_files.glob("*")) - files_before if "sem" not in path.name
    } == set()
    assert not leftovers()


def test_a_forgotten_loader_ends_its_workers():
    loader = Loader(Numbers(), batches(), collate, workers=1)
    iterator = iter(loader)
    next(iterator)
    assert leftovers()
    del iterator, loader
    gc.collect()
    deadline = time.monotonic() + 30
    while leftovers() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not leftovers()


SCRIPT = """
import sys, time
sys.path.insert(0, {folder!r})
from loader_fakes import Numbers, batches, collate
from bevatron.data.loader import Loader
print("begin", flush=True)
loader = Loader(Numbers(delay=0.05), batches(), collate, workers=2)
for item in loader:
    print(*loader.worker_pids, flush=True)
    time.sleep(0.1)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_main_process(tmp_path, how):
    script = tmp_path / "run.py"
    script.write_text(SCRIPT.format(folder=str(Path(__file__).parent)))
    run = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    # The script has no guard around its main part: workers do not run it again.
    assert run.stdout.readline() == "begin\n"
    pids = [int(pid) for pid in run.stdout.readline().split()]
    assert pids
    os.kill(run.pid, how)
    run.communicate(timeout=60)
    deadline = time.monotonic() + 30
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(psutil.pid_exists(pid) for pid in pids)


def structure():
    """Two coinciding atoms, with two edges."""
    return {
        field.name: np.zeros((2, *field.shape) if field.ragged else field.shape, dtype=field.dtype)
        for field in STRUCTURE_FIELDS
    }


def test_structures_come_through():
    sample = structure()
    dataset = Structures(sample)
    with Loader(dataset, batches(8, 4), collate_structures, workers=1) as loader:
        loaded = [item.batch for item in loader]
    expected = collate_structures([sample] * 4, np.arange(4), [1.0] * 4)
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(getattr(loaded[0], name), value, rtol=0, atol=0)
    assert loaded[1].indices.tolist() == [4, 5, 6, 7]
    assert pickle.loads(pickle.dumps(loaded[0])).num_atoms == 8


def test_workers_by_default_share_the_cpus_among_the_ranks_of_a_node(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(32)), raising=False)
    assert default_workers() == 16
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert default_workers() == 7
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert default_workers() == 1


@pytest.mark.parametrize("arguments", [{"workers": -1}, {"window": 0}, {"sample_timeout": 0}])
def test_wrong_settings_are_refused(arguments):
    with pytest.raises(LoaderError):
        Loader(Numbers(), batches(), collate, **{"workers": 1, **arguments})


@pytest.mark.parametrize("cost", [2, 1])  # batches of two and of four samples
def test_what_is_not_indices_with_weights_is_refused_before_it_is_loaded(cost):
    plan = pack([cost] * 8, 4, num_ranks=1)
    # Without the checks of types that only tests have.
    make, change = inspect.unwrap(Loader.__init__), inspect.unwrap(Loader.set_batches)
    with Loader(Numbers(), plan.flat(0), collate, workers=0) as loader:
        for given in (plan[0], iter(plan.flat(0)), [[1, 2]], [([1, 2], [1.0, 1.0])]):
            with pytest.raises(LoaderError, match=r"batches: .* such as plan\.flat\(rank\), got"):
                make(object.__new__(Loader), Numbers(), given, collate)
            with pytest.raises(LoaderError, match="batches: expected"):
                change(loader, given)
        assert len(list(loader)) == len(plan[0])


def test_what_the_thread_failed_of_is_said_also_to_who_asks_late(monkeypatch):
    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(Pool, "_start", refuse)
    with Loader(Numbers(), batches(), collate, workers=1) as loader:
        loader.set_batches(batches())
        loader._pool._thread.join(timeout=20)
        with pytest.raises(LoaderError, match=r"the loader failed: OSError: .* Too many open"):
            next(iter(loader))
