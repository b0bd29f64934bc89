"""Where in a folder the model is, and of which kind, for commands that work with any."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bevatron.errors import CheckpointError
from bevatron.files import MODEL_FILE


def kind_of_model(arguments: Sequence[str]) -> str | None:
    """Find the first run or model folder among a command's arguments and say what it holds.

    Returns
    -------
    The kind in its model.json; of a run under way that of its best model; None if no argument is
    such a folder: the command itself says so.

    Raises
    ------
    CheckpointError
        If the first argument is no option and no file or folder with a model has that name: which
        options there are depends on the model, so the command would complain of one instead.

    Examples
    --------
    >>> kind_of_model(["--device", "cpu", "no/such/run"]) is None
    True
    """
    for argument in arguments:
        for folder in (Path(argument), Path(argument) / "best"):
            with suppress(OSError, ValueError, KeyError, TypeError):
                return str(json.loads((folder / MODEL_FILE).read_text())["kind"])
    if arguments and not arguments[0].startswith("-"):
        if not Path(arguments[0]).exists():
            raise CheckpointError(f"{arguments[0]}: there is no such run or model folder")
        if Path(arguments[0]).is_dir():
            raise CheckpointError(f"{arguments[0]}: is not a model folder, it has no {MODEL_FILE}")
    return None


def holds_model(path: Path) -> bool:
    """Whether a path is a run or a model folder."""
    return any((folder / MODEL_FILE).is_file() for folder in (path, path / "best"))


def newest_model(path: Path, of_a_file: str = "") -> Path:
    """Return the model folder of a run or model folder; of a run under way, that of its best model.

    Parameters
    ----------
    path
        Where to look.
    of_a_file
        Added to the message if this is a file.

    Raises
    ------
    CheckpointError
        If it is a file. Whether there is a model is checked when it is read.
    """
    if path.is_file():
        raise CheckpointError(f"{path}: is a file, expected a run or a model folder{of_a_file}")
    best = path / "best"
    unfinished = not (path / MODEL_FILE).exists() and (best / MODEL_FILE).exists()
    return best if unfinished else path
