"""Hyper-parameters of GPS++, frozen and checked, and the published ones by name."""

from dataclasses import dataclass, field, replace
from math import sqrt
from typing import Any, Literal, Self

from tyro.conf import Suppress

from bevatron.data.samples import FEATURES_VERSION, FeatureSet, feature_set
from bevatron.errors import ConfigError
from bevatron.models.common.hyper_parameters import check_ranges, from_preset

TargetKind = Literal["regression", "binary", "multiclass"]
"""Kind of a target: a number, 0 or 1, or the number of a class from 0."""

PCQM4MV2_MEAN = 5.380503871833475
PCQM4MV2_STD = 1.1785068841097899
"""Mean and spread of the training labels of PCQM4Mv2 that the published models use, eV."""

MEAN_DISTANCE = 3.6966338
"""Mean distance of two atoms in PCQM4Mv2 in Å; distances are divided by twice as much."""


@dataclass(frozen=True)
class Target:
    """One property to be predicted.

    Attributes
    ----------
    name : name in metrics and predictions
    kind : see `TargetKind`
    mean, std : for ``regression``: the network learns (label - mean) / std
    unit : unit, for tables
    num_classes : for ``multiclass``
    """

    name: str
    kind: TargetKind = "regression"
    mean: float = 0.0
    std: float = 1.0
    unit: str = ""
    num_classes: int = 0

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ConfigError(f"std: expected above 0 for '{self.name}', got {self.std}")
        if self.kind == "multiclass" and self.num_classes < 2:
            raise ConfigError(
                f"num_classes: expected 2 or more for '{self.name}', got {self.num_classes}"
            )

    @property
    def width(self) -> int:
        """Number of network outputs for this target."""
        return self.num_classes if self.kind == "multiclass" else 1


@dataclass(frozen=True)
class TrainedOn:
    """The domain of a model's training molecules, to recognise others.

    Attributes
    ----------
    atomic_numbers : atomic numbers of all elements that occurred, ascending
    min_atoms, max_atoms : heavy atoms of the smallest and the largest
    positions : whether positions were shown
    formal_charges
        All formal charges that occurred, ascending; None = not recorded, or not a feature.
    """

    atomic_numbers: tuple[int, ...]
    min_atoms: int
    max_atoms: int
    positions: bool
    formal_charges: tuple[int, ...] | None = None

    def joined(self, other: Self | None) -> Self:
        """Return the union of both domains."""
        if other is None:
            return self
        charges, others = self.formal_charges, other.formal_charges
        known = None if charges is None or others is None else tuple(sorted({*charges, *others}))
        return replace(
            self,
            atomic_numbers=tuple(sorted({*self.atomic_numbers, *other.atomic_numbers})),
            formal_charges=known,
            min_atoms=min(self.min_atoms, other.min_atoms),
            max_atoms=max(self.max_atoms, other.max_atoms),
            positions=self.positions or other.positions,
        )


@dataclass(frozen=True)
class DropoutConfig:
    """Rates of dropout; all but ``attention`` and ``ffn`` drop whole rows.

    Attributes
    ----------
    node : rate for an atom's updates in message passing
    edge : rate for a directed edge's
    global_ : rate for a molecule's
    encoder : rate for the encoded positions and bond lengths
    attention : rate for single attention probabilities
    graph
        Rate at which a whole molecule skips attention and FFN of the last block (stochastic depth);
        it rises linearly with depth, from 0 in the first block.
    ffn : rate for single hidden features of the FFN
    """

    node: float = 0.3
    edge: float = 0.0035
    global_: float = 0.35
    encoder: float = 0.18
    attention: float = 0.3
    graph: float = 0.3
    ffn: float = 0.0

    def __post_init__(self) -> None:
        for name, rate in vars(self).items():
            if not 0 <= rate < 1:
                raise ConfigError(f"dropout.{name}: expected one in [0, 1), got {rate}")


@dataclass(frozen=True)
class GPSPlusPlusConfig:
    """Everything that defines a GPS++ apart from its weights.

    Attributes
    ----------
    feature_set
        Chemical features of atoms and bonds, see `bevatron.data.samples.FEATURE_SETS`.
    num_layers
        Number of blocks.
    node_width
        Features of an atom.
    edge_width
        Features of a directed edge.
    global_width
        Features of a molecule.
    num_heads
        Attention heads, among which a node's features are divided.
    ffn_width
        Hidden features of the FFN.
    expansion
        Hidden features of the MLPs of nodes, edges and globals as a multiple of their outputs.
    embedding_width
        Width of the embeddings of chemical features and degrees.
    encoder_width
        Outputs of the MLPs of positional encodings.
    encoder_expansion
        Hidden features of these MLPs as a multiple of their outputs.
    encoder_norm
        Whether their inputs are normalised.
    decoder_width
        Hidden features of the readout; None = the width of a node.
    decoder
        Input of the readout: the sum over atoms, or that and the global features.
    mpnn
        Message passing in a block.
    attention
        Attention between all atoms of a molecule in a block.
    ffn
        The FFN of a block.
    edges
        Edge features with an MLP; without them a message is the two atoms' features.
    globals_
        Global features.
    sender_aggregation
        Atoms also sum over their outgoing edges.
    adjacent_aggregation
        Atoms also sum over their neighbours' features.
    laplacian
        Eigenvectors of the graph's Laplacian as an encoding of an atom's position in it.
    num_laplacian
        Number of eigenvectors.
    random_walk
        Return probabilities of random walks of 1, 2, ... steps, as a positional encoding.
    num_walks
        Number of steps.
    degree
        Number of neighbours, as a positional encoding.
    shortest_paths
        Attention bias by the number of bonds between two atoms.
    distance_bias
        Attention bias by distance.
    distance_sum
        3D centrality: a node feature from the distances to all atoms.
    bond_lengths
        Bond lengths as an edge feature.
    unused_bias
        Keep the tables and networks of the bias without attention, as official checkpoints do.
    num_kernels
        Gaussian kernels of the distance.
    max_path
        Last row of the table of shortest paths: b bonds read row min(b + 1, max_path); row 0 means
        no path.
    max_degree
        Larger degrees count as this one.
    noisy_nodes
        A head that reconstructs the features of atoms.
    noisy_edges
        A head that reconstructs the features of bonds.
    denoising
        A head that predicts the direction of the noise on positions.
    targets
        What is predicted.
    features_version
        See `bevatron.data.samples.FEATURES_VERSION`.
    trained_on
        See `TrainedOn`; None = not recorded.
    dropout
        See `DropoutConfig`.

    Raises
    ------
    ConfigError
        If a value is out of its range or values contradict each other.

    Examples
    --------
    >>> GPSPlusPlusConfig.preset("gpspp-16").num_layers
    16
    """

    feature_set: str = "set1"
    num_layers: int = 16
    node_width: int = 256
    edge_width: int = 128
    global_width: int = 64
    num_heads: int = 32
    ffn_width: int = 1024
    expansion: int = 4
    embedding_width: int = 64
    encoder_width: int = 32
    encoder_expansion: int = 2
    encoder_norm: bool = True
    decoder_width: int | None = None
    decoder: Literal["nodes", "nodes_and_global"] = "nodes"
    mpnn: bool = True
    attention: bool = True
    ffn: bool = True
    edges: bool = True
    globals_: bool = True
    sender_aggregation: bool = True
    adjacent_aggregation: bool = True
    laplacian: bool = True
    num_laplacian: int = 7
    random_walk: bool = True
    num_walks: int = 16
    degree: bool = True
    shortest_paths: bool = True
    distance_bias: bool = True
    distance_sum: bool = True
    bond_lengths: bool = True
    unused_bias: bool = False
    num_kernels: int = 128
    max_path: int = 100
    max_degree: int = 60
    noisy_nodes: bool = True
    noisy_edges: bool = True
    denoising: bool = False
    targets: Suppress[tuple[Target, ...]] = (Target("gap", unit="eV"),)
    features_version: Suppress[int] = FEATURES_VERSION
    trained_on: Suppress[TrainedOn | None] = None
    dropout: DropoutConfig = field(default_factory=DropoutConfig)

    def __post_init__(self) -> None:
        feature_set(self.feature_set)
        check_ranges(self, _RANGES)
        if self.decoder_width is not None:
            check_ranges(self, [("decoder_width", 1, 65536)])
        if self.node_width % self.num_heads:
            raise ConfigError(
                f"num_heads: {self.num_heads} heads do not divide node_width {self.node_width}"
            )
        if not (self.mpnn or self.attention):
            raise ConfigError("mpnn: a block needs message passing or attention, both are off")
        if self.decoder == "nodes_and_global" and not self.globals_:
            raise ConfigError("decoder: 'nodes_and_global' needs globals_")
        if self.noisy_edges and not self.edges:
            raise ConfigError("noisy_edges: needs edges")
        if self.denoising and not self.uses_positions:
            raise ConfigError("denoising: needs distance_bias, distance_sum or bond_lengths")
        names = [target.name for target in self.targets]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"targets: expected different names, got {names}")

    @property
    def features(self) -> FeatureSet:
        """The chemical features."""
        return feature_set(self.feature_set)

    @property
    def has_bias(self) -> bool:
        """Whether attention reads a bias at all."""
        return (self.shortest_paths or self.distance_bias) and (self.attention or self.denoising)

    @property
    def uses_positions(self) -> bool:
        """Whether positions can change anything."""
        distances = self.distance_bias and (self.attention or self.denoising)
        return distances or self.distance_sum or (self.bond_lengths and self.edges)

    @property
    def scale(self) -> float:
        """Scale of the attention logits."""
        return 1.0 / sqrt(self.node_width / self.num_heads)

    def updates_globals(self, layer: int) -> bool:
        """Whether a block, counted from 0, has an MLP of the global features."""
        last = layer == self.num_layers - 1
        return self.globals_ and self.mpnn and (self.decoder != "nodes" or not last)

    def graph_dropout(self, layer: int) -> float:
        """Return the rate at which a block's attention and FFN skip a whole molecule."""
        return self.dropout.graph * layer / max(self.num_layers - 1, 1)

    @classmethod
    def preset(cls, name: str, **changes: Any) -> Self:
        """Return published hyper-parameters by name, with changes.

        Raises ConfigError if there is no such preset, or no such entry.
        """
        return from_preset(cls, PRESETS, name, changes)


FROM_DATA = ("targets", "features_version", "trained_on")
"""Hyper-parameters that follow from the data and are never set by hand."""

_RANGES = (
    ("num_layers", 1, 1024),
    ("node_width", 1, 65536),
    ("edge_width", 1, 65536),
    ("global_width", 1, 65536),
    ("num_heads", 1, 65536),
    ("ffn_width", 1, 1048576),
    ("expansion", 1, 64),
    ("embedding_width", 1, 65536),
    ("encoder_width", 1, 65536),
    ("encoder_expansion", 1, 64),
    ("num_laplacian", 1, 7),
    ("num_walks", 1, 16),
    ("num_kernels", 1, 65536),
    ("max_path", 1, 254),
    ("max_degree", 1, 1024),
    ("features_version", 1, FEATURES_VERSION),
)

_GAP = (Target("gap", mean=PCQM4MV2_MEAN, std=PCQM4MV2_STD, unit="eV"),)

_SMALL: dict[str, Any] = {
    "num_layers": 3,
    "node_width": 64,
    "edge_width": 32,
    "global_width": 16,
    "num_heads": 8,
    "ffn_width": 128,
    "expansion": 2,
    "embedding_width": 32,
    "num_kernels": 32,
    "dropout": DropoutConfig(node=0.1, global_=0.1, encoder=0.1, attention=0.1, graph=0.1),
    "targets": _GAP,
}

PRESETS: dict[str, dict[str, Any]] = {
    **{
        f"gpspp-{layers}{suffix}": {"num_layers": layers, "targets": _GAP, **changes}
        for suffix, changes in (("", {}), ("-mpnn", {"attention": False}))
        for layers in (16, 8, 4)
    },
    "gpspp-small": _SMALL,
}
"""The published models, 44, 22 and 11 million parameters, and those without attention; and a small
one of 0.36 million for thousands of molecules, which a CPU trains in minutes."""
