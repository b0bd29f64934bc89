"""Times training steps and inference of MACE on one GPU, beside mace-torch.

    python benchmarks/train_step.py [--models paper mp-0-medium] [--peers e3nn cueq] [--captured]
                                    [--what train infer]

Peers: mace-torch with e3nn and with cuEquivariance's kernels. With --captured our step is also
timed as the trainer runs it, and inference as `Potential.evaluate` does: padded on the host,
copied, recorded as CUDA graphs, results copied back. "evaluate ms" is a single `Potential.evaluate`
from numpy to numpy. All run in one process on the same atoms with the same weights (converted), in
float32 without TF32 unless --tf32. A step is energy and forces, loss, double backward, clipping and
Adam. Before anything is timed, all forces are compared with ours in float64.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.build import bulk
from report import write_result
from step_trace import trace

from bevatron import kernels
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import StructureBatch, collate_structures, unlabelled_structure
from bevatron.models.mace import MACE, LossConfig, MaceConfig, MaceTask
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.potential import PER_ATOM, Potential
from bevatron.train.captured_inference import CapturedInference
from bevatron.train.captured_step import CapturedStep
from bevatron.train.loop import begin_state
from bevatron.train.optim import make_optimizer
from bevatron.train.run import Run
from bevatron.train.settings import OptimConfig, Settings, TrainConfig
from bevatron.train.step import LaunchedStep

ELEMENTS = (28, 29)
ENERGIES = (-1.9, -1.2)
TOGETHER = 5
OPTIM = OptimConfig(algorithm="adam", lr=1e-4, weight_decay=0.0, clip=100.0)


REPEATS = {
    "crystals": {(4, 4, 4): 12},
    "mixed": {
        None: 20,
        (1, 1, 1): 20,
        (2, 2, 2): 12,
        (3, 3, 3): 6,
        (4, 4, 4): 3,
        (5, 5, 5): 1,
        (4, 6, 8): 1,
    },
}
"""Cells of four atoms along each axis -> how many such structures; None is a single atom."""


ATOMS = {
    "crystals": "12 supercells of 256 atoms",
    "mixed": "63 structures of 1, 4, 32, 108, 256, 500 and 768 atoms",
}


def rattled_crystals(mix: str) -> list[Any]:
    """Make rattled fcc supercells of copper and nickel: 12 x 256 atoms, or 1 to 768 atoms."""
    generator = np.random.default_rng(0)
    structures = []
    sizes = [size for size, number in REPEATS[mix].items() for _ in range(number)]
    for i, size in enumerate(sizes):
        atoms = bulk("Cu", "fcc", a=3.585 + 0.004 * (i % 12), cubic=True) * (size or (1, 1, 1))
        if size is None:
            atoms = atoms[:1]
            atoms.pbc = False
        atoms.numbers[generator.random(len(atoms)) < 0.5] = 28
        atoms.positions += generator.normal(0, 0.05, atoms.positions.shape)
        atoms.info["energy"] = float(-1.5 * len(atoms) + generator.normal())
        atoms.arrays["forces"] = generator.normal(0, 0.5, atoms.positions.shape)
        structures.append(atoms)
    return structures


def our_samples(structures: list[Any], cutoff: float) -> list[Any]:
    """Make samples of labelled structures."""
    samples = []
    for atoms in structures:
        sample = unlabelled_structure(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc)
        sample["energy"] = np.array(atoms.info["energy"])
        sample["forces"] = atoms.arrays["forces"]
        samples.append(add_neighbours(sample, cutoff))
    return samples


def our_batch(samples: list[Any]) -> StructureBatch:
    """Put samples into one batch."""
    return collate_structures(samples, np.arange(len(samples)), [1.0] * len(samples))


def our_model(preset: str, batch: StructureBatch) -> MACE:
    """Make a model with random weights for the batch's elements."""
    torch.manual_seed(0)
    config = MaceConfig.preset(preset).with_data(
        atomic_numbers=ELEMENTS,
        atomic_energies=(ENERGIES,),
        avg_num_neighbors=batch.num_edges / batch.num_atoms,
    )
    return MACE(config)


@dataclass
class Contender:
    """One implementation and what of it is timed; those of one name share a row."""

    name: str
    step: Callable[[], torch.Tensor] | None = None
    infer: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
    evaluate: Callable[[], object] | None = None


def our_contender(preset: str, batch: StructureBatch, implementation: str) -> Contender:
    """Train and infer with our model."""
    model = our_model(preset, batch).cuda()
    task, optimizer = MaceTask(LossConfig()), make_optimizer(model, OPTIM)
    normalisers = {k: v.to(batch.positions.device) for k, v in task.normalisers(batch).items()}
    parameters = [p for p in model.parameters() if p.requires_grad]

    def step() -> torch.Tensor:
        with kernels.use(implementation):
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(model, batch, normalisers).total
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, OPTIM.clip or 1e9)
            optimizer.step()
        return loss.detach()

    def infer() -> tuple[torch.Tensor, torch.Tensor]:
        with kernels.use(implementation):
            outputs = model(batch)
        return outputs["energy"], outputs["forces"]

    return Contender(f"bevatron, {implementation}", step, infer)


def captured_contender(preset: str, batch: StructureBatch, implementation: str) -> Contender:
    """Train as the trainer does with captured steps: one launched before the last is read."""
    with kernels.use(implementation):
        model = our_model(preset, batch)
        sizes = {"atoms": np.array([batch.num_atoms]), "edges": np.array([batch.num_edges])}
        train = TrainConfig(dtype="float32", device="cuda", explode_factor=None)
        optim = replace(OPTIM, ema=0.99)
        settings = Settings(optim=optim, train=train)
        task = MaceTask(LossConfig())
        run = Run(model, task, [], sizes, Path("unused"), settings)  # type: ignore[arg-type]
        mesh = Mesh(device=torch.device("cuda"))
        step = CapturedStep(run, begin_state(run, mesh, None), mesh)
    waiting: list[LaunchedStep] = []

    def launch() -> torch.Tensor:
        with kernels.use(implementation):
            waiting.append(step([batch], lr=1e-4))
        if len(waiting) > 1:
            waiting.pop(0).result()
        return torch.zeros(())

    launch()
    print(step.buckets)
    return Contender(f"bevatron, {implementation}, captured", launch)


def captured_inference(preset: str, batch: StructureBatch, implementation: str) -> Contender:
    """Infer as a potential does with captured evaluations: one launched before the last is read."""
    model = our_model(preset, batch).cuda().eval().requires_grad_(False)
    inference = CapturedInference(model, torch.device("cuda"), torch.float32, PER_ATOM, patience=0)
    waiting: list[Callable[[], dict[str, torch.Tensor]]] = []

    def infer() -> tuple[torch.Tensor, torch.Tensor]:
        with kernels.use(implementation):
            waiting.append(inference.launch(batch))
        outputs = waiting.pop(0)() if len(waiting) > 1 else waiting[0]()
        return outputs["energy"], outputs["forces"]

    infer()
    print(inference.shapes)
    return Contender(f"bevatron, {implementation}, captured", infer=infer)


def evaluating(
    preset: str, batch: StructureBatch, implementation: str, samples: list[Any], *, capture: bool
) -> Contender:
    """Evaluate as users do, waiting for the results each time."""
    potential = Potential(our_model(preset, batch), "cuda", "float32", capture=capture)

    def evaluate() -> object:
        with kernels.use(implementation):
            return list(potential.evaluate(samples, max_atoms=batch.num_atoms))

    name = f"bevatron, {implementation}" + (", captured" if capture else "")
    return Contender(name, evaluate=evaluate)


def measure(
    contender: Contender, wanted: Sequence[str], repeats: int, *, traced: bool
) -> dict[str, float]:
    """Time steps and inference in ms (medians), and the peak memory of a step in MiB.

    Steps are launched five at a time, as in training: the host may be ahead of the GPU.
    """
    found = {}
    timed = {"train": contender.step, "infer": contender.infer, "evaluate": contender.evaluate}
    for what, function in timed.items():
        if function is None or {"evaluate": "infer"}.get(what, what) not in wanted:
            continue
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(TOGETHER):
                function()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end) / TOGETHER)
        found[f"{what} ms"] = statistics.median(times)
        if what != "evaluate":
            found[f"{what} peak MiB"] = peak_memory() / 2**20
    return found | (trace(contender.step, top=30) if traced and contender.step else {})


def peak_memory() -> int:
    """Return the most bytes in use since the last reset, or held for recorded graphs."""
    allocated = torch.cuda.max_memory_allocated()
    pools = torch.cuda.memory_snapshot()
    held = sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in pools
        if segment["segment_pool_id"] != (0, 0)
    )
    return int(allocated + held)


def accuracy(contender: Contender, reference: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the largest force error relative to the largest force."""
    if contender.infer is None:
        return 0.0  # its forces are compared by the others of its row
    _, forces = contender.infer()
    forces = forces.to(reference[1].device, torch.float64)
    return float((forces - reference[1]).abs().max() / reference[1].abs().max())


def run_model(preset: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all contenders on one model."""
    structures = rattled_crystals(arguments.mix)
    samples = our_samples(structures, MaceConfig.preset(preset).r_max)
    batch = our_batch(samples)
    model = our_model(preset, batch)
    rows: dict[str, dict[str, Any]] = {}
    with kernels.use("reference"):
        exact = model.double().cuda()(batch.to("cuda", torch.float64))
        reference = exact["energy"], exact["forces"].detach()
    del exact
    moved = batch.to("cuda", torch.float32)
    contenders: list[Callable[[], Contender]] = []
    for name in arguments.implementations:
        user = partial(evaluating, preset, batch, name, samples)
        contenders.append(partial(our_contender, preset, moved, name))
        if "infer" in arguments.what:
            contenders.append(partial(user, capture=False))
        if arguments.captured and "train" in arguments.what:
            contenders.append(partial(captured_contender, preset, batch, name))
        if arguments.captured and "infer" in arguments.what:
            contenders.append(partial(captured_inference, preset, batch, name))
            contenders.append(partial(user, capture=True))
    contenders += [
        partial(load_peer, name, our_model(preset, batch), structures) for name in arguments.peers
    ]
    for make in contenders:
        torch.cuda.empty_cache()
        contender = make()
        error = accuracy(contender, reference)
        if not error < 1e-3:
            print(f"{contender.name}: forces are off by {error:.1e}, not timed")
            continue
        row = rows.setdefault(
            contender.name, {"model": preset, "edges": batch.num_edges, "what": contender.name}
        )
        row |= {
            k: round(v, 2)
            for k, v in measure(
                contender, arguments.what, arguments.repeats, traced=arguments.trace
            ).items()
        }
        if "train ms" in row:
            row["atoms/s"] = round(batch.num_atoms / row["train ms"] * 1e3)
        if contender.infer is not None:
            row["force error"] = f"{error:.0e}"
        print(row, flush=True)
        del contender
    return list(rows.values())


def load_peer(name: str, model: MACE, structures: list[Any]) -> Contender:
    """Import the peer only where it is asked for."""
    from train_step_peer import peer

    return Contender(*peer(name, model, structures, OPTIM))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=["paper", "mp-0-medium"])
    parser.add_argument("--implementations", nargs="*", default=["reference"])
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--what", nargs="*", default=["train", "infer"])
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--trace", action="store_true", help="launches and idle time per step")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tf32", action="store_true")
    parser.add_argument("--mix", choices=sorted(REPEATS), default="crystals")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    rows = [row for preset in arguments.models for row in run_model(preset, arguments)]
    notes = (
        ATOMS[arguments.mix]
        + " (rattled fcc Cu/Ni), float32, "
        + ("TF32 on" if arguments.tf32 else "TF32 off")
        + "; a step is energy and forces, weighted loss, double backward, clipping, Adam. "
        "Medians by CUDA events; all in one process with the same weights. Inference of captured "
        "rows includes padding and both copies, one launched before the last is read; others find "
        "the batch on the GPU. Evaluating begins and ends with numpy, each result waited for."
    )
    name = "train_step" if "train" in arguments.what else "inference"
    name += "_mixed" if arguments.mix == "mixed" else ""
    name += "_tf32" if arguments.tf32 else ""
    write_result(name, rows, notes, device="cuda")


if __name__ == "__main__":
    main()
