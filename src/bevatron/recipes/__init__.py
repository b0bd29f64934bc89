"""Recipes: functions that return a complete run. The only place that names model and trainer."""

import importlib
from typing import Any

from bevatron.errors import ConfigError

RECIPES = {
    "gpspp": ("bevatron.recipes.gpspp.run", "GpsppRun"),
    "graph": ("bevatron.recipes.graph.run", "GraphRun"),
    "mace": ("bevatron.recipes.mace.run", "MaceRun"),
}
"""Name -> module and the class of its configuration; the module's ``build`` makes the run."""


def recipe(name: str) -> tuple[Any, Any]:
    """Return (class of the configuration, function that builds the run) of a recipe.

    Raises
    ------
    ConfigError
        If there is none of that name.
    """
    if name not in RECIPES:
        known = ", ".join(sorted(RECIPES))
        raise ConfigError(f"there is no recipe '{name}' (known: {known}) and no such YAML file")
    module_name, class_name = RECIPES[name]
    module = importlib.import_module(module_name)
    return getattr(module, class_name), module.build
