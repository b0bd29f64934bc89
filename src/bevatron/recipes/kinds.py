"""Finds the model in a folder and its kind, for commands that take any model."""

from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from bevatron.errors import CheckpointError, ConfigError
from bevatron.files import MODEL_FILE, read_description
from bevatron.recipes.named_models import models_folder, named_model

EXPECTED = "expected a run or a model folder"

OF_OTHERS = {".model", ".pt", ".pth"}
"""Suffixes of models of other packages, which a system may know how to convert."""


def kind_of_model(arguments: Sequence[str]) -> str | None:
    """Find the first run or model folder among a command's arguments and return its kind.

    Raises CheckpointError if that model.json is damaged, or if the first argument is not an option
    and names no folder with a model: the options depend on the model, so the command would
    complain of one instead.

    Returns
    -------
    The kind in its model.json; of an unfinished run that of its best model; None if no argument is
    such a folder: the command itself says so.

    Examples
    --------
    >>> kind_of_model(["--device", "cpu", "no/such/run"]) is None
    True
    """
    for argument in arguments:
        path = named_model(argument)
        for folder in (path, path / "best"):
            if _is_file(folder / MODEL_FILE):
                return str(read_description(folder / MODEL_FILE)["kind"])
    if arguments and not arguments[0].startswith("-"):
        _refuse_missing(Path(arguments[0]))
        if (Path(arguments[0]) / "config.yaml").is_file():
            raise CheckpointError(
                f"{arguments[0]}: the run has no model yet, neither a final one nor a best one; "
                'train it further with `resume="auto"`'
            )
        folder, suffix = Path(arguments[0]).parent, Path(arguments[0]).suffix
        if Path(arguments[0]).is_file() and suffix not in OF_OTHERS:
            where = f", such as {folder}" if holds_model(folder) else ""
            raise CheckpointError(f"{arguments[0]}: is a file, {EXPECTED}{where}")
        if Path(arguments[0]).is_dir():
            raise CheckpointError(f"{arguments[0]}: is not a model folder, it has no {MODEL_FILE}")
    return None


def _refuse_missing(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(
            f"{path}: there is no such run or model folder, nor a model of that name in "
            f"{models_folder()}"
        )


def _is_file(path: Path) -> bool:
    """Whether it is a file; an argument may also be too long for a name or have a NUL in it."""
    with suppress(OSError, ValueError):
        return path.is_file()
    return False


def holds_model(path: Path) -> bool:
    """Whether a path is a run or a model folder."""
    return any((folder / MODEL_FILE).is_file() for folder in (path, path / "best"))


def newest_model(path: Path, of_a_file: str = "") -> Path:
    """Return the folder of a model; of an unfinished run, that of its best model.

    Raises CheckpointError if it is a file, is not there, or is the name of a published model that
    is not there. Whether a folder holds a model is checked when it is read.

    Parameters
    ----------
    path : a run or a model folder, or the name of one in `named_models.models_folder`
    of_a_file : added to the message if this is a file
    """
    path = named_model(path)
    if path.is_file():
        raise CheckpointError(f"{path}: is a file, {EXPECTED}{of_a_file}")
    _refuse_missing(path)
    best = path / "best"
    unfinished = not (path / MODEL_FILE).exists() and (best / MODEL_FILE).exists()
    return best if unfinished else path


def check_distinct(models: Iterable[object]) -> None:
    """Refuse a committee that has a model twice: their spread would be too small.

    Raises ConfigError naming the model; only paths and names are compared.
    """
    folders = Counter(newest_model(Path(m)).resolve() for m in models if isinstance(m, str | Path))
    for folder, times in folders.items():
        if times > 1:
            raise ConfigError(
                f"{folder}: is given {times} times; a committee needs different models"
            )
