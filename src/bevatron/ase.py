"""The ASE calculator of trained potentials: ``from bevatron.ase import BevatronCalculator``."""

from bevatron.recipes.mace.calculator import BevatronCalculator

__all__ = ["BevatronCalculator"]
