"""Dropout whose mask is shared along an axis and is a function of a seed.

There is no generator state: a recomputed activation sees the same mask, and a captured step draws a
new one whenever the seed, a tensor on the device, has changed.
"""

from math import prod

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bevatron import kernels
from bevatron.kernels.graph.csr.dropout import COLUMN, HEAD, MASK, mix, threshold
from bevatron.kernels.pair.add_dropped import Shared
from bevatron.parallel.axial import own


def keep_masks(
    seed: Int[Tensor, ""], call: int, x: Float[Tensor, "*batch _ N C"], count: int, rate: float
) -> Float[Tensor, "count *batch N C"]:
    """Draw the masks of a stack of layers at once: 0 or ``1 / (1 - rate)``.

    AlphaFold2's supplement, section 1.11.6. One draw for many layers costs a handful of launches;
    the masks lack one axis of ``x``, so even those of 48 blocks are smaller than a pair.

    Parameters
    ----------
    seed : seed of the step, int64 on the device of ``x``
    call : a different number for each draw of a step
    x : the updated tensor; pairs are square, so N fits either axis
    count : number of masks
    rate : probability that a channel is dropped
    """
    shape = (count, *x.shape[:-3], *x.shape[-2:])
    low, high = seed & MASK, (seed >> 32) & MASK
    key = mix(low ^ mix((high + (call + 1) * HEAD) & MASK))
    # Every [N, C] counts from 0, so that padding N changes no real entry.
    layer = mix((torch.arange(prod(shape[:-2]), device=x.device) * HEAD + key) & MASK)
    index = torch.arange(prod(shape[-2:]), device=x.device)
    word = mix(layer[:, None] ^ mix((index + COLUMN) & MASK))
    kept = (word >= threshold(rate)).to(x.dtype)
    return kept.mul_(1.0 / (1.0 - rate)).view(shape)


def add_dropped(
    x: Float[Tensor, "*batch R N C"],
    update: Float[Tensor, "*batch R N C"],
    mask: Float[Tensor, "*batch N C"] | None,
    shared: Shared = "rows",
) -> Float[Tensor, "*batch R N C"]:
    """Add an update with dropout: `bevatron.kernels.add_dropped` with one of `keep_masks`.

    If columns share the mask, own rows of a sharded pair take their part of it.
    """
    if mask is not None and shared == "columns":
        mask = own(mask, -2)
    return kernels.add_dropped(x, update, mask, shared)
