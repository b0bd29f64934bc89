"""AlphaFold3: tokens and pairs from sequences and alignments, coordinates by diffusion.

Algorithm 1 of its supplement. `forward` runs the trunk; from its result the diffusion denoises
copies and samples structures; `judge` predicts the errors of a structure.

Legend: A atoms, N tokens, C channels of a single, P of a pair, I of the input embedding, M copies.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from bevatron.data.proteins.tokens import NUM_CLASSES
from bevatron.kernels.shared.standing_weights import standing_weights
from bevatron.models.alphafold3 import edm, sampler
from bevatron.models.alphafold3.atom_attention import AtomEncoder
from bevatron.models.alphafold3.augmentation import draw_noise
from bevatron.models.alphafold3.confidence import ConfidenceHead, ConfidenceLogits
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.diffusion import DiffusionModule, Shared
from bevatron.models.alphafold3.distogram import DistogramHead
from bevatron.models.alphafold3.trunk import Trunk
from bevatron.models.common.folding.normal import Normal


class Representation(NamedTuple):
    """Output of the trunk.

    Attributes
    ----------
    s_inputs, s, z : input embedding, single representation and own rows of the pair's
    """

    s_inputs: Float[Tensor, "*batch N I"]
    s: Float[Tensor, "*batch N C"]
    z: Float[Tensor, "*batch R N P"]


class AlphaFold3(nn.Module):
    """The whole model.

    Parameters
    ----------
    config : sizes
    """

    def __init__(self, config: AlphaFold3Config) -> None:
        super().__init__()
        self.config = config
        widths, policy = config.widths, config.checkpointing
        self.input_encoder = AtomEncoder(config.atoms, config.token_width, None, policy)
        self.trunk = Trunk(config)
        self.distogram = DistogramHead(widths.pair, config.distogram_bins)
        self.diffusion = DiffusionModule(config.diffusion, widths)
        self.confidence = ConfidenceHead(config.confidence, widths, policy)

    def forward(
        self,
        batch: Mapping[str, Tensor],
        cycles: int | None = None,
        seed: Int[Tensor, ""] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Representation:
        """Run the trunk: algorithm 1, lines 1 to 13.

        Parameters
        ----------
        batch : fields of `bevatron.data.proteins.complex_batch.ComplexBatch`
        cycles : passes; None = the maximum, as in predictions
        seed : seed of dropout; None = no dropout
        dtype : type of all activations; None = that of the batch
        """
        s_inputs = self.embed_inputs(batch)
        s_inputs = s_inputs if dtype is None else s_inputs.to(dtype)
        s, z = self.trunk(batch, s_inputs, cycles or self.config.cycles, seed)
        return Representation(s_inputs, s, z)

    def embed_inputs(self, batch: Mapping[str, Tensor]) -> Float[Tensor, "*batch N I"]:
        """Embed reference poses, classes and profiles: algorithm 2."""
        atoms = self.input_encoder.describe(batch)
        a, _ = self.input_encoder(atoms)
        a = a.squeeze(-3)
        restype = F.one_hot(batch["restype"], NUM_CLASSES).to(a.dtype)
        deletions = batch["deletion_mean"][..., None]
        return torch.cat([a, restype, batch["profile"].to(a.dtype), deletions.to(a.dtype)], -1)

    def condition(self, batch: Mapping[str, Tensor], trunk: Representation) -> Shared:
        """Compute the values that all copies of the diffusion share."""
        shared: Shared = self.diffusion.describe(batch, *trunk)
        return shared

    def sample(
        self, batch: Mapping[str, Tensor], shared: Shared, copies: int, steps: int, normal: Normal
    ) -> Float[Tensor, "*batch M A 3"]:
        """Sample structures without gradients, Å: algorithm 18."""
        mask = batch["atom_mask"]
        shape = (*mask.shape[:-1], copies, mask.shape[-1])
        start = draw_noise(shape, normal)
        levels = edm.schedule(steps, mask.device, start.dtype)
        draws = sampler.draw_steps(steps, shape, normal)
        with torch.no_grad(), standing_weights():
            prepared = self.diffusion.prepare(shared)
            conditions = self.diffusion.levels(sampler.raised(levels), prepared)

            def denoise(x: Tensor, sigma: Tensor) -> Tensor:
                found: Tensor = self.diffusion(x, sigma, prepared, next(conditions))
                return found

            return sampler.sample(denoise, levels, start, draws, mask)

    def judge(
        self,
        batch: Mapping[str, Tensor],
        trunk: Representation,
        structure: Float[Tensor, "*batch A 3"],
    ) -> ConfidenceLogits:
        """Judge one structure of every sample: algorithm 31."""
        logits: ConfidenceLogits = self.confidence(batch, *trunk, structure)
        return logits
