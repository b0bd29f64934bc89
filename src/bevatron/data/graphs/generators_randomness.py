"""Counter-based random numbers: they depend only on a seed and a position, on any device.

A rank that needs the random numbers of edges 10^9 ... 10^9 + 10^6 computes just these. Only int64
arithmetic modulo 2^64 is used, so CPU and GPU agree to the last bit, in any order of draws.
"""

from collections.abc import Callable

from jaxtyping import Int64
from torch import Tensor

WORD = 1 << 64
GOLDEN = 0x9E3779B97F4A7C15


def _signed(word: int) -> int:
    """Return a 64-bit word as torch's int64 holds it."""
    word %= WORD
    return word - WORD if word >= WORD // 2 else word


def _shift_right(words: Tensor, bits: int) -> Tensor:
    """Shift zeros in from the left; torch's own shift repeats the sign."""
    return words.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)


def _mix_(words: Tensor) -> Tensor:
    """Spread every input bit over all output bits, in place (the finaliser of SplitMix64)."""
    words.bitwise_xor_(_shift_right(words, 30)).mul_(_signed(0xBF58476D1CE4E5B9))
    words.bitwise_xor_(_shift_right(words, 27)).mul_(_signed(0x94D049BB133111EB))
    return words.bitwise_xor_(_shift_right(words, 31))


def seed_word(*parts: int) -> int:
    """Fold whole numbers (a seed, a stream's number) into one 64-bit word.

    Examples
    --------
    >>> seed_word(1, 2) == seed_word(2, 1)
    False
    """
    word = 0
    for part in parts:
        word = (word + part + GOLDEN) % WORD
        word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) % WORD
        word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) % WORD
        word ^= word >> 31
    return word


def random_words(positions: Int64[Tensor, "*shape"], *key: int) -> Int64[Tensor, "*shape"]:
    """Draw a 64-bit word for every position of the stream that ``key`` names.

    SplitMix64: word e is the mixed (key + e * golden ratio), Steele et al., OOPSLA 2014.

    Examples
    --------
    >>> import torch
    >>> both = random_words(torch.arange(4), 7)
    >>> bool((random_words(torch.tensor([3, 1]), 7) == both[[3, 1]]).all())
    True
    """
    return _mix_((positions * _signed(GOLDEN)).add_(_signed(seed_word(*key))))


def random_below(
    positions: Int64[Tensor, "*shape"], bound: int, *key: int
) -> Int64[Tensor, "*shape"]:
    """Draw a whole number in [0, ``bound``) for every position; ``bound`` is at most 2^31.

    The upper 32 bits are scaled down; no number is more likely than another by more than
    ``bound`` / 2^32.
    """
    if not 0 < bound <= 1 << 31:
        raise ValueError(f"bound: expected 1 to 2^31, got {bound}")
    return _shift_right(_shift_right(random_words(positions, *key), 32).mul_(bound), 32)


class RandomOrder:
    """A random permutation of 0 ... n-1 that is computed, not stored.

    Rounds of x -> odd * x + c and x -> x ^ (x >> half) permute the smallest power of two that
    holds n; numbers that land outside go through again until they are inside, which permutes
    0 ... n-1 itself.

    Parameters
    ----------
    count : n, at least 1

    Examples
    --------
    >>> import torch
    >>> order = RandomOrder(10, seed=0)
    >>> sorted(order(torch.arange(10)).tolist()) == list(range(10))
    True
    >>> order.inverse(order(torch.arange(10))).tolist() == list(range(10))
    True
    """

    ROUNDS = 4

    def __init__(self, count: int, seed: int) -> None:
        if count < 1:
            raise ValueError(f"count: expected at least 1, got {count}")
        self.count = count
        self._bits = max((count - 1).bit_length(), 1)
        self._mask = (1 << self._bits) - 1
        words = [seed_word(seed, 0x0DE12, r) for r in range(2 * self.ROUNDS)]
        self._steps = [
            ((words[2 * r] | 1) & self._mask, words[2 * r + 1] & self._mask)
            for r in range(self.ROUNDS)
        ]

    def __call__(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
        """Return the new number of each vertex."""
        return self._walk(ids, self._forward)

    def inverse(self, ids: Int64[Tensor, "*shape"]) -> Int64[Tensor, "*shape"]:
        """Return the vertex that has each new number."""
        return self._walk(ids, self._backward)

    def _walk(self, ids: Tensor, step: Callable[[Tensor], Tensor]) -> Tensor:
        found = step(ids)
        if self.count == self._mask + 1:
            return found
        outside = (found >= self.count).nonzero(as_tuple=True)
        while outside[0].numel():
            moved = step(found[outside])
            found[outside] = moved
            still = moved >= self.count
            outside = tuple(axis[still] for axis in outside)
        return found

    def _forward(self, ids: Tensor) -> Tensor:
        half = (self._bits + 1) // 2
        found = ids.clone()
        for factor, shift in self._steps:
            found.mul_(factor).add_(shift).bitwise_and_(self._mask)
            found.bitwise_xor_(found.bitwise_right_shift(half))
        return found

    def _backward(self, ids: Tensor) -> Tensor:
        half = (self._bits + 1) // 2
        found = ids.clone()
        for factor, shift in reversed(self._steps):
            # A shift by at least half of the bits undoes itself.
            found.bitwise_xor_(found.bitwise_right_shift(half))
            found.sub_(shift).mul_(pow(factor, -1, self._mask + 1)).bitwise_and_(self._mask)
        return found
