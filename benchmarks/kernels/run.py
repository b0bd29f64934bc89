"""Checks kernels, then times them beside their references, peers and floors.

    python -m benchmarks.kernels.run --list
    python -m benchmarks.kernels.run --op channelwise_tensor_product radial_tensor_product
    python -m benchmarks.kernels.run --op triangle_multiply pair_attention --peers
    python -m benchmarks.kernels.run --op transition layer_norm --cases rows --peers eager compile
    python -m benchmarks.kernels.run --op graph --cases 17-88M --peers --parallel
    python -m benchmarks.kernels.run --op gat --cases "17-88M, k 16" --tiles 512x32x1 1024x32x1

Operators and sizes are registered in `cases_equivariant`, `cases_pair`, `cases_folding`,
`cases_graph` and `cases_optim`. Every case is checked at the same shape, type and device before it
is timed. Times are medians of CUDA-graph replays that take turns, peers included; "eager ms" is of
calls launched from Python. The floor is the larger of bytes over the rate of a copy and operations
over that of a matmul, both measured in the same run.
``--dry-run`` checks small cases against the reference, also on a CPU.
"""

import argparse
import contextlib
import gc
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.common import report, timing
from benchmarks.common.arguments import add_out
from benchmarks.kernels import (
    cases_equivariant,
    cases_folding,
    cases_graph,
    cases_optim,
    cases_pair,
)
from benchmarks.kernels.cases import (
    OPERATORS,
    Case,
    Family,
    Operator,
    Row,
    Setup,
    Step,
    cases_of,
    direction,
    leaves_of,
)
from benchmarks.kernels.checks import gradients
from torch import Tensor

from bevatron import kernels

FAMILIES = {
    family.name: family
    for family in (
        cases_equivariant.EQUIVARIANT,
        cases_pair.PAIR,
        cases_folding.STRUCTURE,
        cases_graph.GRAPH,
        cases_optim.OPTIMIZER,
    )
}


FAR, NOTHING = 0.3, 1e-3
"""Relative norm of what is no rounding, and of a gradient of nothing else beside the largest."""
IN_TURN = (
    "Replays of all implementations take turns, in every other round from the last to the first; "
    "GHz: the clock of the SMs right after them."
)


def operators(names: Sequence[str]) -> dict[str, list[str]]:
    """Return the operators that are named, directly or through their family, by family."""
    found: dict[str, list[str]] = {}
    for op, (family, _, default) in OPERATORS.items():
        if op in names or (family.name in names and default):
            found.setdefault(family.name, []).append(op)
    return found


def peers_of(case: Case, names: Sequence[str] | None) -> Iterator[tuple[str, Operator]]:
    """Yield the peers of a case: none, all (no names), or those named."""
    if names is None:
        return
    torch.compiler.reset()  # after eight shapes a compiled function would run as written
    if case.plain is not None:
        if not names or "eager" in names:
            yield "eager", case.plain
        if not names or "compile" in names:
            yield "compile", torch.compile(case.plain, dynamic=False)
        if "max-autotune" in names:  # compiles for minutes
            mode = "max-autotune-no-cudagraphs"
            yield "max-autotune", torch.compile(case.plain, dynamic=False, mode=mode)
    for name, peer in case.peers.items():
        if not names or name in names:
            yield name, peer


def launched_and_captured(
    case: Case, family: Family, which: str, who: str, operator: Operator, known: list[Tensor]
) -> tuple[Row, timing.Call | None]:
    """Measure one implementation of a pass as launched; return its replay too, if it has one.

    A peer's result and gradients are compared with ours, which are kept in ``known``.
    """
    with kernels.use("reference" if who == "reference" else "triton"):
        step, row = case.step(which, operator), Row()
        short = who == "reference" or (operator is not case.ours and not family.capture_peers)
        if step.run is not None:
            row |= launched(step, family, repeats=3 if short else 10)
        if which == "forward+backward" and operator is not case.ours:
            row["off by"] = off_by(case, operator, known)
        if case.plain is not None:
            row["kept MiB"] = kept_mib(case, operator)
        if who == "reference" or step.launch_only:
            return row, None
        eager = row.get("eager ms", 0.0)
        if short or eager >= family.capture_below_ms:
            return row | {"ms": eager}, None
        try:
            return row, replay_of(step)
        except RuntimeError as error:
            torch.cuda.synchronize()
            return row | {"ms": eager, "note": f"not captured: {str(error)[:60]}"}, None


def launched(step: Step, family: Family, repeats: int) -> Row:
    """Time calls from Python, and take their peak memory."""
    assert step.run is not None
    if step.before is not None:
        step.before()
    row = Row() if family.host else Row({"MiB": round(timing.peak_mib(step.run))})
    row["eager ms"] = timing.median_ms(step.run, repeats, flush=family.flush, before=step.before)
    if family.host:
        row["host ms"] = timing.host_ms(step.run, step.before or step.run)
    return row


def replay_of(step: Step) -> timing.Call:
    """Capture a step."""
    if step.capture is not None:
        return step.capture()
    assert step.run is not None
    return timing.captured(step.run)


def kept_mib(case: Case, operator: Operator) -> float:
    """Memory saved between the passes, without inputs and result, in MiB."""
    inputs = case.draw(0)
    for leaf in leaves_of(inputs).values():
        leaf.requires_grad_()
    before = torch.cuda.memory_allocated()
    result = operator(**inputs)
    return round((torch.cuda.memory_allocated() - before - result.nbytes) / timing.MIB, 1)


def off_by(case: Case, operator: Operator, known: list[Tensor]) -> float:
    """Return how far a peer's result and gradients are from ours, which are kept in ``known``.

    Raises RuntimeError if it computes something else.
    """
    inputs = case.draw(0)
    along = direction(case, inputs)
    if not known:
        known += [x.cpu() for x in gradients(case.ours, inputs, along)]
    found = [x.cpu() for x in gradients(operator, inputs, along)]
    norms = [(float((a - b).norm()), float(a.norm())) for a, b in zip(known, found, strict=True)]
    least = NOTHING * max(norm for _, norm in norms)
    worst = max(error / max(norm, least, 1e-30) for error, norm in norms)
    if not worst < FAR:
        raise RuntimeError(f"off by {worst:.2g} of ours")
    return worst


class Rates(NamedTuple):
    """Bytes per second of a copy and operations per second of a matmul."""

    copy: float
    matmul: float


def measured(
    case: Case, family: Family, options: argparse.Namespace, rates: Rates, told: Row
) -> Iterator[Row]:
    """Yield a row for each pass and implementation of a case that has passed its check."""
    found = dict(peers_of(case, options.peers))
    known: list[Tensor] = []
    if family.reference and not options.no_reference:
        found["reference"] = case.ours
    for which, work in case.least.items():
        floor = case.floor(which) if case.floor is not None else work.floor_ms(*rates)
        rows: list[Row] = []
        replays: dict[int, timing.Call] = {}
        for who, operator in {"bevatron": case.ours, **found}.items():
            row = Row(op=case.op, case=case.name, **{"pass": which}, who=who, **case.labels)
            row |= {"to reach": case.to_reach} if case.to_reach else {}
            row["floor ms"] = floor
            try:
                more, replay = launched_and_captured(case, family, which, who, operator, known)
                row |= more
                if replay is not None:
                    replays[len(rows)] = replay
            except torch.OutOfMemoryError:
                row["note"] = "out of memory" + (" beside the replays before" if replays else "")
            except ImportError as error:  # a peer's may hide what it lacks
                row["note"] = f"{error.name} is not installed" if error.name else str(error)[:80]
            except RuntimeError as error:
                if operator is case.ours:
                    raise
                row["note"] = f"failed: {str(error)[:80]}"  # a peer that does not compile, say
            rows.append(row)
            gc.collect()
            torch.cuda.empty_cache()
        times = timing.in_turn([*replays.values()], flush=family.flush)
        for place, (ms, clock) in zip(replays, times, strict=True):
            rows[place] |= {"ms": ms, "GHz": clock}
        rows[0] |= told
        if work.bytes and "ms" in rows[0]:
            rows[0] |= {"GB/s": work.bytes / rows[0]["ms"] / 1e6, "ratio": rows[0]["ms"] / floor}
        for row in rows:
            print(row, flush=True)
        yield from rows


def checked(case: Case) -> Row:
    """Check a case and return the columns about it; raise if it fails."""
    with kernels.use("triton"):
        return Row(case.check(case))


def run_family(family: Family, ops: Sequence[str], options: argparse.Namespace) -> list[str]:
    """Check and time the operators of a family; return what failed.

    Results are written after each operator, even if a case fails or the run is interrupted.
    """
    rates = Rates(timing.copy_rate(), timing.matmul_rate(family.matmul_dtype))
    rows: list[Row] = []
    failed = []
    names = options.dtype or [family.dtype]
    tiles = options.tiles or [None]
    if options.tiles and family.tiles is None:
        raise SystemExit(f"--tiles: not of operators of the family {family.name}")

    def write() -> None:
        notes = family.notes.format(
            dtype=", ".join(names), copy=rates.copy / 1e12, matmul=rates.matmul / 1e12
        )
        notes = f"{notes} {IN_TURN}"
        name = options.name or result_name(family, ops, options.cases, tiles=bool(options.tiles))
        report.write_result(name, family.table(rows), notes, device="cuda", folder=options.out)

    for op in ops:
        for name, tile in itertools.product(names, tiles):
            setup = Setup(getattr(torch, name))
            more = Row(type=name) if len(names) > 1 else Row()
            more |= Row(tile=tile) if tile else Row()
            context = family.tiles(tile) if tile and family.tiles else contextlib.nullcontext()
            with context:
                for case in cases_of(op, setup, options.cases):
                    try:
                        told = Row() if options.checked else checked(case)
                        found = measured(case, family, options, rates, told)
                        rows.extend(row | more for row in found)
                    except torch.OutOfMemoryError:  # what is not checked is not timed
                        rows.append(failed_row(case, "no memory to check it") | more)
                    except (SystemExit, AssertionError) as error:
                        failed.append(str(error))
                        rows.append(failed_row(case, f"refused: {error}") | more)
        write()
    return failed


def failed_row(case: Case, why: str) -> Row:
    """Return the row of a case that was not timed."""
    first = next(iter(case.least))
    row = Row(op=case.op, case=case.name, **{"pass": first}, who="bevatron", **case.labels)
    return row | {"note": why}


def result_name(
    family: Family, ops: Sequence[str], named: Sequence[str], *, tiles: bool = False
) -> str:
    """Return area and name of a result: all operators of a family, or some, or some cases."""
    name = family.result
    if family.by_operator:
        usual = [op for op, found in OPERATORS.items() if found.family is family and found.default]
        if set(ops) != set(usual):
            name = f"kernels/{'-'.join(ops)}"
        if named:
            name += "-rows" if set(named) == {"rows"} else "-shapes"
    return f"{name}_tiles" if tiles else name


def check_in_processes(ops: Sequence[str], options: argparse.Namespace) -> None:
    """Check every operator in a separate process, which also fills the kernel cache."""
    start = time.time()
    more = [*(["--cases", *options.cases] if options.cases else [])]
    more += [*(["--dtype", *options.dtype] if options.dtype else [])]
    command = [sys.executable, "-m", "benchmarks.kernels.run", "--check-only", *more, "--op"]
    jobs = {op: subprocess.Popen([*command, op]) for op in ops}
    if failed := [op for op, job in jobs.items() if job.wait()]:
        raise SystemExit(f"these checks failed: {', '.join(failed)}")
    print(f"checked in {time.time() - start:.1f} s", flush=True)


def dry_run(ops: Sequence[str], options: argparse.Namespace) -> None:
    """Check small cases by the reference, and run every pass of ours and of plain PyTorch."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for op in ops:
        for name in options.dtype or ["float32"]:
            for case in cases_of(op, Setup(getattr(torch, name), device, tiny=True)):
                with kernels.use("reference"):
                    told = case.check(case)
                    for which in case.least:
                        for operator in filter(None, (case.ours, case.plain)):
                            step = case.step(which, operator)
                            for call in filter(None, (step.before, step.run)):
                                call()
                print(op, case.name, name, *case.least, told or "", flush=True)


def listed(families: Mapping[str, Sequence[str]]) -> None:
    """Print the operators with their usual cases and the groups of others."""
    for name, ops in families.items():
        print(f"{name}: {FAMILIES[name].result}, {FAMILIES[name].dtype}")
        print(*(f"    {op}" for op in ops), sep="\n")


def arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    known = [*FAMILIES, *OPERATORS]
    parser.add_argument(
        "--op", nargs="+", choices=known, metavar="OP", default=[*FAMILIES],
        help="operators, or families of them: " + ", ".join(FAMILIES),
    )  # fmt: skip
    parser.add_argument(
        "--cases", nargs="+", default=(), help="names or groups: other, rows, memory, a graph, k 16"
    )
    types = ["bfloat16", "float16", "float32", "float64"]
    parser.add_argument("--dtype", nargs="+", choices=types, help="of the inputs")
    parser.add_argument("--peers", nargs="*", help="time all, or those named")
    parser.add_argument("--no-reference", action="store_true", help="do not time the reference")
    parser.add_argument("--tiles", nargs="+", help="of graph operators, such as 1024x32x1")
    parser.add_argument("--parallel", action="store_true", help="check in processes first")
    parser.add_argument("--check-only", action="store_true", help="check and do not time")
    parser.add_argument("--checked", action="store_true", help="time without a check")
    parser.add_argument(
        "--after", type=Path, metavar="FILE",
        help="check, make FILE.ready, and take times when FILE is there",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="list operators and stop")
    parser.add_argument("--dry-run", action="store_true", help="small cases by the reference")
    parser.add_argument("--name", help="of the result, instead of one made from the operators")
    add_out(parser)
    return parser.parse_args()


def main() -> None:
    """Check, time and write the results."""
    options = arguments()
    families = operators(options.op)
    every = [op for ops in families.values() for op in ops]
    if options.list:
        listed(families)
        return
    torch.manual_seed(0)
    if options.dry_run:
        dry_run(every, options)
        return
    if options.parallel:
        check_in_processes(every, options)
        options.checked = True
    if options.check_only or options.after is not None:
        for name, ops in families.items():
            for op, dtype in itertools.product(ops, options.dtype or [FAMILIES[name].dtype]):
                for case in cases_of(op, Setup(getattr(torch, dtype)), options.cases):
                    checked(case)
        if options.check_only:
            return
        options.checked = True
        options.after.with_suffix(".ready").touch()
        while not options.after.exists():
            time.sleep(0.05)
    failed = []
    for name, ops in families.items():
        failed += run_family(FAMILIES[name], ops, options)
    if failed:
        raise SystemExit("\n".join(failed))


if __name__ == "__main__":
    main()
