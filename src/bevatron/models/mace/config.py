"""Hyper-parameters of MACE, frozen and checked, and the published ones by name."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, Self

from tyro.conf import Suppress

from bevatron.errors import ConfigError
from bevatron.models.common.hyper_parameters import check_ranges, from_preset

InteractionKind = Literal["agnostic", "residual", "density", "density_residual"]
"""The interaction blocks, by divisor of the message and place of the element-dependent skip.

``agnostic``, ``density``: the skip acts on the message; without neighbours the atom has its E0.
``residual``, ``density_residual``: the skip carries the features of the layer before to the next.
``density*``: the message is divided by 1 + the sum of a learned edge density, the others divide by
the average number of neighbours.
"""


@dataclass(frozen=True)
class MaceConfig:
    """Everything that defines a MACE apart from its weights.

    The entries that depend on the data (`atomic_numbers`, `atomic_energies`, `avg_num_neighbors`,
    `scale`, `shift`) are filled from statistics of the training set; see `with_data`. The command
    line omits them (``Suppress``).

    Attributes
    ----------
    atomic_numbers
        The elements that the model knows, each once.
    heads
        Names of the read-outs; a structure's head is an index into them.
    default_head
        The head of structures that name none; models of bevatron 0.1 have none.
    atomic_energies
        E0, energy of each isolated atom in eV, one row per head in the order of `heads`.
    avg_num_neighbors
        Mean number of neighbours of the atoms that have any; divides the messages.
    scale, shift
        Per head: interaction energy of an atom = scale * (read-outs + pair repulsion) + shift, eV.
    scale_shift
        False is mace's plain model, which has neither.
    r_max
        Cutoff, Å.
    num_bessel
        Radial basis functions.
    polynomial_cutoff
        Exponent p of the cutoff function (and of that of the pair repulsion).
    apply_cutoff
        Whether the cutoff multiplies the radial basis, or else the output of the radial MLP.
    distance_transform
        ``agnesi`` gives the radial basis a transformed distance, as in MACE-MP-0b.
    pair_repulsion
        Add the Ziegler-Biersack-Littmark repulsion of nuclei.
    radial_mlp
        Hidden widths of the MLP from radial basis to the weights of the tensor product.
    l_max
        Highest degree of the spherical harmonics of an edge, 0 to 4.
    num_channels
        Channels K of each degree.
    max_L
        Highest degree of the node features between layers, 0 to 3.
    correlation
        Number of neighbours that one layer's product correlates (body order - 1), 1 to 4.
    num_interactions
        Number of layers.
    readout_width
        Hidden width of the last layer's read-out, per head.
    interaction_first
        The block of the first layer, see `InteractionKind`.
    interaction
        The block of the other layers.
    coefficients
        ``exact``: coupling coefficients are built in float64 and cast. ``stored``: they come with
        the weights, because a converted checkpoint has others (a reduced basis, or the same basis
        rounded to float32).

    Raises
    ------
    ConfigError
        If a value is out of its range or values contradict each other.

    Examples
    --------
    >>> MaceConfig.preset("paper").hidden_irreps
    '128x0e+128x1o'
    """

    atomic_numbers: Suppress[tuple[int, ...]] = ()
    heads: Suppress[tuple[str, ...]] = ("default",)
    default_head: Suppress[str | None] = None
    atomic_energies: Suppress[tuple[tuple[float, ...], ...]] = ()
    avg_num_neighbors: Suppress[float] = 1.0
    scale: Suppress[tuple[float, ...]] = (1.0,)
    shift: Suppress[tuple[float, ...]] = (0.0,)
    scale_shift: bool = True
    r_max: float = 5.0
    num_bessel: int = 8
    polynomial_cutoff: int = 5
    apply_cutoff: bool = True
    distance_transform: Literal["none", "agnesi"] = "none"
    pair_repulsion: bool = False
    radial_mlp: tuple[int, ...] = (64, 64, 64)
    l_max: int = 3
    num_channels: int = 128
    max_L: int = 1  # noqa: N815  the name its users know
    correlation: int = 3
    num_interactions: int = 2
    readout_width: int = 16
    interaction_first: InteractionKind = "agnostic"
    interaction: InteractionKind = "residual"
    coefficients: Suppress[Literal["exact", "stored"]] = "exact"

    def __post_init__(self) -> None:
        check_ranges(self, _RANGES)
        if not 0 < self.r_max < math.inf:
            raise ConfigError(f"r_max: expected a length above 0 Å, got {self.r_max}")
        if not 0 < self.avg_num_neighbors < math.inf:
            raise ConfigError(
                f"avg_num_neighbors: expected a number above 0, got {self.avg_num_neighbors}"
            )
        if any(width < 1 for width in self.radial_mlp):
            raise ConfigError(f"radial_mlp: expected widths of 1 or more, got {self.radial_mlp}")
        if self.correlation == 4 and (self.l_max > 3 or self.max_L > 1):
            entries = (2 * self.max_L + 1) * (self.l_max + 1) ** 8
            raise ConfigError(
                "correlation: 4 needs l_max <= 3 and max_L <= 1; "
                f"l_max {self.l_max} and max_L {self.max_L} would need {entries:,} coefficients "
                "for each coupling path of the highest degree"
            )
        self._check_data()

    @property
    def hidden_irreps(self) -> str:
        """Irreps of the features between layers, ``128x0e+128x1o``."""
        return irreps(self.num_channels, self.max_L)

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return len(self.heads)

    @property
    def num_elements(self) -> int:
        """Number of elements."""
        return len(self.atomic_numbers)

    def head_index(self, name: str | None = None) -> int:
        """Return the index of a head; without a name that of the default one.

        Raises ConfigError if there is no such head, or several and none is the default.
        """
        names = ", ".join(self.heads)
        if name is None and self.default_head is None and self.num_heads > 1:
            raise ConfigError(
                f"head: the model has several ({names}) and none is its default; choose one with "
                '`head="NAME"`'
            )
        chosen = name or self.default_head or self.heads[0]
        if chosen not in self.heads:
            raise ConfigError(f"head: the model has no '{chosen}' (it has {names})")
        return self.heads.index(chosen)

    def layer_kind(self, layer: int) -> InteractionKind:
        """Return the interaction block of a layer, counted from 0."""
        return self.interaction_first if layer == 0 else self.interaction

    def layer_degrees(self, layer: int) -> tuple[int, int]:
        """Return the highest degrees of a layer's input and output features, counted from 0."""
        return (
            0 if layer == 0 else self.max_L,
            0 if layer == self.num_interactions - 1 else self.max_L,
        )

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return published hyper-parameters by name, with changes.

        Raises ConfigError if there is no such preset, or no such entry.
        """
        return from_preset(cls, PRESETS, name, changes)

    def with_data(
        self,
        *,
        atomic_numbers: tuple[int, ...],
        atomic_energies: tuple[tuple[float, ...], ...],
        avg_num_neighbors: float,
        scale: Suppress[tuple[float, ...]] = (1.0,),
        shift: Suppress[tuple[float, ...]] = (0.0,),
        heads: tuple[str, ...] | None = None,
    ) -> Self:
        """Return a copy with the entries that depend on the data."""
        return dataclasses.replace(
            self,
            atomic_numbers=tuple(int(z) for z in atomic_numbers),
            atomic_energies=tuple(tuple(float(e) for e in row) for row in atomic_energies),
            avg_num_neighbors=float(avg_num_neighbors),
            scale=tuple(float(s) for s in scale),
            shift=tuple(float(s) for s in shift),
            heads=self.heads if heads is None else tuple(heads),
        )

    def _check_data(self) -> None:
        if len(set(self.atomic_numbers)) != len(self.atomic_numbers):
            raise ConfigError(f"atomic_numbers: {list(self.atomic_numbers)} holds an element twice")
        if any(not 1 <= z <= 118 for z in self.atomic_numbers):
            raise ConfigError(
                f"atomic_numbers: expected numbers of 1 to 118, got {list(self.atomic_numbers)}"
            )
        if not self.heads or len(set(self.heads)) != len(self.heads):
            raise ConfigError(f"heads: expected different names, got {list(self.heads)}")
        if self.default_head is not None and self.default_head not in self.heads:
            raise ConfigError(
                f"default_head: '{self.default_head}' is not one of the heads "
                f"{', '.join(self.heads)}"
            )
        if self.atomic_energies and len(self.atomic_energies) != self.num_heads:
            raise ConfigError(
                f"atomic_energies: expected one row for each of {self.num_heads} heads, "
                f"got {len(self.atomic_energies)}"
            )
        for head, row in zip(self.heads, self.atomic_energies, strict=False):
            if len(row) != self.num_elements:
                raise ConfigError(
                    f"atomic_energies: head '{head}' has {len(row)} energies "
                    f"for {self.num_elements} elements"
                )
        for name in ("scale", "shift"):
            if len(getattr(self, name)) not in {1, self.num_heads}:
                raise ConfigError(
                    f"{name}: expected 1 value or one for each of {self.num_heads} heads, "
                    f"got {len(getattr(self, name))}"
                )


def irreps(channels: int, l_max: int) -> str:
    """Name the irreps of ``channels`` features of each degree up to l_max, parity (-1)^l.

    Examples
    --------
    >>> irreps(8, 2)
    '8x0e+8x1o+8x2e'
    """
    return "+".join(f"{channels}x{degree}{'eo'[degree % 2]}" for degree in range(l_max + 1))


_RANGES = (
    ("l_max", 0, 4),
    ("max_L", 0, 3),
    ("correlation", 1, 4),
    ("num_interactions", 1, 64),
    ("num_channels", 1, 65536),
    ("num_bessel", 1, 4096),
    ("polynomial_cutoff", 2, 100),
    ("readout_width", 1, 65536),
)

_MP_0 = {
    "num_channels": 128,
    "l_max": 3,
    "correlation": 3,
    "r_max": 6.0,
    "num_bessel": 10,
    "interaction_first": "residual",
    "interaction": "residual",
}
_MP_0B2 = {
    "num_channels": 128,
    "l_max": 3,
    "correlation": 3,
    "r_max": 5.0,
    "num_bessel": 8,
    "interaction_first": "density",
    "interaction": "density_residual",
    "distance_transform": "agnesi",
    "pair_repulsion": True,
}

PRESETS: dict[str, dict[str, Any]] = {
    "default": {},
    "paper": {
        "num_channels": 128,
        "max_L": 1,
        "l_max": 3,
        "correlation": 2,
        "r_max": 4.5,
        "num_bessel": 8,
        "interaction_first": "residual",
        "interaction": "residual",
    },
    "mp-0-small": {**_MP_0, "max_L": 0},
    "mp-0-medium": {**_MP_0, "max_L": 1},
    "mp-0-large": {**_MP_0, "max_L": 2},
    "mp-0b2-small": {**_MP_0B2, "max_L": 0},
    "mp-0b2-medium": {**_MP_0B2, "max_L": 1},
    "mp-0b2-large": {**_MP_0B2, "max_L": 2},
    "small": {
        "num_channels": 32,
        "max_L": 1,
        "l_max": 2,
        "correlation": 2,
        "r_max": 4.5,
        "num_bessel": 8,
        "radial_mlp": (32, 32, 32),
    },
}
"""Published hyper-parameters: Firoz et al. 2025 (``paper``), the MACE-MP foundation models, the
defaults of mace-torch's command line (``default``), and quick ones for demonstrations (``small``).
"""
