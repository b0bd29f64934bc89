"""Statistics of a data set of molecules, computed shard by shard by `prepare`."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from bevatron.data.samples import UNREACHABLE
from bevatron.data.summary.structures import merge, size_range
from bevatron.typing import Arrays


def summarise_molecules(samples: Sequence[Arrays]) -> dict[str, Any]:
    """Summarise a list of prepared molecules.

    Parameters
    ----------
    samples : each with the fields of `bevatron.data.samples.molecule_fields`

    Returns
    -------
    dict
        ``molecules``, ``unusable``, ``atoms``, ``bonds``, ``with_3d``, ``disconnected``,
        ``single_atoms``; ``reasons`` (rows by reason of exclusion, numbers replaced by #);
        ``elements`` (atoms by atomic number); ``sizes`` (atoms and bonds per molecule: min, max
        and histogram by the lower bound of the bin); ``targets`` (by position: known, sum,
        sum_squares, min, max).
    """
    return merge([_summarise(sample) for sample in samples])


def _summarise(sample: Arrays) -> dict[str, Any]:
    num_atoms, num_bonds = len(sample["atom_features"]), len(sample["bonds"]) // 2
    part: dict[str, Any] = {
        "molecules": 1,
        "unusable": int(num_atoms == 0),
        "atoms": num_atoms,
        "bonds": num_bonds,
        "with_3d": int(len(sample["positions"]) > 0),
        "single_atoms": int(num_atoms == 1),
        "disconnected": int(bool(np.any(sample["shortest_paths"] == UNREACHABLE))),
    }
    reason = sample["reason"].tobytes().decode()
    if reason:
        part["reasons"] = {re.sub(r"\d+", "#", reason): 1}
    if num_atoms:
        numbers, counts = np.unique(sample["atom_features"][:, 0] + 1, return_counts=True)
        part["elements"] = dict(zip(map(str, numbers.tolist()), counts.tolist(), strict=True))
        part["sizes"] = {"atoms": size_range(num_atoms), "bonds": size_range(num_bonds)}
    if "targets" in sample:
        part["targets"] = {
            str(i): {"known": 1, "sum": v, "sum_squares": v * v, "min": v, "max": v}
            if np.isfinite(v)
            else {"known": 0}
            for i, v in enumerate(sample["targets"].astype(float).tolist())
        }
    return part
