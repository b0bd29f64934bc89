"""Recipes: a folder for each system, `proteins` for what two share; here model and trainer meet."""

import importlib
from typing import Any

from bevatron.errors import ConfigError
from bevatron.recipes.system import System

SYSTEMS = {
    "mace": "bevatron.recipes.mace",
    "gpspp": "bevatron.recipes.gpspp",
    "graph": "bevatron.recipes.graph",
    "alphafold2": "bevatron.recipes.alphafold2",
    "alphafold3": "bevatron.recipes.alphafold3",
}
"""Name -> package, whose ``SYSTEM`` declares everything else."""

DEFAULT = next(iter(SYSTEMS))


def systems() -> list[System]:
    """Return all systems."""
    return [importlib.import_module(package).SYSTEM for package in SYSTEMS.values()]


def system(name: str) -> System:
    """Return the system of a name; ConfigError if there is none."""
    if name not in SYSTEMS:
        known = ", ".join(sorted(SYSTEMS))
        raise ConfigError(f"there is no recipe '{name}' (known: {known})")
    found: System = importlib.import_module(SYSTEMS[name]).SYSTEM
    return found


def recipe(name: str) -> tuple[Any, Any]:
    """Return (class of the configuration, function that builds the run) of a system.

    Raises ConfigError if there is none of that name.
    """
    found = system(name)
    return found.load(found.config), found.load(found.build)
