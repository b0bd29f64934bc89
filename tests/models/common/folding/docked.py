"""Complexes of the docking benchmark, bound and unbound, as flat arrays."""

import gzip
import json
from dataclasses import dataclass

import numpy as np
import torch


def read_atoms(path):
    """Position of each heavy atom of a PDB file by (chain, residue, name of residue, atom)."""
    atoms = {}
    with gzip.open(path, "rt") as lines:
        for line in lines:
            if line.startswith("ATOM") and not line[12:16].strip().startswith("H"):
                key = (line[21], line[22:27].strip(), line[17:20], line[12:16].strip())
                atoms.setdefault(key, [float(line[i : i + 8]) for i in (30, 38, 46)])
    return atoms


@dataclass
class Pair:
    """The same atoms in two states."""

    bound: torch.Tensor
    unbound: torch.Tensor
    residue: torch.Tensor
    partner: torch.Tensor
    names: list
    backbone: torch.Tensor


def load(shared, name):
    folder = shared / "data" / "complexes" / "bm5"
    bound = read_atoms(folder / "bound" / f"{name}_target.pdb.gz")
    unbound = read_atoms(folder / "unbound" / f"{name}_r_u.pdb.gz")
    unbound |= read_atoms(folder / "unbound" / f"{name}_l_u.pdb.gz")
    keys = [key for key in bound if key in unbound]
    residues = {r: i for i, r in enumerate(dict.fromkeys(key[:2] for key in keys))}
    names = [key[3] for key in keys]
    return Pair(
        torch.tensor([bound[key] for key in keys], dtype=torch.float64),
        torch.tensor([unbound[key] for key in keys], dtype=torch.float64),
        torch.tensor([residues[key[:2]] for key in keys]),
        torch.tensor([{"A": 0, "B": 1}[key[0]] for key in keys]),
        names,
        torch.tensor([atom in {"N", "CA", "C", "O"} for atom in names]),
    )


def interface_rmsd(shared, name):
    """I-RMSD of the benchmark's own table: C-alpha atoms of the interface."""
    index = shared / "data" / "complexes" / "bm5" / "index.json.gz"
    entries = json.loads(gzip.decompress(index.read_bytes()))
    return next(entry["i_rmsd"] for entry in entries if entry["id"] == name)


def random_motion(seed):
    random = np.random.default_rng(seed)
    q = np.linalg.qr(random.normal(size=(3, 3)))[0]
    q[:, 0] *= np.linalg.det(q)
    return torch.from_numpy(q), torch.from_numpy(random.normal(size=3) * 30)
