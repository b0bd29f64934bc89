"""Block sizes of kernels, tuned by hand so that a cold start compiles one of each.

Nothing is tuned at run time. Tests and benchmarks replace entries of a table.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from bevatron.kernels.shared.layouts import forget

ALIGNED = 16
"""Alignment in bytes of the rows of a matrix read through a tensor descriptor."""

T = TypeVar("T")


@dataclass(frozen=True)
class Tiles:
    """Tiling of one kernel.

    Attributes
    ----------
    rows, columns : of a block of the result; in attention, queries and keys
    warps, stages : warps of a program, and stages of its load pipeline
    depth : size of a step along the summed dimension, if the kernel has such a loop
    per_sm : programs per SM of a persistent kernel
    registers
        Cap on registers per thread, so that more programs fit on an SM; 0 sets none.
    shared_memory : bytes that a program needs, if not every GPU has them
    hold : whether rows that enter many matmuls are held in the layout of a dot result
    """

    rows: int
    columns: int
    warps: int = 4
    stages: int = 2
    depth: int = 0
    per_sm: int = 1
    registers: int = 0
    shared_memory: int = 0
    hold: bool = False

    def register_limit(self, device: torch.device) -> dict[str, Any]:
        """Return the launch option that caps registers; only NVIDIA's compiler has one."""
        limited = self.registers and device.type == "cuda" and torch.version.hip is None
        return {"maxnreg": self.registers} if limited else {}

    def fits(self, *matrices: Tensor) -> bool:
        """Whether the device has the shared memory, and TMA can read these 16-bit matrices."""
        device = matrices[0].device
        if device.type == "cuda":
            properties = torch.cuda.get_device_properties(device)
            if getattr(properties, "shared_memory_per_block_optin", 0) < self.shared_memory:
                return False
        return all(
            matrix.element_size() == 2
            and matrix.is_contiguous()
            and matrix.shape[1] * 2 % ALIGNED == 0
            and matrix.data_ptr() % ALIGNED == 0
            and 0 < len(matrix) < 2**31 - 1024
            for matrix in matrices
        )


class TileTable(dict[str, T]):
    """Tiles by kernel.

    Examples
    --------
    >>> table = TileTable(forward=Tiles(64, 32))
    >>> with table.replaced(forward=Tiles(16, 16)):
    ...     table["forward"].rows
    16
    >>> table["forward"].rows
    64
    """

    @contextmanager
    def replaced(self, **tiles: T) -> Iterator[None]:
        """Replace tiles by kernel within a block, to benchmark others or to test small ones."""
        before = dict(self)
        self.update(tiles)
        forget()
        try:
            yield
        finally:
            self.clear()
            self.update(before)
            forget()
