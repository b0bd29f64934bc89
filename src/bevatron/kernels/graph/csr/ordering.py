"""Sorts the entries of a sparse matrix by row or by column in bounded memory."""

import itertools

import torch
from torch import Tensor

from bevatron.errors import DataError
from bevatron.kernels.shared.checks import no_tensor

PIECE = 2**28
"""Entries sorted at once; each takes about forty bytes."""


def index_type(count: int) -> torch.dtype:
    """Return the smallest integer type that indexes ``count`` elements."""
    return torch.int32 if count <= torch.iinfo(torch.int32).max else torch.int64


def expand(ptr: Tensor, dtype: torch.dtype, count: int) -> Tensor:
    """List the segment of each of ``count`` entries: 0 for the first ``ptr[1]``, and so on."""
    if count <= PIECE:
        number = torch.arange(len(ptr) - 1, device=ptr.device, dtype=dtype)
        return torch.repeat_interleave(number, ptr.diff(), output_size=count)
    segment = torch.empty(count, dtype=dtype, device=ptr.device)
    for start in range(0, count, PIECE):
        entry = torch.arange(start, min(start + PIECE, count), device=ptr.device)
        segment[start : start + PIECE] = torch.searchsorted(ptr, entry, right=True) - 1
    return segment


def check_indices(name: str, index: Tensor, count: int) -> None:
    """Refuse an index that is not a whole number or outside 0..count-1.

    Raises DataError naming the first entry that is wrong, or the type.
    """
    if index.dtype not in {torch.int32, torch.int64, torch.int16, torch.int8, torch.uint8}:
        raise no_tensor("Csr", [(name, index)]) or DataError(
            f"Csr: the {name}s of the entries are {str(index.dtype).removeprefix('torch.')}, "
            "expected whole numbers"
        )
    if len(index) == 0:
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low >= 0 and high < count:
        return
    entry = next(
        start + int(wrong[0])
        for start in range(0, len(index), PIECE)
        if len(wrong := _outside(index[start : start + PIECE], count).nonzero())
    )
    raise DataError(
        f"Csr: entry {entry} has the {name} {int(index[entry])}, expected 0 to {count - 1} for a "
        f"matrix with {count} {name}s"
    )


def order_entries(
    major: Tensor, minor: Tensor, num_major: int, num_minor: int, *, unique: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Sort entries by major, then minor index; raise DataError on a duplicate.

    Parameters
    ----------
    unique : refuse duplicates

    Returns
    -------
    tuple
        Offsets of the major indices (int64, with the end), the sorted minor indices, and the
        permutation (int64).
    """
    ptr = torch.zeros(num_major + 1, dtype=torch.int64, device=major.device)
    for start in range(0, len(major), PIECE):
        ptr[1:] += torch.bincount(major[start : start + PIECE], minlength=num_major)
    torch.cumsum(ptr, 0, out=ptr)
    dtype = index_type(num_minor)
    if len(major) <= PIECE:
        ordered, entry = _sort(major, minor, num_minor, unique)
        return ptr, ordered.to(dtype), entry
    ordered = torch.empty(len(major), dtype=dtype, device=major.device)
    entry = torch.empty(len(major), dtype=torch.int64, device=major.device)
    for first, last in _pieces(ptr):
        chosen = torch.cat(
            [
                start + _inside(major[start : start + PIECE], first, last).nonzero().squeeze(1)
                for start in range(0, len(major), PIECE)
            ]
        )
        place = slice(int(ptr[first]), int(ptr[last]))
        found, order = _sort(major[chosen], minor[chosen], num_minor, unique)
        ordered[place], entry[place] = found.to(dtype), chosen[order]
    return ptr, ordered, entry


def _sort(major: Tensor, minor: Tensor, num_minor: int, unique: bool) -> tuple[Tensor, Tensor]:
    key = major.to(torch.int64) * num_minor + minor
    key, order = torch.sort(key)
    if unique and len(key) > 1:
        twice = key[1:] == key[:-1]
        if bool(twice.any()):
            first = int(key[int(twice.nonzero()[0])])
            raise DataError(
                f"Csr: the entry of row {first // num_minor} and column {first % num_minor} is "
                f"there twice ({int(twice.sum())} such); merge duplicates first"
            )
    return key.remainder_(max(num_minor, 1)), order


def _pieces(ptr: Tensor) -> list[tuple[int, int]]:
    """Cut the major indices into pieces of about `PIECE` entries."""
    total = int(ptr[-1])
    goals = torch.arange(PIECE // 2, total, PIECE // 2, device=ptr.device)
    cuts = torch.searchsorted(ptr, goals).unique().tolist()
    bounds = sorted({0, *cuts, len(ptr) - 1})
    return list(itertools.pairwise(bounds))


def _inside(index: Tensor, first: int, last: int) -> Tensor:
    return (index >= first) & (index < last)


def _outside(index: Tensor, count: int) -> Tensor:
    return (index < 0) | (index >= count)
