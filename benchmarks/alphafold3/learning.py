"""Does AlphaFold3 learn? One complex by heart; complexes that were held out, with and without MSAs.

    python -m benchmarks.alphafold3.learning STORE --by-heart --seconds 60 --out rows
    python -m benchmarks.alphafold3.learning TRAIN --held STORE --seconds 60 --out rows
    python -m benchmarks.alphafold3.learning TRAIN --steps 200 --constant --precision float32
    python -m benchmarks.alphafold3.learning --collect rows

A model of reduced sizes is trained at a rate that rises, stays and falls to zero over the last
third, one crop a step, with the trainer's own step; its averaged weights are judged. By heart: the
whole complex is the crop, or with ``--crop`` one part of it, and several structures are sampled.
Otherwise crops of the held-out complexes are predicted, with their alignments and without; runs
named NAME-SEED are averaged. Runs at a constant rate leave curves to compare with the first steps
of those: of kernels, of precisions, over seeds.
"""

import argparse
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
import torch
from benchmarks.alphafold3.arms import ATOMS_PER_TOKEN, TRIED, Crops
from benchmarks.common.arguments import add_rows, read_all, script_parser
from benchmarks.common.arms import Arm, Training
from benchmarks.common.report import add_picture, hardware, versions, write_result

from bevatron.data.packing.draws import Draws, Source
from bevatron.data.proteins.complex_batch import collate_complex
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.sample import SampleSizes
from bevatron.files import write_text_atomically
from bevatron.kernels import use
from bevatron.maths.superposition import superposed
from bevatron.models.alphafold3.config import TOKEN_FEATURES, AlphaFold3Config
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    ConfidenceConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.config_trunk import (
    MsaConfig,
    PairConfig,
    PairformerConfig,
    TemplateConfig,
)
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.task import AlphaFold3Task, StepOptions
from bevatron.models.common.folding import Checkpointing
from bevatron.recipes.alphafold3.data import ComplexDataset, sizes_for_validation, units_of
from bevatron.recipes.alphafold3.run import AlphaFold3Run, ComplexStage
from bevatron.recipes.alphafold3.stores import open_complexes
from bevatron.train.optim import averaged
from bevatron.train.report import plots
from bevatron.train.report.plots import Curve, Panel
from bevatron.train.run import Run, Stage

CHUNK = 25
"""Steps between two looks at the clock, and of which a curve shows the mean."""
FALLS_FROM = 2 / 3
"""Share of a run from which on the rate falls."""
SPREAD = ("distogram", "contact_precision", "lddt")
"""Measures whose deviation over seeds is told."""
_PAIR = PairConfig(hidden=64, num_heads=4, head_width=16, transition=2)


def reduced() -> AlphaFold3Config:
    """Return a model of 24 million weights."""
    atoms = AtomConfig(width=128, pair_width=16, num_heads=4, num_blocks=2)
    never = Checkpointing()
    return AlphaFold3Config(
        widths=TrunkWidths(inputs=TOKEN_FEATURES + 128, single=192, pair=64),
        atoms=replace(atoms, num_blocks=1),
        templates=TemplateConfig(num_blocks=0),
        msa=MsaConfig(2, 64, 16, 4, 16, 2, 0.15, _PAIR),
        pairformer=PairformerConfig(8, 8, 24, 2, _PAIR),
        diffusion=DiffusionConfig(
            encoder=atoms,
            transformer=TokenTransformerConfig(width=384, num_heads=8, num_blocks=8),
            decoder=atoms,
            noise_width=128,
            checkpointing=never,
        ),
        confidence=ConfidenceConfig(PairformerConfig(1, 8, 24, 2, replace(_PAIR, dropout=0.0))),
        cycles=1,
        checkpointing=never,
    )


def small() -> AlphaFold3Config:
    """Return the preset for a CPU without templates."""
    known = AlphaFold3Config.preset("small", cycles=1)
    return replace(known, templates=replace(known.templates, num_blocks=0))


def short(config: AlphaFold3Config) -> AlphaFold3Config:
    """Return the sizes to learn by heart: two Pairformer blocks, no alignment, no dropout."""
    undropped = replace(config.pairformer.pair, dropout=0.0)
    return replace(
        config,
        msa=replace(config.msa, num_blocks=0),
        pairformer=replace(config.pairformer, num_blocks=2, pair=undropped),
    )


class Still(ComplexDataset):
    """One sample of the first entry, whatever the seed: the same crop and reference poses."""

    drawn_by = 0

    def sample(self, index: SupportsIndex, seed: int) -> Any:
        """Make that sample; noise follows from the given seed."""
        return {**super().sample(index, self.drawn_by), "seed": np.array(seed, np.int64)}


class WithoutAlignments(ComplexDataset):
    """Crops of a store that show sequences alone."""

    @cached_property
    def opened(self) -> Any:
        """The store and its sources but the alignments."""
        store, sources = super().opened
        return store, replace(sources, alignments=None)


def published() -> AlphaFold3Config:
    """Return the published sizes."""
    return AlphaFold3Config.preset("alphafold3", cycles=1)


SIZES = {"reduced": reduced, "small": small, "published": published}


def sizes_of(tokens: int, rows: int) -> SampleSizes:
    """Return the most that a crop holds."""
    return SampleSizes(CropSizes(tokens=tokens, atoms=ATOMS_PER_TOKEN * tokens), rows)


def entries_of(store: Path, *, alignments: bool, tokens: int, rows: int) -> ComplexDataset:
    """Return the largest crop of every entry of a store, always the same."""
    entries = np.flatnonzero(open_complexes(store).lengths("restype"))
    sizes = sizes_for_validation(sizes_of(tokens, rows))
    units = np.stack([entries, 0 * entries, 0 * entries], axis=1)
    return (ComplexDataset if alignments else WithoutAlignments)(store, units, sizes)


def drawn_crops(given: argparse.Namespace) -> Source:
    """Return what is trained on: the whole complex, or crops of chains and interfaces.

    Published sizes are trained on crops of one padded shape, which is captured once.
    """
    if given.sizes == "published":
        return Source("crops", Crops(given.store, given.tokens, rows=given.rows, different=TRIED))
    if given.by_heart:
        whole = entries_of(given.store, alignments=True, tokens=given.tokens, rows=given.rows)
        if given.crop is None:
            return Source("crops", whole)
        still = Still(whole.path, whole.units, whole.sizes)
        still.drawn_by = given.crop
        return Source("crops", still)
    store = open_complexes(given.store)
    units, weights = units_of(store, np.flatnonzero(store.lengths("restype")))
    crops = WithoutAlignments if given.without else ComplexDataset
    return Source("crops", crops(given.store, units, sizes_of(given.tokens, given.rows)), weights)


def training_of(given: argparse.Namespace) -> Training:
    """Build the model and its training."""
    device = torch.device(given.device)
    narrow = torch.bfloat16 if given.precision == "bfloat16" else None
    torch.manual_seed(given.seed)
    config = SIZES[given.sizes]()
    model = AlphaFold3(short(config) if given.by_heart else config).to(device)
    options = StepOptions(copies=given.copies, confidence_every=0)
    task = AlphaFold3Task(1, [options], narrow, validation_steps=given.sampling)
    values = {
        "train": {"device": given.device, "seed": given.seed},
        "optim": {"ema": given.ema, "lr": given.lr},
    }
    draws = Draws([drawn_crops(given)], given.seed)
    sizes = {"tokens": draws.lengths("tokens")}
    stage = Stage("initial", ComplexStage(steps=1, samples_per_step=1, step=options), draws, sizes)
    settings = AlphaFold3Run.from_values(values).settings
    settings = replace(settings, optim=replace(settings.optim, accumulate=1))
    run = Run(model, task, draws, sizes, Path("unused"), settings, stages=[stage])
    captured = device.type == "cuda" and (given.kernels == "auto" or given.sizes == "published")
    arm = Arm(
        "", given.kernels, given.policy, captured,
        precision=given.precision, workers=given.workers,
    )  # fmt: skip
    return Training(arm, run)


def trained(
    training: Training, given: argparse.Namespace, curve: list[dict[str, float]]
) -> Iterator[None]:
    """Train for so many steps or seconds; add loss and terms of every step to the curve.

    Seconds are those of steps: captures and pauses are left out. Yields between chunks of steps.
    """
    chunks: list[float] = []
    share = 0.0
    while share < 1:
        done = len(curve)
        falling = 1.0 if given.constant else (1 - share) / (1 - FALLS_FROM)
        training.lr = given.lr * min((done + given.chunk) / given.warmup, 1.0, falling)
        steps = training.steps(range(done, done + given.chunk))
        for result, seconds in zip(steps.results, steps.seconds, strict=True):
            terms = {"gradient norm": result.grad_norm, **result.terms}
            curve.append({"loss": result.loss, "seconds": seconds, **terms})
        chunks.append(sum(steps.seconds))
        if given.steps is not None:
            share = len(curve) / given.steps
        else:
            longest = 3 * float(np.median(chunks))
            share = sum(min(chunk, longest) for chunk in chunks) / given.seconds
        if done % (20 * given.chunk) == 0:
            print(f"{given.name}: {len(curve)} steps, {100 * share:.0f} %", flush=True)
        yield


def by_heart(training: Training, given: argparse.Namespace) -> dict[str, float]:
    """Sample structures of the one complex; RMSD is over all its resolved atoms, Å."""
    found: dict[str, list[float]] = {"rmsd": []}
    crops = training.run.train.sources[0].dataset
    for seed in range(given.samples):
        judged = training.run.task.metrics()
        outputs = predicted(training, crops.sample(0, seed), judged)
        x, truth = outputs["rollout"][0], outputs["position"]
        resolved = outputs["truth_resolved"]
        fitted = superposed(truth[None], x[None], resolved[None].float())[0]
        square = (x - fitted)[resolved].square().sum(-1).mean()
        found["rmsd"].append(float(square.sqrt()))
        for name, value in judged.compute().items():
            found.setdefault(name, []).append(value)
    return {name: float(np.mean(values)) for name, values in found.items()} | {
        "rmsd, worst": max(found["rmsd"])
    }


@torch.no_grad()
def predicted(training: Training, sample: Mapping[str, Any], judged: Any, index: int = 0) -> Any:
    """Predict a sample and add what came of it to the metrics."""
    batch = collate_complex([sample], np.array([index]), [1.0]).to(training.device)
    outputs = training.run.task.predict(training.run.model, batch)
    judged.update(batch, outputs)
    return outputs


def held_out(
    training: Training, given: argparse.Namespace
) -> Iterator[tuple[str, dict[str, float]]]:
    """Predict crops of the held-out complexes, with and without alignments; means over them."""
    for name, alignments in (("with alignments", True), ("without alignments", False)):
        if given.held is None or (alignments and given.without):
            continue
        crops = entries_of(given.held, alignments=alignments, tokens=given.tokens, rows=given.rows)
        judged = training.run.task.metrics()
        for index in range(len(crops))[: given.most]:
            predicted(training, crops.sample(index, 0), judged, index)
        yield name, judged.compute()


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Train once and judge the averaged weights; what is known is kept before every prediction."""
    began = time.perf_counter()
    training = training_of(given)
    model = training.run.model
    found: dict[str, Any] = {}
    measured = {
        "name": given.name,
        "store": given.store.name,
        "options": {k: v for k, v in vars(given).items() if isinstance(v, int | float | str)},
        "parameters": sum(p.numel() for p in model.parameters()),
        "found": found,
        "hardware": hardware(training.device.type),
        "versions": versions(),
    }
    with use(given.kernels):
        curve: list[dict[str, float]] = []
        measured["curve"] = curve
        for _ in trained(training, given, curve) if given.steps != 0 else [None]:
            measured |= {"steps": len(curve), "seconds": time.perf_counter() - began}
            keep(measured, given.out)
        model.eval()
        with averaged(model, training.state.ema if curve else None):
            if given.by_heart:
                found["by heart"] = by_heart(training, given)
            for name, metrics in held_out(training, given):
                found[name] = metrics
                keep(measured, given.out)
    keep(measured, given.out)
    return measured


def keep(measured: Mapping[str, Any], folder: Path) -> None:
    """Write what is known of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text_atomically(folder / f"learning-{measured['name']}.json", json.dumps(measured))


def collect(folder: Path, results: Path, page: str, note: str) -> None:
    """Join the runs: what was found after training, and on a page of their own curves."""
    runs = read_all(folder, "learning-*.json")
    judged_runs = [run for run in runs if run["found"]]
    curves = [run for run in runs if run["curve"] and "by heart" not in run["found"]]
    curves = [run for run in curves if not run["options"]["without"]]
    common = min((len(run["curve"]) for run in curves), default=0)
    curves = [{**run, "curve": run["curve"][:common]} for run in curves]
    text = curve_notes(curves[0]["options"]) if curves else ""
    for name, of, rows, notes in (
        ("alphafold3/learning", judged_runs, found_rows(judged_runs), NOTES),
        (f"alphafold3/{page}", curves, curve_rows(curves), text),
    ):
        if not of:
            continue
        kept = [{**run, "curve": thinned(run["curve"])} for run in of]
        path = write_result(
            name,
            rows,
            f"{notes} {note}".strip(),
            folder=results,
            measured_on=of[-1],
            extra={"runs": kept},
        )
        add_picture(picture(of), path)


def arm_of(run: Mapping[str, Any]) -> str:
    """Return the name of a run without its seed."""
    return str(run["name"]).removesuffix(f"-{run['options']['seed']}")


def found_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what is predicted after training, means over the runs that differ in the seed."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for run in runs:
        trained_as = arm_of(run)
        for name in run["found"]:
            groups.setdefault((trained_as, name), []).append(run)
    rows = []
    for (trained_as, name), of in groups.items():
        found = [run["found"][name] for run in of]
        row: dict[str, Any] = {"trained": trained_as, "seeds": len(of)}
        row |= {"steps": round(np.mean([run["steps"] for run in of])), "on": of[0]["hardware"]}
        row["predicted"] = name
        for measure in dict.fromkeys(key for one in found for key in one if key != "plddt"):
            values = [one[measure] for one in found if measure in one]
            row[measure] = float(np.mean(values))
            if measure in SPREAD and len(values) > 1:
                row[f"{measure}, deviation"] = float(np.std(values, ddof=1))
        rows.append(row)
    return rows


def curve_rows(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return mean losses of so many steps: of each arm over its seeds, and beside plain operators.

    Plain operators are compared with the run of an arm from the same seed.
    """
    arms: dict[str, dict[int, list[float]]] = {}
    for run in runs:
        options = run["options"]
        kind = "plain" if options["kernels"] == "reference" else "fused"
        losses = [one["loss"] for one in thinned(run["curve"])]
        arms.setdefault(f"{kind} {options['precision']}", {})[options["seed"]] = losses
    rows = []
    lengths = (len(losses) for seeds in arms.values() for losses in seeds.values())
    for place in range(min(lengths, default=0)):
        row: dict[str, Any] = {"to step": min(CHUNK * (place + 1), len(runs[0]["curve"]))}
        for arm, seeds in sorted(arms.items()):
            here = [losses[place] for losses in seeds.values()]
            row[f"{arm}, mean of {len(here)}"] = float(np.mean(here))
            if len(here) > 1:
                row[f"{arm}, deviation of seeds"] = float(np.std(here, ddof=1))
        for fused, plain in product(sorted(arms), repeat=2):
            both = arms[fused].keys() & arms[plain].keys()
            if fused.startswith("fused") and plain.startswith("plain") and both:
                ratios = [arms[fused][seed][place] / arms[plain][seed][place] for seed in both]
                row[f"{fused} off {plain} by"] = max(abs(ratio - 1) for ratio in ratios)
        rows.append(row)
    return rows


def thinned(curve: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    """Average every so many steps of a curve."""
    chunks = [curve[first : first + CHUNK] for first in range(0, len(curve), CHUNK)]
    return [
        {name: round(float(np.mean([one[name] for one in chunk])), 5) for name in chunk[0]}
        for chunk in chunks
    ]


def picture(runs: Sequence[Mapping[str, Any]]) -> Any:
    """Draw the loss of every run, and the norm of its gradient before clipping."""
    runs = sorted(runs, key=lambda run: "gradient norm" not in (run["curve"] or [{}])[0])
    panels = []
    for title, name in (("Training", "loss"), ("Before clipping", "gradient norm")):
        curves = []
        for run in runs:
            values = [one[name] for one in thinned(run["curve"]) if name in one]
            steps = [min(CHUNK * (n + 1), len(run["curve"])) for n in range(len(values))]
            arm = arm_of(run)
            label = arm if arm == run["name"] else f"{arm}, seed {run['options']['seed']}"
            curves += [Curve(label, steps, values)] if values else []
        panels += [Panel(title, name, curves)] if curves else []
    return plots.curves(panels, "steps")


NOTES = (
    "The model has 24 million weights (8 Pairformer blocks, 8 of the diffusion); by heart it has "
    "2 Pairformer blocks and no alignment (21 million). One pass through the trunk, no "
    "confidences, one crop a step, weights averaged with 0.99, rate 1e-3, falling to zero over the "
    "last third. Held out: one structure each, equal chains exchanged to fit best; `with` is "
    "predicted with alignments and without; lDDT is over pairs of atoms of all of them; deviation: "
    "over seeds. rmsd: all resolved atoms, Å, mean of the samples."
)


def curve_notes(options: Mapping[str, Any]) -> str:
    """Say how the runs of a page of curves were trained."""
    return (
        "The same crops, noise and dropout for all arms of one seed; crops of "
        f"{options['tokens']} tokens, {options['rows']} rows, {options['copies']} copies, rate "
        f"{options['lr']:g} after {options['warmup']} steps; loss: mean of {CHUNK} steps. Where "
        "fused kernels in float32 stand beside plain operators in bfloat16, their distance has "
        "both in it."
    )


def main() -> None:
    """Train one model, or join what others have written."""
    parser = script_parser(__doc__)
    parser.add_argument("store", type=Path, nargs="?", help="of complexes to train on")
    parser.add_argument("--name", default="run")
    parser.add_argument("--by-heart", action="store_true", help="the store holds one complex")
    parser.add_argument("--crop", type=int, help="by heart: this one of the complex's crops")
    parser.add_argument("--sizes", choices=[*SIZES], default="reduced", help="of the model")
    parser.add_argument("--held", type=Path, help="store of complexes to predict")
    parser.add_argument("--without", action="store_true", help="train without alignments")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--steps", type=int, help="instead of seconds")
    parser.add_argument("--constant", action="store_true", help="the rate does not fall")
    parser.add_argument("--chunk", type=int, default=CHUNK, help="steps between two savings")
    parser.add_argument("--policy", default="none", help="what the backward pass computes again")
    parser.add_argument("--tokens", type=int, default=128, help="of a crop")
    parser.add_argument("--rows", type=int, default=64, help="of the alignment")
    parser.add_argument("--copies", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--warmup", type=int, default=100, help="steps")
    parser.add_argument("--ema", type=float, default=0.99)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kernels", default="auto")
    parser.add_argument("--precision", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--sampling", type=int, default=100, help="steps of a sampling")
    parser.add_argument("--samples", type=int, default=5, help="of a complex learnt by heart")
    parser.add_argument("--most", type=int, help="held-out complexes at most")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--curves", default="learning_curves", help="page that --collect writes")
    add_rows(parser, "alphafold3-learning-rows")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect, given.results, given.curves, given.note)
        return
    found = measure(given)
    print(given.name, found["steps"], found["seconds"], json.dumps(found["found"]), flush=True)


if __name__ == "__main__":
    main()
