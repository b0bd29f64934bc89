"""The declaration of a system, from which the command line follows."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from bevatron.errors import ConfigError
from bevatron.output import Outcome


@dataclass(frozen=True)
class System:
    """One system: its names, and where its functions are.

    Functions are given as ``"module:name"``, the module within `package` (``":name"`` is in the
    package itself), and imported when they are called: a declaration costs nothing.

    Attributes
    ----------
    name : name on the command line: ``bevatron train NAME``
    package : python package of the system
    kind : kind of its models, as in their model.json
    summary : description in one line
    samples : kind of its training samples, as in a store: ``structures``, ``molecules``
    config : the configuration class of its runs, a `bevatron.recipes.run_config.RunConfig`
    build : (configuration, resume) -> `bevatron.train.run.Run`
    commands : its commands by name (``"predict"``, ``"convert mace-torch"``) and their functions
    usage : lines of ``bevatron --help``: the command and what it does
    recognises
        path -> whether ``bevatron prepare`` assigns it to this system; None = files that no
        other system recognises. A system without preparation says so of its files.
    inspect
        Module with ``describe(store)`` (tables), ``draw(report, store)`` and ``sizes(store)``
        (what is counted of samples, and edges if any) for ``bevatron inspect``; None = no stores.
    starter
        File in the package with the commented configuration that ``bevatron init`` prints and the
        short help of ``bevatron train`` is made from, see `bevatron.recipes.starter`.
    api
        Module with ``load(path, device, ...)``, ``evaluate(model, sources, ...)`` and
        ``predict(model, source, out, ...)`` for `bevatron.load` and so on, where a model is a path,
        several, or what ``load`` returned; None = the system is used by commands only.
    demo : (folder) -> exit code: its part of ``bevatron demo``
    """

    name: str
    package: str
    kind: str
    summary: str
    samples: str
    config: str
    build: str
    commands: Mapping[str, str] = field(default_factory=dict)
    usage: tuple[tuple[str, str], ...] = ()
    recognises: str | None = None
    inspect: str | None = None
    starter: str | None = None
    api: str | None = None
    demo: str | None = None

    def module(self, name: str) -> Any:
        """Import a module of the system's package, or with a leading dot one of its parent."""
        return importlib.import_module(f".{name}", self.package)

    def load(self, place: str) -> Any:
        """Import the object at ``"module:name"``."""
        module, _, name = place.partition(":")
        return getattr(self.module(module), name)

    def command(self, name: str) -> Callable[..., Outcome]:
        """Return the function of a command; ConfigError if the system has no such command."""
        if name == "prepare" and name not in self.commands:
            raise ConfigError(
                f"prepare: {self.samples} need no preparation; `bevatron train {self.name} --data "
                "FILE` reads them as they are"
            )
        if name not in self.commands:
            known = ", ".join(self.commands)
            raise ConfigError(f"{name}: {self.name} has no such command (it has: {known})")
        function: Callable[..., Outcome] = self.load(self.commands[name])
        return function

    def inspected(self) -> Any:
        """Return the module that describes the system's stores; ConfigError if it has none."""
        if self.inspect is None:
            raise ConfigError(f"inspect: {self.name} has no stores to inspect")
        return self.module(self.inspect)

    def starter_text(self) -> str:
        """Return the system's starter configuration; ConfigError if it has none."""
        if self.starter is None:
            raise ConfigError(f"init: {self.name} has no starter configuration")
        return (files(self.package) / self.starter).read_text(encoding="utf-8")

    def used(self) -> Any:
        """Return the module that uses the system's models in Python; ConfigError if it has none."""
        if self.api is None:
            raise ConfigError(f"{self.name}: its models are used by commands only")
        return self.module(self.api)

    def takes(self, path: Path) -> bool:
        """Whether ``bevatron prepare`` recognises a file as this system's."""
        return self.recognises is not None and bool(self.load(self.recognises)(path))

    def exported(self, name: str) -> Any:
        """Return the configuration class or ``build`` by name: the package's ``__getattr__``."""
        for place in (self.config, self.build):
            if place.partition(":")[2] == name:
                return self.load(place)
        raise AttributeError(f"module '{self.package}' has no attribute '{name}'")
