"""MACE: an equivariant interatomic potential of high body order.

Batatia et al., "MACE: Higher order equivariant message passing neural networks" (NeurIPS 2022),
with the variations of its foundation models. From bottom to top: `blocks` (linear maps, radial
functions, read-outs), `layers` (message and product), and here the whole. An atom's features are
flat, ``128x0e+128x1o``, in the layout ``ir_mul`` (component after component); a layer maps those
of an atom and of its neighbours within r_max to new ones. Each layer adds to the energy of the
atom through a read-out of its scalars. Forces and stress are derivatives of the energy.

Legend: N atoms, E directed edges (sender -> receiver), G structures, K channels, Z elements, H
heads, S = (l_max+1)^2 components of the spherical harmonics. Units eV and Å.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from ase.data import chemical_symbols
from jaxtyping import Float, Int
from torch import Tensor, nn

from bevatron.data.samples import StructureBatch
from bevatron.errors import ConfigError, DataError
from bevatron.kernels import edge_vectors, scatter_sum, spherical_harmonics
from bevatron.kernels.equivariant.channelwise_tensor_product import EdgeOrder
from bevatron.kernels.equivariant.element_order import ElementOrder
from bevatron.maths.symmetric_product import CouplingTensor
from bevatron.models.mace.blocks import (
    LinearReadout,
    NodeEmbedding,
    NonlinearReadout,
    PairRepulsion,
    RadialBasis,
)
from bevatron.models.mace.config import MaceConfig
from bevatron.models.mace.layers import ContractionWeights, Interaction, Product

OUTPUTS = ("energy", "node_energy", "forces", "stress", "virials", "descriptors", "features")
"""Outputs of `MACE.forward`."""


class MACE(nn.Module):
    """The potential.

    Raises ConfigError if the configuration has no elements or no E0.

    Parameters
    ----------
    config : complete hyper-parameters, elements and E0 included
    dtype
        Floating-point type; torch's default if not given. Asking here for float64 keeps E0 and
        the radial constants exact, which ``MACE(config).double()`` would not.

    Examples
    --------
    >>> config = MaceConfig.preset("small").with_data(
    ...     atomic_numbers=(1, 8), atomic_energies=((-13.6, -432.0),), avg_num_neighbors=12.0
    ... )
    >>> sum(p.numel() for p in MACE(config).parameters()) > 10_000
    True
    """

    atomic_numbers: Tensor
    atomic_energies: Tensor
    scale: Tensor
    shift: Tensor
    element_index: Tensor

    def __init__(self, config: MaceConfig, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        if not config.atomic_numbers:
            raise ConfigError("atomic_numbers: a model needs elements; take them from the data")
        if not config.atomic_energies:
            raise ConfigError("atomic_energies: a model needs E0; take them from the data")
        self.config = config
        # Built in double precision whatever the type: the same seed gives the same weights, and
        # constants are rounded once.
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            self._build(config)
        finally:
            torch.set_default_dtype(before)
        self.to(dtype or before)

    def _build(self, config: MaceConfig) -> None:
        numbers = torch.tensor(config.atomic_numbers, dtype=torch.int64)
        self.register_buffer("atomic_numbers", numbers)
        self.register_buffer("atomic_energies", torch.tensor(config.atomic_energies))
        for name in ("scale", "shift"):
            values = torch.tensor(getattr(config, name))
            self.register_buffer(name, values.expand(config.num_heads).clone())
        # Unknown elements were refused before.
        index = torch.full((256,), config.num_elements, dtype=torch.int64)
        index[numbers] = torch.arange(config.num_elements)
        self.register_buffer("element_index", index, persistent=False)
        self.embedding = NodeEmbedding(config.num_elements, config.num_channels)
        self.radial_basis = RadialBasis(config)
        repulsion = PairRepulsion(config.polynomial_cutoff) if config.pair_repulsion else None
        self.pair_repulsion = repulsion
        layers = range(config.num_interactions)
        self.interactions = nn.ModuleList(Interaction(config, layer) for layer in layers)
        self.products = nn.ModuleList(Product(config, layer) for layer in layers)
        # As in mace-torch a model of a single layer has the linear read-out only.
        readouts: list[nn.Module] = [
            LinearReadout(config.num_channels, config.num_heads)
            for _ in range(max(1, config.num_interactions - 1))
        ]
        if config.num_interactions > 1:
            width = config.readout_width
            readouts.append(NonlinearReadout(config.num_channels, width, config.num_heads))
        self.readouts = nn.ModuleList(readouts)

    def forward(
        self,
        batch: StructureBatch,
        *,
        compute: Collection[str] = ("energy", "forces"),
        create_graph: bool = False,
    ) -> dict[str, Tensor]:
        """Compute energies and other requested outputs.

        Raises DataError if an element is unknown to the model, naming it.

        Parameters
        ----------
        batch : structures with their neighbours within r_max, floating-point type that of the model
        compute : any of `OUTPUTS`
        create_graph
            Whether the results are to be differentiated (training on forces or stress, Hessians).

        Returns
        -------
        dict
            energy [G] and node_energy [N], always, in float64: atoms are summed in double precision
            whatever the model's; forces [N, 3] = -dE/dr; stress [G, 3, 3] = dE/d(strain)/volume,
            zero without a periodic axis, see `stress_volume`; virials [G, 3, 3] = -dE/d(strain);
            descriptors [N, layers * K], the scalars of every layer; features [N, sum of F], all
            features of every layer, channel after channel as e3nn has them.
        """
        _check_outputs(compute)
        straining = "stress" in compute or "virials" in compute
        derivatives = straining or "forces" in compute
        if not batch.checked:
            self.check(batch)
        index = self.element_index[batch.atomic_numbers]
        elements = ElementOrder(index, self.config.num_elements)
        with torch.set_grad_enabled(derivatives or torch.is_grad_enabled()):
            geometry = Geometry.of(batch, forces=derivatives, strain=straining)
            features = self._features(geometry, elements)
            outputs = self._energies(batch, geometry, features, elements)
            if "descriptors" in compute:
                k = self.config.num_channels
                outputs["descriptors"] = torch.cat([x[:, :k] for x in features], dim=1)
            if "features" in compute:
                outputs["features"] = torch.cat([self._by_channel(x) for x in features], dim=1)
            if derivatives:
                outputs.update(
                    geometry.derivatives(outputs["energy"], batch, self.config.r_max, create_graph)
                )
        kept = {"energy", "node_energy", *compute}
        return {name: value for name, value in outputs.items() if name in kept}

    def couplings(self, layer: int, degree: int) -> list[CouplingTensor]:
        """Return the coefficients of a layer's product to one degree, of correlation 1, 2, ..."""
        return self._contraction(layer, degree).couplings()

    def take_shapes(self, state: Mapping[str, Tensor]) -> None:
        """Prepare for weights that come with other coupling coefficients (``stored``)."""
        for layer in range(self.config.num_interactions):
            for degree in range(self.config.layer_degrees(layer)[1] + 1):
                prefix = f"products.{layer}.contraction.{degree}."
                self._contraction(layer, degree).take_shapes(state, prefix)

    def _contraction(self, layer: int, degree: int) -> ContractionWeights:
        return cast(
            "ContractionWeights", self.get_submodule(f"products.{layer}.contraction.{degree}")
        )

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Split the parameters as mace-torch does: products and message maps decay, others not."""
        decayed: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            message_map = name.startswith("interactions.") and ".linear.weights." in name
            chosen = decayed if message_map or name.startswith("products.") else others
            chosen.append(parameter)
        return [
            {"params": decayed, "weight_decay": weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]

    def _features(self, geometry: "Geometry", elements: ElementOrder) -> list[Tensor]:
        """Run all layers; one flat feature [N, F] of each."""
        harmonics = spherical_harmonics(self.config.l_max, geometry.vectors)
        radial = self.radial_basis(geometry.lengths, geometry.numbers, geometry.order.edges)
        features = [self.embedding(elements)]
        for interaction, product in zip(self.interactions, self.products, strict=True):
            a, skip = interaction(features[-1], harmonics, radial, geometry.order, elements)
            features.append(product(a, skip, elements))
        return features[1:]

    def _by_channel(self, x: Tensor) -> Tensor:
        """Bring a layer's features from ``ir_mul`` to ``mul_ir``: all of a channel together."""
        rows = x.unflatten(1, (-1, self.config.num_channels))
        degrees = range(math.isqrt(rows.shape[1]))  # (L + 1)^2 components
        return torch.cat(
            [rows[:, d**2 : (d + 1) ** 2].transpose(1, 2).flatten(1) for d in degrees], dim=1
        )

    def _energies(
        self,
        batch: StructureBatch,
        geometry: "Geometry",
        features: list[Tensor],
        elements: ElementOrder,
    ) -> dict[str, Tensor]:
        """E_i = E0[head, z_i] + scale[head] * (pair_i + sum of read-outs) + shift[head]."""
        head = batch.head[batch.graph]
        energy = sum(
            readout(x, head) for readout, x in zip(self.readouts, features, strict=True)
        ) + torch.zeros_like(geometry.positions[:, 0])
        if self.pair_repulsion is not None:
            energy = energy + self.pair_repulsion(
                geometry.lengths, geometry.numbers, geometry.order.edges
            )
        if self.config.scale_shift:
            energy = self.scale[head] * energy + self.shift[head]
        isolated = self.atomic_energies[head, elements.elements]
        node_energy = isolated.double() + energy.double()
        total = scatter_sum(node_energy, batch.graph, batch.num_graphs, ordered=True)
        return {"energy": total, "node_energy": node_energy}

    def check(self, batch: StructureBatch) -> None:
        """Refuse a batch with elements that the model does not know.

        Raises DataError naming them.
        """
        present = set(batch.atomic_numbers.tolist())
        unknown = sorted(present - set(self.config.atomic_numbers))
        if unknown:
            known = ", ".join(chemical_symbols[z] for z in self.config.atomic_numbers)
            names = ", ".join(chemical_symbols[z] if z < 119 else str(z) for z in unknown)
            raise DataError(
                f"the structures contain {names}, which the model does not know; it knows {known}"
            )


@dataclass(frozen=True)
class Geometry:
    """Edge vectors as functions of the positions and strain that energies are differentiated for.

    Attributes
    ----------
    positions : [N, 3] Å; forces are the gradient with respect to them
    strain : [G, 3, 3], zeros; stress is the gradient with respect to it; None if not needed
    vectors, lengths : [E, 3], [E] Å, from sender to receiver
    order : the edges [2, E] with their orders
    numbers : [N] atomic numbers
    """

    positions: Float[Tensor, "N 3"]
    strain: Float[Tensor, "G 3 3"] | None
    vectors: Float[Tensor, "E 3"]
    lengths: Float[Tensor, " E"]
    order: EdgeOrder
    numbers: Int[Tensor, " N"]

    @classmethod
    def of(cls, batch: StructureBatch, *, forces: bool, strain: bool) -> "Geometry":
        """Build edge vectors; vec = r[receiver] - r[sender] + shift . cell.

        A strain moves positions and cells by their product with its symmetric part.
        """
        positions, cell = batch.positions, batch.cell
        if forces and not positions.requires_grad:
            positions = positions.detach().requires_grad_()
        moved, zero = positions, None
        if strain:
            zero = torch.zeros_like(cell).requires_grad_()
            symmetric = 0.5 * (zero + zero.transpose(1, 2))
            moved = positions + torch.einsum("ni,nij->nj", positions, symmetric[batch.graph])
            cell = cell + cell @ symmetric
        order = EdgeOrder(batch.edges, batch.num_atoms, by_receiver=True)
        vectors = edge_vectors(moved, order, batch.edge_shifts, cell, batch.graph)
        lengths = torch.linalg.vector_norm(vectors, dim=-1)
        return cls(positions, zero, vectors, lengths, order, batch.atomic_numbers)

    def derivatives(
        self, energy: Float[Tensor, " G"], batch: StructureBatch, r_max: float, create_graph: bool
    ) -> dict[str, Tensor]:
        """Differentiate the energies with respect to positions and strain."""
        inputs = [self.positions] if self.strain is None else [self.positions, self.strain]
        gradients = torch.autograd.grad(
            energy.sum(), inputs, create_graph=create_graph, materialize_grads=True
        )
        outputs = {"forces": -gradients[0]}
        if self.strain is not None:
            volume = stress_volume(batch, r_max)
            inverse = torch.where(volume > 0, 1.0 / volume.clamp(min=1e-30), 0.0)
            outputs["virials"] = -gradients[1]
            outputs["stress"] = gradients[1] * inverse[:, None, None]
        return outputs


@torch.no_grad()
def stress_volume(batch: StructureBatch, r_max: float) -> Float[Tensor, " G"]:
    """Volume that the stress of each structure refers to, Å^3; 0 without a periodic axis.

    With three periodic axes it is that of the cell. An open axis of a slab or wire has no length;
    mace-torch gives it 5 r_max (1 + the largest coordinate), whatever the cell, and this function
    does the same, so that stresses can be compared. Virials need no such choice.
    """
    largest = batch.positions.abs().amax(dim=1)
    reach = largest.new_zeros(batch.num_graphs).scatter_reduce(0, batch.graph, largest, "amax")
    axes = torch.eye(3, dtype=batch.cell.dtype, device=batch.cell.device)
    open_axes = (5.0 * r_max * (1.0 + reach))[:, None, None] * axes
    volume = torch.linalg.det(torch.where(batch.pbc[:, :, None], batch.cell, open_axes)).abs()
    return torch.where(batch.pbc.any(dim=1), volume, 0.0)


def hessian(model: MACE, batch: StructureBatch) -> Float[Tensor, "N 3 N 3"]:
    """Second derivatives of the energy with respect to all positions of a batch, eV/Å^2.

    Entries between atoms of different structures are zero.

    Examples
    --------
    A frequency analysis divides H[i, a, j, b] by sqrt(m_i m_j) and diagonalises [3N, 3N].
    """
    positions = batch.positions.detach().requires_grad_()
    shaken = dataclasses.replace(batch, positions=positions)
    forces = model(shaken, compute=("forces",), create_graph=True)["forces"]
    rows = [
        torch.autograd.grad(-component, positions, retain_graph=True, materialize_grads=True)[0]
        for component in forces.flatten()
    ]
    second: Tensor = torch.stack(rows).unflatten(0, (-1, 3))
    return second


def _check_outputs(compute: Collection[str]) -> None:
    unknown = [name for name in compute if name not in OUTPUTS]
    if isinstance(compute, str) or unknown:
        raise ConfigError(
            f"compute: there is no {unknown or [compute]} (known: {', '.join(OUTPUTS)})"
        )
