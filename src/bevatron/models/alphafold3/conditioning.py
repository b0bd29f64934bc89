"""Conditioning of the denoiser on trunk and noise level (AlphaFold3, algorithms 21 and 22).

Legend: M copies, N tokens, C channels of a single, P of a pair, I of the input embedding.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.alphafold3.config_diffusion import TrunkWidths
from bevatron.models.alphafold3.relative_position import RelativePositionEncoding
from bevatron.models.common.folding import LayerNorm, Linear, Transition

SEED_OF_NOISE_EMBEDDING = 42


class NoiseEmbedding(nn.Module):
    r"""Random Fourier features :math:`\cos(2 \pi (t w + b))` of a noise level: algorithm 22.

    w and b are standard normal numbers, drawn once and stored with the weights; they are not
    trained.
    """

    w: Tensor
    b: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED_OF_NOISE_EMBEDDING)
        for name in ("w", "b"):
            self.register_buffer(name, torch.randn(width, generator=generator, device="cpu"))

    def forward(self, noise: Float[Tensor, "*levels"]) -> Float[Tensor, "*levels C"]:
        """Embed c_noise of `edm.preconditioning`."""
        w, b = self.w.to(noise.dtype), self.b.to(noise.dtype)
        return (2 * torch.pi * (noise[..., None] * w + b)).cos()


class DiffusionConditioning(nn.Module):
    """Pairs and singles that condition the denoiser: algorithm 21.

    Pairs and the part of the singles without noise are the same for all copies and sampling steps;
    `pairs` and `singles` compute them once.

    Parameters
    ----------
    widths : I, C and P of the trunk
    noise_width : channels of the embedding of a noise level
    """

    def __init__(self, widths: TrunkWidths, noise_width: int) -> None:
        super().__init__()
        C, P = widths.single, widths.pair
        self.relative_position = RelativePositionEncoding(P)
        self.pair_norm = LayerNorm(2 * P, bias=False)
        self.pair = Linear(2 * P, P, bias=False)
        self.pair_transitions = nn.ModuleList(Transition(P, 2) for _ in range(2))
        self.single_norm = LayerNorm(C + widths.inputs, bias=False)
        self.single = Linear(C + widths.inputs, C, bias=False)
        self.noise_embedding = NoiseEmbedding(noise_width)
        self.noise_norm = LayerNorm(noise_width, bias=False)
        self.noise = Linear(noise_width, C, bias=False)
        self.single_transitions = nn.ModuleList(Transition(C, 2) for _ in range(2))

    def pairs(
        self, batch: Mapping[str, Tensor], z: Float[Tensor, "*batch R N P"]
    ) -> Float[Tensor, "*batch R N P"]:
        """Condition own rows of the trunk's pairs on relative positions (lines 1 to 5)."""
        both = torch.cat([z, self.relative_position(batch).to(z.dtype)], -1)
        z = layer_norm_linear(both, *self.pair_norm.parts, self.pair.weight)
        for transition in self.pair_transitions:
            z = transition(z)
        return z

    def singles(
        self, s_inputs: Float[Tensor, "*batch N I"], s: Float[Tensor, "*batch N C"]
    ) -> Float[Tensor, "*batch N C"]:
        """Join the trunk's single representation and the input embedding (lines 6 and 7)."""
        both = torch.cat([s, s_inputs.to(s.dtype)], -1)
        return layer_norm_linear(both, *self.single_norm.parts, self.single.weight)

    def at_noise(
        self, singles: Float[Tensor, "*batch N C"], noise: Float[Tensor, "*batch M"]
    ) -> Float[Tensor, "*batch M N C"]:
        """Add every copy's noise level (lines 8 to 12).

        Parameters
        ----------
        singles : what `singles` returns
        noise : c_noise of `edm.preconditioning`
        """
        level = self.noise_embedding(noise).to(singles.dtype)
        level = layer_norm_linear(level, *self.noise_norm.parts, self.noise.weight)
        s = singles[..., None, :, :] + level[..., None, :]
        for transition in self.single_transitions:
            s = transition(s)
        return s
