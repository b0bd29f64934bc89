"""Layout of mace-torch's state dict: one list that serves both directions.

mace-torch stores a linear map as one flat vector, block after block; here each degree has a matrix
of its own. A `Piece` maps a slice of one of their tensors to one of ours.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import torch
from torch import Tensor

from bevatron.maths.so3 import wigner_3j
from bevatron.models.mace.config import MaceConfig
from bevatron.models.mace.layers import product_paths


@dataclass(frozen=True)
class Piece:
    """One of our tensors as a part of one of theirs.

    Attributes
    ----------
    ours, theirs : names in the state dicts
    shape : shape of the piece in their order of axes
    order : their axes in our order; None if they are the same
    flat : whether their tensor is the flat concatenation of its pieces; otherwise it is the piece
    """

    ours: str
    theirs: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    flat: bool = False

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def to_ours(self, values: Tensor) -> Tensor:
        """Reshape a slice of their tensor to ours."""
        shaped = values.reshape(self.shape)
        return (shaped if self.order is None else shaped.permute(self.order)).contiguous()

    def to_theirs(self, values: Tensor) -> Tensor:
        """Reshape ours to their slice."""
        if self.order is not None:
            inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
            values = values.permute(inverse)
        return values.reshape(-1) if self.flat else values.reshape(self.shape).contiguous()


def pieces(config: MaceConfig, *, single_head_flat: bool = True) -> Iterator[Piece]:
    """List the common tensors; pieces of one flat tensor are in its order.

    Parameters
    ----------
    single_head_flat
        Whether a single head's E0, scale and shift lack the head axis, as mace-torch writes them.
    """
    z, k, h = config.num_elements, config.num_channels, config.num_heads
    head_axis = () if h == 1 and single_head_flat else (h,)
    yield Piece("embedding.weight", "node_embedding.linear.weight", (z, k), flat=True)
    yield from _radial(config)
    yield Piece("atomic_energies", "atomic_energies_fn.atomic_energies", (*head_axis, z))
    for layer in range(config.num_interactions):
        yield from _interaction(config, layer)
        yield from _product(config, layer)
    last = config.num_interactions - 1
    for layer in range(max(1, last)):
        yield Piece(
            f"readouts.{layer}.weight", f"readouts.{layer}.linear.weight", (k, h), flat=True
        )
    if last:
        width, name = config.readout_width * h, f"readouts.{last}"
        yield Piece(f"{name}.hidden", f"{name}.linear_1.weight", (k, width), flat=True)
        yield Piece(f"{name}.output", f"{name}.linear_2.weight", (width, h), flat=True)
    if config.scale_shift:
        yield Piece("scale", "scale_shift.scale", head_axis)
        yield Piece("shift", "scale_shift.shift", head_axis)


def _radial(config: MaceConfig) -> Iterator[Piece]:
    theirs = "radial_embedding.bessel_fn"
    yield Piece("radial_basis.frequencies", f"{theirs}.bessel_weights", (config.num_bessel,))
    yield Piece("radial_basis.prefactor", f"{theirs}.prefactor", ())
    yield Piece("radial_basis.r_max", "radial_embedding.cutoff_fn.r_max", ())
    if config.distance_transform == "agnesi":
        for name in ("a", "q", "p"):
            transform = f"radial_embedding.distance_transform.{name}"
            yield Piece(f"radial_basis.agnesi.{name}", transform, ())
        radii = "radial_embedding.distance_transform.covalent_radii"
        yield Piece("radial_basis.agnesi.covalent_radii", radii, (119,))
    if config.pair_repulsion:
        for ours, name, shape in (
            ("coefficients", "c", (4,)),
            ("exponent", "a_exp", ()),
            ("prefactor", "a_prefactor", ()),
            ("covalent_radii", "covalent_radii", (119,)),
        ):
            yield Piece(f"pair_repulsion.{ours}", f"pair_repulsion_fn.{name}", shape)


def _interaction(config: MaceConfig, layer: int) -> Iterator[Piece]:
    z, k = config.num_elements, config.num_channels
    l_in, l_out = config.layer_degrees(layer)
    name, kind = f"interactions.{layer}", config.layer_kind(layer)
    for degree in range(l_in + 1):
        ours = f"{name}.linear_up.weights.{degree}"
        yield Piece(ours, f"{name}.linear_up.weight", (k, k), flat=True)
    paths = product_paths(l_in, config.l_max)
    widths = [config.num_bessel, *config.radial_mlp, sum(paths) * k]
    for i, shape in enumerate(pairwise(widths)):
        theirs = f"{name}.conv_tp_weights.layer{i}.weight"
        yield Piece(f"{name}.radial_mlp.weights.{i}", theirs, shape)
    for degree, number in enumerate(paths):
        ours = f"{name}.linear.weights.{degree}"
        yield Piece(ours, f"{name}.linear.weight", (number * k, k), flat=True)
    residual = kind in {"residual", "density_residual"}
    for degree in range((min(l_in, l_out) if residual else config.l_max) + 1):
        ours = f"{name}.skip.weights.{degree}"
        yield Piece(ours, f"{name}.skip_tp.weight", (k, z, k), order=(1, 0, 2), flat=True)
    if "density" in kind:
        theirs = f"{name}.density_fn.layer0.weight"
        yield Piece(f"{name}.density.weights.0", theirs, (config.num_bessel, 1))


def _product(config: MaceConfig, layer: int) -> Iterator[Piece]:
    z, k = config.num_elements, config.num_channels
    name = f"products.{layer}"
    _, l_out = config.layer_degrees(layer)
    for degree in range(l_out + 1):
        ours = f"{name}.contraction.{degree}.weights"
        theirs = contraction_name(layer, degree)
        for nu in range(1, config.correlation + 1):
            # The number of paths depends on the checkpoint: -1.
            weights = weight_name(config, nu)
            yield Piece(f"{ours}.{nu - 1}", f"{theirs}.{weights}", (z, -1, k))
    for degree in range(l_out + 1):
        ours = f"{name}.linear.weights.{degree}"
        yield Piece(ours, f"{name}.linear.weight", (k, k), flat=True)


def contraction_name(layer: int, degree: int) -> str:
    """Their name of the contraction to one degree."""
    return f"products.{layer}.symmetric_contractions.contractions.{degree}"


def weight_name(config: MaceConfig, nu: int) -> str:
    """Their name of the weights of one correlation: the highest first."""
    return "weights_max" if nu == config.correlation else f"weights.{config.correlation - 1 - nu}"


@dataclass(frozen=True)
class CoefficientName:
    """Coefficients of one layer, degree and correlation: our name, theirs, that of their flag.

    The flag says that all of them vanish. The numbers of their flags ascend with the correlation
    although those of their weights descend; so it is in mace-torch.
    """

    layer: int
    degree: int
    nu: int
    ours: str
    theirs: str
    flag: str


def coefficient_names(config: MaceConfig) -> Iterator[CoefficientName]:
    """List all coefficients of the products."""
    for layer in range(config.num_interactions):
        for degree in range(config.layer_degrees(layer)[1] + 1):
            name = contraction_name(layer, degree)
            for nu in range(1, config.correlation + 1):
                flag = "max" if nu == config.correlation else nu - 1
                yield CoefficientName(
                    layer,
                    degree,
                    nu,
                    ours=f"products.{layer}.contraction.{degree}.coefficients.{nu - 1}",
                    theirs=f"{name}.U_matrix_{nu}",
                    flag=f"{name}.weights_{flag}_zeroed",
                )


def wigner_names(config: MaceConfig) -> Iterator[tuple[str, tuple[int, int, int]]]:
    """List their names of the coupling coefficients of the tensor products, with the degrees.

    Products with a degree 0 are written out in e3nn and have none.
    """
    for layer in range(config.num_interactions):
        prefix = f"interactions.{layer}.conv_tp._compiled_main_left_right._w3j"
        for l1 in range(1, config.layer_degrees(layer)[0] + 1):
            for l2 in range(1, config.l_max + 1):
                for l3 in range(max(1, abs(l1 - l2)), min(l1 + l2, config.l_max) + 1):
                    if (l1 + l2 + l3) % 2 == 0:
                        yield f"{prefix}_{l1}_{l2}_{l3}", (l1, l2, l3)


def constants(config: MaceConfig, dtype: torch.dtype) -> dict[str, Tensor]:
    """Build mace-torch's constant entries: masks, empty biases, couplings, flags."""
    k, s = config.num_channels, (config.l_max + 1) ** 2
    state = {
        "atomic_numbers": torch.tensor(config.atomic_numbers, dtype=torch.int64),
        "num_interactions": torch.tensor(config.num_interactions, dtype=torch.int64),
        "radial_embedding.cutoff_fn.p": torch.tensor(config.polynomial_cutoff, dtype=torch.int32),
    }
    if config.pair_repulsion:
        p = torch.tensor(config.polynomial_cutoff, dtype=torch.int32)
        state["pair_repulsion_fn.p"] = p

    def linear(name: str, size: int) -> None:
        state[f"{name}.bias"] = torch.zeros(0, dtype=dtype)
        state[f"{name}.output_mask"] = torch.ones(size, dtype=dtype)

    linear("node_embedding.linear", k)
    for layer in range(config.num_interactions):
        l_in, l_out = config.layer_degrees(layer)
        name, features = f"interactions.{layer}", k * (l_out + 1) ** 2
        paths = product_paths(l_in, config.l_max)
        mid = k * sum(n * (2 * degree + 1) for degree, n in enumerate(paths))
        linear(f"{name}.linear_up", k * (l_in + 1) ** 2)
        state[f"{name}.conv_tp.weight"] = torch.zeros(0, dtype=dtype)
        state[f"{name}.conv_tp.output_mask"] = torch.ones(mid, dtype=dtype)
        linear(f"{name}.linear", k * s)
        residual = config.layer_kind(layer) in {"residual", "density_residual"}
        mask = torch.ones(features if residual else k * s, dtype=dtype)
        if residual:
            mask[k * (min(l_in, l_out) + 1) ** 2 :] = 0.0
        state[f"{name}.skip_tp.output_mask"] = mask
        linear(f"products.{layer}.linear", features)
    for name, degrees in wigner_names(config):
        state[name] = wigner_3j(*degrees).to(dtype)
    last = config.num_interactions - 1
    for layer in range(max(1, last)):
        linear(f"readouts.{layer}.linear", config.num_heads)
    if last:
        linear(f"readouts.{last}.linear_1", config.readout_width * config.num_heads)
        linear(f"readouts.{last}.linear_2", config.num_heads)
    return state
