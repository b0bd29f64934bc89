"""The functions of ``import bevatron``: train, load, evaluate and predict, for every system.

They do what the commands of the same names do, and return in memory what those print or write.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bevatron.data.readers.paths import Paths
from bevatron.errors import CheckpointError, ConfigError
from bevatron.recipes import systems
from bevatron.recipes.dispatch import system_of_kind
from bevatron.recipes.kinds import kind_of_model, newest_model
from bevatron.recipes.system import System
from bevatron.recipes.training import Resume, begin, configuration
from bevatron.train.loop import fit
from bevatron.train.run import FitResult


def train(
    system: str | Path,
    data: Paths | Mapping[str, Any] | None = None,
    output: str | Path | None = None,
    *,
    resume: Resume = "never",
    **values: Any,
) -> FitResult:
    """Train a model, as ``bevatron train`` does.

    Raises BevatronError for settings and data that cannot be trained on.

    Parameters
    ----------
    system : ``mace``, gpspp, graph, alphafold2, alphafold3, or a YAML file
    data : files to train on, or all keys of ``data``
    output : the run's folder
    resume
        ``never``: the folder must not hold a run; ``auto``: resume one if it does; ``must``: it has
        to hold one.
    **values : other keys of the configuration, as in a YAML file: ``train={"epochs": 20}``

    Returns
    -------
    The outcome: folder, metrics, best epoch.
    """
    if data is not None:
        values["data"] = dict(data) if isinstance(data, Mapping) else {"train": _listed(data)}
    if output is not None:
        values["output"] = str(output)
    return fit(begin(configuration(str(system), changes=values), resume))


def load(model: Paths, **options: Any) -> Any:
    """Load a trained model, ready to be used, on a GPU if there is one.

    Raises BevatronError if there is no model.

    Parameters
    ----------
    model : a run or a model folder; several are a committee where the system has that
    **options : ``device``, ``dtype`` and what the system has besides

    Returns
    -------
    An ASE calculator of a potential, or a predictor of molecules, vertices, chains or complexes.
    """
    api = _system(model).used()
    with _naming("load", options):
        return api.load(model, **options)


def evaluate(model: Any, sources: Any, **options: Any) -> dict[str, Any]:
    """Compute the errors of a model on labelled data, as ``bevatron evaluate`` does.

    Raises BevatronError for data without labels, or that the model does not know.

    Parameters
    ----------
    model : a run, a model folder, or what `load` returned
    sources : a file, or several
    **options : those of the command, with underscores

    Returns
    -------
    The tables that the command prints with ``--json``.
    """
    api = _system(model).used()
    written = {name: Path(options[name]) for name in ("out", "pictures") if options.get(name)}
    with _naming("evaluate", options):
        found: dict[str, Any] = api.evaluate(model, sources, **options | written)
    return found


def predict(model: Any, source: Any, out: str | Path | None = None, **options: Any) -> Any:
    """Predict, as ``bevatron predict`` does, or in memory.

    Raises BevatronError for data that the model does not know.

    Parameters
    ----------
    model : a run, a model folder, or what `load` returned
    source : a file; or structures of ASE, SMILES, a graph
    out
        File to write, of proteins a folder, if ``source`` is a file; None = the predictions are
        returned.
    **options : those of the command, with underscores

    Returns
    -------
    Without ``out`` structures of ASE with results, predictions of molecules, or of vertices; else
    what the command says of the file.
    """
    api = _system(model).used()
    if out is not None and not isinstance(source, str | Path):
        found = type(source).__name__
        raise ConfigError(f"predict: 'out' goes with a file to predict, got {found}; leave it out")
    with _naming("predict", options):
        return api.predict(model, source, out, **options)


@contextmanager
def _naming(function: str, options: Mapping[str, Any]) -> Iterator[None]:
    """Say of an option that a system's function refuses which function the user called."""
    try:
        yield
    except TypeError as error:
        found = _REFUSED.search(str(error))
        if found is None or found[1] not in options:
            raise
        raise TypeError(
            f"bevatron.{function}: has no argument '{found[1]}' for this model"
        ) from None


_REFUSED = re.compile(r"(?:unexpected|multiple values for) (?:keyword )?argument '(\w+)'")
"""How Python says that a function does not take an argument, or takes it from elsewhere."""


def _listed(paths: Paths) -> list[str]:
    return [str(paths)] if isinstance(paths, str | Path) else [str(path) for path in paths]


def _system(model: Any) -> System:
    """Return the system of a model: by its folder, or by the module of its class."""
    several = isinstance(model, Sequence) and not isinstance(model, str)
    one = model[0] if several and model else model
    if isinstance(one, str | Path):
        newest_model(Path(one))  # raises for a file
        kind = kind_of_model([str(one)])
        found = system_of_kind(kind)
        if found is None:
            raise CheckpointError(f"{one}: holds a model of kind '{kind}', which is not known here")
        return found
    for each in systems():
        if type(one).__module__.startswith(f"{each.package}."):
            return each
    given = type(one).__name__  # the text of a module has many lines
    raise CheckpointError(
        f"expected a run, a model folder or what bevatron.load returned, got {given}"
    )
