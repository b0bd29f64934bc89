"""Failure of a rank: the others stop with its message within seconds.

A rank that fails leaves a message in the store of the process group. One that is killed leaves
none, but its operating system closes its connections: each rank keeps one to rank 0 just to
detect that.
"""

import json
import logging
import os
import secrets
import socket
import sys
import threading
import time
from contextlib import suppress
from multiprocessing.connection import wait
from typing import Any

from torch._C._distributed_c10d import Store

from bevatron.errors import BevatronError

FAILURE_KEY = "bevatron/failure"
"""Key under which the first rank to fail stores its message."""

LIFELINE_KEY = "bevatron/lifeline"
"""Key under which rank 0 stores its port and the token for clients."""

WATCH_SECONDS = 1.0
GRACE_SECONDS = 8.0
"""Time for the other ranks to stop by themselves after one has failed."""
CLOSING_SECONDS = 120.0
"""Time for a rank that has closed its connections to say why: it may be writing a checkpoint."""

GONE = "it ended without a message: killed, perhaps out of memory, or its machine is gone"
GOODBYE = b"."
GREETING = 32 + 1 + 8
"""Bytes that a rank sends first: the token, a blank and its rank."""

log = logging.getLogger("bevatron.ranks")


class FailureWatch:
    """A thread that ends this process when another rank has failed.

    A rank blocked in a collective runs no Python, so only a thread can notice. It gives the rank
    time to stop by itself (gloo notices a closed connection), then exits with the message.

    Parameters
    ----------
    rank, world : of this process
    store : store of the process group
    """

    def __init__(self, rank: int, world: int, store: Store) -> None:
        self._rank, self._store = rank, store
        self._stopped = threading.Event()
        self._bell, self._ring = socket.socketpair()
        self._server: socket.socket | None = None
        self._token = ""
        # The rank at the other end, or the bytes received from an unknown one so far.
        self._lines: dict[socket.socket, int | bytes] = {}
        if rank == 0:
            self._listen(world)
        else:
            self._connect()
        self._thread = threading.Thread(target=self._watch, name="failure-watch", daemon=True)
        self._thread.start()

    def _listen(self, world: int) -> None:
        try:
            self._server = socket.create_server(
                ("", 0), family=socket.AF_INET6, dualstack_ipv6=True, backlog=world
            )
        except (OSError, ValueError):
            self._server = socket.create_server(("", 0), backlog=world)
        self._server.setblocking(False)
        self._token = secrets.token_hex(16)
        self._store.set(LIFELINE_KEY, f"{self._server.getsockname()[1]} {self._token}")

    def _connect(self) -> None:
        port, token = self._store.get(LIFELINE_KEY).decode().split()
        try:
            line = socket.create_connection((os.environ["MASTER_ADDR"], int(port)), timeout=10)
            line.sendall(f"{token} {self._rank:08d}".encode())
            _keep_alive(line)
        except OSError as error:
            log.warning("rank %d: the end of rank 0 will be noticed late (%s)", self._rank, error)
            return
        self._lines[line] = 0

    def report(self, error: BaseException) -> tuple[int, str] | None:
        """Store this rank's message, unless another failed before; return the first message."""
        if isinstance(error, Exception) and not isinstance(error, BevatronError):
            # A closed connection is the fault of another rank, whose message tells more.
            # Those of the operating system, such as of a pipe that is not read, are subclasses.
            closed = type(error) is ConnectionError
            deadline = time.monotonic() + (CLOSING_SECONDS if closed else 2 * WATCH_SECONDS)
            while self.first_failure() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        self._leave(self._rank, f"{type(error).__name__}: {error}".splitlines()[0])
        return self.first_failure()

    def _leave(self, rank: int, message: str) -> None:
        with suppress(Exception):
            self._store.compare_set(FAILURE_KEY, "", json.dumps([rank, message]))

    def first_failure(self) -> tuple[int, str] | None:
        """Return (rank, message) of the first rank that failed, None if there is none."""
        try:
            if self._store.check([FAILURE_KEY]):
                rank, message = json.loads(self._store.get(FAILURE_KEY))
                return int(rank), str(message)
        except (RuntimeError, ValueError):
            return 0, "the process that joins the ranks is gone"
        return None

    def stop(self) -> None:
        """End the thread and tell the other ranks that this is not a failure."""
        self._stopped.set()
        with suppress(OSError):
            self._ring.send(b"!")
        self._thread.join(timeout=2 * WATCH_SECONDS)
        for line in self._lines:
            with suppress(OSError):
                line.sendall(GOODBYE)
            line.close()
        for one in (self._server, self._bell, self._ring):
            if one is not None:
                one.close()

    def _watch(self) -> None:
        while not self._stopped.is_set():
            self._look()
            failure = self.first_failure()
            if failure is None or failure[0] == self._rank:
                continue
            if self._stopped.wait(GRACE_SECONDS):
                return
            sys.stderr.write(f"error: rank {failure[0]} failed: {failure[1]}\n")
            sys.stderr.flush()
            time.sleep(0.1)
            os._exit(1)

    def _look(self) -> None:
        """Wait for a connection to come or to close, at most `WATCH_SECONDS`."""
        sources: list[Any] = [self._bell, *self._lines]
        if self._server is not None:
            sources.append(self._server)
        for source in wait(sources, WATCH_SECONDS):
            if source is self._server:
                with suppress(OSError):
                    line, _ = self._server.accept()
                    _keep_alive(line)
                    self._lines[line] = b""
            elif source in self._lines:
                self._read(source)

    def _read(self, line: socket.socket) -> None:
        """Identify a connection, or notice that it has closed and whether that is a failure."""
        try:
            said = line.recv(64)
        except OSError:
            said = b""
        whose = self._lines[line]
        if isinstance(whose, bytes):
            greeting = whose + said
            if said and len(greeting) < GREETING:
                self._lines[line] = greeting  # the rest will follow
                return
            if len(greeting) >= GREETING and greeting[:32] == self._token.encode():
                self._lines[line] = whose = int(greeting[32:GREETING])
                said = greeting[GREETING:]
                if not said:
                    return
        del self._lines[line]
        line.close()
        if isinstance(whose, int) and not said.startswith(GOODBYE):
            self._leave(whose, GONE)


def _keep_alive(line: socket.socket) -> None:
    """Detect a lost machine within 15 s; the end of a process is detected at once."""
    line.settimeout(5.0)
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 2)):
        if hasattr(socket, name):
            line.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
