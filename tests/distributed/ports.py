"""Ports at which ranks meet."""

import itertools
import os
import socket

FIRST, LAST, EACH = 12_000, 30_000, 64
_numbers = itertools.count()


def free_port() -> int:
    """Return a port that is free, and that no other process of tests will take.

    The system's own choice may go to anybody before the ranks listen. These lie below what it
    chooses from, and every process has a range by its id.
    """
    for number in itertools.islice(_numbers, EACH):
        port = FIRST + (EACH * os.getpid() + number % EACH) % (LAST - FIRST)
        with socket.socket() as free:
            try:
                free.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise OSError(f"no free port between {FIRST} and {LAST}")
