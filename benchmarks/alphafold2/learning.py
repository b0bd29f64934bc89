"""Does AlphaFold2 learn? A reduced model on real chains, judged on families that it never saw.

    python -m benchmarks.alphafold2.learning TRAIN --valid VALID --test TEST --seed 0 --out rows
    python -m benchmarks.alphafold2.learning FIVE --valid FIVE --name overfit --samples 1 --out rows
        --set schedule.kind=linear stages.initial.loss.masked_msa=0 model.evoformer.dropout=0 ...
    python -m benchmarks.alphafold2.learning TRAIN --name "n, float32" --set precision=float32
    python -m benchmarks.alphafold2.learning TRAIN --name "n, window 8" --slow 0.1
        --set loader.window=8 loader.prefetch=8
    python -m benchmarks.alphafold2.learning --collect rows

Stores are made by `bevatron prepare`, one for each part of a split. One run of the recipe per
process; samples are padded to the full size, so that few graphs are captured. Every distinct test
chain is predicted whole with its alignment and, by the same weights, from its sequence alone. A run
named after another, a comma and what differs is compared with it. A run that is stopped by SIGUSR1
is tested as far as it came.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from benchmarks.alphafold2.train_step import ACTIVATIONS, FullChains
from benchmarks.common.arguments import add_rows, add_set, change, read_all, script_parser
from benchmarks.common.report import add_picture, hardware, versions, write_result

from bevatron.data.dataset import column
from bevatron.data.packing.draws import Draws
from bevatron.data.proteins.chain_batch import ChainBatch, collate_chain
from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.errors import DivergenceError
from bevatron.files import write_text_atomically
from bevatron.models.alphafold2.task import AlphaFold2Task
from bevatron.recipes.alphafold2.data import ChainDataset, chain_table
from bevatron.recipes.alphafold2.predictor import ChainPredictor
from bevatron.recipes.alphafold2.run import CYCLES, AlphaFold2Run, build
from bevatron.recipes.alphafold2.stores import open_chains
from bevatron.train.logger import METRICS, read_journal
from bevatron.train.loop import fit
from bevatron.train.report import plots
from bevatron.train.report.plots import Curve, Panel
from bevatron.train.run import Run

REDUCED = {
    "evoformer": {"num_blocks": 6},
    "extra_msa": {"num_blocks": 1},
    "templates": {"num_blocks": 1},
    "checkpointing": {"kind": "none"},
}
"""What is smaller than published; widths are not."""

JUDGED = ("distogram", "contact_precision", "lddt_ca")
TOLD = (*JUDGED, "lddt", "tm_score", "rmsd", "plddt")
TITLES = ("cross entropy of the distogram", "precision of contacts", "lDDT of CA atoms")
SHOWN_ROWS, SHOWN_EXTRA = 124, 1024
"""Rows of a test chain's alignment."""
WINDOW = 20
"""Steps of which losses are averaged for a curve."""
Result = dict[str, Any]


def configuration(given: argparse.Namespace, folder: Path) -> AlphaFold2Run:
    """Make the configuration of the run."""
    values: dict[str, Any] = {
        "output": str(folder / "run"),
        "preset": given.preset,
        "data": {
            "train": [str(given.store)],
            "valid": [str(path) for path in given.valid],
            "valid_longest": given.longest,
            "valid_most": given.valid_most,
            "valid_size": 0.0,
        },
        "model": {} if given.preset == "small" else REDUCED,
        "stages": {
            "initial": {
                "steps": given.steps,
                "samples_per_step": given.samples,
                "evaluate_every": given.evaluate_every,
                "crop": given.crop,
                "rows": given.rows,
                "extra_rows": given.extra_rows,
            }
        },
        "optim": {"lr": given.lr, "clip": 10.0, "ema": 0.99},
        "schedule": {"kind": "constant", "warmup_steps": min(100, given.steps)},
        "checkpoint": {"every_steps": 10**6},
        "train": {"seed": given.seed, "device": given.device, "explode_factor": None},
        "report": False,
    }
    change(values, given.set)
    return AlphaFold2Run.from_values(values)


class UnevenChains(FullChains):
    """Of which some take longer: up to ``longest`` seconds, spread over three orders of it."""

    share, longest = 0.0, 1.0

    def sample(self, index: SupportsIndex, seed: int) -> Any:
        """Make the sample of a seed, whose delay is always the same."""
        chance, power = np.random.default_rng([int(index), seed]).random(2)
        if chance < self.share:
            time.sleep(self.longest * 10 ** (3 * power - 3))
        return super().sample(index, seed)


class Watched(AlphaFold2Task):
    """The task, which counts the samples that another drawn later has overtaken."""

    last, overtaken = -1, 0

    def normalisers(self, batch: ChainBatch) -> dict[str, Any]:
        """Count the chains, too."""
        for index in batch.indices.tolist():
            self.overtaken += index < self.last
            self.last = max(self.last, index)
        return super().normalisers(batch)


def reduced(run: Run, given: argparse.Namespace) -> Run:
    """Draw the same crops, all padded to the full size, and pass through the model less often."""
    assert isinstance(run.task, AlphaFold2Task)
    activations = {None: run.task.activations, **ACTIVATIONS}[given.activations]
    task = Watched(given.passes, run.task.stages, activations)
    draws = run.stages[0].train
    sources = []
    for source in draws.sources:
        data = source.dataset
        assert isinstance(data, ChainDataset)
        sizes = replace(data.sizes, templates=given.templates)
        lengths = data.lengths("tokens")
        full = UnevenChains(data.path, data.units, lengths, sizes, given.passes)
        full.share, full.longest = given.slow, given.longest_delay
        sources.append(replace(source, dataset=full))
    train = Draws(sources, draws.seed)
    return replace(run, task=task, train=train, stages=[replace(run.stages[0], train=train)])


class Alone(ChainDataset):
    """Chains without their alignments and templates."""

    @cached_property
    def opened(self) -> Any:
        """The store alone."""
        return super().opened[0], None, None


def tested(predictor: ChainPredictor, path: Path, longest: int, most: int | None) -> list[Result]:
    """Predict the distinct chains of a store, or some, with their alignments and without."""
    store = open_chains(path)
    table = chain_table(store)
    keys = column(store, "chain_key")
    first = np.zeros(len(keys), dtype=bool)
    first[np.unique(keys, return_index=True)[1]] = True
    table = table.take(first & table.usable & (table.length <= longest))
    if most is not None:
        table = table.take(np.unique(np.linspace(0, len(table.length) - 1, most).astype(int)))
    sizes = ChainSizes(longest, SHOWN_ROWS, SHOWN_EXTRA, best_templates=True)
    found = []
    for kind, dataset in (("alignment", ChainDataset), ("sequence alone", Alone)):
        data = dataset(path, table.units, table.length, sizes, CYCLES)
        for index in range(len(data)):
            sample = data[index]
            one = collate_chain([sample], np.array([index]), [1.0]).to(predictor.device)
            metrics = predictor.task.metrics()
            metrics.update(one, predictor.task.predict(predictor.model, one))
            rows = int(sample["msa_mask"].any(-1).sum() + sample["extra_msa_mask"].any(-1).sum())
            # Names end in the file's; where it was on a machine says nothing.
            name = Path(data.describe(index)).name
            length = int(table.length[index])
            found.append(
                {"chain": name, "residues": length, "rows": rows, "shown": kind}
                | kept(metrics.compute())
            )
    return found


def measure(given: argparse.Namespace) -> Result:
    """Train once and test."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bevatron-") as scratch:
        config = configuration(given, Path(scratch))
        run = reduced(build(config), given)
        parameters = sum(p.numel() for p in run.model.parameters())
        built, said = time.perf_counter(), ""
        try:
            fit(run)
        except DivergenceError as error:
            said = str(error)
            print(said, flush=True)
        device = next(run.model.parameters()).device.type
        trained = time.perf_counter()
        records = [*read_journal(config.output / METRICS)]
        curves = curve(records)
        chains = []
        if given.test and not said:
            predictor = ChainPredictor(config.output, given.device)
            predictor.task = AlphaFold2Task(given.passes, activations=predictor.task.activations)
            for path in given.test:
                chains += tested(predictor, path, given.longest, None)
            if given.seen:
                seen = tested(predictor, given.store, given.longest, given.seen)
                chains += [row | {"of": "training"} for row in seen]
    chosen = ("preset", "seed", "steps", "samples", "crop", "rows", "extra_rows", "passes", "lr",
              "slow", "longest_delay", "set")  # fmt: skip
    return {
        "name": given.name,
        **{key: getattr(given, key) for key in chosen},
        "parameters": parameters,
        "chains in training": len(run.train),
        "overtaken": run.task.overtaken,
        "diverged": said,
        "seconds": spent(records, trained - built)
        | {"building": built - began, "testing": time.perf_counter() - trained},
        "curve": curves,
        "tested": chains,
        "hardware": hardware(device),
        "versions": versions(),
    }


def spent(records: Sequence[dict[str, Any]], whole: float) -> dict[str, float]:
    """Divide the seconds of a training; the rest is starting, saving and ending."""
    times = [record["time"] for record in records if record["kind"] == "epoch"]
    found = {
        "compiling and capturing": sum(each.get("capture", 0.0) for each in times),
        "waiting for data": sum(each["seconds"] * each["wait_share"] for each in times),
        "validating": sum(each["validation_seconds"] for each in times),
    }
    steps = sum(each["seconds"] for each in times)
    found["steps"] = steps - found["compiling and capturing"] - found["waiting for data"]
    return found | {"rest": whole - steps - found["validating"]}


def curve(records: Iterable[dict[str, Any]]) -> dict[str, list[Any]]:
    """Pick from a log what is drawn: losses, means of some steps, and the validations' measures.

    ``steps``: number of the last one, loss, term of the distogram.
    """
    windows: dict[int, list[Any]] = defaultdict(list)
    valid = []
    for record in records:
        if record["kind"] == "epoch" and record["valid"]:
            valid.append({"step": record["step"], **kept(record["valid"])})
        elif record["kind"] == "step":
            row = record["step"], record["loss"], record["terms"]["distogram"]
            windows[(record["step"] - 1) // WINDOW].append(row)
    steps = [[rows[-1][0], *np.mean(rows, axis=0)[1:].round(4).tolist()]
             for rows in windows.values()]  # fmt: skip
    return {"steps": steps, "valid": valid}


def kept(measures: Mapping[str, float]) -> dict[str, float]:
    """Pick the measures that are told, rounded."""
    return {name: round(measures[name], 4) for name in TOLD if name in measures}


def collect(folder: Path, out: Path, note: str) -> None:
    """Make a table and pictures of all runs in a folder."""
    runs = sorted(read_all(folder), key=lambda run: (run["name"], run["seed"]))
    groups: dict[str, list[Result]] = defaultdict(list)
    for run in runs:
        groups[run["name"]].append(run)
    rows = [row for name, members in groups.items() for row in rows_of(name, members)]
    path = write_result(
        "alphafold2/learning", rows, f"{NOTES} {note}".rstrip(), folder=out, extra={"runs": runs},
        measured_on=runs[0],
    )  # fmt: skip
    drawn = {
        name: members
        for name, members in groups.items()
        if ", " not in name and len(members[0]["curve"]["valid"]) > 1
    }
    add_picture(draw(drawn), path)
    timed = [run for name in drawn for run in groups[name] if "seconds" in run]
    if timed:
        write_result(
            "alphafold2/time_to_train", [time_of(run) for run in timed], TIME_NOTES, folder=out,
            measured_on=timed[0],
        )  # fmt: skip
    twins = [row for name in groups for row in beside_twin(name, groups)]
    if twins:
        path = write_result(
            "alphafold2/learning_pairs", twins, TWIN_NOTES, folder=out,
            measured_on=groups[twins[0]["run"]][0],
        )  # fmt: skip
        add_picture(draw_twins(groups), path)


def time_of(run: Result) -> dict[str, Any]:
    """Return the row of a run's seconds."""
    return {
        "run": label(run),
        "steps": run["curve"]["steps"][-1][0],
        **{f"{part}, s": seconds for part, seconds in run["seconds"].items()},
    }


def beside_twin(name: str, groups: dict[str, list[Result]]) -> list[dict[str, Any]]:
    """Compare the runs of "name" with those of "name, precision", and with each other."""
    rows = []
    for other in (each for each in groups if each.startswith(f"{name}, ")):
        pairs = [
            (one, twin)
            for one in groups[name]
            for twin in groups[other]
            if one["seed"] == twin["seed"]
        ]
        both = (*groups[name], *groups[other])
        windows = min(len(run["curve"]["steps"]) for run in both)
        smooth = {id(run): np.array(run["curve"]["steps"])[:windows, 1] for run in both}
        apart = [np.abs(smooth[id(a)] / smooth[id(b)] - 1).mean() for a, b in pairs]
        seeds = np.stack([smooth[id(run)] for run in groups[name]])
        spread = (seeds.std(0, ddof=1) / seeds.mean(0)).mean() if len(seeds) > 1 else ""
        twin = groups[other][0]
        slow = twin.get("slow", 0.0)
        rows.append(
            {
                "run": name,
                "beside": other,
                "parameters": f"{twin['parameters'] / 1e6:.1f} M",
                "crop": twin["crop"],
                "samples a step": twin["samples"],
                "pairs of one seed": len(pairs),
                "steps": both[0]["curve"]["steps"][windows - 1][0],
                "samples made slow %": 100 * slow,
                "longest delay s": slow and twin["longest_delay"],
                "overtaken": sum(run.get("overtaken", 0) for run in groups[other]),
                "diverged": sum(bool(run.get("diverged")) for run in groups[other]),
                "loss apart %": 100 * float(np.mean(apart)),
                "spread of seeds %": spread and 100 * float(spread),
                "on": groups[name][0]["hardware"],
            }
        )
    return rows


def rows_of(name: str, members: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the rows of the runs that differ in their seed alone: validated, and tested."""
    last = [one for run in members for one in run["curve"]["valid"][-1:]]
    about = {
        "run": name,
        "parameters": f"{members[0]['parameters'] / 1e6:.1f} M",
        "crop": members[0]["crop"],
        "seeds": len(members),
        "steps": min(run["curve"]["steps"][-1][0] for run in members),
        "on": members[0]["hardware"],
    }
    rows = []
    if last:
        after = min(one["step"] for one in last)
        # A run that was stopped may have no validation.
        about_last = {**about, "seeds": len(last)}
        rows.append({**about_last, "judged on": f"validation, step {after}", **judged(last)})
    for judged_on in dict.fromkeys(map(kind_of, members[0]["tested"])):
        each = [
            {key: statistics.mean(row[key] for row in run["tested"]
                                  if kind_of(row) == judged_on and key in row) for key in JUDGED}
            for run in members
        ]  # fmt: skip
        rows.append({**about, "judged on": judged_on, **judged(each)})
    return rows


def kind_of(row: Result) -> str:
    """Say whether a chain was trained on, and what was shown of it."""
    return f"{row.get('of', 'test')}, {row['shown']}"


def judged(each: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Write mean and standard deviation over seeds."""
    found = {}
    for key, title in zip(JUDGED, TITLES, strict=True):
        values = [one[key] for one in each if key in one]
        spread = f" ± {statistics.stdev(values):.3f}" if len(values) > 1 else ""
        found[title] = f"{statistics.mean(values):.3f}{spread}" if values else ""
    return found


NOTES = (
    "Families of validation and test occur in no training chain; overfit is validated on its own "
    "five chains. Mean over chains, ± standard deviation over seeds. Sequence alone: the same "
    "weights, trained with alignments. A distogram that knows nothing has a cross entropy of 4.16."
)


TIME_NOTES = (
    "Seconds of each run, one GPU, one sample a step. The first run of a process compiles its "
    "kernels, the others find them. building: model and data sets; rest: starting workers, "
    "checkpoints, the end. ScaleFold's time to train (figures 9 to 11): about 2 of its 7.5 minutes "
    "on 2,080 GPUs are initialisation and compilation, and evaluation took 22 % before it ran "
    "beside training."
)


TWIN_NOTES = (
    f"Training losses, means of {WINDOW} steps: how far runs of one seed are apart that differ in "
    "what stands behind the comma, and the standard deviation of the seeds of the first. With a "
    "window of 8 a sample may be overtaken by 7 others, else by none; delays of slow samples are "
    "spread over three orders of magnitude. 48 blocks: the published model, 0 or 1 recyclings; 6 "
    "blocks: its widths, no recycling; both in bfloat16 with our attention where nothing else is "
    "said. Attention of PyTorch: everywhere. Nothing scales the loss in float16."
)


def draw(groups: dict[str, list[Result]]) -> Any:
    """Draw losses of the training and measures of the validation, of every run."""
    curves: dict[tuple[str, str], list[Curve]] = defaultdict(list)
    for run in (run for members in groups.values() for run in members):
        steps = np.array(run["curve"]["steps"])
        for place, title in ((1, "training: loss"), (2, "training: distogram, weighted")):
            drawn = Curve(label(run), steps[:, 0], steps[:, place])
            curves[title, f"mean of {WINDOW} steps"].append(drawn)
        for key, title in zip(JUDGED, TITLES, strict=True):
            points = [(one["step"], one[key]) for one in run["curve"]["valid"] if key in one]
            if len(points) > 1:
                drawn = Curve(label(run), *np.array(points, dtype=float).T)
                curves["validation", title].append(drawn)
    panels = [Panel(*titles, of, logarithmic=False) for titles, of in curves.items()]
    return plots.curves(panels, "steps")


def draw_twins(groups: dict[str, list[Result]]) -> Any:
    """Draw the losses of runs that are compared, both in one panel."""
    panels = []
    for other in (name for name in groups if ", " in name):
        name, difference = other.split(", ", maxsplit=1)
        seeds = {run["seed"] for run in groups[other]}
        runs = [("", run) for run in groups[name] if run["seed"] in seeds]
        runs += [(f", {difference}", run) for run in groups[other]]
        windows = min(len(run["curve"]["steps"]) for _, run in runs)
        curves = []
        for suffix, run in runs:
            steps = np.array(run["curve"]["steps"])[:windows]
            curves.append(Curve(f"seed {run['seed']}{suffix}", steps[:, 0], steps[:, 1]))
        panels.append(Panel(other, f"loss, mean of {WINDOW} steps", curves, logarithmic=False))
    return plots.curves(panels, "steps")


def label(run: Result) -> str:
    """Name a run in a picture."""
    return f"{run['name']}, seed {run['seed']}"


def main(argv: Sequence[str] | None = None) -> None:
    """Train one run, or join what others have written."""
    parser = script_parser(__doc__)
    parser.add_argument("store", type=Path, nargs="?", help="of chains, made by `bevatron prepare`")
    add_rows(parser, "alphafold2-learning-rows")
    parser.add_argument("--valid", type=Path, nargs="*", default=[])
    parser.add_argument("--test", type=Path, nargs="*", default=[])
    parser.add_argument("--name", default="held out")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--preset", default="alphafold2", help="reduced in depth, but for small")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--samples", type=int, default=4, help="of a step")
    parser.add_argument("--evaluate-every", type=int, default=200)
    parser.add_argument("--valid-most", type=int, default=12)
    parser.add_argument("--longest", type=int, default=384, help="of the chains that are judged")
    parser.add_argument("--crop", type=int, default=128)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--extra-rows", type=int, default=256)
    parser.add_argument("--templates", type=int, default=1)
    parser.add_argument("--passes", type=int, default=1, help="of a step at most; 1: no recycling")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seen", type=int, default=0, help="chains of the training judged, too")
    parser.add_argument("--slow", type=float, default=0.0, help="share of samples that take longer")
    parser.add_argument("--longest-delay", type=float, default=1.0, help="of a slow one, seconds")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--activations", choices=[*ACTIVATIONS], help="default: as the recipe")
    add_set(parser)
    given = parser.parse_args(argv)
    if given.collect is not None:
        collect(given.collect, given.results, given.note)
        return
    if given.store is None:
        parser.error("expected a STORE (or --collect FOLDER)")
    result = measure(given)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / f"{given.name.replace(', ', '-').replace(' ', '-')}-{given.seed}.json"
    write_text_atomically(path, json.dumps(result, indent=1) + "\n")
    valid = result["curve"]["valid"][-1:]
    print(given.name, given.seed, result["seconds"], valid, path)


if __name__ == "__main__":
    main()
