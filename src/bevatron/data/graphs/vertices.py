"""Checks of the data of vertices: features, labels and splits."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.data.dataset import ROLES
from bevatron.data.graphs.graph import Labels, SparseFeatures, in_float32
from bevatron.data.graphs.options import GraphOptions
from bevatron.errors import DataError
from bevatron.typing import Array, BoolArray

Features = npt.NDArray[np.floating] | SparseFeatures

SPLIT_NAMES: dict[str, tuple[str, ...]] = {
    "train": ("train", "train_mask", "train_masks", "train_idx", "idx_train"),
    "valid": (
        "valid", "val", "valid_mask", "val_mask", "valid_masks", "val_masks",
        "valid_idx", "val_idx", "idx_valid", "idx_val",
    ),
    "test": ("test", "test_mask", "test_masks", "test_idx", "idx_test"),
}  # fmt: skip
"""Role -> names under which files hold it."""

_CHUNK = 2**20  # rows that are checked at a time


def checked_features(
    features: Features | Array | None, num_nodes: int, options: GraphOptions, name: str
) -> Features | None:
    """Check features and normalise them as the options say.

    Floating-point numbers keep their type (float16 becomes float32), others become float32. Raises
    DataError for another number of rows than vertices, or a value that is not finite in float32.
    """
    if features is None:
        return None
    if isinstance(features, SparseFeatures):
        check_rows(features.shape[0], num_nodes, "features", name)
        if len(features.indices) and not (
            0 <= int(features.indices.min()) <= int(features.indices.max()) < features.width
        ):
            raise DataError(
                f"{name}: sparse features point outside of the {features.width} columns"
            )
        if features.values is not None:
            _check_finite(features.values[:, None], name, features.indptr)
        return _scaled_sparse(features) if options.features == "rows" else features
    array: npt.NDArray[np.floating] = _as_floating(
        features if features.ndim > 1 else features[:, None], name
    )
    if array.ndim != 2:
        raise DataError(f"{name}: features have shape {array.shape}, expected one row per vertex")
    check_rows(len(array), num_nodes, "features", name)
    _check_finite(array, name)
    if options.features == "rows":
        total = np.abs(array).sum(axis=1, keepdims=True)
        array = array / np.where(total > 0, total, 1).astype(array.dtype)
    return array


def checked_labels(labels: Array | None, num_nodes: int, name: str) -> Labels | None:
    """Check labels; -1 or NaN is a vertex without one.

    Raises DataError for another number of labels than vertices, or numbers that are not classes.

    Returns
    -------
    [N] int32 classes, or [N, T] float32 for answers to several questions.
    """
    if labels is None:
        return None
    if labels.ndim == 2 and labels.shape[1] == 1:
        labels = labels[:, 0]
    if labels.ndim not in {1, 2} or labels.dtype.kind not in "iubf":
        raise DataError(
            f"{name}: labels are {labels.dtype} of shape {labels.shape}, expected one class per "
            "vertex, or a row of answers 0 and 1"
        )
    check_rows(len(labels), num_nodes, "labels", name)
    if labels.ndim == 2:
        return _answers(labels, name)
    if labels.dtype.kind == "f":
        whole = np.where(np.isnan(labels), -1, labels)
        wrong = np.flatnonzero((whole != np.round(whole)) | np.isinf(whole))
    else:
        whole, wrong = labels, np.empty(0, dtype=np.int64)
    if not len(wrong):
        wrong = np.flatnonzero((whole < -1) | (whole >= 2**31 - 1))
    if len(wrong):
        raise DataError(
            f"{name}: the label of vertex {wrong[0]} is {labels[wrong[0]]}, expected a class from "
            "0, or -1 for none"
        )
    return whole.astype(np.int32)


def _answers(labels: Array, name: str) -> npt.NDArray[np.float32]:
    answers = labels.astype(np.float32)
    if labels.dtype.kind == "i":
        answers[answers == -1] = np.nan
    wrong = np.argwhere(~np.isnan(answers) & (answers != 0) & (answers != 1))
    if len(wrong):
        vertex, question = wrong[0]
        raise DataError(
            f"{name}: answer {question} of vertex {vertex} is {labels[vertex, question]}, expected "
            "0 or 1 (or NaN for none); classes belong in one column"
        )
    return answers


def checked_roles(
    splits: Mapping[str, Array],
    labels: Labels | None,
    num_nodes: int,
    options: GraphOptions,
    name: str,
) -> npt.NDArray[np.uint8] | None:
    """Turn splits, as masks or as numbers of vertices, into one role per vertex.

    Raises DataError for splits that overlap, point outside, or hold a vertex without a label.

    Parameters
    ----------
    splits : arrays of the file; those named in `SPLIT_NAMES` count
    """
    if options.random_split is not None:
        return _random_roles(labels, num_nodes, options, name)
    roles = np.zeros(num_nodes, dtype=np.uint8)
    any_found = False
    for number, role in enumerate(ROLES, start=1):
        key = next((key for key in SPLIT_NAMES[role] if key in splits), None)
        if key is None:
            continue
        any_found = True
        members = _members(splits[key], num_nodes, options.split, f"{name}: split '{key}'")
        taken = members[roles[members] != 0]
        if len(taken):
            raise DataError(
                f"{name}: vertex {taken[0]} is in the splits '{ROLES[roles[taken[0]] - 1]}' and "
                f"'{role}'; each vertex may be in one"
            )
        if labels is not None:
            blank = members[~has_label(labels)[members]]
            if len(blank):
                raise DataError(
                    f"{name}: split '{key}' holds vertex {blank[0]}, which has no label"
                )
        roles[members] = number
    if options.split and not any_found:
        raise DataError(f"{name}: holds no splits, so there is no split {options.split}")
    return roles if any_found else None


def has_label(labels: Labels) -> BoolArray:
    """Mark the vertices that have a label, [N]."""
    known: Any = labels >= 0 if labels.ndim == 1 else ~np.isnan(labels).all(axis=1)
    return np.asarray(known, dtype=bool)


def check_rows(found: int, num_nodes: int, what: str, name: str) -> None:
    """Refuse features or labels of another number of vertices; DataError naming both numbers."""
    if found != num_nodes:
        raise DataError(f"{name}: holds {what} of {found:,} vertices, the graph has {num_nodes:,}")


def _members(values: Any, num_nodes: int, which: int, where: str) -> Array:
    if values.ndim == 2:
        if values.shape[0] != num_nodes and values.shape[-1] == num_nodes:
            values = values.T
        if which >= values.shape[1]:
            raise DataError(f"{where}: there is no split {which}, the file holds {values.shape[1]}")
        values = values[:, which]
    elif which:
        raise DataError(f"{where}: there is no split {which}, the file holds 1")
    if _is_integer_mask(values):
        values = values.astype(bool)
    if values.dtype.kind == "b":
        if len(values) != num_nodes:
            raise DataError(
                f"{where}: the mask has {len(values):,} entries, the graph has {num_nodes:,} "
                "vertices"
            )
        return np.flatnonzero(values)
    if values.dtype.kind not in "iu" or values.ndim != 1:
        raise DataError(f"{where}: expected a mask or numbers of vertices, got {values.dtype}")
    wrong = values[(values < 0) | (values >= num_nodes)]
    if len(wrong):
        raise DataError(f"{where}: there is no vertex {wrong[0]}, the graph has {num_nodes:,}")
    return np.unique(values.astype(np.int64))


def _is_integer_mask(values: Any) -> bool:
    """Whether whole numbers are a mask: as numbers of vertices, 0 and 1 would be repeated."""
    whole = values.ndim == 1 and values.dtype.kind in "iu" and len(values) > 2
    return bool(whole and values.min() >= 0 and values.max() <= 1)


def _random_roles(
    labels: Labels | None, num_nodes: int, options: GraphOptions, name: str
) -> npt.NDArray[np.uint8]:
    if labels is None:
        raise DataError(f"{name}: has no labels, so there is nothing to split at random")
    known = np.flatnonzero(has_label(labels))
    order = np.random.default_rng(options.split_seed).permutation(known)
    shares = np.cumsum([0.0, *(options.random_split or ())])
    bounds = np.round(shares * len(known)).astype(np.int64)
    roles = np.zeros(num_nodes, dtype=np.uint8)
    for number in range(len(ROLES)):
        roles[order[bounds[number] : bounds[number + 1]]] = number + 1
    return roles


def _as_floating(features: Array, name: str) -> Any:
    if features.dtype in {np.dtype(np.float32), np.dtype(np.float64)}:
        return features
    if features.dtype.kind not in "fiub":
        raise DataError(f"{name}: features are of type {features.dtype}, expected numbers")
    return features.astype(np.float32)


def _check_finite(values: npt.NDArray[np.floating], name: str, indptr: Array | None = None) -> None:
    for start in range(0, len(values), _CHUNK):
        finite = in_float32(values[start : start + _CHUNK])
        wrong = np.flatnonzero(~finite.all(axis=1))
        if len(wrong):
            place = start + int(wrong[0])
            value = values[place][~finite[wrong[0]]][0]
            vertex = place if indptr is None else int(np.searchsorted(indptr, place, "right")) - 1
            raise DataError(
                f"{name}: a feature of vertex {vertex} is {value}, expected a number that float32 "
                "holds"
            )


def _scaled_sparse(features: SparseFeatures) -> SparseFeatures:
    counts = np.diff(features.indptr)
    if features.values is None:
        total: Any = counts.astype(np.float32)
        values: npt.NDArray[np.floating] = np.ones(len(features.indices), dtype=np.float32)
    else:
        values = features.values
        owner = np.repeat(np.arange(len(counts)), counts)
        total = np.bincount(owner, weights=np.abs(values), minlength=len(counts))
        total = total.astype(values.dtype)
    scale = 1 / np.where(total > 0, total, 1)
    scaled = values * np.repeat(scale, counts).astype(values.dtype)
    return SparseFeatures(features.indptr, features.indices, scaled, features.width)
