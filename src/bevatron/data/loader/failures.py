"""Error messages for samples that cannot be loaded and for workers that die."""

import signal
from collections.abc import Sequence
from dataclasses import dataclass

from bevatron.data.dataset import SampleSource
from bevatron.data.loader.worker import Failure, Unreadable
from bevatron.errors import LoaderError
from bevatron.typing import IntArray

_MAX_NAMED = 8


@dataclass(frozen=True)
class LeftOut:
    """A sample that could not be read, twice.

    Attributes
    ----------
    sample, name : index of the sample, and how ``describe`` names it
    reason : the exception, or the time limit
    """

    sample: int
    name: str
    reason: str


def named(dataset: SampleSource, unreadable: Sequence[Unreadable]) -> list[LeftOut]:
    """Name samples that were left out."""
    return [LeftOut(sample, name_of(dataset, sample), reason) for sample, reason in unreadable]


def loader_error(
    dataset: SampleSource, position: int, indices: IntArray, failure: Failure
) -> LoaderError:
    """Turn a failure into an error that names the sample, with the traceback as a note."""
    if failure.sample is not None:
        text = f"{name_of(dataset, failure.sample)}: {failure.message}"
    else:
        names = names_of(dataset, indices)
        text = f"batch {position} could not be put together: {failure.message}; samples: {names}"
    error = LoaderError(text)
    error.add_note(f"In the loader's worker:\n{failure.traceback}")
    return error


def name_of(dataset: SampleSource, sample: int) -> str:
    """Return the name of a sample, or its index if ``describe`` fails."""
    try:
        return dataset.describe(sample)
    except Exception:  # noqa: BLE001  a message about an error must not fail
        return f"sample {sample}"


def names_of(dataset: SampleSource, indices: IntArray) -> str:
    """Return the names of the first samples of a batch."""
    named = [name_of(dataset, int(index)) for index in indices[:_MAX_NAMED]]
    more = [f"and {len(indices) - _MAX_NAMED} more"] if len(indices) > _MAX_NAMED else []
    return "; ".join(named + more)


def exit_text(exitcode: int | None) -> str:
    """Describe how a process exited."""
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        hint = ", perhaps out of memory" if exitcode == -signal.SIGKILL else ""
        return f"killed by {name}{hint}"
    return f"exit code {exitcode}"
