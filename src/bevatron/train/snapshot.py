"""The state of a run, copied to the host between two steps, for a checkpoint written meanwhile.

A checkpoint's tensors are copied into memory that has the layout of its files, page-locked where
they come from a GPU, and taken once for all checkpoints of the run. The step waits for that copy
alone.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bevatron.parallel.collectives import gather_bytes
from bevatron.parallel.mesh import Mesh
from bevatron.train.optim import optimizer_tensors
from bevatron.train.state import TrainState, random_state

SHARED_RANDOM = "rng-shared.safetensors"
"""States of the run's own generators, which are the same on all ranks."""

PENDING = "pending.safetensors"
"""Weights whose validation is not over."""

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.complex64: "C64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of types in a safetensors file."""


class HostFile:
    """A safetensors file in memory, with room for tensors of given names, shapes and types."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        # Descending widths keep every tensor aligned.
        names = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, Any] = {}
        end = 0
        for name in names:
            begin, end = end, end + tensors[name].numel() * tensors[name].element_size()
            header[name] = {
                "dtype": DTYPES[tensors[name].dtype],
                "shape": list(tensors[name].shape),
                "data_offsets": [begin, end],
            }
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self.header = len(text).to_bytes(8, "little") + text
        on_gpu = any(tensor.is_cuda for tensor in tensors.values())
        self._memory = torch.empty(end, dtype=torch.uint8, pin_memory=on_gpu)
        self.tensors: dict[str, Tensor] = {}
        for name in names:
            begin, end = header[name]["data_offsets"]
            raw = self._memory[begin:end].view(tensors[name].dtype)
            self.tensors[name] = raw.view(tensors[name].shape)

    def fits(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether it has room for just these."""
        return tensors.keys() == self.tensors.keys() and all(
            (value.shape, value.dtype) == (self.tensors[name].shape, self.tensors[name].dtype)
            for name, value in tensors.items()
        )

    def copy(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy the tensors; from a GPU, once its stream has come so far."""
        if not tensors:
            return
        places = [self.tensors[name] for name in tensors]
        values = [value.detach() for value in tensors.values()]
        torch._foreach_copy_(places, values, non_blocking=True)

    @property
    def memory(self) -> Tensor:
        """The bytes of all tensors, one after another."""
        return self._memory

    @property
    def parts(self) -> tuple[memoryview, memoryview]:
        """The bytes of the file."""
        memory: Any = self._memory.numpy()
        return memoryview(self.header), memoryview(memory)


@dataclass(frozen=True)
class Snapshot:
    """The state after a step.

    Attributes
    ----------
    files : bytes of each file of the checkpoint but ``state.json``
    values : values of ``state.json``: progress and averaged updates
    best : weights that are the best so far and not on disk yet
    """

    step: int
    files: Mapping[str, tuple[memoryview, ...]]
    values: Mapping[str, Any]
    best: Mapping[str, Tensor] | None = None


class SnapshotMemory:
    """Takes snapshots, each in the memory of the one before."""

    def __init__(self) -> None:
        self._files: dict[str, HostFile] = {}

    @torch.no_grad()
    def take(
        self, state: TrainState, mesh: Mesh, best: Mapping[str, Tensor] | None = None
    ) -> Snapshot | None:
        """Copy the state to the host; all ranks call it, and only rank 0 gets a snapshot.

        Parameters
        ----------
        best : weights to copy with it
        """
        random_states = gather_bytes(random_state(mesh.device), mesh)
        if not mesh.is_main:
            return None
        tensors = {
            "model.safetensors": dict(state.model.state_dict()),
            "optimizer.safetensors": optimizer_tensors(state.model, state.optimizer),
        }
        if state.ema is not None:
            tensors["ema.safetensors"] = state.ema.tensors()
        if state.progress.pending is not None and state.pending is not None:
            tensors[PENDING] = dict(state.pending)
        if state.generators:
            tensors[SHARED_RANDOM] = {n: g.get_state() for n, g in state.generators.items()}
        files: dict[str, tuple[memoryview, ...]] = {
            f"rng-rank{rank}.safetensors": (memoryview(data),)
            for rank, data in enumerate(random_states)
        }
        files |= {name: self._copy(name, values).parts for name, values in tensors.items()}
        copied = None if best is None else self._copy("best", best).tensors
        if mesh.device.type == "cuda":
            torch.cuda.current_stream().synchronize()
        values = {
            "progress": state.progress.to_json(),
            "ema_updates": None if state.ema is None else state.ema.updates,
        }
        return Snapshot(state.progress.step, files, values, copied)

    def _copy(self, name: str, tensors: Mapping[str, Tensor]) -> HostFile:
        file = self._files.get(name)
        if file is None or not file.fits(tensors):
            file = self._files[name] = HostFile(tensors)
        file.copy(tensors)
        return file
