"""Base classes and arithmetic of the schemes that distribute graph attention."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from bevatron.errors import ConfigError
from bevatron.kernels.graph.csr import Csr
from bevatron.parallel.groups import Group


class Scheme(ABC):
    """A graph partitioned over the ranks, and attention on it.

    Attributes
    ----------
    name : the name that users choose
    vertices : original numbers of the vertices whose features this rank holds, in order
    replicas : number of ranks that hold the same vertices
    block : the part of the matrix that this rank computes with
    everyone : the group of all ranks
    """

    name: str
    vertices: Int64[Tensor, "T"]
    replicas: int = 1
    block: Csr
    everyone: Group

    @abstractmethod
    def graph_attention(
        self,
        x: Float[Tensor, "T H C"],
        row_score: Float[Tensor, "T H"],
        col_score: Float[Tensor, "T H"],
        *,
        negative_slope: float,
        dropout: float,
        seed: int,
    ) -> Float[Tensor, "T H C"]:
        """Attend as GAT does; all ranks must call it."""

    def dot_attention(
        self,
        x: Float[Tensor, "T H C"],
        scale: Float[Tensor, "_"],
        *,
        normalize: bool,
        softmax: bool,
    ) -> Float[Tensor, "T H C"]:
        """Attend by dot products or cosines; all ranks must call it.

        Raises ConfigError if the scheme cannot.
        """
        del x, scale, normalize, softmax
        raise ConfigError(
            f"graph partition: scheme '{self.name}' has no attention by dot products, since it "
            "splits the features; choose two_dimensional or rows"
        )


class BlockScheme(Scheme):
    """A scheme over blocks of the matrix, with tiles of vertices padded to one length.

    Attributes
    ----------
    row_group, column_group : ranks (i, *); ranks (*, j)
    padded : length of every tile with its padding
    functions : graph attention and dot attention over padded tiles
    """

    row_group: Group
    column_group: Group
    padded: int
    functions: tuple[type[torch.autograd.Function], type[torch.autograd.Function]]

    def graph_attention(  # noqa: D102  see Scheme
        self,
        x: Float[Tensor, "T H C"],
        row_score: Float[Tensor, "T H"],
        col_score: Float[Tensor, "T H"],
        *,
        negative_slope: float,
        dropout: float,
        seed: int,
    ) -> Float[Tensor, "T H C"]:
        tiles = [pad_rows(rows, self.padded) for rows in (x, row_score, col_score)]
        learns = torch.is_grad_enabled() and any(rows.requires_grad for rows in tiles)
        options = (negative_slope, dropout)
        found: Tensor = self.functions[0].apply(*tiles, self, options, seed, learns)
        return found[: len(self.vertices)]

    def dot_attention(  # noqa: D102  see Scheme
        self,
        x: Float[Tensor, "T H C"],
        scale: Float[Tensor, "_"],
        *,
        normalize: bool,
        softmax: bool,
    ) -> Float[Tensor, "T H C"]:
        tile = pad_rows(x, self.padded)
        found: Tensor = self.functions[1].apply(tile, scale, self, normalize, softmax)
        return found[: len(self.vertices)]


def pad_rows(rows: Tensor, count: int) -> Tensor:
    """Append rows of zeros up to ``count``."""
    missing = count - rows.shape[0]
    return rows if missing == 0 else F.pad(rows, [0, 0] * (rows.ndim - 1) + [0, missing])


def safe_log_total(largest: Tensor, total: Tensor) -> Tensor:
    """Return the logarithm of a row's sum of exponentials; 0 for a row without entries."""
    full = total > 0
    return torch.where(full, largest + torch.log(torch.where(full, total, 1)), 0)


def rescale(largest: Tensor, reference: Tensor) -> Tensor:
    """Return exp(m - reference), 0 for a row without entries."""
    return torch.where(largest == -torch.inf, 0, torch.exp(largest - reference))


def divide(sums: Tensor, total: Tensor) -> Tensor:
    """Divide sums by totals; 0 where the total is 0."""
    return sums / torch.where(total > 0, total, 1).unsqueeze(-1)


def channel_chunks(channels: int, chunks: int) -> list[slice]:
    """Split channels into equal chunks, at most the given number."""
    width = -(-channels // max(min(chunks, channels), 1))
    return [slice(start, min(start + width, channels)) for start in range(0, channels, width)]
