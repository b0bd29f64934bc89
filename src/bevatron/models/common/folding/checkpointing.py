"""Activation checkpointing: which activations are kept and which are recomputed.

A model names its recomputable blocks where it calls them, ``checkpointed(policy, "pair_block",
self.pair)``; the policy, a part of its configuration, selects among them. No random state is
saved: the dropout of blocks is a function of their inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, ParamSpec, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from bevatron.errors import ConfigError
from bevatron.kernels.pair import LARGE_PAIR
from bevatron.parallel.axial import sample_group
from bevatron.parallel.axial.collectives import lengths

Kind = Literal["auto", "none", "pair", "all", "segments", "paper"]
"""Policies.

``none`` keeps all activations, if pairs are smaller than `LARGE_PAIR`. ``pair`` recomputes pair
blocks, which hold most of them, ``all`` every block of every stack. ``segments`` recomputes groups
of several blocks, and within a group each block once more: of a stack of B blocks in groups of k it
keeps B / k + k inputs instead of B.
``paper`` recomputes every sub-layer by itself, as MegaFold's appendix C lists them. ``auto`` leaves
the choice to the training run, which knows the memory of its GPUs; outside of one it is ``all``.
All but ``none`` also recompute what lies between stacks: see `recomputed`.
"""

SUB_LAYERS = frozenset(
    {
        "outer_product_mean",
        "pair_weighted_averaging",
        "attention_pair_bias",
        "transition",
        "pair_block",
    }
)
"""Layers that ``paper`` recomputes in AlphaFold3."""

ALIGNMENT_LAYERS = frozenset({"msa_row_attention", "msa_column_attention"})
"""Layers that ``paper`` recomputes in AlphaFold2 too."""

_NAMES: dict[Kind, frozenset[str]] = {
    "auto": frozenset(),
    "none": frozenset(),
    "pair": frozenset({"pair_block"}),
    "all": frozenset(),
    "segments": frozenset(),
    "paper": SUB_LAYERS | ALIGNMENT_LAYERS,
}

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Checkpointing:
    """A policy.

    Attributes
    ----------
    kind
        See `Kind`.
    segment
        Number of blocks in a group of ``segments``.

    Raises
    ------
    ConfigError
        If a group is empty.
    """

    kind: Kind = "none"
    segment: int = 8

    def __post_init__(self) -> None:
        if self.segment < 1:
            raise ConfigError(f"segment: expected 1 or more, got {self.segment}")


AUTOMATIC = Checkpointing("auto")


@dataclass(frozen=True)
class Recomputation:
    """A choice that replaces ``auto``; call it with the model or a copy of it.

    Attributes
    ----------
    modules : names of the modules concerned, see `automatic`
    kind : the chosen policy
    """

    modules: tuple[str, ...]
    kind: Kind

    def __call__(self, model: nn.Module) -> None:
        """Set the policy."""
        for name in self.modules:
            module: Any = model.get_submodule(name)
            module.checkpointing = Checkpointing(self.kind)


def automatic(model: nn.Module) -> tuple[str, ...]:
    """Name the modules of a model whose policy is ``auto``."""
    return tuple(
        name
        for name, module in model.named_modules()
        if getattr(module, "checkpointing", None) == AUTOMATIC
    )


def checkpointed(policy: Checkpointing, name: str, fn: Callable[P, R]) -> Callable[P, R]:
    """Return fn, or a version of it that recomputes its activations in the backward pass.

    Parameters
    ----------
    policy : which blocks
    name : name of this block
    fn : a function of its arguments alone, without random numbers of its own
    """
    return _again(fn) if name in _NAMES[policy.kind] else fn


def recomputed(policy: Checkpointing, fn: Callable[P, R]) -> Callable[P, R]:
    """Return fn, or under every policy but ``none`` a version that recomputes its activations.

    For a few layers outside of all stacks that keep more than they cost.
    """
    return fn if policy.kind == "none" else _again(fn)


def recomputed_if_large(z: Tensor, fn: Callable[P, R]) -> Callable[P, R]:
    """Return fn, or for a pair of `LARGE_PAIR` or more a version that recomputes its activations.

    The layers of a block that is recomputed keep theirs at the same time. Processes that share the
    pair exchange what fn needs, so the longest of their parts decides for all.
    """
    rows = lengths(z.shape[-2], sample_group().size)[0]
    size = z.shape[:-3].numel() * rows * z.shape[-2:].numel() * z.itemsize
    return fn if size < LARGE_PAIR else _again(fn)


def run_stack(policy: Checkpointing, blocks: Sequence[Callable[[R], R]], state: R) -> R:
    """Run ``state = block(state)`` for all blocks, under the policy for whole blocks.

    Parameters
    ----------
    policy : ``all`` recomputes each block, ``segments`` each group and then its blocks
    blocks : in order, each bound to its other inputs
    state : a tensor or a tuple of tensors that passes from block to block
    """

    def run(some: Sequence[Callable[[R], R]], state: R) -> R:
        with _runs(False):  # the next block reads what each returns, even if all run again
            for block in some:
                state = block(state)
        return state

    if policy.kind not in {"auto", "all", "segments"}:
        return run(blocks, state)
    blocks = [_again(block) for block in blocks]
    if policy.kind != "segments":
        return run(blocks, state)
    for first in range(0, len(blocks), policy.segment):
        state = _again(run)(blocks[first : first + policy.segment], state)
    return state


def recomputing() -> bool:
    """Whether the innermost function that is recomputed runs for its activations alone.

    Nobody reads what it returns, so it need not begin an exchange for the next block.
    """
    return _recomputing.get()


_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


@contextmanager
def _runs(again: bool) -> Iterator[None]:
    before = _recomputing.set(again)
    try:
        yield
    finally:
        _recomputing.reset(before)


def _again(fn: Callable[P, R]) -> Callable[P, R]:
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.is_grad_enabled():
            return fn(*args, **kwargs)
        # One by one: an outer group of blocks could not free what a closure or a tuple holds.
        given, kinds = tree_flatten((args, kwargs))
        ran = False

        def bound(*given: Any) -> R:
            nonlocal ran
            again, ran = ran, True
            args, kwargs = tree_unflatten(given, kinds)
            with _runs(again):
                return fn(*args, **kwargs)

        return cast("R", checkpoint(bound, *given, use_reentrant=False, preserve_rng_state=False))

    return call
