"""Every error that a user can meet.

A message is one sentence that names the file, row or key and says what was found and what to do.
The command line prints it without a traceback and leaves with exit code 2.
"""

import importlib
from types import ModuleType


class BevatronError(Exception):
    """Base of all errors that a user can fix."""


class ConfigError(BevatronError):
    """A configuration has an unknown key, a wrong type or values that contradict each other."""


class DataError(BevatronError):
    """An input file holds something that must not be trained on."""


class StoreError(DataError):
    """A prepared store is missing, damaged or made with other settings."""


class OtherInputsError(StoreError):
    """A folder holds a store of other inputs."""


class LoaderError(BevatronError):
    """A batch could not be produced; the message names its samples."""


class CheckpointError(BevatronError):
    """A checkpoint is missing, incomplete or of another model or other settings."""


class DamagedError(CheckpointError):
    """A file of a checkpoint is missing or does not match its checksum."""


class DivergenceError(BevatronError):
    """A loss or a prediction is not finite, or a loss exploded; the message names the samples."""


class OutOfMemoryError(BevatronError):
    """The device has too little memory; the message gives the batch's size and what to set."""


class KernelError(BevatronError):
    """The implementation of an operator that was asked for cannot run here."""


class MissingPackageError(BevatronError):
    """An optional package is not installed."""


class TrustError(BevatronError):
    """A file would have to be unpickled, which can run any code that is in it."""


def reason_of(error: BaseException, path: object) -> str:
    """Return what an error says, without the name of the file that it begins with.

    Examples
    --------
    >>> reason_of(DataError("a.pdb, line 8: has no atoms"), "a.pdb")
    'line 8: has no atoms'
    """
    return str(error).removeprefix(f"{path}: ").removeprefix(f"{path}, ")


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether memory was too small, as Python, numpy, torch, CUDA and Triton say it.

    Examples
    --------
    >>> ran_out_of_memory(MemoryError("Unable to allocate 8.00 TiB"))
    True
    """
    told = ("DefaultCPUAllocator", "CUDA error: out of memory", "[CUDA]: out of memory")
    of_torch = type(error).__name__ == "OutOfMemoryError"
    return isinstance(error, MemoryError) or of_torch or any(text in str(error) for text in told)


def require(package: str, extra: str, *, distribution: str | None = None) -> ModuleType:
    """Import an optional package or say which extra brings it.

    Raises MissingPackageError if the package is not installed.

    Parameters
    ----------
    package : the module's import name
    extra : the extra of bevatron that installs it
    distribution : what to install instead, for a package that no extra of bevatron brings

    Examples
    --------
    >>> require("math", "none").floor(1.5)
    1
    """
    try:
        return importlib.import_module(package)
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.split(".")[0] != package.split(".", maxsplit=1)[0]:
            raise
        wanted, name = distribution or f"'bevatron[{extra}]'", package.partition(".")[0]
        raise MissingPackageError(
            f"the package '{name}' is not installed; `pip install {wanted}` brings it"
        ) from None
