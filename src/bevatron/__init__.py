"""Bevatron: training scientific graph and structure models on GPUs.

``bevatron.train``, ``load``, ``evaluate`` and ``predict`` do what the commands do; torch is
imported when one of them is used.
"""

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from bevatron.moved import keep_old_names

if TYPE_CHECKING:
    from bevatron.recipes.api import evaluate as evaluate
    from bevatron.recipes.api import load as load
    from bevatron.recipes.api import predict as predict
    from bevatron.recipes.api import train as train

__version__ = "0.1.0"

__all__ = ["__version__", "evaluate", "load", "predict", "train"]


class _Trainer(ModuleType):
    """The package `bevatron.train`, which can be called as the function of the same name."""

    def __call__(self, *arguments: Any, **values: Any) -> Any:
        return importlib.import_module("bevatron.recipes.api").train(*arguments, **values)


class _Bevatron(ModuleType):
    """The package `bevatron`: makes `bevatron.train` callable, whoever imports it first."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "train" and isinstance(value, ModuleType):
            value.__class__ = _Trainer
        super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    if name == "train":
        return importlib.import_module("bevatron.train")
    if name in __all__:
        return getattr(importlib.import_module("bevatron.recipes.api"), name)
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")


def __dir__() -> list[str]:
    # For help() and completion, which see only what is there.
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Bevatron
keep_old_names()
