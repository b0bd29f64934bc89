"""OGB's PCQM4Mv2 as downloaded: the table, the split file, the structures of the training part."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.dataset import ROLES
from bevatron.data.readers.molecule_options import MoleculeOptions
from bevatron.data.readers.molecules.base import Geometry
from bevatron.data.readers.molecules.structures import SdfGeometry
from bevatron.data.readers.molecules.tables import TableFile
from bevatron.errors import DataError, TrustError
from bevatron.typing import Array, IntArray

_TABLE = Path("raw") / "data.csv.gz"
_SPLIT = "split_dict.pt"
_STRUCTURES = ("pcqm4m-v2-train.sdf", "pcqm4m-v2-train.sdf.gz")
TARGET = "homolumogap"


def is_ogb_folder(path: Path) -> bool:
    """Whether a folder looks like OGB's PCQM4Mv2."""
    return (path / _TABLE).is_file()


class OgbFolder(TableFile):
    """PCQM4Mv2: 3.7 million SMILES, gaps of the training and validation part.

    ``pcqm4m-v2-train.sdf`` is looked for in the folder, in ``raw`` and in the parent folder;
    without it there are no structures. Its entry k is the k-th molecule of the training part.
    Raises DataError if a file is missing or they do not agree.

    Parameters
    ----------
    path : the folder with ``raw/data.csv.gz`` and ``split_dict.pt``
    options
        ``targets`` is the gap unless given; ``geometry`` is the path of the SDF if it is elsewhere.
    """

    def __init__(self, path: Path, options: MoleculeOptions) -> None:
        table = path / _TABLE
        targets = options.targets or (TARGET,)
        super().__init__(
            table, MoleculeOptions(options.smiles, targets, unlabelled=options.unlabelled)
        )
        self.name = str(path)
        self.parts = read_split(path / _SPLIT) if (path / _SPLIT).is_file() else None
        for name, rows in (self.parts or {}).items():
            if len(rows) and not 0 <= rows.min() <= rows.max() < self.num_rows:
                raise DataError(f"{path / _SPLIT}: '{name}' names rows beyond {self.num_rows - 1}")
        self.geometry = self._structures(path, options.geometry)

    def _structures(self, path: Path, given: Path | None) -> Geometry | None:
        places = [folder / name for folder in (path, path / "raw") for name in _STRUCTURES]
        places += [path.parent / name for name in _STRUCTURES]
        sdf = given or next((place for place in places if place.is_file()), None)
        if sdf is None:
            return None
        if self.parts is None or "train" not in self.parts:
            raise DataError(f"{path}: needs {_SPLIT}, which assigns the structures to rows")
        return SdfGeometry(sdf, self.num_rows, self.parts["train"])

    def splits(self) -> Array | None:
        """Return the official split; test-dev and test-challenge are both test."""
        if self.parts is None:
            return None
        part_of = np.full(self.num_rows, -1, dtype=np.int8)
        for name, rows in self.parts.items():
            part_of[rows] = ROLES.index(name.split("-")[0]) if name.split("-")[0] in ROLES else -1
        return part_of

    def report(self) -> list[str]:
        """Report the size of each part and whether there are structures."""
        lines = super().report()
        counts = ", ".join(f"{len(rows)} {name}" for name, rows in (self.parts or {}).items())
        found = "without 3D structures" if self.geometry is None else "with 3D of the training part"
        return [*lines, f"{self.name}: {counts or 'no split file'}; {found}"]


def read_split(path: Path) -> dict[str, IntArray]:
    """Read OGB's split file, a dictionary of index arrays, without running any code in it.

    Raises TrustError if it holds anything but arrays and tensors; DataError if it cannot be read.
    """
    import torch

    rebuild = np.zeros(0).__reduce__()[0]  # the module it is in depends on numpy's version
    named = [
        (rebuild, f"{module}._reconstruct")
        for module in ("numpy.core.multiarray", "numpy._core.multiarray")
    ]
    kinds = [type(np.dtype(name)) for name in ("int64", "int32", "uint32", "uint64")]
    # Empty arrays pickle their memory as bytes().
    allowed: list[Any] = [np.ndarray, np.dtype, bytes, *kinds, *named, (bytes, "__builtin__.bytes")]
    try:
        with torch.serialization.safe_globals(allowed):
            found = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError:
        raise TrustError(
            f"{path}: holds more than arrays, so reading it could run code; make a file of index "
            "arrays of it"
        ) from None
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise DataError(f"{path}: not a split file ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict):
        raise DataError(f"{path}: expected a dictionary of index arrays")
    try:
        return {str(k): np.asarray(v).astype(np.int64).reshape(-1) for k, v in found.items()}
    except (TypeError, ValueError) as error:
        raise DataError(f"{path}: expected arrays of whole numbers ({error})") from None
