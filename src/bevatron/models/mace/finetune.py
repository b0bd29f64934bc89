"""Start from another model, with other elements or heads; matching weights are copied.

Weights of an element or a head move to its new index. If a map is normalised by the number of
elements or heads, the weights are rescaled so that the function does not change.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Literal

import torch
from torch import Tensor

from bevatron.errors import CheckpointError
from bevatron.models.mace.config import MaceConfig
from bevatron.models.mace.model import MACE

Status = Literal["loaded", "resized", "new", "ignored"]


@dataclass(frozen=True)
class TransferRow:
    """The origin of one tensor.

    Attributes
    ----------
    name : name of the tensor in the state dict
    status
        ``loaded`` unchanged; ``resized`` for other elements or heads, partly new (see ``note``);
        ``new``: not in the source; ``ignored``: only in the source, or of another shape.
    shape : in the model, or in the source if ignored
    note : what was done
    """

    name: str
    status: Status
    shape: tuple[int, ...]
    note: str = ""


def adapted_config(
    source: MaceConfig,
    *,
    atomic_numbers: Sequence[int],
    heads: Sequence[str],
    atomic_energies: Sequence[Sequence[float]],
    start: Mapping[str, str] | None = None,
    default_head: str | None = None,
) -> MaceConfig:
    """Return the configuration of a model like ``source`` for other elements and heads.

    Everything that gives the weights their meaning stays, including the average number of
    neighbours. A head gets the scale and shift of the source's head that it starts from, see
    `load_matching`.
    """
    index = [_start_index(source.heads, head, start) for head in heads]

    def spread(values: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(values[i] if len(values) > 1 else values[0] for i in index)

    return replace(
        source,
        atomic_numbers=tuple(int(z) for z in atomic_numbers),
        heads=tuple(heads),
        default_head=default_head,
        atomic_energies=tuple(tuple(float(e) for e in row) for row in atomic_energies),
        scale=spread(source.scale),
        shift=spread(source.shift),
    )


@torch.no_grad()
def load_matching(
    model: MACE,
    source_state: Mapping[str, Tensor],
    source_heads: Sequence[str] | None = None,
    *,
    start: Mapping[str, str] | None = None,
    keep_energies: bool = False,
    new_heads: Literal["copy", "random"] = "copy",
) -> list[TransferRow]:
    """Copy the matching weights of another model.

    Raises CheckpointError if the source is not a MACE, or has no element in common with the model.

    Parameters
    ----------
    model : the model to fill
    source_state : state dict of the other model; its elements are the entry ``atomic_numbers``
    source_heads
        Names of the other model's heads, which are matched by name. By default they are the first
        heads of ``model`` in order.
    start
        For each head of the model the source's head that it starts from; by default the one of the
        same name, or else the source's first.
    keep_energies
        Keep the model's own E0 for all heads. Otherwise heads and elements that the source has
        get its E0; new ones always keep theirs.
    new_heads : whether a head that the source lacks starts as a copy, or random

    Returns
    -------
    list
        One row per tensor of either model.
    """
    if "atomic_numbers" not in source_state or "embedding.weight" not in source_state:
        raise CheckpointError("the weights to start from are not those of a MACE")
    plan = _Plan(model, source_state, source_heads, new_heads, start)
    model.take_shapes(source_state)
    rows: list[TransferRow] = []
    target_state = model.state_dict()
    for name, target in target_state.items():
        if name == "atomic_numbers":
            continue
        if name not in source_state or (name == "atomic_energies" and keep_energies):
            note = "the model's own" if name in source_state else ""
            rows.append(TransferRow(name, "new", tuple(target.shape), note))
            continue
        rows.append(plan.transfer(name, target, source_state[name].to(target)))
    for name, value in source_state.items():
        if name not in target_state:
            rows.append(TransferRow(name, "ignored", tuple(value.shape), "not in this model"))
    return rows


class _Plan:
    """The source's element and head for each of the model's."""

    def __init__(
        self,
        model: MACE,
        source: Mapping[str, Tensor],
        source_heads: Sequence[str] | None,
        new_heads: str,
        start: Mapping[str, str] | None,
    ) -> None:
        elements = [int(z) for z in source["atomic_numbers"]]
        self.elements = [
            elements.index(z) if z in elements else None for z in model.config.atomic_numbers
        ]
        if not any(index is not None for index in self.elements):
            raise CheckpointError("the model to start from has no element of the data")
        self.num_source_elements = len(elements)
        self.num_source_heads = int(source["scale"].numel())
        names = tuple(source_heads or model.config.heads)[: self.num_source_heads]
        self.own_heads = [
            names.index(head) if head in names else None for head in model.config.heads
        ]
        self.heads = [
            None if own is None and new_heads == "random" else _start_index(names, head, start)
            for head, own in zip(model.config.heads, self.own_heads, strict=True)
        ]
        self.width = model.config.readout_width
        self.element_factor = sqrt(model.config.num_elements / self.num_source_elements)
        self.head_factor = sqrt(model.config.num_heads / self.num_source_heads)

    def transfer(self, name: str, target: Tensor, source: Tensor) -> TransferRow:
        """Fill one tensor in place."""
        shape = tuple(target.shape)
        moved = self._by_element(name, target, source)
        moved = self._by_head(name, target, source) if moved is None else moved
        if moved is None:
            if source.shape != target.shape:
                note = f"the source's is {list(source.shape)}"
                return TransferRow(name, "new", shape, note)
            target.copy_(source)
            return TransferRow(name, "loaded", shape)
        before = source if source.shape == target.shape else None
        target.copy_(moved)
        if before is not None and torch.equal(before, target):
            return TransferRow(name, "loaded", shape)
        return TransferRow(name, "resized", shape, self._note(name))

    def _by_element(self, name: str, target: Tensor, source: Tensor) -> Tensor | None:
        if name == "atomic_energies":
            rows = _move(target[:, :1].expand(-1, source.shape[1]), source, 0, self.own_heads)
            filled = _move(target, rows, 1, self.elements)
            own = torch.tensor([head is not None for head in self.own_heads], device=target.device)
            return torch.where(own[:, None], filled, target)
        if re.fullmatch(r"embedding\.weight|interactions\.\d+\.skip\.weights\.\d+", name):
            return self._checked(target, source * self.element_factor, 0, self.elements)
        if re.fullmatch(r"products\.\d+\.contraction\.\d+\.weights\.\d+", name):
            return self._checked(target, source, 0, self.elements)
        return None

    def _by_head(self, name: str, target: Tensor, source: Tensor) -> Tensor | None:
        if name in {"scale", "shift"}:
            return _move(target, source, 0, self.heads)
        if re.fullmatch(r"readouts\.\d+\.weight", name):
            return self._checked(target, source, 1, self.heads)
        if re.fullmatch(r"readouts\.\d+\.hidden", name):
            blocks = (-1, self.width)
            if source.shape[0] != target.shape[0] or source.shape[1] % self.width:
                return None
            moved = _move(target.unflatten(1, blocks), source.unflatten(1, blocks), 1, self.heads)
            return moved.flatten(1)
        if re.fullmatch(r"readouts\.\d+\.output", name):
            blocks = (-1, self.width)
            if source.shape[0] != self.width * self.num_source_heads:
                return None
            inner = (source * self.head_factor).unflatten(0, blocks)
            wide = target.unflatten(0, blocks)
            rows = _move(wide[:, :, :1].expand(-1, -1, inner.shape[2]), inner, 0, self.heads)
            return _move(wide, rows, 2, self.heads).flatten(0, 1)
        return None

    @staticmethod
    def _checked(
        target: Tensor, source: Tensor, axis: int, index: Sequence[int | None]
    ) -> Tensor | None:
        """Move along one axis if all other axes agree."""
        others = [
            (a, b)
            for i, (a, b) in enumerate(zip(target.shape, source.shape, strict=False))
            if i != axis
        ]
        if target.ndim != source.ndim or any(a != b for a, b in others):
            return None
        return _move(target, source, axis, index)

    def _note(self, name: str) -> str:
        notes = []
        if "readouts" not in name and name not in {"scale", "shift"}:
            fresh = sum(index is None for index in self.elements)
            dropped = self.num_source_elements - (len(self.elements) - fresh)
            notes.append(
                f"{len(self.elements) - fresh} elements taken, {fresh} new, {dropped} left"
            )
        if "readouts" in name or name in {"scale", "shift", "atomic_energies"}:
            fresh = sum(head is None for head in self.own_heads)
            notes.append(f"{len(self.own_heads) - fresh} heads taken, {fresh} new")
        return "; ".join(notes)


def _start_index(names: Sequence[str], head: str, start: Mapping[str, str] | None) -> int:
    """Return the index of the source's head that a head starts from."""
    origin = (start or {}).get(head, head)
    return names.index(origin) if origin in names else 0


def _move(target: Tensor, source: Tensor, axis: int, index: Sequence[int | None]) -> Tensor:
    """Copy slices of ``source`` to their new indices along ``axis``; None keeps the target's."""
    places = [i for i, origin in enumerate(index) if origin is not None]
    origins = [origin for origin in index if origin is not None]
    if not places:
        return target.clone()
    where = torch.tensor(places, device=target.device)
    taken = source.index_select(axis, torch.tensor(origins, device=source.device))
    return target.clone().index_copy(axis, where, taken)
