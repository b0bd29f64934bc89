"""Bevatron: training scientific graph and structure models at the speed of the hardware."""

__version__ = "0.1.0"

__all__ = ["__version__"]
