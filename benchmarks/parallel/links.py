"""Times the exchanges of processes that share a sample, by size, in captured CUDA graphs.

    torchrun --nproc-per-node 2 -m benchmarks.parallel.links [--out links]
    python -m benchmarks.parallel.links --collect links

Each exchange is checked, launched and replayed, before it is timed. The rows list the environment
variables that configure NCCL.
"""

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from benchmarks.common.arguments import add_rows, read_all
from benchmarks.common.report import hardware, versions, write_result
from benchmarks.common.timing import median_ms
from torch import Tensor

from bevatron.parallel import axial
from bevatron.parallel.axial.collectives import gather, transpose
from bevatron.parallel.groups import Group
from bevatron.parallel.mesh import Mesh, open_mesh
from bevatron.parallel.traffic import count_traffic
from bevatron.parallel.windows import WindowGroup
from bevatron.train.capture.cuda_graphs import GraphPool

MIB = 2**20
USUAL = ("NCCL_DEBUG", "NCCL_VERSION", "NCCL_GRAPH_REGISTER", "NCCL_NVLS_ENABLE")
"""What does not matter, and what every run sets."""
WIDTH = 64
WINDOWS = "windows"


def nccl_settings() -> str:
    """Name the settings of NCCL in the environment."""
    told = sorted(one for one in os.environ.items() if one[0].startswith("NCCL_"))
    return " ".join(f"{name[5:]}={value}" for name, value in told if name not in USUAL) or "default"


def carrier(group: Group, device: torch.device) -> str:
    """Name what carries the exchanges of a group; nothing carries those of one process."""
    if group.size == 1:
        return ""
    if isinstance(group, WindowGroup):
        return "windows"
    return "NCCL" if device.type == "cuda" else "gloo"


def exchanges(own: Tensor, side: int, group: Group) -> dict[str, Callable[[], Tensor]]:
    """Every exchange of own rows of a square; their results are known in advance."""
    flat = own.reshape(-1)
    return {
        "gather": lambda: gather(own, 0, side, group.urgent).wait(),
        "transpose": lambda: transpose(own, side, group.urgent).wait(),
        "pass_on": lambda: group.urgent.pass_on(flat, torch.empty_like(flat), flat.nbytes).wait(),
        "all_reduce": lambda: group.all_reduce(flat.clone()).wait(),
    }


def expected(whole: Tensor, group: Group) -> dict[str, Tensor]:
    """Return the expected result of every exchange."""
    parts = whole.chunk(group.size)
    after = parts[(group.index + 1) % group.size]
    columns = whole.transpose(0, 1).chunk(group.size)[group.index]
    total = torch.stack(parts).sum(0)
    return {
        "gather": whole, "transpose": columns,
        "pass_on": after.reshape(-1), "all_reduce": total.reshape(-1),
    }  # fmt: skip


def measured(mesh: Mesh, group: Group, sizes: list[float], together: int) -> list[dict[str, Any]]:
    rows = []
    for size in sizes:
        side = max(int((size * MIB * group.size / (2 * WIDTH)) ** 0.5), 1)
        side -= side % (8 * group.size)
        make = torch.Generator(mesh.device).manual_seed(0)
        # Small integers add exactly.
        whole = torch.randint(-8, 8, (side, side, WIDTH), generator=make, device=mesh.device)
        whole = whole.to(torch.bfloat16)
        own, right = whole.chunk(group.size)[group.index].contiguous(), expected(whole, group)
        for name, call in exchanges(own, side, group).items():
            with count_traffic() as traffic:
                assert torch.equal(call(), right[name]), name
            row = {"exchange": name, "GPUs": mesh.world, "own MiB": own.nbytes / MIB}
            row["sent MiB"] = traffic.total / MIB
            if mesh.device.type == "cuda":
                row |= timed(call, right[name], together)
                row["GB/s"] = traffic.total / row["replayed us"] / 1e3
            rows.append(row)
    return rows


def timed(call: Callable[[], Tensor], right: Tensor, together: int) -> dict[str, Any]:
    """Time an exchange by itself, replayed many times in one graph, and launched."""
    results: list[Tensor] = []

    def many() -> None:
        results[:] = [call() for _ in range(together)]

    replay = GraphPool(right.device).capture(many)
    replay()
    assert torch.equal(results[-1], right), "the captured exchange gives other numbers"
    return {
        "replayed us": 1e3 * median_ms(replay, 7) / together,
        "launched us": 1e3 * median_ms(call, 7, together=together),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="*", type=float, default=[0.25, 1, 4, 16, 64], help="MiB")
    parser.add_argument("--together", type=int, default=10, help="in one graph")
    parser.add_argument("--device", default="auto")
    add_rows(parser, "links")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect, given.results)
        return
    nccl = nccl_settings()
    with open_mesh(given.device, timeout_seconds=300) as mesh:
        rows = []
        with axial.shared(mesh, mesh.world) as group:
            through = {f"NCCL {nccl}": Group(group.ranks, mesh.rank, group.process_group)}
            if isinstance(group, WindowGroup):
                through[WINDOWS] = group
            for name, one in through.items():
                found = measured(mesh, one, given.sizes, given.together)
                rows += [{"through": name, **row} for row in found]
        if mesh.is_main:
            on = {"hardware": hardware(mesh.device.type), "versions": versions()}
            given.out.mkdir(parents=True, exist_ok=True)
            (given.out / f"links-{mesh.world}-{nccl}.json").write_text(
                json.dumps({"measured on": on, "together": given.together, "rows": rows})
            )


def collect(folder: Path, results: Path) -> None:
    """Join the rows of all calls and write the result."""
    found = read_all(folder, "links-*.json")
    notes = (
        "bfloat16; through: NCCL with these settings, or windows; own MiB: held by every GPU; "
        f"median of 7 times {found[0]['together']} exchanges, one after another, in one CUDA graph "
        "(replayed) or launched, including copies that rearrange rows. GB/s: sent by one GPU, "
        "replayed."
    )
    on = found[0]["measured on"]
    device = "cpu" if on["hardware"].startswith("cpu") else "cuda"
    rows = [row for one in found for row in one["rows"]]
    write_result("parallel/links", rows, notes, device=device, folder=results, measured_on=on)


if __name__ == "__main__":
    main()
