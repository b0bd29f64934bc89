"""The batch of one protein sample: named tensors, ragged along tokens, atoms, rows and others.

A model of proteins holds N^2 numbers for N tokens, so a batch is one sample; a step over several
sums their gradients. It can be padded to a shape; masks mark the real entries.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from bevatron.data.padding.shape import (
    Axis,
    BatchShape,
    PaddingRule,
    RaggedFields,
    Rows,
    ragged_axes,
)
from bevatron.data.samples.flat import Movable
from bevatron.errors import DataError
from bevatron.typing import Arrays, IntArray

SAMPLES = "samples"
"""Name of the samples in logs."""


@dataclass(frozen=True)
class ProteinBatch(Movable):
    """One sample; the base of the batches of AlphaFold2 and AlphaFold3.

    A subclass adds its tensors as fields and says along which axes they are ragged.

    Attributes
    ----------
    seed : [] int64, the sample's random number, from which the random numbers of its step follow
    weight : [] float32, 1, or 0 for a sample that only fills up a rank
    indices : [1] int64 numpy, position of the sample in its data set
    """

    seed: Tensor
    weight: Tensor
    indices: IntArray

    padding: ClassVar[PaddingRule]
    ragged: ClassVar[RaggedFields]

    @property
    def sample_indices(self) -> IntArray:
        """Position of the sample in its data set, [1]."""
        return self.indices

    @property
    def sizes(self) -> Mapping[str, int]:
        """Length of every ragged axis, for logs; first the number of samples."""
        found = {SAMPLES: 1}
        for name, ragged in self.ragged.items():
            for each in ragged_axes(ragged):
                length = getattr(self, name).shape[each.dim] - each.extra
                found.setdefault(each.axis, length)
        return found

    def tensors(self) -> dict[str, Tensor]:
        """Return the input tensors of a model by name."""
        return {name: getattr(self, name) for name in self.ragged}

    def over(self, tensors: Mapping[str, Any]) -> Self:
        """Return a batch of these tensors without reference to a sample."""
        changes: dict[str, Any] = {**tensors, "indices": np.zeros(0, dtype=np.int64)}
        return replace(self, **changes)

    def padding_rows(self, shape: BatchShape) -> Mapping[str, Rows]:  # noqa: ARG002  of the protocol
        """Return what follows the real rows of each field: 0 and False."""
        return {}


def one_sample(
    samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]
) -> tuple[dict[str, Tensor], IntArray]:
    """Return the tensors of the only sample of a batch, with ``seed`` and ``weight``.

    Raises DataError if there are several.
    """
    if len(samples) != 1:
        raise DataError(
            f"a batch of proteins is one sample, not {len(samples)}; set batch.size to 1 and "
            "optim.accumulate to the number of samples of a step"
        )
    (sample,), (weight,) = samples, weights
    tensors = {name: torch.from_numpy(np.asarray(x, order="C")) for name, x in sample.items()}
    tensors.setdefault("seed", torch.zeros((), dtype=torch.int64))
    tensors["weight"] = torch.tensor(weight, dtype=torch.float32)
    return tensors, np.asarray(indices, dtype=np.int64)


def rule(*axes: Axis) -> PaddingRule:
    """Return the padding rule of batches of one sample; the first axis decides most of the work."""
    return PaddingRule((*axes, Axis(SAMPLES, 1, counts_work=False)), samples=SAMPLES)
