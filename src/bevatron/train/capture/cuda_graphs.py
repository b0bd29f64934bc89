"""Work recorded once as a CUDA graph and replayed, so that launching it costs nothing.

A step of an equivariant network is some thousands of short kernels; launched one by one from Python
they leave the GPU waiting. A graph launches them all at once. What is recorded must read and write
fixed memory, never ask the device for a number and always do the same.
"""

import contextlib
from collections.abc import Callable

import torch

from bevatron.errors import BevatronError

Work = Callable[[], None]


class NotRecordableError(BevatronError):
    """Work waits for the device, so it cannot be recorded."""


def same_draws(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Put the random numbers back behind what is only a rehearsal: a resumed run has another."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class Recorder:
    """Records work as CUDA graphs that share one pool of memory.

    They share it because they are replayed one after the other and hand nothing to each other but
    through memory from outside. On a CPU the record of some work is the work itself.

    Parameters
    ----------
    device
        Where the work runs.

    Examples
    --------
    >>> total = torch.zeros(())
    >>> replay = Recorder(torch.device("cpu")).record(lambda: total.add_(1))
    >>> replay(), float(total)
    (tensor(1.), 1.0)
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def record(self, work: Work, rehearsal: Work | None = None) -> Work:
        """Warm up twice, then record some work without running it; no random number is used up.

        Parameters
        ----------
        work
            Without arguments or results.
        rehearsal
            What runs twice to warm up if the work itself must not: the same kernels.

        Returns
        -------
        Callable
            Replays the work on the current stream.

        Raises
        ------
        NotRecordableError
            If the work waits for the device; the sentence says where.
        """
        if not self._on_gpu:
            return work
        with same_draws(self.device):
            return self._record(work, rehearsal or work)

    def _record(self, work: Work, rehearsal: Work) -> Work:
        present = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            rehearsal()  # loads modules, compiles kernels, fills caches: it may wait
            self._try_without_waiting(rehearsal)
        present.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads, such as one that pins memory, may go on meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        return graph.replay

    @staticmethod
    def _try_without_waiting(work: Work) -> None:
        """Find out before recording whether the work waits: a recording that breaks off leaks."""
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise NotRecordableError(f"it waits for the GPU in {_place(error)}") from error
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _place(error: BaseException) -> str:
    """Say where in the code an error was raised: the innermost function."""
    trace = error.__traceback__
    place = "an operator of torch"
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place
