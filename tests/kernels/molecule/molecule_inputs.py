"""Devices, tolerances and random inputs for tests of operators on molecules."""

import torch

from bevatron.testing import Tolerance

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16
EXACT = Tolerance(2e-6, 2e-5)
TOLERANCES = {torch.float32: EXACT, HALF: Tolerance(1e-2, 3e-2)}


def draw(*shape, dtype=torch.float32, seed=7):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def pointers(*counts):
    return torch.tensor([0, *counts], dtype=torch.int64, device=DEVICE).cumsum(0)


def molecule(num_atoms, num_bonds, seed=5):
    """Random bonds, both directions of each in rows 2k and 2k + 1."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randint(0, max(num_atoms, 1), (2, num_bonds), generator=generator)
    return torch.stack([ends, ends.flip(0)], -1).reshape(2, -1).to(DEVICE)
