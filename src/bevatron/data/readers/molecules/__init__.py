"""Readers of molecules: SMILES and targets, with 3D structures or without, as raw samples.

Nothing is parsed here: SMILES are bytes, structures are text. Featurization finds what cannot be
parsed and reports it by row.
"""

from bevatron.data.readers.molecule_options import MoleculeOptions
from bevatron.data.readers.molecules.base import RAW_MOLECULE_FIELDS, MoleculeFile
from bevatron.data.readers.molecules.in_memory import molecules_in_memory
from bevatron.data.readers.molecules.reader import MoleculeReader, open_molecules

__all__ = [
    "RAW_MOLECULE_FIELDS",
    "MoleculeFile",
    "MoleculeOptions",
    "MoleculeReader",
    "molecules_in_memory",
    "open_molecules",
]
