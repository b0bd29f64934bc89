"""The confidence head (AlphaFold3, algorithm 31): expected errors of a predicted structure.

Legend: A atoms, N tokens, C channels of a single, P of a pair, I of the input embedding, K the
largest number of atoms in a token.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.alphafold3.atom_tokens import AtomTokens
from bevatron.models.alphafold3.config_diffusion import ConfidenceConfig, TrunkWidths
from bevatron.models.alphafold3.pairformer import Pairformer
from bevatron.models.common.folding import (
    Checkpointing,
    LayerNorm,
    Linear,
    distance_bins,
    recomputed,
)
from bevatron.parallel.axial import own, transposed

DISTANCE_BINS = (3.25, 50.75, 39)
"""Lower ends of the first and the last bin of distances, Å, and how many."""
FARTHEST = 1e6
"""Å."""
LARGEST_SINGLE = 512.0


class ConfidenceLogits(NamedTuple):
    """Logits of classes; `bevatron.models.alphafold3.losses` defines them.

    Attributes
    ----------
    plddt : lDDT of every atom
    pae : error of token j in the frame of token i, own rows
    pde : error of the distance of two tokens, symmetric, own rows
    resolved : whether an atom is resolved
    """

    plddt: Float[Tensor, "*batch A _"]
    pae: Float[Tensor, "*batch R N _"]
    pde: Float[Tensor, "*batch R N _"]
    resolved: Float[Tensor, "*batch A 2"]


class ConfidenceHead(nn.Module):
    """Distances of a predicted structure added to the trunk's pairs, a Pairformer, four heads.

    Beyond the supplement, as in Protenix: a linear layer of the distance itself and a norm in front
    of every output.

    Parameters
    ----------
    widths : I, C and P of the trunk
    checkpointing : what the backward pass recomputes
    """

    def __init__(
        self, config: ConfidenceConfig, widths: TrunkWidths, checkpointing: Checkpointing
    ) -> None:
        super().__init__()
        C, P, K = widths.single, widths.pair, config.atoms_per_token
        self.trunk_norm = LayerNorm(C)
        self.column = Linear(widths.inputs, P, bias=False)
        self.row = Linear(widths.inputs, P, bias=False)
        self.distance_bin = Linear(DISTANCE_BINS[2], P, bias=False)
        self.distance = Linear(1, P, bias=False)
        self.pairformer = Pairformer(C, P, config.pairformer, checkpointing)
        self.pae_norm, self.pde_norm = LayerNorm(P), LayerNorm(P)
        self.plddt_norm, self.resolved_norm = LayerNorm(C), LayerNorm(C)
        self.pae = Linear(P, config.pae_bins, bias=False, init="final")
        self.pde = Linear(P, config.pde_bins, bias=False, init="final")
        self.plddt = nn.Parameter(torch.zeros(K, C, config.plddt_bins))
        self.resolved = nn.Parameter(torch.zeros(K, C, 2))

    def forward(
        self,
        batch: Mapping[str, Tensor],
        s_inputs: Float[Tensor, "*batch N I"],
        s: Float[Tensor, "*batch N C"],
        z: Float[Tensor, "*batch R N P"],
        coordinates: Float[Tensor, "*batch A 3"],
    ) -> ConfidenceLogits:
        """Judge one structure of every sample: `logits` of what `represent` returns."""
        return self.logits(batch, *self.represent(batch, s_inputs, s, z, coordinates))

    def represent(
        self,
        batch: Mapping[str, Tensor],
        s_inputs: Float[Tensor, "*batch N I"],
        s: Float[Tensor, "*batch N C"],
        z: Float[Tensor, "*batch R N P"],
        coordinates: Float[Tensor, "*batch A 3"],
    ) -> tuple[Float[Tensor, "*batch N C"], Float[Tensor, "*batch R N P"]]:
        """Run the Pairformer of the head; only the head's own weights are trained.

        Parameters
        ----------
        batch : ``token_mask`` and ``representative_atom``
        s_inputs, s, z : input embedding, single and pair representation of the trunk
        coordinates : coordinates of a rollout, Å
        """
        s_inputs, s, z, coordinates = (x.detach() for x in (s_inputs, s, z, coordinates))
        s = s.clamp(-LARGEST_SINGLE, LARGEST_SINGLE)
        s = self.trunk_norm(s)
        embedded = recomputed(self.pairformer.checkpointing, self._embedded)
        z = embedded(s_inputs, z, coordinates, batch["representative_atom"])
        state: tuple[Tensor, Tensor] = self.pairformer(s, z, batch["token_mask"])
        return state

    def logits(
        self,
        batch: Mapping[str, Tensor],
        s: Float[Tensor, "*batch N C"],
        z: Float[Tensor, "*batch R N P"],
    ) -> ConfidenceLogits:
        """Compute the logits, in float32 where the trunk is 16-bit.

        Parameters
        ----------
        batch : ``atom_to_token``, ``atom_mask`` and ``token_mask``
        s, z : what `represent` returns
        """
        wide = torch.promote_types(z.dtype, torch.float32)
        s, z = s.to(wide), z.to(wide)
        num_tokens = batch["token_mask"].shape[-1]
        tokens = AtomTokens.of(batch["atom_to_token"], batch["atom_mask"], num_tokens)
        return ConfidenceLogits(
            _per_atom(s, self.plddt_norm, self.plddt, tokens),
            _normed(z, self.pae_norm, self.pae),
            _normed(z + transposed(z), self.pde_norm, self.pde),
            _per_atom(s, self.resolved_norm, self.resolved, tokens),
        )

    def _embedded(
        self, s_inputs: Tensor, z: Tensor, coordinates: Tensor, representative: Tensor
    ) -> Tensor:
        """Add the input embedding and the distances of the structure to the pairs."""
        rows, columns = self.row(s_inputs), self.column(s_inputs)
        z = z + own(rows, -2)[..., :, None, :] + columns[..., None, :, :]
        return z + self._distances(coordinates, representative).to(z.dtype)

    def _distances(self, coordinates: Tensor, representative: Tensor) -> Tensor:
        """Embed distances of representative atoms, own rows [..., R, N, P]."""
        x = coordinates.gather(-2, representative[..., None].expand(*representative.shape, 3))
        bins = distance_bins(x, *DISTANCE_BINS, farthest=FARTHEST)
        # Not torch.cdist: by a matmul it is wrong by 0.01 Å for near atoms.
        distance = (own(x, -2)[..., :, None, :] - x[..., None, :, :]).norm(dim=-1, keepdim=True)
        embedded: Tensor = self.distance_bin(bins.to(x.dtype)) + self.distance(distance)
        return embedded


def _normed(z: Tensor, norm: LayerNorm, layer: Linear) -> Tensor:
    return layer_norm_linear(z, *norm.parts, layer.weight)


def _per_atom(s: Tensor, norm: LayerNorm, weight: Tensor, tokens: AtomTokens) -> Tensor:
    """Apply the weights of an atom's position in its token to the token's row.

    All positions are computed for all tokens, which takes less memory than gathering weights.
    """
    K, _, bins = weight.shape
    n = norm(s)
    logits = torch.einsum("...nc,kcb->...nkb", n, weight.to(n.dtype))
    slot = tokens.token * K + tokens.place.clamp(max=K - 1)
    sample = torch.arange(slot[..., 0].numel(), device=slot.device)
    first = sample.reshape(*slot.shape[:-1], 1) * logits.shape[-3] * K
    return logits.reshape(-1, bins)[first + slot]
