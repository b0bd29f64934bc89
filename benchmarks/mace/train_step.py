"""Times training steps and inference of MACE on one GPU, compared with mace-torch.

    python -m benchmarks.mace.train_step [--models paper mp-0-medium] [--captured]
        [--peers e3nn cueq] [--what train infer evaluate] [--tf32 off on]

Peers: mace-torch with e3nn and with cuEquivariance's kernels. With --captured our step is also
timed as the trainer runs it, and inference as `Potential.evaluate` does: padded on the host,
copied, captured as CUDA graphs, results copied back. "evaluate ms" is a single `Potential.evaluate`
from numpy to numpy. All run on the same atoms with the same weights (converted), in float32, with
TF32 off or on for both sides. A step is energy and forces, loss, double backward, clipping and
Adam. Before anything is timed, all forces are compared with ours in float64.

Each model has a process of its own: all are prepared side by side (imports and kernels compiled at
run time take longer than what is measured), then measured one after the other.
"""

import argparse
import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase.build import bulk
from benchmarks.common.arguments import script_parser
from benchmarks.common.report import write_result
from benchmarks.common.timing import median_ms, memory_with_graphs
from benchmarks.common.trace import trace

from bevatron import kernels
from bevatron.data.neighbours import add_neighbours
from bevatron.data.samples import StructureBatch, collate_structures, unlabelled_structure
from bevatron.models.mace import MACE, LossConfig, MaceConfig, MaceTask
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.mace.potential import ROWS, Potential
from bevatron.train.capture.inference import CapturedInference
from bevatron.train.capture.step import CapturedStep
from bevatron.train.loop import begin_state
from bevatron.train.optim import make_optimizer
from bevatron.train.run import Run
from bevatron.train.settings import OptimConfig, Settings, TrainConfig
from bevatron.train.step import LaunchedStep

ELEMENTS = (28, 29)
ENERGIES = (-1.9, -1.2)
TOGETHER = 5
SLOW = 0.1
"""Seconds of a step."""
OPTIM = OptimConfig(algorithm="adam", lr=1e-30, weight_decay=0.0, clip=100.0)
"""With a rate at which weights stay as they are: forces can be compared after any step."""


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
"""Cells of four atoms along each axis -> number of such structures; None is a single atom."""


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
    samples = []
    for atoms in structures:
        sample = unlabelled_structure(atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc)
        sample["energy"] = np.array(atoms.info["energy"])
        sample["forces"] = atoms.arrays["forces"]
        samples.append(add_neighbours(sample, cutoff))
    return samples


def our_batch(samples: list[Any]) -> StructureBatch:
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
    own: int = 0
    """Bytes that it holds all the time."""


def our_contender(preset: str, batch: StructureBatch, implementation: str) -> Contender:
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
            waiting.append(step([batch], lr=OPTIM.lr))
        if len(waiting) > 1:
            waiting.pop(0).result()
        return torch.zeros(())

    launch()
    print(step.buckets)
    return Contender(f"bevatron, {implementation}, captured", launch)


def captured_inference(preset: str, batch: StructureBatch, implementation: str) -> Contender:
    """Infer as a potential does with captured evaluations: one launched before the last is read."""
    model = our_model(preset, batch).cuda().eval().requires_grad_(False)
    inference = CapturedInference(model, torch.device("cuda"), torch.float32, ROWS, patience=0)
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
    contender: Contender, wanted: Sequence[str], repeats: int
) -> tuple[dict[str, float], bool]:
    """Time steps and inference in ms (medians), and the peak memory of a step in MiB.

    Steps are launched five at a time, as in training: the host may be ahead of the GPU. Those of
    more than 100 ms, where a launch does not count, are launched one by one. Also returned is
    whether the last were.
    """
    found = {}
    timed = {"train": contender.step, "infer": contender.infer, "evaluate": contender.evaluate}
    slow = False
    for what, function in timed.items():
        if function is None or what not in wanted:
            continue
        others = memory_with_graphs(torch.cuda.memory_allocated()) - contender.own
        for _ in range(3):
            torch.cuda.synchronize()
            before = time.perf_counter()
            function()
            torch.cuda.synchronize()
            slow = time.perf_counter() - before > SLOW
        torch.cuda.reset_peak_memory_stats()
        together = 1 if slow else TOGETHER
        found[f"{what} ms"] = median_ms(function, repeats, warm_up=0, together=together)
        if what != "evaluate":
            most = memory_with_graphs(torch.cuda.max_memory_allocated())
            found[f"{what} peak MiB"] = (most - others) / 2**20
    return found, slow


def with_own(make: Callable[[], Contender], *, run: bool = True) -> Contender:
    """Make a contender, perhaps run it once, and find out what it then holds."""
    gc.collect()
    before = memory_with_graphs(torch.cuda.memory_allocated())
    contender = make()
    if run:
        run_once(contender)
    gc.collect()
    contender.own = memory_with_graphs(torch.cuda.memory_allocated()) - before
    return contender


def accuracy(contender: Contender, reference: tuple[torch.Tensor, torch.Tensor]) -> float:
    """Return the largest force error relative to the largest force."""
    if contender.infer is None:
        return 0.0  # its forces are compared by the others of its row
    _, forces = contender.infer()
    forces = forces.to(reference[1].device, torch.float64)
    return float((forces - reference[1]).abs().max() / reference[1].abs().max())


class Model:
    """All contenders on one model: made and run once, then measured.

    Parameters
    ----------
    preset : the model's hyper-parameters
    arguments : of the command line
    """

    def __init__(self, preset: str, arguments: argparse.Namespace) -> None:
        self.preset, self.arguments = preset, arguments
        self.structures = rattled_crystals(arguments.mix)
        self.samples = our_samples(self.structures, MaceConfig.preset(preset).r_max)
        self.batch = our_batch(self.samples)
        self.rows: dict[tuple[str, str], dict[str, Any]] = {}
        self.kernels: list[dict[str, Any]] = []
        # What takes the CPU longest comes first, what needs most memory last.
        order = sorted(arguments.peers)
        self.peers = [self._peer(name) for name in order if name == "cueq"]
        self.ours = [
            (tf32, with_own(make)) for tf32 in self._each_tf32() for make in self._makers()
        ]
        self.peers += [self._peer(name) for name in order if name != "cueq"]
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def run(self) -> Iterator[bool]:
        """Check and measure everything, one after the other; ``rows`` grow.

        Yields True once, before the peers that take longest.
        """
        reference = self._reference()
        for tf32, contender in self.ours:
            self._measure(contender, tf32, reference)
            yield False
        self.ours.clear()
        waiting = True
        while self.peers:
            contender = self.peers.pop(0)
            if waiting and not contender.name.endswith("cueq"):
                waiting = False
                yield True
            for tf32 in self._each_tf32():
                self._measure(contender, tf32, reference)
                yield False
            del contender
        if waiting:
            yield True

    def _makers(self) -> list[Callable[[], Contender]]:
        given, wanted = self.arguments, self.arguments.what
        moved = self.batch.to("cuda", torch.float32)
        makers: list[Callable[[], Contender]] = []
        for name in given.implementations:
            user = partial(evaluating, self.preset, self.batch, name, self.samples)
            makers.append(partial(our_contender, self.preset, moved, name))
            if "evaluate" in wanted:
                makers.append(partial(user, capture=False))
            if given.captured and "train" in wanted:
                makers.append(partial(captured_contender, self.preset, self.batch, name))
            if given.captured and "infer" in wanted:
                makers.append(partial(captured_inference, self.preset, self.batch, name))
            if given.captured and "evaluate" in wanted:
                makers.append(partial(user, capture=True))
        return makers

    def _peer(self, name: str) -> Contender:
        made = partial(load_peer, name, our_model(self.preset, self.batch), self.structures)
        return with_own(made, run=name == "cueq")

    def _each_tf32(self) -> Iterator[str]:
        """Set each of the wanted settings in turn."""
        for tf32 in self.arguments.tf32:
            torch.backends.cuda.matmul.allow_tf32 = tf32 == "on"
            yield tf32

    def _reference(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.backends.cuda.matmul.allow_tf32 = False
        found = []
        with kernels.use("reference"):
            model = our_model(self.preset, self.batch).double().cuda()
            # One by one: the reference writes all messages.
            for sample in self.samples:
                exact = model(our_batch([sample]).to("cuda", torch.float64))
                found.append((exact["energy"].detach(), exact["forces"].detach()))
        energies, forces = zip(*found, strict=True)
        return torch.cat(energies), torch.cat(forces)

    def _measure(
        self, contender: Contender, tf32: str, reference: tuple[torch.Tensor, torch.Tensor]
    ) -> None:
        torch.backends.cuda.matmul.allow_tf32 = tf32 == "on"
        gc.collect()
        torch.cuda.empty_cache()
        error = accuracy(contender, reference)
        if not error < (1e-2 if tf32 == "on" else 1e-3):
            print(f"{contender.name}: forces are off by {error:.1e}, not timed")
            return
        first = {"model": self.preset, "edges": self.batch.num_edges, "what": contender.name}
        row = self.rows.setdefault((tf32, contender.name), first)
        fast = "captured" in contender.name or contender.name.endswith("cueq")
        found, slow = measure(contender, self.arguments.what, self.arguments.repeats)
        if self.arguments.trace and fast and tf32 == self.arguments.tf32[0]:
            found |= self._trace(contender, steps=3 if slow else 10)
        row |= {key: round(value, 2) for key, value in found.items()}
        if "train ms" in row:
            row["atoms/s"] = round(self.batch.num_atoms / row["train ms"] * 1e3)
        if contender.infer is not None:
            row["force error"] = f"{error:.0e}"
        print(tf32, row, flush=True)

    def _trace(self, contender: Contender, steps: int) -> dict[str, float]:
        """Trace what a contender does; return the summary of a training step."""
        found: dict[str, float] = {}
        for what, function in (("train", contender.step), ("infer", contender.infer)):
            if function is None or what not in self.arguments.what:
                continue
            summary, rows = trace(function, steps)
            first = {"model": self.preset, "what": contender.name, "part": what}
            self.kernels += [{**first, **row} for row in rows]
            if what == "train":
                found = summary
        return found


def run_once(contender: Contender) -> Contender:
    """Have everything compiled that is compiled at run time."""
    for function in (contender.step, contender.infer, contender.evaluate):
        if function is not None:
            function()
    torch.cuda.synchronize()
    return contender


def load_peer(name: str, model: MACE, structures: list[Any]) -> Contender:
    """Import the peer only where it is asked for."""
    from benchmarks.mace.train_step_peer import peer

    return Contender(*peer(name, model, structures, OPTIM))


def work(preset: str, arguments: argparse.Namespace, parent: Connection) -> None:
    """Prepare one model in a process, wait for its turn, measure it."""
    model = Model(preset, arguments)
    parent.send("ready")
    parent.recv()
    for pause in model.run():
        parent.send((model.rows, model.kernels))
        if pause:
            parent.send(None)
            parent.recv()
    parent.send(None)


Rows = dict[tuple[str, str], dict[str, Any]]
Process = tuple[BaseProcess, Connection]


def run_models(arguments: argparse.Namespace) -> Iterator[tuple[Rows, list[dict[str, Any]]]]:
    """Yield each model's rows, by TF32 and contender, and its kernels, whenever there are more.

    All models come before the slow peers of any.
    """
    context = multiprocessing.get_context("spawn")
    processes: list[Process] = []
    for preset in arguments.models:
        own, other = context.Pipe()
        process = context.Process(target=work, args=(preset, arguments, other), daemon=True)
        process.start()
        other.close()
        processes.append((process, own))
    while arguments.start is not None and not arguments.start.exists():
        time.sleep(0.05)
    if arguments.start is None:
        # Nobody may be busy while another is measured.
        for _, own in processes:
            own.poll(None)
    for turn in range(2):
        for process, own in processes if turn else whichever_is_ready(processes):
            try:
                own.send("go")
                while (found := own.recv()) is not None:
                    yield found
            except (EOFError, BrokenPipeError):
                print("a model could not be measured to its end")
            if turn:
                process.join()


def whichever_is_ready(processes: Sequence[Process]) -> Iterator[Process]:
    """Yield the processes in their order, those that are not ready later."""
    waiting = list(processes)
    while waiting:
        ready = wait([own for _, own in waiting])
        chosen = next(process for process in waiting if process[1] in ready)
        waiting.remove(chosen)
        try:
            chosen[1].recv()
        except EOFError:
            print("a model could not be prepared")
            continue
        yield chosen


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--models", nargs="*", default=["paper", "mp-0-medium"])
    parser.add_argument("--implementations", nargs="*", default=["reference"])
    parser.add_argument("--peers", nargs="*", default=[])
    parser.add_argument("--what", nargs="*", default=["train", "infer"])
    parser.add_argument("--captured", action="store_true")
    parser.add_argument("--trace", action="store_true", help="launches and idle time of a step")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--tf32", nargs="*", choices=["off", "on"], default=["off"])
    parser.add_argument("--mix", choices=sorted(REPEATS), default="crystals")
    parser.add_argument("--start", type=Path, help="measure only once this file is there")
    arguments = parser.parse_args()
    name = "mace/train_step" if "train" in arguments.what else "mace/inference"
    name += "_mixed" if arguments.mix == "mixed" else ""
    rows: dict[tuple[str, str, str], dict[str, Any]] = {}
    spent: dict[str, list[dict[str, Any]]] = {}
    for found, of_kernels in run_models(arguments):
        rows |= {(tf32, what, row["model"]): row for (tf32, what), row in found.items()}
        if of_kernels:
            spent[of_kernels[0]["model"]] = of_kernels
            write_kernels(name, [row for part in spent.values() for row in part])
        for tf32 in arguments.tf32:
            chosen = [row for key, row in rows.items() if key[0] == tf32]
            named = name + ("_tf32" if tf32 == "on" else "")
            if chosen:
                write_result(named, chosen, notes(arguments.mix, tf32), device="cuda")


def write_kernels(name: str, rows: list[dict[str, Any]]) -> None:
    """Write which kernels the traced parts consist of; the page has those of 0.3 % and more."""
    parts = {(row["model"], row["what"], row["part"]): 0.0 for row in rows}
    for row in rows:
        parts[row["model"], row["what"], row["part"]] += row["ms"]
    long = [row for row in rows if row["ms"] > 3e-3 * parts[row["model"], row["what"], row["part"]]]
    text = (
        "Kernels and copies in a profiler's trace, per step or evaluation, longer than 0.3 % of it."
    )
    write_result(f"{name}_kernels", long, text, device="cuda")


def notes(mix: str, tf32: str) -> str:
    """Say what was measured and how."""
    return (
        f"{ATOMS[mix]} (rattled fcc Cu/Ni), float32, TF32 {tf32}"
        "; a step is energy and forces, weighted loss, double backward, clipping, Adam. "
        "Medians by CUDA events, all on one machine with the same weights, one after the other. "
        "Inference of captured rows includes padding and both copies, one launched before the last "
        "is read; others find the batch on the GPU. Evaluating begins and ends with numpy, each "
        "result waited for. Force errors are relative to the largest force in float64."
    )


if __name__ == "__main__":
    main()
