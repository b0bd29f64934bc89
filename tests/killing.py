"""Work that is killed (SIGKILL) before each of its steps on disk, one process for each step."""

import multiprocessing
import os
import signal

from bevatron import files


def _die(work, out, place_to_die, done):
    count = iter(range(100_000))

    def die(name, path):
        if next(count) == place_to_die:
            os.kill(os.getpid(), signal.SIGKILL)

    files.crash_hooks.append(die)
    work(out)
    done.value = 1


def killed_at_each_step(work, root):
    """Yield a new folder below ``root`` each time ``work(folder)`` was killed, one step later.

    The last one was not killed.
    """
    context = multiprocessing.get_context("fork")
    done = context.Value("i", 0)
    for place in range(100_000):
        out = root / f"killed{place}" / "s"
        out.parent.mkdir()
        process = context.Process(target=_die, args=(work, out, place, done))
        process.start()
        process.join(60)
        yield out
        if done.value:
            return
