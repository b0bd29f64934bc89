"""Measures the pages of operators on pairs and structures, each on the next free GPU of a host.

    python -m benchmarks.kernels.pages --out measured --seconds 500
    python -m benchmarks.kernels.pages --pages qkvg transition --out measured
    python -m benchmarks.kernels.pages --collect measured

Those most wanted come first. Pages that are in the folder are not measured again: a call that ran
out of time is continued by the next.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import torch
from benchmarks.common.arguments import add_rows, read_all, script_parser
from benchmarks.common.report import write_result

COMPILED = ("--peers", "compile")
PAGES: dict[str, Sequence[str]] = {
    "pair_attention": (
        *("pair_attention", "--peers", "flex_attention", "cuEquivariance", "trifast", "SDPA"),
    ),
    "pair_attention-heads_first": (
        *("pair_attention", "--cases", "heads first", "--peers", "flex_attention"),
    ),
    "transition": ("transition", "conditioned_transition", *COMPILED, "compile, joined weights"),
    "triangle_multiply": ("triangle_multiply", "--peers", "cuEquivariance"),
    "qkvg": ("qkvg", *COMPILED),
    "layer_norm-layer_norm_linear": ("layer_norm", "layer_norm_linear", "--peers"),
    "add_dropped": ("add_dropped", "--peers"),
    "invariant_point_attention": ("invariant_point_attention", "--peers"),
    "pair_weighted_averaging": ("pair_weighted_averaging", "--peers"),
    "outer_product_mean": ("outer_product_mean", *COMPILED),
    "global_attention": ("global_attention", *COMPILED),
    "window_attention": ("window_attention", "--peers"),
    "smooth_lddt": ("smooth_lddt", "--peers"),
    "triangle_multiply-shapes": (
        *("triangle_multiply", "--cases", "other", "--peers", "cuEquivariance"),
    ),
    "pair_attention-shapes": ("pair_attention", "--cases", "other"),
    "transition-autotuned": (
        *("transition", "conditioned_transition", *COMPILED, "max-autotune", "--cases"),
        *("147456 x 128, x4", "18432 x 768, condition 384"),
    ),
}
"""Result -> arguments of `run` after ``--op``."""
LEAST = 25
"""Seconds that a page needs at least."""


def page_in(folder: Path, name: str) -> Path:
    """Return the file of a measured page."""
    return folder / "kernels" / f"{name}.json"


def measure(pages: SimpleQueue[str], gpu: str, given: argparse.Namespace) -> list[str]:
    """Measure pages on a GPU while there are any and time is left; return those that failed."""
    failed = []
    began = time.monotonic()
    while True:
        left = given.seconds - (time.monotonic() - began)
        try:
            name = pages.get_nowait()
        except Empty:
            return failed
        if left < LEAST or not measured(name, gpu, given.out, left):
            failed.append(name)


def measured(name: str, gpu: str, folder: Path, seconds: float) -> bool:
    """Measure a page; keep it only if the whole of it was measured."""
    unfinished = folder / "unfinished" / name
    unfinished.mkdir(parents=True, exist_ok=True)
    page_in(folder, name).parent.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "benchmarks.kernels.run", "--op", *PAGES[name]]
    command += ["--name", f"kernels/{name}", "--out", str(unfinished)]
    began = time.monotonic()
    with (folder / f"{name}.log").open("w") as log:
        try:
            done = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu},
            ).returncode == 0  # fmt: skip
        except subprocess.TimeoutExpired:
            done = False
    took = f"{time.monotonic() - began:.0f} s on GPU {gpu}"
    print(f"{name}: {'measured' if done else 'not measured, see its log'}, {took}", flush=True)
    if done:
        page_in(unfinished, name).rename(page_in(folder, name))
    return done


def collect(folder: Path, results: Path, note: str) -> None:
    """Write the results in a folder as those of today."""
    for page in read_all(folder / "kernels"):
        notes = " ".join(filter(None, (page["notes"], note)))
        write_result(page["name"], page["rows"], notes, folder=results, measured_on=page)


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--pages", nargs="*", choices=[*PAGES], default=[*PAGES], metavar="PAGE")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then stop")
    add_rows(parser, "operator-pages")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect, given.results, given.note)
        return
    wanted: SimpleQueue[str] = SimpleQueue()
    for name in given.pages:
        if not page_in(given.out, name).exists():
            wanted.put(name)
    listed = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = listed.split(",") if listed else [*map(str, range(torch.cuda.device_count()))]
    with ThreadPoolExecutor(len(gpus)) as threads:
        failed = threads.map(lambda gpu: measure(wanted, gpu, given), gpus)
    if left := [name for names in failed for name in names]:
        raise SystemExit(f"not measured: {', '.join(left)}")


if __name__ == "__main__":
    main()
