"""Inputs of a model: a batch unchanged, or masked and corrupted with noise for training.

torch draws all random numbers on the batch's device, in shapes that depend on the batch's shapes
alone: a captured step draws new ones at every replay, and the host never waits for the device.
Every mask applies to whole molecules, so none can join two molecules.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.data.samples import FeatureSet, MoleculeBatch
from bevatron.errors import ConfigError
from bevatron.models.gpspp.vocabulary import sizes_on

Mode = Literal["2d", "3d", "both"]
"""What a model sees: shortest paths, positions, or both; a molecule without positions is always
seen in 2D."""


@dataclass(frozen=True)
class CorruptionConfig:
    """Corruption of inputs in training.

    Attributes
    ----------
    node_noise : probability that an entry of an atom's features is resampled from its vocabulary
    edge_noise : the same for a directed edge's features
    masking
        Odds that a molecule with positions is shown with shortest paths only, positions only, or
        both. Applies only if the model can use positions.
    random_signs
        Flip the signs of the Laplacian's eigenvectors at random for every molecule and step.
    position_noise
        Standard deviation of the noise on positions, Å, if the model has a denoising head.
    """

    node_noise: float = 0.01
    edge_noise: float = 0.01
    masking: tuple[float, float, float] = (1.0, 3.0, 1.0)
    random_signs: bool = True
    position_noise: float = 0.2

    def __post_init__(self) -> None:
        for name in ("node_noise", "edge_noise"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: expected one in [0, 1], got {getattr(self, name)}")
        if min(self.masking) < 0 or sum(self.masking) <= 0:
            raise ConfigError(
                f"masking: expected three odds of 0 or more, not all 0, got {self.masking}"
            )
        if self.position_noise <= 0:
            raise ConfigError(f"position_noise: expected above 0 Å, got {self.position_noise}")

    @property
    def shares(self) -> tuple[float, float, float]:
        """Return the odds of ``masking`` as probabilities."""
        only_2d, only_3d, both = (odds / sum(self.masking) for odds in self.masking)
        return only_2d, only_3d, both


@dataclass(frozen=True)
class Inputs:
    """Fields that a model reads in place of the batch's own.

    Attributes
    ----------
    atom_features, bond_features, laplacian_vectors, positions : as in `MoleculeBatch`
    keep_2d : molecules whose shortest paths are seen, [G]; None = all
    keep_3d : molecules whose positions are seen, [G]; None = none, and nothing of them is computed
    position_noise
        Noise on positions over its standard deviation: standard normal. None = no noise.
    """

    atom_features: Int[Tensor, "N F"]
    bond_features: Int[Tensor, "E Fe"]
    laplacian_vectors: Float[Tensor, "N V"]
    positions: Float[Tensor, "N 3"]
    keep_2d: Bool[Tensor, " G"] | None = None
    keep_3d: Bool[Tensor, " G"] | None = None
    position_noise: Float[Tensor, "N 3"] | None = None

    @property
    def only_3d(self) -> Bool[Tensor, " G"] | None:
        """Molecules that are seen by their positions alone."""
        if self.keep_2d is None or self.keep_3d is None:
            return None
        return self.keep_3d & ~self.keep_2d


def observe(batch: MoleculeBatch, mode: str = "2d") -> Inputs:
    """Show a batch unchanged.

    Raises ConfigError if there is no such mode.

    Parameters
    ----------
    batch : molecules
    mode : see `Mode`; GPS++ is validated and used in 2D
    """
    found = batch.has_positions
    keep = {"2d": (None, None), "3d": (~found, found), "both": (None, found)}
    if mode not in keep:
        raise ConfigError(f"mode: expected one of {', '.join(keep)}, got '{mode}'")
    return Inputs(
        batch.atom_features,
        batch.bond_features,
        batch.laplacian_vectors,
        batch.positions,
        *keep[mode],
    )


@torch.no_grad()
def corrupt(
    batch: MoleculeBatch,
    config: CorruptionConfig,
    features: FeatureSet,
    *,
    uses_positions: bool = True,
    denoising: bool = False,
) -> Inputs:
    """Mask and corrupt a batch for one step of training.

    Parameters
    ----------
    batch : molecules
    config : rates and odds of the corruption
    features : sizes of the vocabularies
    uses_positions : whether the model can; if not, all molecules are shown with shortest paths
    denoising : whether noise is added to positions
    """
    positions, noise, keep_2d, keep_3d = batch.positions, None, None, None
    if uses_positions:
        keep_2d, keep_3d = _groups(batch, config)
    if denoising:
        noise = torch.randn_like(positions)
        positions = positions + config.position_noise * noise
    vectors = batch.laplacian_vectors
    if config.random_signs:
        shape = (batch.num_graphs, vectors.shape[1])
        signs = torch.randint(0, 2, shape, device=vectors.device).to(vectors.dtype) * 2 - 1
        vectors = vectors * signs[batch.graph]
    return Inputs(
        _redrawn(batch.atom_features, features.atom_sizes, config.node_noise),
        _redrawn(batch.bond_features, features.bond_sizes, config.edge_noise),
        vectors,
        positions,
        keep_2d,
        keep_3d,
        noise,
    )


def _groups(batch: MoleculeBatch, config: CorruptionConfig) -> tuple[Tensor, Tensor]:
    """Draw the mode of every molecule."""
    only_2d, only_3d, _ = config.shares
    draw = torch.rand(batch.num_graphs, device=batch.has_positions.device)
    keep_3d = batch.has_positions & (draw >= only_2d)
    return ~(keep_3d & (draw < only_2d + only_3d)), keep_3d


def _redrawn(features: Tensor, sizes: tuple[int, ...], chance: float) -> Tensor:
    """Replace each entry with the given probability by any value of its vocabulary."""
    if chance == 0.0:
        return features
    draws = torch.rand(2, *features.shape, device=features.device)
    limits = sizes_on(sizes, features.device)
    resampled = torch.minimum((draws[1] * limits).long(), limits - 1)
    return torch.where(draws[0] < chance, resampled, features)
