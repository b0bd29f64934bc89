"""The denoiser of AlphaFold3 (algorithm 20).

`describe` computes, once, the values that all noisy copies and sampling steps share; `forward`
denoises copies. Shared values are never repeated for the copies. Sampling also calls `prepare` and
`levels`: everything that does not depend on coordinates, for several noise levels at a time.

Legend: M copies, A atoms, N tokens, C channels of a single, P of a pair, I of the input embedding.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.alphafold3 import edm
from bevatron.models.alphafold3.atom_attention import AtomDecoder, AtomEncoder, Atoms
from bevatron.models.alphafold3.atom_transformer import Prepared
from bevatron.models.alphafold3.conditioning import DiffusionConditioning
from bevatron.models.alphafold3.config_diffusion import DiffusionConfig, TrunkWidths
from bevatron.models.alphafold3.diffusion_transformer import (
    BlockCondition,
    DiffusionTransformer,
    block_conditions,
)
from bevatron.models.common.folding import LayerNorm, Linear, recomputed
from bevatron.parallel.axial import Coming, all_of, sample_group

ROWS_AT_ONCE = 1024
"""Tokens of all noise levels that are conditioned together: enough for a GPU, 0.2 GB at 16 bits."""


class Shared(NamedTuple):
    """Inputs shared by all copies of a structure.

    Attributes
    ----------
    singles : the condition of tokens before the noise level is added
    pairs : conditioned, own rows; biases of the token transformer's attention are made of them
    atoms : conditions and pairs of atoms
    mask : false for padded tokens
    biases, encoder, decoder : of `DiffusionModule.prepare`
    """

    singles: Float[Tensor, "*batch N C"]
    pairs: Float[Tensor, "*batch R N P"]
    atoms: Atoms
    mask: Bool[Tensor, "*batch N"]
    biases: Sequence[Float[Tensor, "*batch H R N"] | Coming] | None = None
    encoder: Prepared | None = None
    decoder: Prepared | None = None


class Level(NamedTuple):
    """What denoising takes of a noise level.

    Attributes
    ----------
    factors : of the level
    tokens : added to the tokens in front of their transformer
    blocks : condition of the transformer's blocks: s, or of `block_conditions`
    """

    factors: edm.Preconditioning
    tokens: Float[Tensor, "*batch _ N T"]
    blocks: Float[Tensor, "*batch _ N C"] | Sequence[BlockCondition]


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
        """Compute the values that all copies share.

        Parameters
        ----------
        batch : a sample's features of atoms and tokens; see `AtomEncoder.describe`
        s_inputs, s, z
            Input embedding, single representation and own rows of the pair's of the trunk;
            activations have the type of s.
        """
        pairs = recomputed(self.transformer.checkpointing, self.conditioning.pairs)(batch, z)
        atoms = self.encoder.describe(batch, s, pairs)
        singles = self.conditioning.singles(s_inputs, s)
        return Shared(singles, pairs, atoms, batch["token_mask"])

    def prepare(self, shared: Shared) -> Shared:
        """Precompute, without gradients, values that pay off over many passes.

        If processes share a sample, each then has all rows of the biases; blocks that recompute
        activations to save memory gather their own in every pass instead.
        """
        atoms = shared.atoms
        own = self.transformer.biases(shared.pairs)
        biases: Sequence[Tensor | Coming] = own
        if sample_group().size == 1:
            biases = [bias.contiguous() for bias in own]
        elif self.transformer.checkpointing.kind == "none":
            N = shared.mask.shape[-1]
            biases = [Coming(all_of(bias, -2, N).contiguous()) for bias in own]
        return shared._replace(
            biases=biases,
            encoder=self.encoder.transformer.prepare(atoms.c, atoms.p),
            decoder=self.decoder.transformer.prepare(atoms.c, atoms.p),
        )

    def levels(self, sigmas: Float[Tensor, "L"], shared: Shared) -> Iterator[Level]:
        """Condition on levels, in Å, that all copies take in turn; without gradients."""
        factors = edm.preconditioning(sigmas)
        at_once = max(ROWS_AT_ONCE // shared.mask.shape[-1], 1)
        for some in zip(*(factor.split(at_once) for factor in factors), strict=True):
            # Its tensors are freed before the next.
            yield from self._levels_at_once(edm.Preconditioning(*some), shared)

    def _levels_at_once(self, factors: edm.Preconditioning, shared: Shared) -> Iterator[Level]:
        noise = factors.noise.expand(*shared.mask.shape[:-1], -1)
        s = self.conditioning.at_noise(shared.singles, noise)
        tokens = self._from_condition(s)
        blocks = block_conditions(s, self.transformer.blocks)
        for place, of_level in enumerate(zip(*(f.split(1) for f in factors), strict=True)):
            here = [(one.at(place), other.at(place)) for one, other in blocks]
            yield Level(edm.Preconditioning(*of_level), tokens.narrow(-3, place, 1), here)

    def forward(
        self,
        x: Float[Tensor, "*batch M A 3"],
        sigma: Float[Tensor, "*batch M"],
        shared: Shared,
        level: Level | None = None,
    ) -> Float[Tensor, "*batch M A 3"]:
        """Denoise copies.

        Parameters
        ----------
        x : noisy coordinates, Å
        sigma : noise level of each copy, Å; above 0
        shared : result of `describe`
        level : result of `levels`, if all copies have the level ``sigma``
        """
        if level is None:
            factors = edm.preconditioning(sigma)
            s = self.conditioning.at_noise(shared.singles, factors.noise)
            level = Level(factors, self._from_condition(s), s)
        skip, out, in_ = (factor[..., None, None] for factor in level.factors[:3])
        a, q = self.encoder(shared.atoms, in_ * x, shared.encoder)
        # Not kept with what is shared: so the backward pass turns the gradients of all biases into
        # that of the pairs, a third of their size, before it goes on.
        biases = shared.biases or self.transformer.biases(shared.pairs)
        a = self.transformer(a + level.tokens, level.blocks, biases, shared.mask)
        update: Tensor = self.decoder(self.token_norm(a), q, shared.atoms, shared.decoder)
        return torch.addcmul(skip * x, out, update.to(x.dtype))

    def _from_condition(self, s: Float[Tensor, "*batch _ N C"]) -> Float[Tensor, "*batch _ N T"]:
        return layer_norm_linear(s, *self.single_norm.parts, self.single.weight)
