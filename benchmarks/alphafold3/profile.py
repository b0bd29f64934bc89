"""Where time and memory of a step of AlphaFold3 go, as `bevatron bench profile` tells it.

    python -m benchmarks.alphafold3.profile STORE [--arm "eager, all"] [--out rows/eager]
    python -m benchmarks.alphafold3.profile STORE --language [--out rows/language]
    python -m benchmarks.alphafold3.profile --collect rows

Crops of one complex that have one padded shape, as in alphafold3/train_step. Launched steps have a
timeline besides. ``--language``: a step of a language model of 560 million weights instead.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.alphafold3.arms import Crops, built, training_of
from benchmarks.alphafold3.kernel_time import rows_of
from benchmarks.alphafold3.train_step import ARMS, OURS
from benchmarks.common.arguments import add_crops, add_rows, read_all, script_parser
from benchmarks.common.arms import Training
from benchmarks.common.report import hardware, versions, write_result
from benchmarks.common.trace import profiled
from torch import nn

from bevatron.models.alphafold3.task import StepOptions
from bevatron.recipes.bench_profile import memory_of, profile, short, write

MIB = 2**20
LONGEST = 12
"""Kernels and modules of the table."""
PARTS = {
    "trunk.templates": "templates",
    "trunk.msa": "MSA",
    "trunk.pairformer": "Pairformer",
    "diffusion": "diffusion",
    "confidence": "confidence",
}
REST, ROLLOUT, BACKWARD, OPTIMISER, END, LOADER = (
    "rest of the forward pass", "rollout", "backward pass", "optimiser", "end", "loader",
)  # fmt: skip
WORDS, WIDTH, LAYERS, HEADS, CONTEXT = 250_880, 1024, 24, 16, 2048
"""Of the language model: the published sizes of the smallest BLOOM."""
LANGUAGE = "language model of 560 million weights"


def timeline(training: Training) -> dict[str, float]:
    """Return ms of the parts of a launched step on the device, which waits for the host."""
    marks: list[tuple[str, torch.cuda.Event]] = []
    run = training.run
    loss, modules = run.task.loss, dict(run.model.named_modules())

    def mark(name: str) -> None:
        marks.append((name, torch.cuda.Event(enable_timing=True)))
        marks[-1][1].record()

    def marked_loss(*given: Any) -> Any:
        marks.clear()  # of the step before
        mark(REST)
        found = loss(*given)
        mark(BACKWARD)
        return found

    def begin(name: str) -> Any:
        return lambda *_: mark(name if torch.is_grad_enabled() else ROLLOUT)

    def end(*_: Any) -> None:
        if torch.is_grad_enabled():
            mark(REST)

    optimiser = training.state.optimizer
    hooks = [optimiser.register_step_pre_hook(lambda *_: mark(OPTIMISER))]
    hooks += [optimiser.register_step_post_hook(lambda *_: mark(END))]
    for path, name in PARTS.items():
        hooks += [modules[path].register_forward_pre_hook(begin(name))]
        hooks += [modules[path].register_forward_hook(end)]
    run.task.loss = marked_loss
    steps = training.steps([0, 1])
    torch.cuda.synchronize()
    run.task.loss = loss
    for hook in hooks:
        hook.remove()
    spent = {LOADER: 1e3 * steps.waited[1]}
    for (name, began), (_, ended) in pairwise(marks):
        spent[name] = spent.get(name, 0.0) + began.elapsed_time(ended)
    return spent


def measure(given: argparse.Namespace) -> None:
    """Profile steps and write profile.json."""
    arm = ARMS[given.arm]
    crops = Crops(given.store, given.tokens, rows=given.rows)
    model = built(given.preset, torch.device(given.device))
    training = training_of(arm, model, crops, StepOptions(copies=given.copies))
    run, found = training.run, {}
    if not arm.captured and given.device == "cuda":
        found["timeline"] = timeline(training)
        print(found, flush=True)
    training.release()
    if not arm.captured:
        alone = dataclasses.replace(run.settings.train, cuda_graphs=False)
        run = dataclasses.replace(run, settings=dataclasses.replace(run.settings, train=alone))
    with arm.implementations():
        table = profile(run, given.steps, given.warm)
    assert table is not None
    write({**table, **found, "arm": arm.name, "versions": versions()}, given.out)


class LanguageModel(nn.Module):
    """A decoder of the published sizes of the smallest BLOOM, in plain PyTorch."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, 4 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(
            layer, LAYERS, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the mean cross entropy of the next words."""
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        a = self.layers(self.words(x), mask, is_causal=True)
        logits = F.linear(a[:, :-1], self.words.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), x[:, 1:].flatten())


def measure_language(given: argparse.Namespace) -> None:
    """Trace a step of a language model and write language.json."""
    with torch.device(given.device):
        model = LanguageModel()
        words = torch.randint(WORDS, (1, CONTEXT))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-5)

    def step() -> None:
        with torch.autocast(given.device, torch.bfloat16):
            loss = model(words)
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()

    step()
    found = {"of": "language", "weights": sum(p.numel() for p in model.parameters())}
    found |= {"hardware": hardware(given.device), "kernels": rows_of(profiled(step, 1))}
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "language.json").write_text(json.dumps(found))


def collect(folder: Path, results: Path, note: str) -> None:
    """Write the result from what every call has left."""
    profiles = read_all(folder, "profile.json")
    rows = [row for found in profiles for row in rows_of_profile(found)]
    for found in (json.loads(path.read_text()) for path in folder.rglob("language.json")):
        rows += [
            {"arm": LANGUAGE, "of": "classes", "name": one["kernels"], **counted(one)}
            for one in found["kernels"]
        ]
    first = profiles[0]
    device = "cuda" if first["on_gpu"] else "cpu"
    hardware = first["device"].lower().replace(" ", "-") if first["on_gpu"] else "cpu"
    write_result(
        "alphafold3/profile", rows, f"{NOTES} {note}".strip(), device=device, folder=results,
        measured_on={"hardware": hardware, "versions": first["versions"]},
    )  # fmt: skip


def counted(one: Mapping[str, Any]) -> dict[str, float]:
    """Return ms and launches of a class of kernels."""
    return {"ms": one["ms"], "launches": one["launches"]}


def rows_of_profile(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the table of one arm."""
    (rank,) = found["ranks"]
    memory = rank["memory"]
    rows: list[dict[str, Any]] = [
        {"of": "step", "name": "untraced", "ms": found["step"]},
        {"of": "step", "name": "traced", "ms": rank["traced_step"], "launches": rank["launches"]},
    ]
    for kind in ("classes", "kernels"):
        longest = sorted(rank[kind].items(), key=lambda item: -item[1]["ms"])[:LONGEST]
        rows += [
            {"of": kind, "name": short(name), "ms": spent["ms"], "launches": spent["count"]}
            for name, spent in longest
        ]
    rows += [
        {"of": "memory", "name": kind, "MiB": memory_of(rank, kind)}
        for kind in ("weights", "gradients", "optimizer", "averages", "activations", "temporary")
    ]
    rows += [
        {"of": "activations", "name": name, "MiB": (kept["forward"] + kept["gradient"]) / MIB}
        for name, kept in list(memory["modules"].items())[:LONGEST]
    ]
    rows += [
        {"of": "timeline", "name": name, "ms": ms} for name, ms in found.get("timeline", {}).items()
    ]
    return [{"arm": found.get("arm", f"{OURS}, all"), **row} for row in rows]


NOTES = (
    "A step of 384 tokens of the published model, all blocks computed again; ms and launches a "
    "step, mean of the traced steps; step, untraced: of as many before. memory: averages are the "
    "averaged weights; activations: kept for the backward pass of a batch, by module below; "
    "temporary: what the peak has beyond all of these. timeline: between marks on the device in a "
    "launched step, waiting for the host included; loader: the host's waiting. language model: "
    "a step of "
    f"{LAYERS} layers {WIDTH} wide on {CONTEXT:,} words, bfloat16 by autocast, Adam, eager PyTorch."
)


def main() -> None:
    """Profile, or write the result of a profile."""
    parser = script_parser(__doc__)
    add_crops(parser)
    parser.add_argument("--arm", choices=[*ARMS], default=f"{OURS}, all")
    parser.add_argument("--language", action="store_true", help="a language model instead")
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warm", type=int, default=4)
    add_rows(parser, "alphafold3-profile")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect, given.results, given.note)
    else:
        measure_language(given) if given.language else measure(given)


if __name__ == "__main__":
    main()
