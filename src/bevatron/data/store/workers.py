"""A pool of worker processes for numbered jobs; dead and failed workers are detected at once.

A job is a number and idempotent. Workers start in fresh processes (forkserver or spawn), so the
work must be picklable. A worker whose parent was killed finishes its job and exits.
"""

import multiprocessing
import pickle
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from bevatron.data.processes import PRELOADED, start_without_main
from bevatron.errors import BevatronError, DataError, StoreError

Advance = Callable[[int], None]
"""Called with the number of samples done since the last call."""

Work = Callable[[int, Advance], None]
"""Called with the number of the job and `Advance`."""

_SECONDS_BETWEEN_REPORTS = 0.2


def run_jobs(work: Work, jobs: Sequence[int], workers: int, advance: Advance) -> None:
    """Run all jobs, in this process (``workers=0``) or in worker processes.

    Raises the BevatronError of a job that fails, or DataError for any other exception, after
    stopping the rest; StoreError if a worker died.

    Parameters
    ----------
    work : the function to run; picklable unless ``workers`` is 0
    jobs : numbers of the jobs, started in this order
    workers : number of processes, at most one per job
    advance : called in this process with the progress
    """
    if workers <= 0:
        for job in jobs:
            work(job, advance)
        return
    pool = [_Worker(work) for _ in range(min(workers, len(jobs)))]
    try:
        _distribute(pool, deque(jobs), advance)
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    """A process and the pipe to it; ``job`` is its current job."""

    def __init__(self, work: Work) -> None:
        method = "forkserver" if sys.platform.startswith("linux") else "spawn"
        context: Any = multiprocessing.get_context(method)
        if method == "forkserver":
            # Imported once in the server, not once in every worker.
            context.set_forkserver_preload(list(PRELOADED))
        self.connection, theirs = context.Pipe()
        self.process: BaseProcess = context.Process(target=_serve, args=(theirs, work), daemon=True)
        start_without_main(self.process, needs_main=b"__main__" in pickle.dumps(work))
        theirs.close()
        self.job: int | None = None

    def begin(self, job: int | None) -> None:
        """Send a job; None stops the worker."""
        self.job = job
        with suppress(BrokenPipeError):  # the receiver detects that it died
            self.connection.send(job)

    def stop(self) -> None:
        """Stop the process, at once if it is busy."""
        if self.job is not None:
            self.process.terminate()
        self.process.join(5)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.connection.close()


def _distribute(pool: Sequence[_Worker], jobs: deque[int], advance: Advance) -> None:
    by_connection: dict[Any, _Worker] = {worker.connection: worker for worker in pool}
    for worker in pool:
        worker.begin(jobs.popleft() if jobs else None)
    while by_connection:
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]
            try:
                kind, content = worker.connection.recv()
            except (EOFError, OSError):  # the latter in the middle of a message
                if worker.job is not None:
                    raise StoreError(_death(worker)) from None
                del by_connection[connection]
                continue
            if kind == "advance":
                advance(content)
            elif kind == "failed":
                _raise(*content)
            else:
                worker.begin(jobs.popleft() if jobs else None)


def _death(worker: _Worker) -> str:
    worker.process.join(5)
    code = worker.process.exitcode
    how = f"exit code {code}"
    if code is not None and code < 0:
        how = f"signal {signal.Signals(-code).name}"
    elif code is None:
        how = "no exit code"
    return (
        f"a preparation worker died ({how}) while it wrote shard {worker.job}, perhaps out of "
        "memory; run again with fewer workers, which keeps the finished shards"
    )


def _raise(kind: type[BevatronError], sentence: str, trace: str) -> None:
    raise kind(sentence) from RuntimeError(f"in a worker process:\n{trace}")


def _serve(connection: Connection, work: Work) -> None:
    """Run jobs in the worker until the parent sends None or exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    report = _Reporter(connection)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while (job := connection.recv()) is not None:
            try:
                work(job, report)
                report.flush()
                message: tuple[str, Any] = ("done", job)
            except BevatronError as error:
                message = ("failed", (type(error), str(error), traceback.format_exc()))
            except Exception as error:  # noqa: BLE001  the parent reports any exception
                sentence = f"shard {job}: {type(error).__name__}: {error}"
                message = ("failed", (DataError, sentence, traceback.format_exc()))
            connection.send(message)


class _Reporter:
    """Sends progress at intervals; the job continues if the parent has exited."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.count = 0
        self.last = time.monotonic()

    def __call__(self, count: int) -> None:
        self.count += count
        if time.monotonic() - self.last > _SECONDS_BETWEEN_REPORTS:
            self.flush()

    def flush(self) -> None:
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send(("advance", self.count))
        self.count = 0
        self.last = time.monotonic()
