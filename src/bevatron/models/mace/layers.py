"""The two parts of a MACE layer: messages from neighbours, and the product correlating them."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.kernels import radial_tensor_product, scatter_sum, symmetric_contraction
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.maths.symmetric_product import CouplingTensor, symmetric_coefficients
from bevatron.models.mace.blocks import (
    ElementLinear,
    EquivariantLinear,
    RadialFunctions,
    RadialMLP,
    flatten_degrees,
    join_degrees,
    split_degrees,
)
from bevatron.models.mace.config import MaceConfig, irreps


def product_paths(l_in: int, l_max: int) -> list[int]:
    """Count the paths (l1, l2) -> l3 with l1 <= l_in, l2 <= l_max for each l3 up to l_max.

    Only l1 + l2 + l3 even: all features have the parity (-1)^l.
    """
    return [
        sum(
            abs(l1 - l2) <= l3 <= l1 + l2 and (l1 + l2 + l3) % 2 == 0
            for l1 in range(l_in + 1)
            for l2 in range(l_max + 1)
        )
        for l3 in range(l_max + 1)
    ]


class Interaction(nn.Module):
    r"""Messages: :math:`A_i = W \sum_j R(r_{ij}) \cdot (W_{up} h_j \otimes Y(\hat r_{ij})) / n`.

    Equations 8 to 9 of Batatia et al. 2022. n is the average number of neighbours, or with density
    normalisation :math:`1 + \sum_j \tanh(d(r_{ij})^2)`. The skip is `ElementLinear`: of h in the
    residual kinds, of A in the others.
    """

    def __init__(self, config: MaceConfig, layer: int) -> None:
        super().__init__()
        kind = config.layer_kind(layer)
        l_in, l_out = config.layer_degrees(layer)
        channels, l_max = config.num_channels, config.l_max
        paths = product_paths(l_in, l_max)
        self.residual = kind in {"residual", "density_residual"}
        self.avg_num_neighbors = config.avg_num_neighbors
        self.channels, self.l_in, self.l_max = channels, l_in, l_max
        self.irreps_in = irreps(channels, l_in)
        self.irreps_harmonics = irreps(1, l_max)
        self.irreps_out = irreps(channels, l_max)
        self.linear_up = EquivariantLinear(channels, [1] * (l_in + 1))
        self.radial_mlp = RadialMLP([config.num_bessel, *config.radial_mlp, sum(paths) * channels])
        self.linear = EquivariantLinear(channels, paths)
        skip_in, skip_out = (l_in, l_out) if self.residual else (l_max, l_max)
        self.skip = ElementLinear(config.num_elements, channels, skip_in, skip_out)
        self.density = RadialMLP([config.num_bessel, 1]) if "density" in kind else None

    def forward(
        self,
        features: Float[Tensor, "N D"],
        harmonics: Float[Tensor, "E S"],
        radial: RadialFunctions,
        edges: EdgeOrder,
        elements: ElementOrder,
    ) -> tuple[Float[Tensor, "N K S"], Float[Tensor, "N F"] | None]:
        """Return A and, in the residual kinds, the skip that is added after the product."""
        messages = radial_tensor_product(
            self.linear_up(features),
            harmonics,
            radial.hidden(self.radial_mlp),
            self.radial_mlp.last_weight,
            edges,
            self.irreps_in,
            self.irreps_harmonics,
            self.irreps_out,
            layout="ir_mul",
        )
        a = self._mixed(messages, radial, edges)
        if self.residual:
            skip = self.skip(split_degrees(features, [self.channels] * (self.l_in + 1)), elements)
            return a, flatten_degrees(skip)
        degrees = a.split([2 * degree + 1 for degree in range(self.l_max + 1)], dim=2)
        return join_degrees(self.skip(degrees, elements)), None

    def _mixed(
        self, messages: Tensor, radial: RadialFunctions, edges: EdgeOrder
    ) -> Float[Tensor, "N K S"]:
        """Mix channels; divide by the number of neighbours, average or as a smooth density."""
        scale = 1.0 / self.avg_num_neighbors if self.density is None else 1.0
        mixed: Tensor = self.linear(messages, scale)
        a: Tensor = mixed.unflatten(1, (-1, self.channels)).transpose(1, 2)
        if self.density is None:
            return a
        density = torch.tanh(self.density(radial.basis).square())
        if radial.cutoff is not None:
            density = density * radial.cutoff
        total = scatter_sum(density, edges.edges[1], len(a), ordered=True)
        return a / (1.0 + total).unsqueeze(2)


class Product(nn.Module):
    r"""Correlate up to nu messages of an atom: :math:`B = \sum_\nu W_{z\nu} U_\nu A^{\otimes\nu}`.

    Equations 10 to 11 of Batatia et al. 2022, then a linear map and the skip.
    """

    def __init__(self, config: MaceConfig, layer: int) -> None:
        super().__init__()
        _, l_out = config.layer_degrees(layer)
        channels = config.num_channels
        self.irreps_out = irreps(channels, l_out)
        self.correlation = config.correlation
        self.l_out = l_out
        self.contraction = nn.ModuleList(
            ContractionWeights(config, degree) for degree in range(l_out + 1)
        )
        self.linear = EquivariantLinear(channels, [1] * (l_out + 1))

    def forward(
        self, a: Float[Tensor, "N K S"], skip: Float[Tensor, "N F"] | None, elements: ElementOrder
    ) -> Float[Tensor, "N F"]:
        """Return the features of the next layer."""
        contraction = [cast("ContractionWeights", weights) for weights in self.contraction]
        weights = {w.degree: list(w.weights) for w in contraction}
        couplings = {w.degree: w.couplings() for w in contraction}
        correlated = symmetric_contraction(
            a, weights, elements, self.irreps_out, self.correlation, couplings, layout="ir_mul"
        )
        features: Tensor = self.linear(correlated)
        return features if skip is None else features + skip


class ContractionWeights(nn.Module):
    """Weights [Z, paths, K] of one degree L for every correlation, and its coefficients if stored.

    A checkpoint with its own coefficients may have a different number of paths; loading it
    changes the shape of the weights.
    """

    def __init__(self, config: MaceConfig, degree: int) -> None:
        super().__init__()
        self.degree, self.l_max = degree, config.l_max
        exact = [
            symmetric_coefficients(config.l_max, degree, nu)
            for nu in range(1, config.correlation + 1)
        ]
        self.weights = nn.ParameterList(
            nn.Parameter(
                torch.randn(config.num_elements, coupling.num_paths, config.num_channels)
                / coupling.num_paths
            )
            for coupling in exact
        )
        self.coefficients = None
        if config.coefficients == "stored":
            self.coefficients = nn.ModuleList(StoredCoupling(coupling) for coupling in exact)
        self._couplings: list[CouplingTensor] | None = None

    def couplings(self) -> list[CouplingTensor]:
        """Return the coefficients of correlation 1, 2, ..."""
        if self._couplings is None:
            correlations = range(1, len(self.weights) + 1)
            if self.coefficients is None:
                self._couplings = [
                    symmetric_coefficients(self.l_max, self.degree, nu) for nu in correlations
                ]
            else:
                self._couplings = [
                    cast("StoredCoupling", stored).coupling(
                        self.degree, self.l_max, weight.shape[1]
                    )
                    for stored, weight in zip(self.coefficients, self.weights, strict=True)
                ]
        return self._couplings

    def take_shapes(self, state: Mapping[str, Tensor], prefix: str) -> None:
        """Resize stored coefficients, and the paths of the weights, to a state dict."""
        if self.coefficients is None:
            return
        self._couplings = None
        for i, stored in enumerate(self.coefficients):
            indices = state.get(f"{prefix}coefficients.{i}.indices")
            weight = state.get(f"{prefix}weights.{i}")
            if indices is None or weight is None:
                continue
            cast("StoredCoupling", stored).resize(indices.shape)
            own = self.weights[i]
            if own.shape[1] != weight.shape[1]:
                shape = (own.shape[0], weight.shape[1], own.shape[2])
                self.weights[i] = nn.Parameter(torch.randn(shape).to(own) / shape[1])

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Tensor], prefix: str, *arguments: Any
    ) -> None:
        self.take_shapes(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *arguments)


class StoredCoupling(nn.Module):
    """Coefficients of a checkpoint: positions (M, lm_1, ..., lm_nu, path) and values."""

    indices: Tensor
    values: Tensor

    def __init__(self, coupling: CouplingTensor) -> None:
        super().__init__()
        for name, value in coupling_state(coupling).items():
            self.register_buffer(name, value)

    def resize(self, shape: Sequence[int]) -> None:
        """Allocate this number of coefficients."""
        self.indices = self.indices.new_zeros(tuple(shape))
        self.values = self.values.new_zeros(shape[0])

    def coupling(self, degree: int, l_max: int, num_paths: int) -> CouplingTensor:
        """Return the coefficients in the form that the contraction takes."""
        indices = self.indices.cpu().to(torch.int64).numpy()
        return CouplingTensor(
            degree=degree,
            l_max=l_max,
            num_paths=num_paths,
            indices=indices[:, :-1],
            paths=indices[:, -1],
            values=self.values.detach().cpu().double().numpy(),
        )


def coupling_state(coupling: CouplingTensor) -> dict[str, Tensor]:
    """Return coefficients as tensors that safetensors can hold."""
    columns = [torch.from_numpy(coupling.indices), torch.from_numpy(coupling.paths)[:, None]]
    return {
        "indices": torch.cat(columns, dim=1).to(torch.int32),
        "values": torch.from_numpy(coupling.values),
    }
