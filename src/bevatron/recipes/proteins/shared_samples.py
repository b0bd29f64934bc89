"""Settings that a run chooses by the memory of its GPUs.

How many of them compute a sample together (``parallel.axial: auto``), and in each stage what the
backward pass recomputes (``checkpointing: {kind: auto}`` of a model).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from bevatron.models.common.folding.checkpointing import Kind, Recomputation, automatic
from bevatron.parallel.collectives import gather_json
from bevatron.parallel.mesh import Mesh, open_mesh, parse_device
from bevatron.train.description import Planned, memory_of_stage
from bevatron.train.memory_plan import MemoryPlan, NotPlannableError, would_be_captured
from bevatron.train.run import BesideGraphs, Run, SamplesApart, SamplesInGroups, Stage
from bevatron.train.settings import TrainConfig

USABLE = 0.92
"""Share of a GPU's memory for a step; the rest is for CUDA, NCCL and gaps between tensors."""
GIB = 2**30

RECOMPUTED: dict[Kind, str] = {
    "none": "nothing",
    "pair": "pair blocks",
    "all": "every block",
    "segments": "groups of blocks",
}
"""What ``auto`` chooses from, the fastest first."""
SPARING: dict[Kind, Kind] = {"none": "all", "pair": "all"}
"""What steps launched next to captured ones recompute instead; weights stay bitwise the same."""
GROWTH = 0.1
"""Share of a captured step's activations by which graphs of other shapes may add to the memory that
all share. In simulated pools of AlphaFold3 it was 0.03 to 0.08."""


def gpu_memory(config: TrainConfig) -> int | None:
    """Return the bytes of the smallest GPU of a run's processes, None if they compute on the CPU.

    All must call it together: they have to choose the same.
    """
    if parse_device(config.device, "train.device").type != "cuda" or not torch.cuda.is_available():
        return None
    with open_mesh(config.device, config.timeout_minutes * 60) as mesh:
        return smallest(torch.cuda.get_device_properties(mesh.device).total_memory, mesh)


def smallest(own: int, mesh: Mesh) -> int:
    """Return the smallest of a number of all ranks."""
    return min(map(int, gather_json(own, mesh)))


@dataclass(frozen=True)
class _Chosen:
    """What a stage recomputes, and the bytes that its steps need.

    Attributes
    ----------
    planned : why there is no plan, if so; None where a longer stage was planned
    """

    stage: Stage
    planned: int | NotPlannableError | None


def fitted(run: Run, sizes: Sequence[int], memory: int) -> Run:
    """Let as few GPUs share a sample as have the memory, and recompute as little as fits.

    Several GPUs take more than their share of one GPU's time for a sample, and a block that is
    computed again costs a third of its time: so the first of ``sizes`` that fits, and of it the
    first policy in each stage, is the fastest. Memory is planned on tensors that have none.

    Parameters
    ----------
    run : in stages
    sizes : numbers of GPUs a sample, the smallest first
    memory : bytes of the smallest GPU

    Returns
    -------
    Run
        With ``sharing`` and what its stages set up, and notes that say what was chosen. If nothing
        fits, or nothing can be planned, it is the last size with the last policy.
    """
    for size in sizes:
        shared = replace(run, sharing=SamplesInGroups(size) if size > 1 else SamplesApart())
        chosen = _choose(shared, memory)
        if all(one.planned is None or _fits(one.planned, memory) for one in chosen):
            break
    notes = [_note(one, memory) for one in chosen if one.planned is not None]
    if len(sizes) > 1:
        apart = "each GPU has its own samples"
        who = f"{size} GPUs compute a sample together" if size > 1 else apart
        notes.insert(0, f"parallel.axial: {who}")
    return replace(shared, stages=[one.stage for one in chosen], notes=[*run.notes, *notes])


def _choose(run: Run, memory: int) -> list[_Chosen]:
    """Choose a policy for each stage: of those with longer crops first, which need the most."""
    modules, captured = automatic(run.model), would_be_captured(run)
    kinds: list[Kind | None] = [*RECOMPUTED] if modules else [None]
    longest = {n: int(stage.sizes["tokens"].max()) for n, stage in enumerate(run.stages)}
    chosen: dict[int, _Chosen] = {}
    # Of policies that did not fit, bytes over the square of the length.
    too_much: dict[Kind | None, float] = {}
    enough, beside = len(kinds), None
    for number in sorted(longest, key=lambda n: -longest[n]):
        squared = longest[number] ** 2
        for place, kind in enumerate(kinds):
            if place == enough:  # fits longer crops
                stage = _stage(run.stages[number], modules, kind)
                chosen[number] = _Chosen(replace(stage, beside=beside), None)
                break
            # Memory grows at most with the square: this is the least that it can be.
            last = place + 1 == len(kinds)
            if too_much.get(kind, 0.0) * squared > USABLE * memory and not last:
                continue
            one = _plan(run, number, modules, kind, captured, memory)
            chosen[number] = one
            if one.planned is not None and _fits(one.planned, memory):
                enough, beside = place, one.stage.beside
                break
            if isinstance(one.planned, int):
                too_much[kind] = one.planned / squared
    return [chosen[number] for number in range(len(run.stages))]


def _stage(stage: Stage, modules: tuple[str, ...], kind: Kind | None) -> Stage:
    return stage if kind is None else replace(stage, set_up=Recomputation(modules, kind))


def _plan(
    run: Run, number: int, modules: tuple[str, ...], kind: Kind | None, captured: bool, memory: int
) -> _Chosen:
    """Plan the steps of a stage over samples of many shapes with a policy.

    The first step of a shape is launched beside the memory that the graphs of others share.
    """

    def planned(stage: Stage) -> Planned:
        stages = [stage if n == number else one for n, one in enumerate(run.stages)]
        return memory_of_stage(replace(run, stages=stages), number, gpu=True)

    stage = _stage(run.stages[number], modules, kind)
    graph = planned(stage)
    if not isinstance(graph, MemoryPlan) or not captured or graph.peak > USABLE * memory:
        return _Chosen(stage, graph.peak if isinstance(graph, MemoryPlan) else graph)
    launched: Planned = graph
    spare = stage.set_up if kind is None else Recomputation(modules, SPARING.get(kind, kind))
    if spare != stage.set_up:
        launched = planned(replace(stage, set_up=spare))
    if not isinstance(launched, MemoryPlan):
        return _Chosen(stage, launched)
    needed = graph.peak + int(GROWTH * graph.activations) + launched.activations
    if spare is not None:
        others = graph.peak - graph.gaps - graph.activations + launched.activations
        stage = replace(stage, beside=BesideGraphs(spare, int(USABLE * memory) - others))
    return _Chosen(stage, needed)


def _fits(needed: int | NotPlannableError, memory: int) -> bool:
    return isinstance(needed, int) and needed <= USABLE * memory


def _note(chosen: _Chosen, memory: int) -> str:
    """Describe what was chosen for a stage."""
    stage, needed = chosen.stage, chosen.planned
    set_up = stage.set_up
    what = RECOMPUTED[set_up.kind] if isinstance(set_up, Recomputation) else "as configured"
    if stage.beside is not None and stage.beside.set_up != set_up:
        what += ", in steps of new shapes every block"
    note = f"stage {stage.name} recomputes {what}: "
    if not isinstance(needed, int):
        return f"{note}its memory cannot be planned"
    note += f"{needed / GIB:.3g} of {memory / GIB:.3g} GiB planned"
    return note if _fits(needed, memory) else f"{note}, which may not suffice"
