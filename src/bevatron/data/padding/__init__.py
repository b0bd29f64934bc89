"""Batches padded to a fixed shape, so that a captured step can be replayed on them.

A padded batch ends with samples that count nowhere. All their labels are absent and of weight zero:
loss, gradients and metrics of the real samples keep every digit that the order of summation leaves
them. A batch that can be padded is a `Paddable`: it says which of its tensors are ragged along
which named axis, what its padding rows hold and, by a `PaddingRule`, which shapes it fits.

`StaticBatch` keeps a padded batch at a fixed address; `size_buckets` chooses the shapes of a run.
"""

from typing import TypeAlias

from bevatron.data.padding.shape import Axis, BatchShape, Paddable, PaddingRule, Ragged
from bevatron.data.padding.static_batch import StaticBatch, pad

__all__ = [
    "Axis",
    "Batch",
    "BatchShape",
    "Paddable",
    "PaddingRule",
    "Ragged",
    "StaticBatch",
    "pad",
    "pad_molecules",
    "pad_structures",
]

Batch: TypeAlias = Paddable
"""The name that `Paddable` had while there were two kinds."""

pad_structures = pad_molecules = pad
"""The names that `pad` had for each kind."""
