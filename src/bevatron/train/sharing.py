"""What the ranks of a run divide among themselves: the samples, or the parts of each sample.

Losses and gradients are sums over ranks divided by counts over all ranks, whatever a rank holds.
So the only thing that differs is who walks which batches.
"""

from dataclasses import dataclass
from typing import Protocol

from bevatron.parallel.mesh import Mesh


class Sharing(Protocol):
    """Decides among which ranks an epoch's samples are divided."""

    def planner(self, mesh: Mesh) -> Mesh:
        """Return this rank among those that have batches of their own."""


@dataclass(frozen=True)
class SamplesApart:
    """Data parallelism: each rank has batches of its own."""

    def planner(self, mesh: Mesh) -> Mesh:
        """Return the mesh itself."""
        return mesh


@dataclass(frozen=True)
class SamplesTogether:
    """Every rank walks every batch and holds a part of each sample, such as a graph cut in blocks.

    The data set gives each rank its part; model and task see to what parts need of each other.

    Examples
    --------
    >>> SamplesTogether().planner(Mesh(rank=3, world=8)).world
    1
    """

    def planner(self, mesh: Mesh) -> Mesh:
        """Return a mesh of one."""
        return Mesh(device=mesh.device)
