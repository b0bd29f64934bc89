"""What a rank learns from the connections of the others."""

import socket
import time
from itertools import pairwise

import pytest
from torch.distributed import HashStore

from bevatron.parallel import failures
from bevatron.parallel.failures import GONE, GOODBYE, LIFELINE_KEY, FailureWatch


@pytest.mark.parametrize("pieces", [[0, 41], [0, 10, 41], [0, 32, 40, 41]])
@pytest.mark.parametrize("leaves", [b"", GOODBYE])
def test_a_greeting_may_come_in_pieces(pieces, leaves):
    store = HashStore()
    watch = FailureWatch(0, 3, store)
    try:
        port, token = store.get(LIFELINE_KEY).decode().split()
        greeting = f"{token} {2:08d}".encode()
        with socket.create_connection(("127.0.0.1", int(port))) as line:
            for begin, end in pairwise(pieces):
                line.sendall(greeting[begin:end])
                time.sleep(0.05)
            line.sendall(leaves)
        # The watch would end this process for another rank's failure, but in some seconds.
        deadline = time.monotonic() + 0.5
        while watch.first_failure() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert watch.first_failure() == (None if leaves else (2, GONE))
    finally:
        watch.stop()


@pytest.mark.parametrize(
    ("error", "waits"), [(ConnectionError("it has ended"), True), (BrokenPipeError(), False)]
)
def test_only_who_lost_another_rank_waits_long_for_its_message(error, waits, monkeypatch):
    monkeypatch.setattr(failures, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(failures, "CLOSING_SECONDS", 2.0)
    watch = FailureWatch(0, 3, HashStore())
    try:
        began = time.monotonic()
        assert watch.report(error) == (0, f"{type(error).__name__}: {error}")
        assert (time.monotonic() - began > 1) == waits
    finally:
        watch.stop()
