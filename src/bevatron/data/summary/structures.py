"""Statistics of a data set of structures, computed shard by shard by `prepare`.

A summary is a tree of numbers; merging adds them, except under the keys ``min`` and ``max``. It
goes into the manifest, for `bevatron inspect` and for checks before training.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from bevatron.typing import Array, Arrays, FloatArray

BINS_PER_OCTAVE = 4
"""Number of histogram bins for each doubling of the size."""


def summarise_structures(samples: Sequence[Arrays]) -> dict[str, Any]:
    """Summarise a list of structures with neighbours.

    Parameters
    ----------
    samples : each with `bevatron.data.samples.STRUCTURE_FIELDS`

    Returns
    -------
    dict
        ``all`` and, by the number of the source file, ``files``: each with ``structures``,
        ``atoms``, ``edges``, ``labels`` (structures with energy, forces, stress, and with none of
        them), ``elements`` (atoms by atomic number), ``neighbours`` (per atom: min, max, and
        ``histogram``: atoms by number of neighbours; the mean is edges / atoms), ``distances``
        (between neighbours, Å; min), ``sizes`` (atoms and edges per structure: min, max and
        histogram by the lower bound of the bin), ``energy_per_atom`` (eV; min, max, sum) and
        ``forces`` (eV/Å; components, sum of squares, max). ``groups`` and ``heads`` count
        structures by name and number.

    Examples
    --------
    >>> merge([{"structures": 2, "sizes": {"max": 9}}, {"structures": 1, "sizes": {"max": 20}}])
    {'structures': 3, 'sizes': {'max': 20}}
    """
    parts = [_summarise(sample) for sample in samples]
    files = [
        {str(int(sample["source"][0])): part} for sample, part in zip(samples, parts, strict=True)
    ]
    groups = [{bytes(sample["group"].astype(np.uint8)).decode(): 1} for sample in samples]
    return {
        "all": merge(parts),
        "files": merge(files),
        "groups": merge(groups),
        "heads": merge([{str(int(sample["head"])): 1} for sample in samples]),
    }


def edge_lengths(sample: Arrays) -> FloatArray:
    """Return the distances between neighbours of a structure, [E] Å."""
    senders, receivers = sample["edges"][:, 0], sample["edges"][:, 1]
    positions = np.asarray(sample["positions"], dtype=np.float64)
    shifts = np.asarray(sample["edge_shifts"], dtype=np.float64)
    moved = shifts @ np.asarray(sample["cell"], dtype=np.float64)
    lengths: FloatArray = np.linalg.norm(positions[receivers] - positions[senders] + moved, axis=1)
    return lengths


def merge(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge summaries; keys keep the order of their first appearance.

    Raises TypeError if a key is a number in one part and a mapping in another.
    """
    result: dict[str, Any] = {}
    for part in parts:
        _merge_into(result, part)
    return result


def _merge_into(result: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if isinstance(value, Mapping):
            _merge_into(result.setdefault(key, {}), value)
        elif key not in result:
            result[key] = value
        elif key == "min":
            result[key] = min(result[key], value)
        elif key == "max":
            result[key] = max(result[key], value)
        else:
            result[key] = result[key] + value


def histogram_bin(size: int) -> int:
    """Return the lower bound of the histogram bin of ``size``.

    Examples
    --------
    >>> [histogram_bin(size) for size in (0, 1, 7, 8, 100)]
    [0, 1, 6, 8, 90]
    """
    if size <= 0:
        return 0
    exponent = int(np.floor(np.log2(size) * BINS_PER_OCTAVE + 1e-9))
    lower = _lower_bound(exponent)
    return _lower_bound(exponent - 1) if lower > size else lower


def _lower_bound(exponent: int) -> int:
    return int(np.floor(2 ** (exponent / BINS_PER_OCTAVE) + 1e-9))


def _summarise(sample: Arrays) -> dict[str, Any]:
    num_atoms = len(sample["atomic_numbers"])
    num_edges = len(sample["edges"])
    energy = float(sample["energy"])
    labels = {
        "energy": int(np.isfinite(energy)),
        "forces": int(num_atoms > 0 and len(sample["forces"]) == num_atoms),
        "stress": int(np.isfinite(sample["stress"]).all()),
    }
    part: dict[str, Any] = {
        "structures": 1,
        "atoms": num_atoms,
        "edges": num_edges,
        "labels": {**labels, "none": int(not any(labels.values()))},
        "elements": _counts(sample["atomic_numbers"]),
        "sizes": {"atoms": size_range(num_atoms), "edges": size_range(num_edges)},
    }
    if num_atoms:
        degrees = np.bincount(sample["edges"][:, 1], minlength=num_atoms)
        part["neighbours"] = {
            "min": int(degrees.min()),
            "max": int(degrees.max()),
            "histogram": _counts(degrees),
        }
    if num_edges:
        part["distances"] = {"min": float(edge_lengths(sample).min())}
    if labels["energy"] and num_atoms:
        per_atom = energy / num_atoms
        part["energy_per_atom"] = {"min": per_atom, "max": per_atom, "sum": per_atom}
    if labels["forces"]:
        forces = sample["forces"].astype(np.float64)
        part["forces"] = {
            "components": forces.size,
            "sum_squares": float(np.square(forces).sum()),
            "max": float(np.abs(forces).max()),
        }
    return part


def size_range(size: int) -> dict[str, Any]:
    """Return the summary of one sample of this size."""
    return {"min": size, "max": size, "histogram": {str(histogram_bin(size)): 1}}


def _counts(values: Array) -> dict[str, int]:
    found, counts = np.unique(values, return_counts=True)
    return {str(int(v)): int(n) for v, n in zip(found, counts, strict=True)}
