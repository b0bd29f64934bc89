"""Matrix products for operators that work on a chunk of rows at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

CHUNK_BYTES = 128 * 2**20
"""Of all buffers of one chunk together."""
CHUNK_MULTIPLE = 1024
"""Rows of a chunk are a multiple: products of whole tiles."""


def chunks(rows: int, bytes_per_row: int, multiple: int | None = None) -> Iterator[slice]:
    """Cut rows into even chunks whose buffers take about `CHUNK_BYTES`.

    Parameters
    ----------
    rows, bytes_per_row
        What there is, and the bytes of all buffers for one row.
    multiple
        Of which the rows of a chunk are one; `CHUNK_MULTIPLE` if not given.
    """
    multiple = CHUNK_MULTIPLE if multiple is None else multiple
    most = max(CHUNK_BYTES // max(bytes_per_row, 1) // multiple, 1) * multiple
    number = -(-rows // most)
    if number == 0:
        return
    size = -(-rows // number)
    size = -(-size // multiple) * multiple
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute ``x weight^T + bias`` of matrices of one type."""
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


class WeightGradient:
    """The gradient of a weight, summed in float32 over chunks of rows in their order.

    Parameters
    ----------
    weight
        Its shape and type are the gradient's.
    """

    def __init__(self, weight: Tensor) -> None:
        self._like = weight
        self._total: Tensor | None = None

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Add ``dy^T x`` of one chunk."""
        if dy.dtype == torch.float32 or dy.device.type != "cuda":
            part = torch.mm(dy.t().float(), x.float())
        else:
            part = torch.mm(dy.t(), x, out_dtype=torch.float32)
        self._total = part if self._total is None else self._total.add_(part)

    def result(self) -> Tensor:
        """Return the sum, in the type of the weight."""
        if self._total is None:
            return torch.zeros_like(self._like, memory_format=torch.contiguous_format)
        return self._total.to(self._like.dtype)


class BiasGradient:
    """The gradient of a bias, summed in float32 over chunks of rows in their order."""

    def __init__(self, bias: Tensor | None, like: Tensor) -> None:
        self._bias, self._like = bias, like
        self._total: Tensor | None = None

    def add(self, dy: Tensor) -> None:
        """Add one chunk, if there is a bias."""
        if self._bias is None:
            return
        part = dy.sum(0, dtype=torch.float32)
        self._total = part if self._total is None else self._total.add_(part)

    def result(self) -> Tensor:
        """Return the sum in the type of the bias; without a bias, no elements."""
        if self._bias is None:
            return self._like.new_empty(0)
        if self._total is None:
            return torch.zeros_like(self._bias)
        return self._total.to(self._bias.dtype)
