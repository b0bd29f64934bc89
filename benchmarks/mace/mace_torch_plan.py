"""What both sides of the comparison with mace-torch do: data, split, batches, model, training."""

from pathlib import Path
from typing import Any

import numpy as np
from ase.io import read

from bevatron.data.packing import pack

DATASETS = {"acac": "acac_train.extxyz.gz", "ethanol_methanol": "ethanol_methanol_train.extxyz.gz"}
SEEDS = (0, 1, 2)
SPLIT_SEED = 20261120
NUM_TRAIN, NUM_VALID = 450, 100

ARCHITECTURE = {
    "num_channels": 32,
    "max_L": 1,
    "l_max": 2,
    "correlation": 2,
    "r_max": 5.0,
    "num_bessel": 8,
    "polynomial_cutoff": 5,
    "num_interactions": 2,
    "interaction_first": "RealAgnosticInteractionBlock",
    "interaction": "RealAgnosticResidualInteractionBlock",
}
TRAINING = {
    "lr": 0.01,
    "weight_decay": 5e-7,
    "ema": 0.99,
    "clip": 10.0,
    "batch_size": 10,
    "energy_weight": 1.0,
    "forces_weight": 100.0,
    "gamma": 0.84,  # 0.01 * 0.84**23 = 1.8e-4 in the last epoch: results are settled
    "epochs": 24,
}


def split(num_structures: int) -> dict[str, list[int]]:
    """Cut a data set once and for all by a seeded permutation."""
    order = np.random.default_rng(SPLIT_SEED).permutation(num_structures).tolist()
    return {
        "train": order[:NUM_TRAIN],
        "valid": order[NUM_TRAIN : NUM_TRAIN + NUM_VALID],
        "test": order[NUM_TRAIN + NUM_VALID :],
    }


def epoch_batches(seed: int, epoch: int) -> list[list[int]]:
    """Return the batches that bevatron's trainer draws, as positions in the training part."""
    size = int(TRAINING["batch_size"])
    plan = pack(np.ones(NUM_TRAIN), None, 1, seed, epoch, "fixed_count", batch_size=size)
    return [batch.tolist() for batch in plan[0]]


def make_plan(data: Path) -> dict[str, Any]:
    """Put all of it together; ``data`` is the folder with the structures."""
    parts = {}
    for name, file in DATASETS.items():
        path = data / file
        parts[name] = {"file": str(path), **split(len(read(path, index=":")))}
    return {
        "architecture": ARCHITECTURE,
        "training": TRAINING,
        "datasets": parts,
        "batches": {
            seed: [epoch_batches(seed, e) for e in range(int(TRAINING["epochs"]))] for seed in SEEDS
        },
    }
