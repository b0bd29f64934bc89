"""How long samples take to prepare, sorted: one thread, from a store, with all checks of its sums.

    python -m benchmarks.alphafold2.sample_times STORE [--draws 1000]

Draws of initial training: crops of 256 residues, up to 124 rows and 1,024 extra ones, four cycles.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.common.arguments import add_out, script_parser
from benchmarks.common.report import add_picture, write_result

from bevatron.data.packing.draws import Draws, Source
from bevatron.data.proteins.weights import chain_weights
from bevatron.recipes.alphafold2.data import ChainDataset, chain_table
from bevatron.recipes.alphafold2.run import CYCLES, published_stages
from bevatron.recipes.alphafold2.stores import open_chains
from bevatron.train.report import plots
from bevatron.train.report.plots import Curve, Panel

SHARES = (0, 50, 90, 99, 100)
NOTES = (
    "Time of one core for each draw, its alignment read from the store and verified. "
    "ScaleFold (figure 4) finds one batch in ten slow, and times spread over three orders of "
    "magnitude; a slow one holds up a loader that keeps the order."
)


def times(store: Path, draws: int) -> list[float]:
    """Return the seconds of a core that each draw took."""
    table = chain_table(open_chains(store))
    table = table.take(table.usable)
    sizes = published_stages()["initial"].sizes
    dataset = ChainDataset(store, table.units, table.length, sizes, CYCLES)
    weights = chain_weights(table.length, table.cluster)
    source = Draws([Source("chains", dataset, weights, 1.0)], seed=0)
    dataset[0]  # imports
    found = []
    for index in range(draws):
        began = time.process_time()
        source[index]
        found.append(time.process_time() - began)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and write the result."""
    parser = script_parser(__doc__)
    parser.add_argument("store", type=Path, help="of chains, made by `bevatron prepare`")
    parser.add_argument("--draws", type=int, default=1000)
    add_out(parser)
    given = parser.parse_args(argv)
    milliseconds = 1e3 * np.sort(times(given.store, given.draws))
    rows = [
        {"share of draws below %": share, "ms": float(np.percentile(milliseconds, share))}
        for share in SHARES
    ]
    path = write_result("alphafold2/sample_times", rows, NOTES, folder=given.out,
                        extra={"ms": milliseconds.round(3).tolist()})  # fmt: skip
    place = np.arange(1, given.draws + 1)
    curve = Curve("bevatron", place, milliseconds)
    panel = Panel("preparation of a sample", "ms", [curve], logarithmic=True)
    add_picture(plots.curves([panel], "samples, sorted"), path)


if __name__ == "__main__":
    main()
