"""Work captured once as a CUDA graph and replayed, so that launching it costs nothing.

A step of an equivariant network is some thousands of short kernels; launched one by one from Python
they leave the GPU idle. A graph launches them all at once. What is captured must read and write
fixed memory, never read a value from the device and always do the same.
"""

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import torch

from bevatron.data.processes import own_cpus
from bevatron.errors import BevatronError

Work = Callable[[], None]

alone = threading.RLock()
"""Held while work is rehearsed or captured: launches of other threads would be left out, or refused
because they wait for the device. Such a thread holds it while it launches."""


class NotCapturableError(BevatronError):
    """Work waits for the device, so it cannot be captured."""


def same_draws(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Restore the random state after what is only a warm-up: a resumed run warms up elsewhere."""
    return torch.random.fork_rng([device] if device.type == "cuda" else [])


class GraphPool:
    """Captures work as CUDA graphs that share one memory pool.

    They can share it because they are replayed one after the other and pass data to each other only
    through memory from outside of it. On a CPU nothing is captured: to replay work is to run it.

    Attributes
    ----------
    grown : bytes of the GPU that captures have taken so far, for the pool and for the graphs

    Examples
    --------
    >>> total = torch.zeros(())
    >>> replay = GraphPool(torch.device("cpu")).capture(lambda: total.add_(1))
    >>> replay(), float(total)
    (tensor(1.), 1.0)
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.grown = device, 0
        self._on_gpu = device.type == "cuda"
        if self._on_gpu:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream(device)

    def compile_ahead(self, work: Work, say: Callable[[str], None]) -> None:
        """Compile the kernels of some work in parallel, if on a GPU; none of them is launched.

        What is not a Triton kernel runs, after all work launched before and before all later work.
        """
        if not self._on_gpu or find_spec("triton") is None:
            return
        from bevatron.kernels.shared import triton_compile

        # Nodes of autograd that outlive the work keep the stream that they were made on.
        with alone, self._in_turn(), same_draws(self.device):
            triton_compile.compile_ahead(work, own_cpus(), say)

    def capture(self, work: Work, warm_up: Work | None = None) -> Work:
        """Warm up twice, then capture work without running it; the random state does not change.

        Raises NotCapturableError if the work waits for the device; the message says where.

        Parameters
        ----------
        work : without arguments or results
        warm_up : what runs twice to warm up if the work itself must not: the same kernels

        Returns
        -------
        Callable
            Replays the work on the current stream.
        """
        if not self._on_gpu:
            return work
        with alone, same_draws(self.device):
            return self._capture(work, warm_up or work)

    def _capture(self, work: Work, warm_up: Work) -> Work:
        with self._in_turn():
            warm_up()  # loads modules, compiles kernels, fills caches: it may wait
            self._try_without_waiting(warm_up)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()  # what the warm-up has left is not the graph's
        free, _ = torch.cuda.mem_get_info(self.device)
        # Other threads, such as one that pins memory, may use the device meanwhile.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()
        self.grown += max(free - torch.cuda.mem_get_info(self.device)[0], 0)
        return graph.replay

    @contextlib.contextmanager
    def _in_turn(self) -> Iterator[None]:
        """Launch on the pool's stream, after all work launched before and before all later work.

        Also before what follows an error: it may reuse the memory that the work reads and writes.
        """
        present = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(present)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            present.wait_stream(self._stream)

    @staticmethod
    def _try_without_waiting(work: Work) -> None:
        """Find out beforehand whether the work waits: a capture that breaks off leaks memory."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            # That a prototype may miss some waits: the capture itself meets them.
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        try:
            work()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise NotCapturableError(f"it waits for the GPU in {_place(error)}") from error
        finally:
            torch.cuda.set_sync_debug_mode(before)


def _place(error: BaseException) -> str:
    """Locate where an error was raised: the innermost function."""
    trace = error.__traceback__
    place = "an operator of torch"
    while trace is not None:
        code = trace.tb_frame.f_code
        place = f"{code.co_qualname} ({code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno})"
        trace = trace.tb_next
    return place
