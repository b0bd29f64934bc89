"""Structures and small models for the tests of MACE."""

import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from bevatron.data.neighbours import neighbour_list
from bevatron.data.samples import collate_structures
from bevatron.models.mace import MACE, MaceConfig

sys.path.insert(0, str(Path(__file__).parent))


def make_sample(
    numbers, positions, cell=None, pbc=False, *, cutoff=3.5, head=0, group=b"", **labels
):
    """One structure with its neighbours; labels are energy, forces, stress and weights."""
    positions = np.asarray(positions, dtype=np.float64).reshape(-1, 3)
    cell = np.zeros((3, 3)) if cell is None else np.asarray(cell, dtype=np.float64)
    pbc = np.broadcast_to(np.asarray(pbc, dtype=bool), 3).copy()
    edges, shifts = neighbour_list(positions, cell, pbc, cutoff)
    return {
        "atomic_numbers": np.asarray(numbers, dtype=np.int32),
        "positions": positions,
        "cell": cell,
        "pbc": pbc,
        "energy": np.float64(labels.get("energy", np.nan)),
        "forces": np.asarray(labels.get("forces", np.zeros((0, 3))), dtype=np.float64),
        "stress": np.asarray(labels.get("stress", np.full((3, 3), np.nan)), dtype=np.float64),
        "weights": np.asarray(labels.get("weights", np.ones(4)), dtype=np.float64),
        "head": np.int32(head),
        "source": np.zeros(2, dtype=np.int64),
        "group": np.frombuffer(group, dtype=np.uint8),
        "edges": edges,
        "edge_shifts": shifts,
    }


def make_batch(*samples, weights=None):
    """Collate samples."""
    return collate_structures(
        samples, np.arange(len(samples)), [1.0] * len(samples) if weights is None else weights
    )


def random_molecule(n=5, seed=0, elements=(1, 6, 8), side=2.6, **arguments):
    """Atoms at random places at least 0.8 Å apart."""
    rng = np.random.default_rng(seed)
    positions = [rng.uniform(0, side, 3)]
    while len(positions) < n:
        candidate = rng.uniform(0, side, 3)
        if min(np.linalg.norm(candidate - p) for p in positions) > 0.8:
            positions.append(candidate)
    return make_sample(rng.choice(elements, n), np.array(positions), **arguments)


def random_crystal(seed=0, cutoff=3.5, **arguments):
    """Three atoms in a skewed cell smaller than the cutoff."""
    rng = np.random.default_rng(seed)
    cell = np.array([[3.1, 0.0, 0.2], [0.4, 2.9, 0.0], [0.0, -0.3, 3.4]])
    fractions = np.array([[0.05, 0.0, 0.1], [0.5, 0.45, 0.55], [0.1, 0.6, 0.5]])
    positions = fractions @ cell + rng.normal(0, 0.05, (3, 3))
    return make_sample((1, 6, 8), positions, cell, True, cutoff=cutoff, **arguments)


@functools.cache
def _tiny(dtype, seed, changes):
    values = {
        "num_channels": 4,
        "max_L": 1,
        "l_max": 2,
        "correlation": 2,
        "r_max": 3.5,
        "num_bessel": 5,
        "radial_mlp": (8, 8),
        "readout_width": 4,
        "avg_num_neighbors": 4.0,
        "atomic_numbers": (1, 6, 8),
        "atomic_energies": ((-13.6, -1029.0, -2041.0),),
        "scale": (1.0,),
        "shift": (0.1,),
        **dict(changes),
    }
    torch.manual_seed(seed)
    return MACE(MaceConfig(**values), dtype)


def tiny_model(dtype=torch.float64, seed=0, **changes):
    """A model of four channels with random weights; the same for the same arguments."""
    import copy

    return copy.deepcopy(_tiny(dtype, seed, tuple(sorted(changes.items()))))


@pytest.fixture(scope="session")
def structures():
    """Functions that make samples and batches."""

    class Structures:
        sample = staticmethod(make_sample)
        batch = staticmethod(make_batch)
        molecule = staticmethod(random_molecule)
        crystal = staticmethod(random_crystal)

    return Structures


@pytest.fixture(scope="session")
def tiny():
    """Function that makes a small model."""
    return tiny_model
