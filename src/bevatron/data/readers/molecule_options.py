"""Options of the readers of molecules, in a module of their own for a quick command line."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class MoleculeOptions:
    """Columns of SMILES and targets, and 3D structures, of a file of molecules.

    Attributes
    ----------
    smiles : column of the SMILES; detected by default (smiles, canonical_smiles, ...)
    targets
        Columns to predict, or names of data items in an SDF; detected if only one numeric column is
        a candidate.
    geometry
        File of 3D structures in the order of the table: an SDF, or an npz of positions. Coordinates
        in a CXSMILES are used without it.
    split : column with train, valid or test; detected if its name is ``split``
    unlabelled : read no targets, for prediction
    """

    smiles: str | None = None
    targets: tuple[str, ...] = ()
    geometry: Path | None = None
    split: str | None = None
    unlabelled: bool = False
