"""``parallel.axial: auto``: how many GPUs compute a sample together, and what is computed again."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from bevatron.models.common.folding import Checkpointing
from bevatron.parallel.collectives import gather_json
from bevatron.parallel.mesh import Mesh, open_mesh, parse_device
from bevatron.train.description import Planned, memory_of_stage
from bevatron.train.memory_plan import MemoryPlan
from bevatron.train.run import Run, SamplesApart, SamplesInGroups
from bevatron.train.settings import TrainConfig

USABLE = 0.92
"""Share of a GPU's memory for a step; the rest is for CUDA, NCCL and gaps between tensors."""
GIB = 2**30


def gpu_memory(config: TrainConfig) -> int | None:
    """Return the bytes of the smallest GPU of a run's processes, None if they compute on the CPU.

    All must call it together: what they choose by it has to be the same.
    """
    if parse_device(config.device, "train.device").type != "cuda" or not torch.cuda.is_available():
        return None
    with open_mesh(config.device, config.timeout_minutes * 60) as mesh:
        return smallest(torch.cuda.get_device_properties(mesh.device).total_memory, mesh)


def smallest(own: int, mesh: Mesh) -> int:
    """Return the smallest of a number of all ranks."""
    return min(map(int, gather_json(own, mesh)))


def divided(run: Run, sizes: Sequence[int], memory: int) -> Run:
    """Let as few GPUs compute a sample together as have the memory, and compute little again.

    Several GPUs take more than their share of one GPU's time for a sample, and a block that is
    computed again costs a third of its time: so the first of ``sizes`` that fits, and of it the
    first policy, is the fastest. What the model's configuration does not compute again, never is.
    Memory is planned for the stage with the longest crops, on tensors that have none.

    Parameters
    ----------
    run : in stages; its model's policy is set
    sizes : numbers of GPUs a sample, the smallest first
    memory : bytes of the smallest GPU

    Returns
    -------
    Run
        With ``sharing``, and a note that says what was chosen. If nothing fits, or nothing can be
        planned, it is the last size with the configured policy.
    """
    number = max(range(len(run.stages)), key=lambda i: int(run.stages[i].sizes["tokens"].max()))
    for size in sizes:
        chosen = replace(run, sharing=SamplesInGroups(size) if size > 1 else SamplesApart())
        for policy in _policies(run.model):
            plan = memory_of_stage(chosen, number, gpu=True)
            if isinstance(plan, MemoryPlan) and plan.peak <= USABLE * memory:
                return _noted(chosen, policy, number, plan, memory)
    return _noted(chosen, policy, number, plan, memory)


def _policies(model: torch.nn.Module) -> Iterator[str]:
    """Set one policy after the other, the fastest first and the configured one last; name it."""
    configured: list[tuple[Any, Checkpointing]] = [
        (module, policy)
        for module in model.modules()
        if isinstance(policy := getattr(module, "checkpointing", None), Checkpointing)
    ]
    kinds = {policy.kind for _, policy in configured} - {"none"}
    for kind in ("none", "pair"):
        if kinds - {kind}:
            for module, policy in configured:
                module.checkpointing = policy if policy.kind == "none" else Checkpointing(kind)
            yield "nothing" if kind == "none" else "pair blocks"
    for module, policy in configured:
        module.checkpointing = policy
    yield "nothing" if not kinds else f"what model.checkpointing says ({', '.join(sorted(kinds))})"


def _noted(run: Run, policy: str, number: int, plan: Planned, memory: int) -> Run:
    """Say what was chosen."""
    size = run.sharing.repeats
    who = f"{size} GPUs compute a sample together" if size > 1 else "each GPU has its own samples"
    note = f"parallel.axial: {who}, computed again: {policy}; "
    if not isinstance(plan, MemoryPlan):
        return replace(run, notes=[*run.notes, f"{note}its memory cannot be planned"])
    note += (
        f"{plan.peak / GIB:.3g} of {memory / GIB:.3g} GiB planned for the longest sample of stage "
        f"{run.stages[number].name}"
    )
    if plan.peak > USABLE * memory:
        note += ", which may not suffice"
    return replace(run, notes=[*run.notes, note])
