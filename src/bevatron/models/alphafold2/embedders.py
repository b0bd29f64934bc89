"""The first representations, from features and from the previous cycle.

Supplement of AlphaFold2, algorithms 3 to 5 and 32.
"""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bevatron.models.common.folding import LayerNorm, Linear, distance_bins
from bevatron.models.common.folding.linear import Init
from bevatron.parallel.axial import own

TARGET_FEATURES, MSA_FEATURES, EXTRA_MSA_FEATURES = 22, 49, 25

RECYCLED_BINS = 15
"""Of 1.25 Å from 3.25 Å, the last without an upper edge."""


class InputEmbedder(nn.Module):
    """Alignment and pair from the features; algorithms 3 to 5."""

    def __init__(self, c_m: int, c_z: int, max_offset: int) -> None:
        super().__init__()
        self.max_offset = max_offset
        self.linear_tf_z_i = Linear(TARGET_FEATURES, c_z)
        self.linear_tf_z_j = Linear(TARGET_FEATURES, c_z)
        self.linear_tf_m = Linear(TARGET_FEATURES, c_m)
        self.linear_msa_m = Linear(MSA_FEATURES, c_m)
        self.linear_relpos = Linear(2 * max_offset + 1, c_z)

    def forward(
        self,
        target_feat: Float[Tensor, "*batch N 22"],
        residue_index: Int[Tensor, "*batch N"],
        msa_feat: Float[Tensor, "*batch S N 49"],
    ) -> tuple[Float[Tensor, "*batch S N M"], Float[Tensor, "*batch R N Z"]]:
        """Return the alignment and own rows of the pair."""
        z = own(self.linear_tf_z_i(target_feat), -2)[..., :, None, :]
        z = z + self.linear_tf_z_j(target_feat)[..., None, :, :]
        z = z + self.linear_relpos(self._offsets(residue_index).to(target_feat.dtype))
        m = self.linear_msa_m(msa_feat) + self.linear_tf_m(target_feat)[..., None, :, :]
        return m, z

    def _offsets(self, residue_index: Tensor) -> Int[Tensor, "*batch R N _"]:
        offset = own(residue_index, -1)[..., :, None] - residue_index[..., None, :]
        clipped = offset.clamp(-self.max_offset, self.max_offset) + self.max_offset
        return F.one_hot(clipped, 2 * self.max_offset + 1)


class RecyclingEmbedder(nn.Module):
    """Updates of alignment and pair from the results of the previous cycle; algorithm 32."""

    def __init__(self, c_m: int, c_z: int) -> None:
        super().__init__()
        self.linear = Linear(RECYCLED_BINS, c_z)
        self.norm_m = LayerNorm(c_m)
        self.norm_z = LayerNorm(c_z)

    def forward(
        self,
        m: Float[Tensor, "*batch N M"],
        z: Float[Tensor, "*batch R N Z"],
        x: Float[Tensor, "*batch N 3"],
    ) -> tuple[Float[Tensor, "*batch N M"], Float[Tensor, "*batch R N Z"]]:
        """Return the updates of the alignment's first row and of the pair's own rows.

        Parameters
        ----------
        m, z : first row of the alignment and own rows of the pair; zeros in the first cycle
        x : positions of CB in Å, likewise
        """
        bins = distance_bins(x, 3.25, 20.75, RECYCLED_BINS)
        return self.norm_m(m), self.norm_z(z) + self.linear(bins.to(z.dtype))


class Projection(nn.Module):
    """One layer that published weights store as a separate module."""

    def __init__(self, width: int, out: int, init: Init = "lecun") -> None:
        super().__init__()
        self.linear = Linear(width, out, init=init)

    def forward(self, x: Float[Tensor, "*rows C"]) -> Float[Tensor, "*rows K"]:
        """Project the last axis."""
        found: Tensor = self.linear(x)
        return found
