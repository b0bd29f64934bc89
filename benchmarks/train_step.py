"""Times training steps and inference of MACE on one GPU, beside mace-torch.

    python benchmarks/train_step.py [--models paper mp-0-medium] [--peers e3nn cueq] [--quick]

Peers: mace-torch with e3nn and with cuEquivariance's kernels. All run in one process on the same
atoms with the same weights (converted), in float32 without TF32 unless --tf32. A step is energy and
forces, loss, double backward, clipping and Adam. Before anything is timed, the forces of every
implementation are compared with ours in float64.
"""

import argparse
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from ase.build import bulk
from report import write_result

from bevatron import kernels
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import StructureBatch, collate_structures, unlabelled_structure
from bevatron.models.mace import MACE, LossConfig, MaceConfig, MaceTask
from bevatron.train.optim import make_optimizer
from bevatron.train.settings import OptimConfig

ELEMENTS = (28, 29)
ENERGIES = (-1.9, -1.2)
OPTIM = OptimConfig(algorithm="adam", lr=1e-4, weight_decay=0.0, clip=100.0)


def crystals(number: int = 12, repeat: int = 4) -> list[Any]:
    """Make rattled fcc supercells of copper and nickel, 256 atoms each."""
    generator = np.random.default_rng(0)
    structures = []
    for i in range(number):
        atoms = bulk("Cu", "fcc", a=3.585 + 0.004 * i, cubic=True) * (repeat, repeat, repeat)
        atoms.numbers[generator.random(len(atoms)) < 0.5] = 28
        atoms.positions += generator.normal(0, 0.05, atoms.positions.shape)
        atoms.info["energy"] = float(-1.5 * len(atoms) + generator.normal())
        atoms.arrays["forces"] = generator.normal(0, 0.5, atoms.positions.shape)
        structures.append(atoms)
    return structures


def our_batch(structures: list[Any], cutoff: float) -> StructureBatch:
    """Put labelled structures into one batch."""
    samples = []
    for atoms in structures:
        sample = unlabelled_structure(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc)
        sample["energy"] = np.array(atoms.info["energy"])
        sample["forces"] = atoms.arrays["forces"]
        samples.append(add_neighbours(sample, cutoff))
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
    """One implementation: what is timed, and how its memory is measured."""

    name: str
    step: Callable[[], torch.Tensor]
    infer: Callable[[], tuple[torch.Tensor, torch.Tensor]]


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


def measure(contender: Contender, repeats: int) -> dict[str, float]:
    """Time steps and inference in ms (medians), and the peak memory of a step in MiB."""
    found = {}
    for what, function in (("train", contender.step), ("infer", contender.infer)):
        for _ in range(3):
            function()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        times = []
        for _ in range(repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            function()
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        found[f"{what} ms"] = statistics.median(times)
        found[f"{what} peak MiB"] = torch.cuda.max_memory_allocated() / 2**20
    return found


def accuracy(contender: Contender, reference: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the largest force error relative to the largest force."""
    _, forces = contender.infer()
    return float((forces.double() - reference[1]).abs().max() / reference[1].abs().max())


def run_model(preset: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure all contenders on one model."""
    structures = crystals()
    batch = our_batch(structures, MaceConfig.preset(preset).r_max)
    model = our_model(preset, batch)
    rows: list[dict[str, Any]] = []
    with kernels.use("reference"):
        exact = model.double().cuda()(batch.to("cuda", torch.float64))
        reference = exact["energy"], exact["forces"].detach()
    del exact
    moved = batch.to("cuda", torch.float32)
    contenders: list[Callable[[], Contender]] = [
        *(partial(our_contender, preset, moved, name) for name in arguments.implementations),
        *(
            partial(load_peer, name, our_model(preset, batch), structures)
            for name in arguments.peers
        ),
    ]
    for make in contenders:
        torch.cuda.empty_cache()
        contender = make()
        error = accuracy(contender, reference)
        if not error < 1e-3:
            print(f"{contender.name}: forces are off by {error:.1e}, not timed")
            continue
        row: dict[str, Any] = {"model": preset, "edges": batch.num_edges, "what": contender.name}
        row |= {k: round(v, 2) for k, v in measure(contender, arguments.repeats).items()}
        row["atoms/s"] = round(batch.num_atoms / row["train ms"] * 1e3)
        row["force error"] = f"{error:.0e}"
        rows.append(row)
        print(row, flush=True)
        del contender
    return rows


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
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tf32", action="store_true")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = arguments.tf32
    rows = [row for preset in arguments.models for row in run_model(preset, arguments)]
    notes = (
        "12 rattled fcc supercells of 256 atoms (Cu, Ni), float32, "
        + ("TF32 on" if arguments.tf32 else "TF32 off")
        + "; a step is energy and forces, weighted loss, double backward, clipping, Adam. "
        "Medians by CUDA events; all in one process with the same weights."
    )
    name = "train_step_tf32" if arguments.tf32 else "train_step"
    write_result(name, rows, notes, device="cuda")


if __name__ == "__main__":
    main()
