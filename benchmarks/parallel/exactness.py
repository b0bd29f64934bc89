"""Compares losses and gradients of several GPUs with those of one GPU.

    torchrun --nproc-per-node 2 -m benchmarks.parallel.exactness COMPLEXES CHAINS [--out results]
        [--sharing together] [--activations bfloat16]

Small models in float32, or with other activations, dropout on. Every rank first computes the
gradients of one process by itself. Then all ranks share one sample, or have one each, and the
summed gradients are read before the update: of a launched step, of its replay as a CUDA graph, and
of a second replay.
"""

import argparse
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from benchmarks.alphafold2 import train_step as alphafold2
from benchmarks.alphafold3 import arms as alphafold3
from benchmarks.common.arguments import add_out
from benchmarks.common.arms import Arm, Training, drawn, free
from benchmarks.common.report import write_result
from benchmarks.parallel.links import carrier
from torch import Tensor

from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.pairformer import PairformerBlock
from bevatron.models.alphafold3.task import StepOptions
from bevatron.models.common.folding import Checkpointing
from bevatron.parallel import axial
from bevatron.parallel.axial import own_rows, sample_group
from bevatron.parallel.axial.collectives import gather, transpose
from bevatron.parallel.groups import Group
from bevatron.parallel.mesh import Mesh, open_mesh
from bevatron.train.capture.step_graphs import StepGraphs
from bevatron.train.course import begin_step
from bevatron.train.precision import arithmetic
from bevatron.train.run import SamplesApart, SamplesInGroups, Sharing

Gradients = tuple[float, list[Tensor]]
"""Loss of a step, and its gradients as they are summed over all ranks."""
SHARINGS = ("together", "apart")
STEPS = ("launched", "replayed", "replayed again")
NOTES = (
    "Small models in float32 without TF32, dropout on, two passes. off by: largest difference of a "
    "gradient from that of one GPU in float32, over the largest gradient of all. median off by: "
    "the median over weights of the norm of this difference over that of the gradient. sharing: "
    "the ranks compute one sample together, or one each, for which the one GPU takes them one "
    "after another. exchanges: of the ranks of a sample, through windows or NCCL (gloo on a CPU). "
    "step: launched, or the first and second replay of its CUDA graph."
)


class Case:
    """A small model of a system whose steps run in several ways."""

    def __init__(self, system: str, given: argparse.Namespace, device: torch.device) -> None:
        self.system, self.given, self.device = system, given, device
        self.arm = Arm("float32", precision="float32", workers=0, captured=True)
        name = given.activations
        self.activations = None if name == "float32" else getattr(torch, name)

    def training(
        self, mesh: Mesh, sharing: Sharing, activations: torch.dtype | None = None
    ) -> Training:
        """Make the training on these ranks, always with the same initial weights."""
        given, arm = self.given, self.arm
        if self.system == "alphafold2":
            chosen = argparse.Namespace(
                store=given.chains, crop=32, msa_rows=8, extra_rows=16, templates=1,
                preset="small", device=str(self.device), stage="initial",
            )  # fmt: skip
            run = alphafold2.run_of(chosen)
            run.task = alphafold2.task_of(arm, run, 2)
            run.sharing, run.task.activations = sharing, activations
            return Training(arm, run, mesh)
        crops = alphafold3.Crops(given.complexes, 64, rows=16)
        model = alphafold3.built("small", self.device)
        options = StepOptions(copies=4)
        training = alphafold3.training_of(
            arm, model, crops, options, cycles=2, mesh=mesh, sharing=sharing
        )
        training.run.task.activations = activations
        return training

    def of_one(self, samples: int, activations: torch.dtype | None = None) -> Gradients:
        """Differentiate the mean loss of some samples on one process, without a trainer."""
        training = self.training(Mesh(device=self.device), SamplesApart(), activations)
        run, state = training.run, training.state
        begin_step(run, state.progress, 0)
        losses = []
        with arithmetic(run.settings.train, None):
            for number in range(samples):
                batch = self.batch(training, number).to(self.device, torch.float32)
                counts = {name: samples * x for name, x in run.task.normalisers(batch).items()}
                losses.append(run.task.loss(run.model, batch, counts).total)
            loss = torch.stack(losses).sum()
            parameters = state.optimizer.parameters
            found = torch.autograd.grad(loss, parameters, allow_unused=True)
        gradients = [
            torch.zeros_like(p) if g is None else g.clone()
            for p, g in zip(parameters, found, strict=True)
        ]
        value = float(loss.detach())
        training.release()
        return value, gradients

    def batch(self, training: Training, number: int) -> Any:
        """Make the batch of a sample."""
        sample = training.run.train[number]
        return training.run.task.collate([sample], np.array([number]), [1.0])

    def rows(self, mesh: Mesh, *, together: bool) -> Iterator[dict[str, Any]]:
        """Compare steps of all ranks with one GPU."""
        sharing = SamplesInGroups(mesh.world) if together else SamplesApart()
        samples = 1 if together else mesh.world
        loss, expected = self.of_one(samples)

        def row(step: str, found: Gradients) -> dict[str, Any]:
            return {
                "system": self.system,
                "sharing": "together" if together else "apart",
                "step": step,
                "loss off by": abs(found[0] - loss) / abs(loss),
                **differences(expected, found[1]),
            }

        if self.activations is not None:
            yield {"GPUs": 1, **row("launched", self.of_one(samples, self.activations))}
        with sharing.joined(mesh):
            training = self.training(mesh, sharing, self.activations)
            batch = self.batch(training, 0 if together else mesh.rank)
            through = {"GPUs": mesh.world, "exchanges": carrier(sample_group(), mesh.device)}
            for step in STEPS:
                with summed_gradients() as found:
                    result = training.launch(batch, 0).result()
                yield through | row(step, (result.loss, found[0]))
            training.release()


def differences(expected: list[Tensor], found: list[Tensor]) -> dict[str, Any]:
    """Return how far gradients are from those of one GPU in float32."""
    errors = [a - b for a, b in zip(expected, found, strict=True)]
    largest, off_by = (max(float(x.abs().max()) for x in all_of) for all_of in (expected, errors))
    shares = [float(e.norm() / x.norm()) for e, x in zip(errors, expected, strict=True) if x.any()]
    return {
        "off by": off_by / largest,
        "median off by": statistics.median(shares),
        "gradients": len(errors),
    }


@contextmanager
def summed_gradients() -> Iterator[list[list[Tensor]]]:
    """Keep what the updates of captured steps are given."""
    found: list[list[Tensor]] = []
    update = StepGraphs.update

    def noted(graphs: StepGraphs, *given: Any) -> Any:
        found.append([x.clone() for x in graphs._update.gradients])  # noqa: SLF001
        return update(graphs, *given)

    with patch.object(StepGraphs, "update", noted):
        yield found


def without_rows(group: Group, device: torch.device) -> tuple[int, float]:
    """Exchange fewer rows than processes; return how many were equal, and a block's error.

    Gradients are compared too.
    """
    count = 0
    for total in range(1, group.size + 2):
        make = torch.Generator(device).manual_seed(total)
        # Whole numbers, whose sums are exact in any order.
        whole = torch.randint(-99, 99, (total, total, 4), generator=make, device=device).float()
        rows = own_rows(whole).clone().requires_grad_()
        found = gather(rows, 0, total, group).wait()
        assert torch.equal(found, whole)
        (gradient,) = torch.autograd.grad(found, rows, whole)
        assert torch.equal(gradient, group.size * own_rows(whole))
        found = transpose(rows, total, group).wait()
        assert torch.equal(found, own_rows(whole.transpose(0, 1)))
        (gradient,) = torch.autograd.grad(found, rows, own_rows(whole.transpose(0, 1)).clone())
        assert torch.equal(gradient, own_rows(whole))
        count += 4
    config = AlphaFold3Config.preset("small")
    torch.manual_seed(0)
    with device:
        block = PairformerBlock(24, config.widths.pair, config.pairformer, Checkpointing("none"))
        drawn(block)
        s, z, tokens = torch.randn(1, 24), torch.randn(1, 1, config.widths.pair), torch.ones(1) > 0

    def run() -> list[Tensor]:
        rows = own_rows(z).clone().requires_grad_()
        found = block((s, rows), tokens, tokens[:, None])
        gradients = torch.autograd.grad(sum(x.square().sum() for x in found), [rows])
        return [x.detach() for x in (*found, *gradients)]

    with axial.one_of(1):
        of_s, *expected = run()
    own_s, *found = run()
    pairs = [(of_s, own_s), *((own_rows(a), b) for a, b in zip(expected, found, strict=True))]
    errors = [float((a - b).abs().max() / a.abs().max()) for a, b in pairs if a.numel()]
    return count, max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("complexes", type=Path, help="store of complexes")
    parser.add_argument("chains", type=Path, help="store of chains")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--sharing", nargs="*", choices=SHARINGS, default=SHARINGS)
    parser.add_argument("--activations", choices=["float32", "bfloat16"], default="float32")
    add_out(parser)
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with open_mesh(given.device, timeout_seconds=300) as mesh:
        for system in ("alphafold2", "alphafold3"):
            for sharing in given.sharing:
                case = Case(system, given, mesh.device)
                for row in case.rows(mesh, together=sharing == "together"):
                    rows.append(row)
                    if mesh.is_main:
                        print(rows[-1], flush=True)
                        publish(rows, NOTES, mesh, given)
                free()
        with axial.shared(mesh, mesh.world) as group:
            exchanged, off_by = without_rows(group, mesh.device)
        if mesh.is_main:
            said = (
                f" Of fewer rows than GPUs {exchanged} exchanges are equal to what they mean, and "
                f"a Pairformer block is off by {off_by:.2g} of the largest number."
            )
            publish(rows, NOTES + said, mesh, given)


def publish(rows: list[dict[str, Any]], notes: str, mesh: Mesh, given: argparse.Namespace) -> None:
    name = "parallel/exactness"
    if given.activations != "float32":
        name += f"-{given.activations}"
        notes += f" Activations in {given.activations}, here those of one process too."
    write_result(name, rows, notes, device=mesh.device.type, folder=given.out)


if __name__ == "__main__":
    main()
