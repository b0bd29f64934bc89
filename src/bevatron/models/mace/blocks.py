r"""The linear maps, radial functions and read-outs of MACE.

Features are flat, ``ir_mul``: degree after degree, within a degree component after component,
within a component all channels, which are contiguous wherever they are read or written. Every map
is normalised as in e3nn: weights are of order 1 and the output is divided by the square root of the
number of inputs.
"""

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import pairwise
from math import sqrt

import torch
from ase.data import covalent_radii
from jaxtyping import Float, Int
from torch import Tensor, nn

from bevatron.kernels import (
    equivariant_linear,
    indexed_linear,
    radial_basis,
    radial_network,
    scatter_sum,
    silu,
    silu_linear,
)
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.maths.radial import (
    agnesi_transform,
    bessel_basis,
    bessel_parameters,
    polynomial_cutoff,
)
from bevatron.models.mace.config import MaceConfig

SILU_NORM = 1.6791767923989418
"""Factor that gives silu of a normal variable a second moment of 1."""


def split_degrees(x: Float[Tensor, "N D"], channels: Sequence[int]) -> list[Tensor]:
    """View a flat feature as a block [N, K, 2l+1] for each degree."""
    # One split, because the gradient of every slice would be a full-sized sum.
    widths = [mul * (2 * degree + 1) for degree, mul in enumerate(channels)]
    return [
        part.unflatten(1, (2 * degree + 1, mul)).transpose(1, 2)
        for degree, (mul, part) in enumerate(zip(channels, x.split(widths, dim=1), strict=True))
    ]


def join_degrees(parts: Sequence[Float[Tensor, "N K _"]]) -> Float[Tensor, "N K S"]:
    """Concatenate the components of all degrees; in memory channels are contiguous."""
    return torch.cat([part.transpose(1, 2) for part in parts], dim=1).transpose(1, 2)


def flatten_degrees(parts: Sequence[Float[Tensor, "N K _"]]) -> Float[Tensor, "N D"]:
    """Join features [N, K, 2l+1] of each degree into a flat one."""
    return torch.cat([part.transpose(1, 2).flatten(1) for part in parts], dim=1)


class EquivariantLinear(nn.Module):
    """Mix the channels of each degree: y_l = W_l x_l / sqrt(channels_in).

    Parameters
    ----------
    channels : K, of each degree of the result and of each block of the input
    blocks : blocks of the input, in the degrees 0, 1, ...
    """

    def __init__(self, channels: int, blocks: Sequence[int]) -> None:
        super().__init__()
        self.blocks = tuple(blocks)
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(number * channels, channels)) for number in blocks
        )

    def forward(self, x: Float[Tensor, "N D_in"], scale: float = 1.0) -> Float[Tensor, "N D"]:
        """Return one block per degree, times ``scale``."""
        return equivariant_linear(x, list(self.weights), self.blocks, scale)


class ElementLinear(nn.Module):
    """Mix the channels of each degree with weights of the atom's element (mace: skip_tp).

    y_l = W_l[z] x_l / sqrt(channels_in * elements).

    Parameters
    ----------
    num_elements : Z
    channels : K, the same before and after
    l_in, l_out : highest degrees; degrees that are not in both are zero
    """

    def __init__(self, num_elements: int, channels: int, l_in: int, l_out: int) -> None:
        super().__init__()
        self.channels, self.l_in, self.l_out = channels, l_in, l_out
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(num_elements, channels, channels))
            for _ in range(min(l_in, l_out) + 1)
        )

    def forward(
        self, parts: Sequence[Float[Tensor, "N K _"]], elements: ElementOrder
    ) -> list[Float[Tensor, "N K _"]]:
        """Return one [N, K, 2l+1] per degree of the output."""
        mixed = []
        for degree in range(self.l_out + 1):
            if degree <= self.l_in:
                weight = self.weights[degree]
                scale = 1.0 / sqrt(weight.shape[0] * weight.shape[1])
                mixed.append(indexed_linear(parts[degree], weight, elements, scale))
            else:
                shape = (parts[0].shape[0], 2 * degree + 1, self.channels)
                mixed.append(parts[0].new_zeros(shape).transpose(1, 2))
        return mixed


class NodeEmbedding(nn.Module):
    """First features of an atom: a learned vector per element, h = W[z] / sqrt(Z)."""

    def __init__(self, num_elements: int, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_elements, channels))

    def forward(self, elements: ElementOrder) -> Float[Tensor, "N K"]:
        """Look up each atom's element."""
        # As a map of one channel its gradient is summed in an order that never changes.
        one = self.weight.new_ones(len(elements.elements), 1, 1)
        scale = 1.0 / sqrt(self.weight.shape[0])
        return indexed_linear(one, self.weight.unsqueeze(1), elements, scale).squeeze(2)


class RadialBasis(nn.Module):
    """Bessel functions of an edge's length and the cutoff polynomial, optionally Agnesi's distance.

    Frequencies, prefactor and r_max are buffers: a converted checkpoint keeps its own, which may be
    rounded.
    """

    frequencies: Tensor
    prefactor: Tensor
    r_max: Tensor

    def __init__(self, config: MaceConfig) -> None:
        super().__init__()
        frequencies, prefactor = bessel_parameters(config.r_max, config.num_bessel)
        self.register_buffer("frequencies", frequencies)
        self.register_buffer("prefactor", prefactor)
        self.register_buffer("r_max", torch.tensor(config.r_max, dtype=torch.float64))
        self.polynomial_cutoff = config.polynomial_cutoff
        self.apply_cutoff = config.apply_cutoff
        self.agnesi = AgnesiTransform() if config.distance_transform == "agnesi" else None

    def forward(
        self, lengths: Float[Tensor, " E"], numbers: Int[Tensor, " N"], edges: Int[Tensor, "2 E"]
    ) -> "RadialFunctions":
        """Return the basis, and the cutoff if it is not part of the basis."""
        constants = (self.frequencies, self.prefactor, self.r_max)
        if self.apply_cutoff and self.agnesi is None:
            given = (lengths, *constants, self.polynomial_cutoff)
            return RadialFunctions(
                partial(radial_basis, *given), None, partial(radial_network, *given)
            )
        cutoff = polynomial_cutoff(lengths, self.r_max, self.polynomial_cutoff).unsqueeze(-1)
        if self.agnesi is not None:
            lengths = self.agnesi(lengths, numbers, edges)
        basis = bessel_basis(lengths, self.frequencies, self.prefactor)
        if self.apply_cutoff:
            return RadialFunctions(lambda: basis * cutoff)
        return RadialFunctions(lambda: basis, cutoff)


class RadialFunctions:
    """Radial functions of all edges.

    Parameters
    ----------
    basis : computes them [E, B] on first use
    cutoff : [E, 1], if it is not part of the basis; None if it is
    network
        Computes the hidden features [E, H] from the matrices of all hidden layers at once, if a
        fused operator supports that.
    """

    def __init__(
        self,
        basis: Callable[[], Tensor],
        cutoff: Float[Tensor, "E 1"] | None = None,
        network: Callable[[Sequence[Tensor]], Tensor] | None = None,
    ) -> None:
        self._make_basis, self.cutoff, self._network = basis, cutoff, network

    @cached_property
    def basis(self) -> Float[Tensor, "E B"]:
        """The functions themselves."""
        return self._make_basis()

    def hidden(self, mlp: "RadialMLP") -> Float[Tensor, "E H"]:
        """Return the input of a network's last layer, the cutoff included."""
        weights = mlp.hidden_weights
        if self._network is not None and weights:
            return self._network(weights)
        hidden = mlp.hidden(self.basis)
        return hidden if self.cutoff is None else hidden * self.cutoff


class AgnesiTransform(nn.Module):
    """Distance relative to the covalent radii of both atoms, see `maths.radial`."""

    a: Tensor
    q: Tensor
    p: Tensor
    covalent_radii: Tensor

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.float64
        for name, value in (("a", 1.0805), ("q", 0.9183), ("p", 4.5791)):
            self.register_buffer(name, torch.tensor(value, dtype=dtype))
        self.register_buffer("covalent_radii", torch.tensor(covalent_radii, dtype=dtype))

    def forward(
        self, lengths: Float[Tensor, " E"], numbers: Int[Tensor, " N"], edges: Int[Tensor, "2 E"]
    ) -> Float[Tensor, " E"]:
        """Transform the lengths."""
        radii = self.covalent_radii[numbers]
        r0 = 0.5 * (radii[edges[0]] + radii[edges[1]])
        return agnesi_transform(lengths, r0, self.a, self.q, self.p)


class PairRepulsion(nn.Module):
    r"""Repulsion of two nuclei after Ziegler, Biersack and Littmark, cut at the covalent radii.

    For every edge half of :math:`14.3996\, Z_i Z_j / r \cdot \phi(r/a)` eV goes to the receiver,
    with :math:`a = 0.4543 \cdot 0.529 / (Z_i^{0.3} + Z_j^{0.3})` Å.
    """

    coefficients: Tensor
    exponent: Tensor
    prefactor: Tensor
    covalent_radii: Tensor
    decays_e4: Tensor

    def __init__(self, polynomial_cutoff: int) -> None:
        super().__init__()
        dtype = torch.float64
        self.polynomial_cutoff = polynomial_cutoff
        phi = torch.tensor([0.1818, 0.5099, 0.2802, 0.02817], dtype=dtype)
        self.register_buffer("coefficients", phi)
        self.register_buffer("exponent", torch.tensor(0.3, dtype=dtype))
        self.register_buffer("prefactor", torch.tensor(0.4543, dtype=dtype))
        # mace-torch's decays are constants in its code, exact in any precision. So are these,
        # because casting a module leaves integers alone.
        decays = torch.tensor([32000, 9423, 4028, 2016])
        self.register_buffer("decays_e4", decays, persistent=False)
        self.register_buffer("covalent_radii", torch.tensor(covalent_radii, dtype=dtype))

    def forward(
        self, lengths: Float[Tensor, " E"], numbers: Int[Tensor, " N"], edges: Int[Tensor, "2 E"]
    ) -> Float[Tensor, " N"]:
        """Return the energy of each atom."""
        charges = numbers.to(lengths.dtype)
        screened = charges**self.exponent
        sender, receiver = edges
        a = self.prefactor * 0.529 / (screened[sender] + screened[receiver])
        decays = self.decays_e4.to(lengths.dtype) / 1e4
        phi = (self.coefficients * torch.exp(-decays * (lengths / a).unsqueeze(-1))).sum(-1)
        radii = self.covalent_radii[numbers]
        cutoff = polynomial_cutoff(lengths, radii[sender] + radii[receiver], self.polynomial_cutoff)
        energy = 0.5 * 14.3996 * charges[sender] * charges[receiver] / lengths * phi * cutoff
        return scatter_sum(energy, receiver, len(numbers), ordered=True)


class RadialMLP(nn.Module):
    """MLP from the radial basis of an edge to numbers per edge: x <- act(x W / sqrt(inputs)).

    The last layer is linear, without act; act is silu times `SILU_NORM`.
    """

    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.randn(n_in, n_out)) for n_in, n_out in pairwise(widths)
        )

    def forward(self, x: Float[Tensor, "E B"]) -> Float[Tensor, "E n"]:
        """Apply all layers."""
        return self.hidden(x) @ self.last_weight

    def hidden(self, x: Float[Tensor, "E B"]) -> Float[Tensor, "E H"]:
        """Return the input of the last layer, which callers apply with `last_weight` (or fuse)."""
        for layer, weight in enumerate(self.hidden_weights):
            x = silu_linear(x, weight) if layer else x @ weight
        return silu(x) if len(self.weights) > 1 else x

    @property
    def hidden_weights(self) -> list[Tensor]:
        """The matrices of all layers but the last, normalisation included."""
        return [self._scaled(layer) for layer in range(len(self.weights) - 1)]

    @property
    def last_weight(self) -> Float[Tensor, "H n"]:
        """The matrix of the last layer, normalisation included."""
        return self._scaled(len(self.weights) - 1)

    def _scaled(self, layer: int) -> Tensor:
        """Return a layer's matrix with the factor of the activation before it."""
        weight: Tensor = self.weights[layer]
        return weight * ((SILU_NORM if layer else 1.0) / sqrt(weight.shape[0]))


class LinearReadout(nn.Module):
    """Energy of an atom, linear in its scalars: one number per head."""

    def __init__(self, channels: int, num_heads: int) -> None:
        super().__init__()
        self.channels = channels
        self.weight = nn.Parameter(torch.randn(channels, num_heads))

    def forward(
        self, features: Float[Tensor, "N D"], head: Int[Tensor, " N"]
    ) -> Float[Tensor, " N"]:
        """Return the energy that each atom's head reads."""
        energies = features[:, : self.channels] @ (self.weight * (1.0 / sqrt(self.channels)))
        return energies.gather(1, head.unsqueeze(1)).squeeze(1)


class NonlinearReadout(nn.Module):
    """Energy of an atom from its scalars through a hidden layer, sliced by head."""

    def __init__(self, channels: int, width: int, num_heads: int) -> None:
        super().__init__()
        self.channels, self.width, self.num_heads = channels, width, num_heads
        self.hidden = nn.Parameter(torch.randn(channels, width * num_heads))
        self.output = nn.Parameter(torch.randn(width * num_heads, num_heads))

    def forward(
        self, features: Float[Tensor, "N D"], head: Int[Tensor, " N"]
    ) -> Float[Tensor, " N"]:
        """Return the energy that each atom's head reads; other heads' hidden parts are masked."""
        x = silu(features[:, : self.channels] @ (self.hidden * (1.0 / sqrt(self.channels))))
        if self.num_heads > 1:
            own = torch.arange(self.num_heads, device=head.device) == head.unsqueeze(1)
            x = (x.unflatten(1, (self.num_heads, self.width)) * own.unsqueeze(2)).flatten(1)
        scale = SILU_NORM / sqrt(self.output.shape[0])
        return (x @ (self.output * scale)).gather(1, head.unsqueeze(1)).squeeze(1)
