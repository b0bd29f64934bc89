"""A simulation: steps of AlphaFold2 and AlphaFold3 on 1 to 2,080 GPUs from measurements on 1 and 2.

    python -m benchmarks.parallel.simulation

A sample on g GPUs takes

    t(g) = s + p k(g) + (1 - h) c(g)

k(g) is the time of all blocks at the shapes of one of g GPUs over that of whole blocks
(`parallel/shards`), so kernels that are too small to get faster are counted. c(g) are the exchanges
of all blocks (`benchmarks.parallel.traffic`), at the times of `parallel/links`: the time of the
least message of its kind, and its bytes at the rate between the two largest; all of them times what
two GPUs took in a trace over their sum. h is the share of them that two GPUs hide. s and p follow
from the fastest step on two GPUs and the one on one GPU of the same call (`parallel/axial_step`).
limit s: s + p / g, the time if kernels of shards were as fast as whole ones and all exchanges were
hidden. A step of more GPUs than samples shares each among GPUs of
a host, of fewer takes its samples one after another; then the gradients are summed over a network
that is assumed, not measured,

    t_sum = 2 (n - 1) / n * bytes / bandwidth,

of which nothing is hidden. Links are taken to be as fast as between two GPUs. measured s: where
that many GPUs were measured; four through NCCL, in earlier code.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import script_parser
from benchmarks.common.report import RESULTS, add_picture, write_result
from benchmarks.parallel import traffic
from benchmarks.parallel.links import WINDOWS
from benchmarks.parallel.traffic import Collective

from bevatron.train.report import plots

Sends = Callable[[str, float], float]
"""Seconds of an exchange of a kind, given the bytes that a GPU sends."""
GPUS = (1, 2, 4, 8, 64, 128, 256, 512, 1024, 2080)
WORD = 2
LINK = {"gather": "gather", "sum": "gather", "transpose": "transpose", "ring": "pass_on"}
"""Name of the corresponding exchange in the links' measurements."""


@dataclass(frozen=True)
class System:
    """The parts of a step of a model.

    Attributes
    ----------
    where
        The rows of `parallel/axial_step` that were measured.
    shards
        Rows of `parallel/shards`: how names of blocks begin, and how many there are.
    blocks
        Every exchange of a pass.
    parameters
        Number of weights.
    passes
        Of a step, of which the last has a gradient.
    samples
        Of a step.
    """

    where: dict[str, Any]
    shards: dict[str, int]
    blocks: list[Collective]
    parameters: int
    passes: float = 1.0
    samples: int = 256

    def exchanges(self) -> Iterator[tuple[float, Collective]]:
        """Yield all exchanges, forward and backward, with their counts."""
        for one in self.blocks:
            yield from ((self.passes, one), (1.0, one.backward()))


def alphafold2(tokens: int = 256, rows: int = 128, extra: int = 1024) -> System:
    """List the exchanges of a pass of initial training."""

    def block(number: int, rows: int, width: int) -> list[Collective]:
        return number * [
            *traffic.pair_bias(tokens, 8),
            *traffic.columns(rows, tokens, width, 32),
            *traffic.triangles(tokens, 128, 128, 4),
        ]

    templates = 2 * traffic.triangles(tokens, 64, 64, 4, batch=4)
    blocks = [*block(48, rows, 256), *block(4, extra, 64), *templates]
    where = {"system": "alphafold2", "N": tokens, "passes": 2.5}
    shards = {"AlphaFold2 Evoformer": 48, "AlphaFold2 extra stack": 4}
    return System(where, shards, blocks, 93_229_082, passes=2.5)


def alphafold3(tokens: int = 384, rows: int = 1024) -> System:
    """List the exchanges of a step with rollout and confidence head."""
    triangles = traffic.triangles(tokens, 128, 128, 4)
    pairformer = [*triangles, Collective("gather", tokens, 1, 384)]
    module = [*traffic.outer_product(rows, tokens, 32), *traffic.pair_bias(tokens, 8), *triangles]
    diffusion = 24 * traffic.pair_bias(tokens, 16)
    templates = 2 * traffic.triangles(tokens, 64, 128, 4)
    blocks = [*(48 + 4) * pairformer, *4 * module, *templates, *diffusion]
    where = {"system": "alphafold3", "N": tokens, "policy": "none"}
    shards = {"AlphaFold3 Pairformer": 48 + 4, "AlphaFold3 MSA module": 4}
    return System(where, shards, blocks, 368_480_000)


def links(rows: Iterable[dict[str, Any]]) -> Sends:
    """Return the time of an exchange from those of two GPUs, through windows."""
    by_kind: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        if not row.get("through", WINDOWS).startswith(WINDOWS) or row.get("GPUs", 2) != 2:
            continue
        point = row["sent MiB"] * 2**20, row["replayed us"] / 1e6
        by_kind.setdefault(row["exchange"], []).append(point)

    def seconds(kind: str, sent: float) -> float:
        (_, least), *_, (less, sooner), (most, later) = sorted(by_kind[LINK[kind]])
        return least + sent * (later - sooner) / (most - less)

    return seconds


def exchanged(system: System, size: int, sends: Sends) -> float:
    """Sum the seconds of all exchanges of a step on a number of GPUs."""
    if size == 1:
        return 0.0
    total = 0.0
    for times, one in system.exchanges():
        kind = "gather" if one.kind == "ring" and size > 2 else one.kind
        total += times * sends(kind, WORD * one.sent(0, size))
    return total


def fastest(system: System, steps: Iterable[dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return the row of the fastest step by the number of GPUs that share its sample.

    Of one GPU it is that of the call in which two were fastest.
    """
    found: dict[int, dict[str, Any]] = {}
    timed = [row for row in steps if not isinstance(row["s/step"], str)]
    timed = [row for row in timed if system.where.items() <= row.items()]
    for row in sorted(timed, key=lambda row: row["s/step"], reverse=True):
        if row["GPUs"] == row["GPUs a sample"] > 1:
            found[row["GPUs"]] = row
    call = found[2].get("call")
    alone = [row for row in timed if row["GPUs"] == 1 and row.get("call") == call]
    return {1: min(alone, key=lambda row: row["s/step"]), **found}


def share_of_kernels(system: System, shards: Iterable[dict[str, Any]]) -> dict[int, float]:
    """Return the time of all blocks on one of several GPUs over that of whole blocks."""
    total: Counter[int] = Counter()
    for row in shards:
        for name, count in system.shards.items():
            total[row["GPUs"]] += count * row["ms"] * row["block"].startswith(name)
    return {size: ms / total[1] for size, ms in total.items()}


def simulated(
    system: System,
    measured: dict[int, dict[str, Any]],
    share: dict[int, float],
    sends: Sends,
    bandwidth: float,
) -> list[dict[str, Any]]:
    """Simulate a step on all numbers of GPUs."""
    one, two = (measured[size]["s/step"] for size in (1, 2))
    # The traced step had one pass.
    traced = measured[2]["sending ms"] / 1e3 / exchanged(replace(system, passes=1.0), 2, sends)
    bare = 1 - measured[2]["hidden %"] / 100
    divided = (one - two + bare * traced * exchanged(system, 2, sends)) / (1 - share[2])
    rows = []
    for number in GPUS:
        size = min(8, max(1, number // system.samples)) if number > 8 else number
        groups = number // size
        samples = system.samples if number > 8 else 1
        sending = traced * exchanged(system, size, sends)
        sample = one - divided * (1 - share[size]) + bare * sending
        summing = 2 * (number - 1) / number * 4 * system.parameters / bandwidth
        whole = -(-samples // groups) * sample + (summing if number > 8 else 0.0)
        rows.append({
            "system": system.where["system"], "GPUs": number, "GPUs a sample": size,
            "samples a step": samples, "s a sample": sample,
            "measured s": measured[size]["s/step"] if size in measured else "",
            "kernels, of one GPU's": share[size],
            "exchanges ms": 1e3 * sending,
            "limit s": one - divided * (1 - 1 / size),
            "s/step": whole,
            "% of one GPU": 100 * samples * one / (whole * number),
        })  # fmt: skip
    return rows


def planned_mib(system: System) -> float:
    """Return the MiB that one of two GPUs sends in the blocks of a step."""
    sent = sum(times * one.sent(0, 2) for times, one in system.exchanges())
    return WORD * sent / 2**20


def main() -> None:
    parser = script_parser(__doc__)
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--bandwidth", type=float, default=50e9, help="of a GPU's network, bytes/s")
    given = parser.parse_args()
    dates: list[str] = []

    def read(page: str) -> list[dict[str, Any]]:
        found = json.loads((given.results / f"{page}.json").read_text())
        dates.append(f"{page} of {found['date']}")
        rows: list[dict[str, Any]] = found["rows"]
        return rows

    several, shards, between = (read(f"parallel/{p}") for p in ("axial_step", "shards", "links"))
    sends, rows, said = links(between), [], []
    for system in (alphafold2(), alphafold3()):
        name = system.where["system"]
        measured = fastest(system, several)
        share = share_of_kernels(system, shards)
        rows += simulated(system, measured, share, sends, given.bandwidth)
        said.append(f"{name} {planned_mib(system):.0f} MiB, h {measured[2]['hidden %']:.0f} %")
    notes = (
        "SIMULATION, not a measurement. "
        + " ".join((__doc__ or "").split("\n\n")[2:]).replace("\n", " ")
        + f" Here {given.bandwidth / 1e9:g} GB/s. Sent by one of two GPUs in the blocks of a step, "
        f"as planned: {'; '.join(said)}. Measured: {', '.join(dates)}. Published for AlphaFold2 "
        "with recycling (ScaleFold, H100): 1.80, 1.12, 0.75 and 0.65 s a sample on 1, 2, 4 and 8 "
        "GPUs."
    )
    path = write_result("parallel/simulation", rows, notes, folder=given.results)
    add_picture(picture(rows), path)


def picture(rows: list[dict[str, Any]]) -> Any:
    """Plot the time of a sample by the GPUs that share it, and the efficiency of steps."""
    times, efficiency = [], []
    for system in dict.fromkeys(row["system"] for row in rows):
        own = [row for row in rows if row["system"] == system]
        host = [row for row in own if row["GPUs"] <= 8]
        many = [row for row in own if row["GPUs"] > 8]
        times.append(
            plots.Curve(system, [r["GPUs"] for r in host], [r["s a sample"] for r in host])
        )
        efficiency.append(
            plots.Curve(system, [r["GPUs"] for r in many], [r["% of one GPU"] for r in many])
        )
    panels = [
        plots.Panel("Simulated: one sample", "s", times, logarithmic=False, from_zero=True),
        plots.Panel(
            "Simulated: 256 samples a step", "% of one GPU", efficiency, logarithmic=False,
            from_zero=True,
        ),
    ]  # fmt: skip
    return plots.curves(panels, "GPUs", logarithmic_x=True)


if __name__ == "__main__":
    main()
