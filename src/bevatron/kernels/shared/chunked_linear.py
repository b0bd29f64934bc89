"""Matmuls for operators that run one chunk of rows at a time."""

from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from bevatron.kernels.shared.launch import on_gpu
from bevatron.kernels.shared.rows import indexable_by_32_bits
from bevatron.kernels.shared.standing_weights import once

CHUNK_BYTES = 128 * 2**20
"""Total size of all buffers of one chunk."""
LARGE = 3
"""Multiple of `CHUNK_BYTES` for operators whose matmuls would otherwise have too few rows."""
MANY_ROWS = 4096
"""From this number on one matmul for several layers is faster, copies of its parts included."""
CHUNK_MULTIPLE = 1024
"""A chunk has a multiple of this many rows, so that matmuls consist of whole tiles."""


def chunks(
    rows: int, bytes_per_row: int, multiple: int | None = None, times: int = 1
) -> Iterator[slice]:
    """Cut rows into even chunks whose buffers take about `CHUNK_BYTES`.

    Parameters
    ----------
    rows, bytes_per_row : number of rows, and bytes of all buffers per row
    multiple : divides the rows of a chunk; `CHUNK_MULTIPLE` if not given
    times : a chunk may take this multiple of `CHUNK_BYTES`
    """
    multiple = CHUNK_MULTIPLE if multiple is None else multiple
    most = max(times * CHUNK_BYTES // max(bytes_per_row, 1) // multiple, 1) * multiple
    number = -(-rows // most)
    if number == 0:
        return
    size = -(-rows // number)
    size = -(-size // multiple) * multiple
    for first in range(0, rows, size):
        yield slice(first, min(first + size, rows))


def chunk_of(tensor: Tensor, part: slice) -> Tensor:
    """Return a chunk of rows; the tensor itself if there is only one, to save the host a view.

    Examples
    --------
    >>> x = torch.zeros(3, 2)
    >>> chunk_of(x, slice(0, 3)) is x, chunk_of(x, slice(1, 3)).shape
    (True, torch.Size([2, 2]))
    """
    whole = part.start in {0, None} and part.stop in {tensor.shape[0], None}
    return tensor if whole else tensor[part]


def linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None
) -> Tensor:
    """Compute ``x weight^T + bias`` of matrices of one type."""
    x = indexable_by_32_bits(x)
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias, x, weight.t(), out=out)


def wide_product(a: Tensor, b: Tensor, onto: Tensor | None = None) -> Tensor:
    """Compute ``a b`` of matrices of one type into a float32 result, or add it to ``onto``."""
    a, b = indexable_by_32_bits(a), indexable_by_32_bits(b)
    plain = a.dtype == torch.float32 or not on_gpu(a)
    if onto is None:
        return torch.mm(a.float(), b.float()) if plain else torch.mm(a, b, out_dtype=torch.float32)
    if plain:
        return onto.addmm_(a.float(), b.float())
    if isinstance(onto, FakeTensor):  # of a memory plan: torch 2.11 takes the type for a factor
        return onto.add_(torch.mm(a, b, out_dtype=torch.float32))
    return torch.addmm(onto, a, b, out_dtype=torch.float32, out=onto)


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Compute ``dy^T x``, summed in float32 and rounded once to the type of the weight."""
    if weight.dtype == x.dtype and on_gpu(x):
        return torch.mm(indexable_by_32_bits(dy.t()), indexable_by_32_bits(x))
    return wide_product(dy.t(), x).to(weight.dtype)


class WeightGradient:
    """The gradient of a weight, summed in float32 over chunks of rows in order.

    Parameters
    ----------
    weight : has the shape and type of the gradient
    """

    def __init__(self, weight: Tensor) -> None:
        self._like = weight
        self._total: Tensor | None = None

    def add(self, dy: Tensor, x: Tensor) -> None:
        """Add ``dy^T x`` of one chunk, accumulated by the matmul."""
        self._total = wide_product(dy.t(), x, self._total)

    def add_part(self, part: Tensor) -> None:
        """Add the gradient of one chunk, in float32."""
        self._total = part if self._total is None else self._total.add_(part)

    def total(self) -> Tensor:
        """Return the sum in float32."""
        if self._total is None:
            return torch.zeros(self._like.shape, dtype=torch.float32, device=self._like.device)
        return self._total

    def result(self) -> Tensor:
        """Return the sum, in the type of the weight."""
        return self.total().to(self._like.dtype)


class BiasGradient:
    """The gradient of a bias, summed in float32 over chunks of rows in order."""

    def __init__(self, bias: Tensor | None, like: Tensor) -> None:
        self._bias, self._like = bias, like
        self._total: Tensor | None = None

    def add(self, dy: Tensor) -> None:
        """Add one chunk, if there is a bias."""
        if self._bias is not None:
            self.add_part(_sum_of_rows(dy))

    def add_part(self, part: Tensor) -> None:
        """Add the sum over one chunk's rows, in float32."""
        self._total = part if self._total is None else self._total.add_(part)

    def result(self) -> Tensor:
        """Return the sum in the type of the bias; empty without a bias."""
        if self._bias is None:
            return self._like.new_empty(0)
        if self._total is None:
            return torch.zeros_like(self._bias)
        return self._total.to(self._bias.dtype)


class Linear:
    """Linear layers on the same rows as one matmul, and their gradients, summed over chunks.

    Parameters
    ----------
    dtype : type of the matmuls; other weights are rounded to it
    weights : [K, C] each; the result concatenates the layers
    biases : [K] each, or None
    """

    def __init__(
        self,
        dtype: torch.dtype,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None] = (None,),
    ) -> None:
        self._weights = weights
        self._biases = (*biases, *[None] * (len(weights) - len(biases)))
        self._has_bias = any(bias is not None for bias in biases)
        self._sizes = [weight.shape[0] for weight in weights]
        self._whole: list[Tensor] = []
        self.matrix = once(lambda: _joined(weights, dtype), *weights, to=dtype)
        """The concatenated weights [sum of K, C], in the type of the matmuls."""
        self._dweight = WeightGradient(self.matrix)
        self._dbiases = [BiasGradient(bias, self.matrix) for bias in self._biases]

    @cached_property
    def bias(self) -> Tensor | None:
        """The concatenated biases, if there is one, in the type of the matmuls."""
        if not self._has_bias:
            return None

        def join() -> Tensor:
            pairs = zip(self._biases, self._sizes, strict=True)
            given = [self.matrix.new_zeros(n) if bias is None else bias for bias, n in pairs]
            return _joined(given, self.matrix.dtype)

        return once(join, *self._biases, to=(self.matrix.dtype, *self._sizes))

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Multiply rows [n, C] to [n, sum of K]."""
        return linear(x, self.matrix, self.bias, out)

    def rectified(self, x: Tensor) -> Tensor:
        """Return ``relu`` of the product; with a bias, cuBLAS computes it before it rounds."""
        if self.bias is None:
            return self(x).relu_()
        x = indexable_by_32_bits(x)
        found: Tensor = torch._addmm_activation(self.bias, x, self.matrix.t())  # noqa: SLF001
        return found

    def backward(self, dy: Tensor, out: Tensor | None = None, *, add: bool = False) -> Tensor:
        """Return the gradient of the rows; ``add`` adds it to what ``out`` holds."""
        dy = indexable_by_32_bits(dy)
        if out is not None and add:
            return torch.addmm(out, dy, self.matrix, out=out)
        return torch.mm(dy, self.matrix, out=out)

    def keep(
        self, dy: Tensor, x: Tensor, first_sum: Tensor | None = None, *, only: bool = False
    ) -> None:
        """Add a chunk to the gradients of weights and biases.

        ``first_sum`` is the sum over rows of the first layer's part of ``dy``, if already known.
        Gradients of an ``only`` chunk are not accumulated, so the matmul rounds them.
        """
        parts = [dy] if len(self._sizes) == 1 else dy.split_with_sizes(self._sizes, dim=1)
        if only and len(parts) > 1 and dy.shape[0] >= MANY_ROWS and self._is_rounded_once(x):
            whole = weight_gradient(dy, x, self._weights[0])
            # Copies: what an operator returns must not lie in one piece of memory.
            self._whole = [part.clone() for part in whole.split_with_sizes(self._sizes)]
        elif only:
            both = zip(parts, self._weights, strict=True)
            self._whole = [weight_gradient(part, x, weight) for part, weight in both]
        else:
            self._dweight.add(dy, x)
        if not self._has_bias:
            return
        if first_sum is not None:
            self._dbiases[0].add_part(first_sum)
        pairs = list(zip(self._dbiases, parts, strict=True))
        for bias, part in pairs[first_sum is not None :]:
            bias.add(part)

    def _is_rounded_once(self, x: Tensor) -> bool:
        """Whether all gradients have the type of the matmuls."""
        return all(weight.dtype == x.dtype for weight in self._weights)

    def gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return the gradients of weights and biases in their types; empty without a bias."""
        biases = [bias.result() for bias in self._dbiases]
        if self._whole:
            return self._whole, biases
        if len(self._weights) == 1:
            return [self._dweight.total().to(self._weights[0].dtype)], biases
        parts = self._dweight.total().split_with_sizes(self._sizes)
        # Copies, because the results of a custom operator must not share memory.
        weights = [
            part.to(weight.dtype, copy=True)
            for part, weight in zip(parts, self._weights, strict=True)
        ]
        return weights, biases


def _sum_of_rows(rows: Tensor) -> Tensor:
    if on_gpu(rows):
        from bevatron.kernels.shared.triton_row_sums import sum_rows

        found: Tensor = sum_rows(rows)
        return found
    return rows.sum(0, dtype=torch.float32)


def concatenated(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate weights and round them to a type; without gradients in one launch."""
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return torch.cat([*tensors]).to(dtype)
    return _joined(tensors, dtype)


def _joined(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate tensors in a type."""
    first, *others = tensors
    if not others:
        return first.to(dtype).contiguous()
    if all(each.dtype == dtype for each in tensors):
        return torch.cat(list(tensors))
    sizes = [each.shape[0] for each in tensors]
    joint = first.new_empty((sum(sizes), *first.shape[1:]), dtype=dtype)
    # One launch rounds and places them all. Torch's runs one program for each of them.
    if on_gpu(joint) and dtype != torch.float64:
        from bevatron.kernels.shared.triton_joined import MOST, join

        if len(tensors) <= MOST:
            join(tensors, joint)
            return joint
    torch._foreach_copy_(list(joint.split_with_sizes(sizes)), list(tensors))
    return joint
