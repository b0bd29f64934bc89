"""Progress of a long forward pass, counted by hooks of the modules that it calls."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import copy_context

from torch import nn

from bevatron.data.store.progress import clock
from bevatron.output import note

SECONDS = 10.0
"""Silence before the first line; later it is a tenth of the time so far, but no less."""

Stages = Mapping[str, tuple[Sequence[nn.Module], int]]
"""By the name of what is counted: the modules whose calls count, and the number of calls."""


@contextmanager
def forward_progress(title: str, stages: Stages) -> Iterator[None]:
    """Say on standard error how far the forward passes in the ``with`` block are.

    Parameters
    ----------
    title : what is computed
    stages : what is counted, in the order in which it is computed
    """
    began, now, over = time.monotonic(), "", threading.Event()

    def counter(what: str, total: int) -> Callable[..., None]:
        begun = 0

        def called(*_: object) -> None:
            nonlocal begun, now
            begun += 1
            now = f", {what} {begun:,} of {total:,}"

        return called

    def tell() -> None:
        while not over.wait(max(SECONDS, 0.1 * (time.monotonic() - began))):
            note(f"{title}{now}, {clock(time.monotonic() - began)} so far")

    with ExitStack() as stack:
        for what, (modules, total) in stages.items():
            count = counter(what, total)
            for module in modules:
                stack.callback(module.register_forward_pre_hook(count).remove)
        # A thread does not inherit the context, which says whether the command is quiet.
        thread = threading.Thread(target=copy_context().run, args=(tell,), daemon=True)
        thread.start()
        stack.callback(thread.join)
        stack.callback(over.set)
        yield
