"""Values of labels: extracted from a frame, converted to one shape and unit, checked."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from bevatron.data.readers.base import LARGEST_LABEL, RawFrame
from bevatron.data.readers.labels import LabelKeys, LabelOptions
from bevatron.errors import DataError
from bevatron.typing import FloatArray


def numbers(value: Any) -> FloatArray:
    """Turn text such as "1 2 3", "[[1, 2], [3, 4]]" or any array into a flat float64 array.

    Raises ValueError if there is anything but numbers.
    """
    if isinstance(value, str):
        words = value.removeprefix("_JSON").translate(_BRACKETS).split()
        try:
            return np.array([float(word) for word in words])
        except ValueError:
            # Fortran writes 1.0D-3.
            return np.array([float(word.replace("D", "E").replace("d", "e")) for word in words])
    return np.asarray(value, dtype=np.float64).ravel()


_BRACKETS = str.maketrans("[](){},", "       ")


@dataclass(frozen=True)
class Labels:
    """The labels of one frame; NaN or no rows where absent."""

    energy: float
    forces: FloatArray
    stress: FloatArray
    weights: FloatArray
    head: int
    group: str


def extract_labels(frame: RawFrame, keys: LabelKeys, options: LabelOptions) -> Labels:
    """Extract the labels of a frame.

    Raises DataError for values that are not numbers, not finite or of the wrong shape, and for two
    names with different values. The caller adds file and frame.
    """
    group = str(frame.info.get(options.group_key, ""))
    return Labels(
        energy=_energy(frame, keys, options),
        forces=_forces(frame, keys, options),
        stress=_stress(frame, keys, options),
        weights=_weights(frame, options, group),
        head=_head(frame, options),
        group=group,
    )


def _values(name: str, value: Any) -> FloatArray:
    try:
        return numbers(value)
    except (ValueError, TypeError):
        raise DataError(f"'{name}' is {value!r:.60}, not numbers") from None


def _finite(what: str, name: str, values: FloatArray, options: LabelOptions) -> bool:
    """Whether float32 holds the values; else it is an error, or they are absent for prediction."""
    if (np.abs(values) <= LARGEST_LABEL).all():
        return True
    if options.allow_unlabelled:
        return False
    raise DataError(
        f"the {what} '{name}' holds NaN or infinity, or a number beyond {LARGEST_LABEL:.1e}"
    )


def _energy(frame: RawFrame, keys: LabelKeys, options: LabelOptions) -> float:
    name = keys.names.get("energy")
    if name is None or frame.info.get(name) is None:
        return float("nan")
    energy = _one(name, frame.info[name])
    if not _finite("energy", name, energy, options):
        return float("nan")
    for rival in keys.rivals.get("energy", ()):
        if frame.info.get(rival) is not None:
            other = _one(rival, frame.info[rival])
            _refuse_difference("energy", name, energy, rival, other, 1e-8, 1e-4)
    return float(energy[0])


def _one(name: str, value: Any) -> FloatArray:
    values = _values(name, value)
    if values.size != 1:
        raise DataError(f"the energy '{name}' has {values.size} numbers; expected one")
    return values


def _forces(frame: RawFrame, keys: LabelKeys, options: LabelOptions) -> FloatArray:
    absent = np.zeros((0, 3))
    name = keys.names.get("forces")
    value = _per_atom(frame, name) if name else None
    if name is None or value is None:
        return absent
    forces = _force_array(frame, name, value)
    if not _finite("forces", name, forces, options):
        return absent
    for rival in keys.rivals.get("forces", ()):
        other = _per_atom(frame, rival)
        if other is not None:
            other = _force_array(frame, rival, other)
            _refuse_difference("forces", name, forces, rival, other, 1e-4, 1e-4)
    return forces


def _per_atom(frame: RawFrame, name: str) -> Any:
    value = frame.arrays.get(name)
    return frame.info.get(name) if value is None else value


def _force_array(frame: RawFrame, name: str, value: Any) -> FloatArray:
    num_atoms = len(frame.numbers)
    if isinstance(value, str) or np.shape(value) != (num_atoms, 3):
        shape = "text" if isinstance(value, str) else f"shape {np.shape(value)}"
        raise DataError(f"the forces '{name}' have {shape}; expected ({num_atoms}, 3)")
    try:
        return np.ascontiguousarray(value, dtype=np.float64)
    except (ValueError, TypeError):
        raise DataError(f"the forces '{name}' are not numbers") from None


def _stress(frame: RawFrame, keys: LabelKeys, options: LabelOptions) -> FloatArray:
    """Stress of a frame, from virials (stress = -virials / volume) if it has no stress itself."""
    found = [
        (name, stress)
        for quantity in ("stress", "virials")
        for name in (keys.names.get(quantity), *keys.rivals.get(quantity, ()))
        if name is not None and frame.info.get(name) is not None and frame.pbc.any()
        for stress in [_stress_of(frame, name, quantity == "virials", options)]
        if stress is not None
    ]
    if not found:
        return np.full((3, 3), np.nan)
    name, stress = found[0]
    for rival, other in [] if options.allow_unlabelled else found[1:]:
        _refuse_difference("stress", name, stress, rival, other, 1e-2, 1e-5)
    return stress


def _stress_of(
    frame: RawFrame, name: str, is_virials: bool, options: LabelOptions
) -> FloatArray | None:
    what = "virials" if is_virials else "stress"
    values = _values(name, frame.info[name])
    if values.size not in {6, 9}:
        raise DataError(
            f"the {what} '{name}' have {values.size} numbers; expected 9 (3x3) or 6 "
            "(xx yy zz yz xz xy)"
        )
    if not _finite(what, name, values, options):
        return None
    # ASE's Voigt order.
    matrix = values[[0, 5, 4, 5, 1, 3, 4, 3, 2]] if values.size == 6 else values
    matrix = matrix.reshape(3, 3)
    if np.abs(matrix - matrix.T).max() > 1e-2 * np.abs(matrix).max() + 1e-9:
        raise DataError(f"the {what} '{name}' are not symmetric")
    volume = abs(float(np.linalg.det(frame.cell)))
    if volume < 1e-6:
        raise DataError(f"the {what} '{name}' are given, but the cell has no volume")
    matrix = (matrix + matrix.T) / 2
    return -matrix / volume if is_virials else matrix


def _refuse_difference(
    quantity: str,
    name: str,
    values: FloatArray,
    rival: str,
    others: FloatArray,
    relative: float,
    absolute: float,
) -> None:
    scale = max(float(np.abs(values).max(initial=0.0)), float(np.abs(others).max(initial=0.0)))
    difference = np.abs(values - others)
    if bool((difference <= relative * scale + absolute).all()):
        return
    worst = int(difference.argmax())
    raise DataError(
        f"both '{name}' ({values.flat[worst]:.8g}) and '{rival}' ({others.flat[worst]:.8g}) hold "
        f"{quantity} and differ; set {quantity}_key to the right one"
    )


def _weights(frame: RawFrame, options: LabelOptions, group: str) -> FloatArray:
    info = frame.info
    names = (
        (options.weight_key,),
        (options.energy_weight_key, "energy_weight"),
        (options.forces_weight_key, "forces_weight"),
        (options.stress_weight_key, "stress_weight", "config_virials_weight"),
    )
    weights = np.ones(4)
    for i, candidates in enumerate(names):
        name = next((n for n in candidates if n in info), None)
        if name is not None:
            values = _values(name, info[name])
            if values.size != 1 or not np.isfinite(values[0]) or values[0] < 0:
                raise DataError(
                    f"the weight '{name}' is {info[name]!r:.40}; expected a number >= 0"
                )
            weights[i] = values[0]
    weights[0] *= options.group_weights.get(group, 1.0)
    return weights


def _head(frame: RawFrame, options: LabelOptions) -> int:
    name = frame.info.get(options.head_key)
    if name is None or not options.heads:
        return 0
    return _head_number(str(name), options.heads, options.head_key)


@lru_cache(maxsize=256)
def _head_number(name: str, heads: tuple[str, ...], key: str) -> int:
    if name not in heads:
        raise DataError(f"the head '{name}' in '{key}' is not one of {', '.join(heads)}")
    return heads.index(name)
