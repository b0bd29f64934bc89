"""The denoiser of AlphaFold3 (algorithm 20).

`describe` computes what all noisy copies and sampling steps share, once; `forward` denoises copies.
Nothing that is shared is repeated for the copies.

Legend: M copies, A atoms, N tokens, C channels of a single, P of a pair, I of the input embedding.
"""

from collections.abc import Mapping
from typing import NamedTuple

from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.alphafold3 import edm
from bevatron.models.alphafold3.atom_attention import AtomDecoder, AtomEncoder, Atoms
from bevatron.models.alphafold3.conditioning import DiffusionConditioning
from bevatron.models.alphafold3.config_diffusion import DiffusionConfig, TrunkWidths
from bevatron.models.alphafold3.diffusion_transformer import DiffusionTransformer
from bevatron.models.common.folding import LayerNorm, Linear
from bevatron.parallel.axial import all_of, sample_group


class Shared(NamedTuple):
    """What all copies of a structure share.

    Attributes
    ----------
    singles
        The condition of tokens before the noise level is added.
    biases
        What the conditioned pairs add in the attention of each block of the token transformer, own
        rows of it.
    atoms
        Conditions and pairs of atoms.
    mask
        False for padded tokens.
    """

    singles: Float[Tensor, "*batch N C"]
    biases: list[Float[Tensor, "*batch H R N"]]
    atoms: Atoms
    mask: Bool[Tensor, "*batch N"]


class DiffusionModule(nn.Module):
    r"""Denoiser :math:`D(x, \sigma) = c_{skip} x + c_{out} F(c_{in} x, c_{noise})`: algorithm 20.

    Parameters
    ----------
    widths : I, C and P of the trunk
    """

    def __init__(self, config: DiffusionConfig, widths: TrunkWidths) -> None:
        super().__init__()
        token = config.transformer
        self.conditioning = DiffusionConditioning(widths, config.noise_width)
        self.encoder = AtomEncoder(
            config.encoder, token.width, (widths.single, widths.pair), config.checkpointing
        )
        self.single_norm = LayerNorm(widths.single, bias=False)
        self.single = Linear(widths.single, token.width, bias=False, init="final")
        self.transformer = DiffusionTransformer(
            token.width,
            widths.single,
            widths.pair,
            token.num_heads,
            token.num_blocks,
            config.checkpointing,
        )
        self.token_norm = LayerNorm(token.width, bias=False)
        self.decoder = AtomDecoder(config.decoder, token.width, config.checkpointing)

    def describe(
        self,
        batch: Mapping[str, Tensor],
        s_inputs: Float[Tensor, "*batch N I"],
        s: Float[Tensor, "*batch N C"],
        z: Float[Tensor, "*batch R N P"],
    ) -> Shared:
        """Compute what all copies share.

        Parameters
        ----------
        batch
            A sample's features of atoms and tokens; see `AtomEncoder.describe`.
        s_inputs, s, z
            Input embedding, single representation and own rows of the pair's of the trunk;
            activations have the type of s.
        """
        pairs = self.conditioning.pairs(batch, z)
        atoms = self.encoder.describe(batch, s, pairs)
        singles = self.conditioning.singles(s_inputs, s)
        return Shared(singles, self.transformer.biases(pairs), atoms, batch["token_mask"])

    def for_many_passes(self, shared: Shared) -> Shared:
        """Have the biases lie as attention reads them.

        Of processes that share a sample each then has all rows of all blocks' biases; where blocks
        compute activations again, to save memory, they gather their own in every pass instead.
        """
        if sample_group().size > 1 and self.transformer.checkpointing.kind != "none":
            return shared
        N = shared.mask.shape[-1]
        return shared._replace(biases=[all_of(b, -2, N).contiguous() for b in shared.biases])

    def forward(
        self,
        x: Float[Tensor, "*batch M A 3"],
        sigma: Float[Tensor, "*batch M"],
        shared: Shared,
    ) -> Float[Tensor, "*batch M A 3"]:
        """Denoise copies.

        Parameters
        ----------
        x : noisy coordinates, Å
        sigma : noise level of each copy, Å; above 0
        shared : of `describe`
        """
        factors = edm.preconditioning(sigma)
        skip, out, in_ = (factor[..., None, None] for factor in factors[:3])
        s = self.conditioning.at_noise(shared.singles, factors.noise)
        a, q = self.encoder(shared.atoms, in_ * x)
        a = a + layer_norm_linear(s, *self.single_norm.parts, self.single.weight)
        a = self.transformer(a, s, shared.biases, shared.mask)
        update: Tensor = self.decoder(self.token_norm(a), q, shared.atoms)
        return skip * x + out * update.to(x.dtype)
