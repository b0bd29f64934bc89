"""Broadcasts rows of tokens to their atoms, and averages rows of atoms over their tokens.

The two sums (one forward, one in the backward pass) run over the consecutive atoms of each token in
a fixed order, so that results repeat bit for bit.

Legend: A atoms, N tokens, M copies, C channels.
"""

from typing import Any, NamedTuple, Self

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.kernels import segment_sum
from bevatron.kernels.shared.standing_weights import once


class AtomTokens(NamedTuple):
    """Assignment of atoms to tokens.

    Attributes
    ----------
    token : token of every atom, ascending; padded atoms at the end have any
    ptr : offsets of the tokens' atoms; behind the last is padding
    """

    token: Int[Tensor, "*batch A"]
    ptr: Int[Tensor, "*batch _"]

    @classmethod
    def of(
        cls,
        atom_to_token: Int[Tensor, "*batch A"],
        atom_mask: Bool[Tensor, "*batch A"],
        num_tokens: int,
    ) -> Self:
        """Compute the offsets of each token's atoms.

        Parameters
        ----------
        atom_to_token : ascending
        atom_mask : false for padded atoms, all at the end
        num_tokens : N, padded ones included
        """
        token = atom_to_token.masked_fill(~atom_mask, num_tokens).contiguous()
        bounds = torch.arange(num_tokens + 1, device=token.device)
        bounds = bounds.expand(*token.shape[:-1], -1).contiguous()
        ptr = torch.searchsorted(token, bounds)
        return cls(token.clamp(max=num_tokens - 1), ptr)

    @property
    def place(self) -> Int[Tensor, "*batch A"]:
        """Number of every atom within its token, from 0."""
        A = self.token.shape[-1]
        return torch.arange(A, device=self.ptr.device) - self.ptr.gather(-1, self.token)

    def spread(self, x: Float[Tensor, "*batch M N C"]) -> Float[Tensor, "*batch M A C"]:
        """Give every atom the row of its token; gradients of padded atoms are dropped."""
        spread: Tensor = _Spread.apply(x, self.token, self.ptr)
        return spread

    def mean(self, x: Float[Tensor, "*batch M A C"]) -> Float[Tensor, "*batch M N C"]:
        """Average the rows of each token's atoms; zero for tokens without atoms."""
        counts = once(lambda: self._counts(x.dtype), self.ptr, to=x.dtype)
        return _sums(x, self.ptr) / counts

    def _counts(self, dtype: torch.dtype) -> Float[Tensor, "*batch 1 N 1"]:
        return self.ptr.diff(dim=-1).clamp(min=1)[..., None, :, None].to(dtype)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, token: Tensor, ptr: Tensor) -> Tensor:
        ctx.save_for_backward(ptr)
        index = token[..., None, :, None].expand(*x.shape[:-2], -1, x.shape[-1])
        return x.gather(-2, index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (ptr,) = ctx.saved_tensors
        return _sums(dy, ptr), None, None


def _sums(x: Float[Tensor, "*batch M A C"], ptr: Int[Tensor, "*batch _"]) -> Tensor:
    """Sum the rows of each token; the last segment of every copy holds the padding."""
    M, A, C = x.shape[-3:]
    sums = segment_sum(x.reshape(-1, C), once(lambda: _bounds(ptr, M, A), ptr, to=(M, A)))
    return sums.reshape(*x.shape[:-2], ptr.shape[-1], C)[..., :-1, :]


def _bounds(ptr: Int[Tensor, "*batch _"], M: int, A: int) -> Int[Tensor, "_"]:
    """Return the offsets of the tokens' atoms in the rows of all copies, and their end."""
    count = ptr.shape[:-1].numel() * M * A
    first = torch.arange(0, count, A, device=ptr.device).reshape(*ptr.shape[:-1], M, 1)
    starts = (first + ptr[..., None, :]).flatten()
    return torch.cat([starts, starts.new_full((1,), count)])
