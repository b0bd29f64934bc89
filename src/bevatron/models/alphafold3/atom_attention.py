"""From atoms to tokens and back (AlphaFold3, algorithms 5 and 6).

Values that do not depend on noise are computed once for all copies and sampling steps:
`AtomEncoder.describe` returns the atoms' condition c and the pairs p within windows, `forward`
computes the rest.

Legend: M copies, A atoms, N tokens, W windows of Q = 32 queries and K = 128 keys, C channels of an
atom, P of an atom pair, T of a token.
"""

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from bevatron.kernels import layer_norm_linear
from bevatron.models.alphafold3.atom_tokens import AtomTokens
from bevatron.models.alphafold3.atom_transformer import AtomTransformer, Prepared
from bevatron.models.alphafold3.atom_windows import keys_of, queries_of
from bevatron.models.alphafold3.config_diffusion import AtomConfig
from bevatron.models.common.folding import Checkpointing, LayerNorm, Linear, recomputed
from bevatron.parallel.axial import all_rows

ELEMENTS, NAME_CHARACTERS, NAME_LENGTH = 128, 64, 4
"""Classes of ``ref_element``, and of each of the characters of ``ref_atom_name_chars``."""


class Atoms(NamedTuple):
    """Embeddings of atoms without noisy coordinates.

    Attributes
    ----------
    c : condition of every atom; the same for all copies
    p : pairs of each window's queries and keys
    tokens : which atoms belong to which token
    mask : false for padded atoms
    """

    c: Float[Tensor, "*batch _ A C"]
    p: Float[Tensor, "*batch W Q K P"]
    tokens: AtomTokens
    mask: Bool[Tensor, "*batch A"]


class TrunkToAtoms(nn.Module):
    """Additional inputs of the diffusion module's encoder: trunk and noisy coordinates."""

    def __init__(self, config: AtomConfig, single_width: int, pair_width: int) -> None:
        super().__init__()
        self.single_norm = LayerNorm(single_width, bias=False)
        self.single = Linear(single_width, config.width, bias=False, init="final")
        self.pair_norm = LayerNorm(pair_width, bias=False)
        self.pair = Linear(pair_width, config.pair_width, bias=False, init="final")
        self.coordinates = Linear(3, config.width, bias=False)

    def singles(self, s: Float[Tensor, "*batch N D"], tokens: AtomTokens) -> Tensor:
        """Give every atom the trunk's embedding of its token, [..., 1, A, C]."""
        rows = layer_norm_linear(s, *self.single_norm.parts, self.single.weight)
        return tokens.spread(rows[..., None, :, :])

    def pairs(
        self,
        z: Float[Tensor, "*batch R N E"],
        token: Int[Tensor, "*batch A"],
        mask: Bool[Tensor, "*batch A"],
    ) -> Float[Tensor, "*batch W Q K P"]:
        """Give every pair of atoms in a window the trunk's embedding of their tokens.

        Windows touch any row of the pairs, so all are gathered, with the channels of atom pairs.
        """
        N = z.shape[-2]
        rows = all_rows(layer_norm_linear(z, *self.pair_norm.parts, self.pair.weight))
        query = queries_of(token[..., None])
        key = keys_of(token[..., None]).transpose(-1, -2)
        sample = torch.arange(z.shape[:-3].numel(), device=z.device)
        sample = sample.reshape(*z.shape[:-3], 1, 1, 1)
        place = query * N + key
        # What nobody attends to reads pairs in turn: gradients of one pair are added one by one.
        real = queries_of(mask[..., None]) & keys_of(mask[..., None]).transpose(-1, -2)
        turn = torch.arange(prod(place.shape[-3:]), device=z.device).view(place.shape[-3:])
        place = torch.where(real, place, turn % N**2)
        return rows.reshape(-1, rows.shape[-1])[sample * N**2 + place]


class AtomEncoder(nn.Module):
    """Atoms' features, and coordinates if there are any, to rows of tokens: algorithm 5.

    Parameters
    ----------
    config : widths, heads and blocks
    token_width : T
    trunk_widths
        Channels of the trunk's single and pair representation for the diffusion module's encoder,
        which also takes coordinates; None for the encoder of the input embedder.
    checkpointing : what the backward pass recomputes
    """

    def __init__(
        self,
        config: AtomConfig,
        token_width: int,
        trunk_widths: tuple[int, int] | None,
        checkpointing: Checkpointing,
    ) -> None:
        super().__init__()
        C, P = config.width, config.pair_width
        self.position = Linear(3, C, bias=False)
        self.charge = Linear(1, C, bias=False)
        self.features = Linear(1 + ELEMENTS + NAME_LENGTH * NAME_CHARACTERS, C, bias=False)
        self.offset = Linear(3, P, bias=False)
        self.inverse_distance = Linear(1, P, bias=False)
        self.same_space = Linear(1, P, bias=False)
        self.trunk = None if trunk_widths is None else TrunkToAtoms(config, *trunk_widths)
        self.pair_of_query = Linear(C, P, bias=False)
        self.pair_of_key = Linear(C, P, bias=False)
        self.pair_mlp = nn.ModuleList(
            Linear(P, P, bias=False, init=init) for init in ("he", "he", "final")
        )
        self.transformer = AtomTransformer(C, P, config.num_heads, config.num_blocks, checkpointing)
        self.to_tokens = Linear(C, token_width, bias=False)

    def describe(
        self,
        batch: Mapping[str, Tensor],
        s: Float[Tensor, "*batch N D"] | None = None,
        z: Float[Tensor, "*batch R N E"] | None = None,
    ) -> Atoms:
        """Compute all that copies share (lines 1 to 6, 8 to 10 and 13 to 14).

        Parameters
        ----------
        batch
            ``ref_pos``, ``ref_charge``, ``ref_mask``, ``ref_element``, ``ref_atom_name_chars``,
            ``ref_space_uid``, ``atom_to_token``, ``atom_mask`` and ``token_mask``; atoms are
            computed in the type of ``s``, or of ``ref_pos`` where there is no trunk.
        s, z
            Single representation of the trunk, and own rows of pairs as the diffusion module
            conditions them.
        """
        mask = batch["atom_mask"]
        tokens = AtomTokens.of(batch["atom_to_token"], mask, batch["token_mask"].shape[-1])
        dtype = batch["ref_pos"].dtype if s is None else s.dtype
        c = self._features(batch, dtype)[..., None, :, :]
        p = self._reference_pairs(batch, dtype)
        if self.trunk is not None and s is not None and z is not None:
            c = c + self.trunk.singles(s, tokens)
            p = p + self.trunk.pairs(z, tokens.token, mask)
        active = c.squeeze(-3).relu()
        p = p + queries_of(self.pair_of_query(active))[..., :, None, :]
        p = p + keys_of(self.pair_of_key(active))[..., None, :, :]
        hidden = recomputed(self.transformer.checkpointing, self._pair_update)(p)
        return Atoms(c, p + hidden, tokens, mask)

    def forward(
        self,
        atoms: Atoms,
        coordinates: Float[Tensor, "*batch M A 3"] | None = None,
        prepared: Prepared | None = None,
    ) -> tuple[Float[Tensor, "*batch M N T"], Float[Tensor, "*batch M A C"]]:
        """Run the transformer over atoms and average them (lines 7, 11, 15 and 16).

        Parameters
        ----------
        atoms : what `describe` returns
        coordinates : noisy, scaled to unit variance; None (and M = 1) in the input embedder
        prepared : what the transformer's `prepare` returns

        Returns
        -------
        Rows of tokens, zero for tokens without atoms; rows of atoms.
        """
        q = atoms.c
        if self.trunk is not None and coordinates is not None:
            q = q + self.trunk.coordinates(coordinates).to(q.dtype)
        q = self.transformer(q, atoms.c, atoms.p, atoms.mask, prepared)
        return recomputed(self.transformer.checkpointing, self._to_tokens)(q, atoms.tokens), q

    def _pair_update(self, p: Tensor) -> Tensor:
        """Apply the MLP of atom pairs (line 14)."""
        for layer in self.pair_mlp:
            p = layer(p.relu())
        return p

    def _to_tokens(self, q: Tensor, tokens: AtomTokens) -> Tensor:
        """Average the atoms of each token (line 16), in rows six times as wide as an atom's."""
        return tokens.mean(self.to_tokens(q).relu())

    def _features(self, batch: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Embed each atom of its reference conformer (line 1), [..., A, C]."""
        position = batch["ref_pos"]
        present = batch["ref_mask"][..., None].to(dtype)
        element = F.one_hot(batch["ref_element"], ELEMENTS)
        name = F.one_hot(batch["ref_atom_name_chars"], NAME_CHARACTERS).flatten(-2)
        charge = batch["ref_charge"].to(position.dtype).arcsinh()[..., None]
        c: Tensor = (self.position(position) + self.charge(charge)).to(dtype)
        c = c + self.features(torch.cat([present, element.to(dtype), name.to(dtype)], -1))
        return c * present

    def _reference_pairs(self, batch: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """Embed offsets between atoms of one reference conformer (lines 2 to 6), [..., W, Q, K, P].

        Offsets are taken in the type of the positions.
        """
        position, space = batch["ref_pos"], batch["ref_space_uid"][..., None]
        mask = batch["atom_mask"][..., None]
        offset = queries_of(position)[..., :, None, :] - keys_of(position)[..., None, :, :]
        same = queries_of(space)[..., :, None, :] == keys_of(space)[..., None, :, :]
        same = same & queries_of(mask)[..., :, None, :] & keys_of(mask)[..., None, :, :]
        nearness = 1 / (1 + offset.square().sum(-1, keepdim=True))
        valid = same.to(position.dtype)
        # All three layers are linear without a bias: one matmul of their inputs side by side.
        weight = torch.cat(
            [self.offset.weight, self.inverse_distance.weight, self.same_space.weight], -1
        )
        inputs = torch.cat([offset * valid, nearness * valid, valid], -1)
        return F.linear(inputs, weight.to(inputs.dtype)).to(dtype)


class AtomDecoder(nn.Module):
    """Rows of tokens to an update of each atom's coordinates: algorithm 6.

    Parameters
    ----------
    config : widths, heads and blocks
    token_width : T
    checkpointing : what the backward pass recomputes
    """

    def __init__(self, config: AtomConfig, token_width: int, checkpointing: Checkpointing) -> None:
        super().__init__()
        self.from_tokens = Linear(token_width, config.width, bias=False)
        self.transformer = AtomTransformer(
            config.width,
            config.pair_width,
            config.num_heads,
            config.num_blocks,
            checkpointing,
        )
        self.norm = LayerNorm(config.width, bias=False)
        self.update = Linear(config.width, 3, bias=False)

    def forward(
        self,
        a: Float[Tensor, "*batch M N T"],
        q: Float[Tensor, "*batch M A C"],
        atoms: Atoms,
        prepared: Prepared | None = None,
    ) -> Float[Tensor, "*batch M A 3"]:
        """Return the update, in float32 where rows are 16-bit.

        Parameters
        ----------
        a : rows of tokens
        q : rows of atoms from the encoder
        atoms : what the encoder's `describe` returns
        prepared : what the transformer's `prepare` returns
        """
        q = q + atoms.tokens.spread(self.from_tokens(a))
        q = self.transformer(q, atoms.c, atoms.p, atoms.mask, prepared)
        wide = torch.promote_types(q.dtype, torch.float32)
        update: Tensor = self.update(self.norm(q.to(wide)))
        return update
