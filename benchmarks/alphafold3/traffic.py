"""Bytes that AlphaFold3's operators move through a GPU's memory, fused and in plain PyTorch.

    python -m benchmarks.alphafold3.traffic [--out rows]      under ncu, which it starts
    python -m benchmarks.alphafold3.traffic --collect rows

The table of the MegaFold paper, measured: Nsight Compute counts the bytes of every kernel.
Before each pass the L2 cache is read full of other numbers, so inputs come from memory; what the
pass leaves in it is counted when the next read drives it out.
"""

import argparse
import csv
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from benchmarks.common.arguments import add_rows, read_all, script_parser
from benchmarks.common.report import hardware, versions, write_result
from benchmarks.kernels.cases import Case, Operator, Setup, cases_of
from benchmarks.kernels.run import kept_mib

from bevatron import kernels

MIB = 2**20
READ, WRITTEN = "dram__bytes_read.sum", "dram__bytes_write.sum"
TRAFFIC = {
    "layer_norm": "147456 x 128",
    "layer_norm_linear": "147456 x 128 to 512",
    "transition": "147456 x 128, x4",
    "pair_attention": "triangle 384",
    "triangle_multiply": "N 384, C 128",
    "outer_product_mean": "512 x 384 x 64",
    "add_dropped": "N 384",
    "conditioned_transition": "18432 x 768, condition 384",
}
"""Operator -> its case: a pair or an alignment of 384 tokens, or 48 noisy copies of them."""
ROWS, WIDTH, OUTPUTS = 384**2, 128, 512
NUMBERS = {
    ("layer_norm", "plain PyTorch"): ROWS * (5 * WIDTH + 8) + 2 * WIDTH,
    ("layer_norm_linear", "plain PyTorch"): ROWS * (8 * WIDTH + 8 + 3 * OUTPUTS)
    + WIDTH * (2 + 3 * OUTPUTS),
    ("layer_norm_linear", "fused"): ROWS * (2 * OUTPUTS + 3 * WIDTH + 8)
    + WIDTH * (2 * OUTPUTS + 2),
}
"""What the paper counts for both passes."""


@triton.jit
def mark(out):  # type: ignore[no-untyped-def]
    """Do nothing that counts; the size of the grid tells which pass begins."""
    tl.store(out + tl.program_id(0), 0)


def passes(setup: Setup) -> Iterator[tuple[Case, str, Operator]]:
    """Yield every case, fused and plain."""
    for op, name in TRAFFIC.items():
        for case in cases_of(op, setup, () if setup.tiny else (name,)):
            assert case.plain is not None
            yield case, "fused", case.ours
            yield case, "plain PyTorch", case.plain


def run_all(setup: Setup, kept: Path) -> None:
    """Run every pass between two marks and write what autograd keeps of it."""
    on_gpu = setup.device == "cuda"
    found: list[dict[str, Any]] = []
    other = torch.ones(2**28 if on_gpu else 1, dtype=torch.uint8, device=setup.device)
    out = torch.zeros(256, device=setup.device)

    def fill_cache() -> None:
        other.max()

    for case, who, operator in passes(setup):
        with kernels.use("triton" if on_gpu else "reference"):
            row = {"operator": case.op, "case": case.name, "implementation": who}
            row["kept MiB"] = kept_mib(case, operator) if on_gpu else 0.0
            run = case.step("forward+backward", operator).run
            assert run is not None
            run()  # compiles
            fill_cache()
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                mark[(2 * len(found) + 1,)](out)
                run()
                mark[(2 * len(found) + 2,)](out)
                fill_cache()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
        found.append(row)
        kept.write_text(json.dumps(found))


def read(lines: Sequence[str], kept: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Add up kernels and bytes of each pass from the table that ncu prints."""
    spent: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    at = 0
    for row in csv.DictReader(lines):
        if not row["ID"]:
            continue  # units
        if row["Kernel Name"].startswith("mark"):
            at = int(row["Grid Size"].strip("() ").split(",")[0])
            continue
        place, after = divmod(at - 1, 2)
        spent[place]["written MiB"] += number(row[WRITTEN]) / MIB
        if not after:
            spent[place]["read MiB"] += number(row[READ]) / MIB
            spent[place]["kernels"] += 1
    return [{**one, **spent[place]} for place, one in enumerate(kept)]


def number(text: str) -> float:
    """Read a number with commas between thousands."""
    return float(text.replace(",", ""))


def measure(given: argparse.Namespace) -> None:
    """Start this script under ncu and keep the rows."""
    given.out.mkdir(parents=True, exist_ok=True)
    kept, profile = given.out / "kept.json", given.out / "traffic"
    inner = [sys.executable, "-m", "benchmarks.alphafold3.traffic", "--kept", str(kept)]
    subprocess.run(
        [
            *("ncu", "--clock-control", "none", "--cache-control", "none", "--force-overwrite"),
            *("--profile-from-start", "off", "--metrics", f"{READ},{WRITTEN}"),
            *("--export", str(profile), *inner),
        ],
        check=True,
    )
    table = subprocess.run(
        [
            *("ncu", "--import", f"{profile}.ncu-rep", "--csv", "--page", "raw"),
            *("--print-units", "base"),
        ],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    (given.out / "traffic.csv").write_text(table.stdout)
    rows = read(table.stdout.splitlines(), json.loads(kept.read_text()))
    found = {"measured on": {"hardware": hardware("cuda"), "versions": versions()}, "rows": rows}
    (given.out / "bytes.json").write_text(json.dumps(found))
    for row in rows:
        print(row)


def compared(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Add the bytes of both directions, what the paper counts, and the ratio to the fused."""
    fused = {row["operator"]: row for row in rows if row["implementation"] == "fused"}
    found = []
    for row in rows:
        both, ours = (one["read MiB"] + one["written MiB"] for one in (row, fused[row["operator"]]))
        more = {"moved MiB": both, "x fused": both / ours}
        counted = NUMBERS.get((row["operator"], row["implementation"]))
        if counted is not None:
            more["paper's count MiB"] = 2 * counted / MIB
        found.append({**row, **more})
    return found


NOTES = (
    "bfloat16, forward and backward pass with all gradients, as Nsight Compute counts the bytes of "
    "each kernel in device memory, the L2 cache full of other numbers before; kept: between the "
    "passes, beyond inputs and result. A pair of 384 tokens (147,456 rows), 512 rows of an "
    "alignment of as many, 48 noisy copies (18,432 rows). paper's count: the formulas of "
    "MegaFold's Table II with 2 bytes a number, for its own kernels."
)


def main() -> None:
    """Measure, or write the result."""
    parser = script_parser(__doc__)
    parser.add_argument("--kept", type=Path, help="run the passes themselves, for ncu")
    add_rows(parser, "alphafold3-traffic")
    given = parser.parse_args()
    if given.kept:
        run_all(Setup(torch.bfloat16), given.kept)
    elif given.collect:
        (found,) = read_all(given.collect, "bytes.json")
        write_result(
            "alphafold3/traffic", compared(found["rows"]), f"{NOTES} {given.note}".strip(),
            device="cuda", folder=given.results, measured_on=found["measured on"],
        )  # fmt: skip
    else:
        measure(given)


if __name__ == "__main__":
    main()
