"""Bevatron: training scientific graph and structure models at the speed of the hardware."""

from bevatron.moved import keep_old_names

__version__ = "0.1.0"

__all__ = ["__version__"]

keep_old_names()
