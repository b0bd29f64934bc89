"""Bytes that autograd saves for a backward pass, by module."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

OUTSIDE = "(outside of modules)"


@dataclass
class SavedBytes:
    """Tensors that a module saves for the backward pass.

    Attributes
    ----------
    forward : bytes of its forward pass
    gradient : bytes of a gradient through it that is itself part of the loss, as forces are
    """

    forward: int = 0
    gradient: int = 0

    @property
    def total(self) -> int:
        """Both."""
        return self.forward + self.gradient


def saved_bytes_by_module(
    model: nn.Module, compute: Callable[[], Tensor], excluded: Iterable[Tensor] = ()
) -> dict[str, SavedBytes]:
    """Count what each module keeps until the backward pass, most first.

    Storage that several operations keep is counted once. What a submodule keeps is not counted
    again for the module around it. Operations of an inner
    gradient belong to the module whose forward pass they go back through.

    Parameters
    ----------
    model : whose modules
    compute : calls the model and returns the loss
    excluded : tensors that do not count: the weights

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    >>> x = torch.ones(5, 4)
    >>> found = saved_bytes_by_module(model, lambda: model(x).sum(), [*model.parameters(), x])
    >>> {name: saved.total for name, saved in found.items()}
    {'1': 80}
    """
    found: dict[str, SavedBytes] = {}
    with ExitStack() as stack:
        places = _Places()
        stack.callback(places.remove)
        places.watch(model)

        def count(size: int) -> None:
            name, inner = places.present()
            saved = found.setdefault(name, SavedBytes())
            if inner:
                saved.gradient += size
            else:
                saved.forward += size

        stack.enter_context(_watched(count, excluded))
        compute()
    return dict(sorted(found.items(), key=lambda item: -item[1].total))


@contextmanager
def _watched(count: Callable[[int], None], excluded: Iterable[Tensor]) -> Iterator[None]:
    """Call ``count`` with the bytes of every storage that autograd keeps in this block."""
    known = {_name(tensor) for tensor in excluded}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        if _name(tensor) not in known:
            known.add(_name(tensor))
            alive.append(tensor.detach())  # so that no storage is named as another was
            count(tensor.untyped_storage().nbytes())
        return tensor.detach()  # an output that holds its own node would keep the graph for ever

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def _name(tensor: Tensor) -> int:
    """Tell storages apart, also those that have no memory."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  torch has no other name for them


class _Places:
    """The running module, in the forward and the backward pass.

    Autograd numbers its nodes in the order of their making; the numbers at which a module began
    and ended show which nodes are its own.
    """

    def __init__(self) -> None:
        self._calls: list[str] = []
        self._numbers: list[int] = []
        self._names: list[str] = []
        self._handles: list[Any] = []

    def watch(self, model: nn.Module) -> None:
        """Follow all modules of a model."""
        for name, module in model.named_modules():
            label = name or OUTSIDE

            def enter(_module: nn.Module, _inputs: object, label: str = label) -> None:
                self._calls.append(label)
                self._note()

            def leave(_module: nn.Module, _inputs: object, _output: object) -> None:
                self._calls.pop()
                self._note()

            self._handles.append(module.register_forward_pre_hook(enter))
            self._handles.append(module.register_forward_hook(leave, always_call=True))

    def present(self) -> tuple[str, bool]:
        """Return the module that is at work and whether a gradient goes back through it."""
        node: Any = torch._C._current_autograd_node()  # noqa: SLF001  None outside of a backward pass
        if node is None:
            return (self._calls[-1] if self._calls else OUTSIDE), False
        place = bisect_right(self._numbers, node._sequence_nr()) - 1  # noqa: SLF001
        return (self._names[place] if place >= 0 else OUTSIDE), True

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _note(self) -> None:
        self._numbers.append(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # noqa: SLF001
        self._names.append(self._calls[-1] if self._calls else OUTSIDE)
