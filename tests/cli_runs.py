"""Tiny runs for the tests of the command line."""

import json
from importlib.resources import files

DATA = files("bevatron.recipes") / "demo_data" / "structures.extxyz.gz"
CUTOFF = "3.0"
TINY = (
    "--preset small --model.num-channels 4 --model.l-max 1 --model.max-L 0 --model.correlation 1 "
    f"--model.r-max {CUTOFF} --train.epochs 1 --train.device cpu --no-report "
    "--data.prepare-workers 1"
).split()


def metrics(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def losses(folder):
    return [line["loss"] for line in metrics(folder) if line["kind"] == "step"]
