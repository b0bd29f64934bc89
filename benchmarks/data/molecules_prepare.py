"""What it costs to prepare molecules: features per second of one core, stores, batches, fill.

The molecules are the 1,999 of PCQM4Mv2 (mean 14.9 heavy atoms) as plain SMILES, and as CXSMILES
with explicit hydrogen and coordinates.

    python -m benchmarks.data.molecules_prepare TABLE.csv.gz [--repeats 5]
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.report import write_result

from bevatron.data.packing import pack
from bevatron.data.padding.atoms import MoleculePadding
from bevatron.data.padding.size_buckets import choose_shapes
from bevatron.data.readers.molecules import MoleculeOptions, molecules_in_memory, open_molecules
from bevatron.data.samples import FEATURE_SETS, collate_molecules
from bevatron.data.store.store import Store
from bevatron.models.gpspp.features import Featurizer, canonical
from bevatron.recipes.gpspp.data import molecule_sizes
from bevatron.recipes.gpspp.stores import prepare_molecules

BUDGETS = (1024, 4096, 8192, 16384)
COUNTS = ("atoms", "edges", "pairs")
SLACK = (1.0, 1.03, 1.05)
"""Room for edges and pairs above the mean molecule's, so that atoms are what fills a batch."""


def best(function: Callable[[], Any], repeats: int) -> float:
    """Shortest time of several, in seconds of this process's core."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        times.append(time.process_time() - begin)
    return min(times)


def row(what: str, rate: float, note: str = "") -> dict[str, Any]:
    return {"what": what, "molecules/s": round(rate), "note": note}


def features(raw: dict[str, list[Any]], repeats: int) -> list[dict[str, Any]]:
    rows = []
    for name in FEATURE_SETS:
        featurizer = Featurizer(name)
        seconds = best(lambda f=featurizer: f.many(raw["2D"]), repeats)
        rows.append(row(f"features {name}, 2D", len(raw["2D"]) / seconds))
    seconds = best(lambda: Featurizer().many(raw["3D"]), repeats)
    rows.append(row("features set1, CXSMILES with 3D", len(raw["3D"]) / seconds))
    some = raw["2D"][:300]
    seconds = best(lambda: [Featurizer()(sample) for sample in some], 2)
    rows.append(row("features set1, 2D, one at a time", len(some) / seconds))
    return rows


def storing(smiles: list[str], folder: Path) -> tuple[list[dict[str, Any]], Store]:
    reader = molecules_in_memory(smiles * 5, np.zeros(5 * len(smiles)))
    begin = time.process_time()
    store = prepare_molecules(reader, folder / "store", workers=0, progress=False)
    seconds = time.process_time() - begin
    size = sum(file.stat().st_size for file in store.path.iterdir())
    note = f"{size / len(store):.0f} bytes per molecule"
    rows = [row("prepare set1 into a store, 2D", len(store) / seconds, note)]
    begin = time.process_time()
    samples = [store[i] for i in range(len(store))]
    rows.append(row("read from the store, verified", len(store) / (time.process_time() - begin)))
    some = samples[:1024]
    indices, weights = np.arange(len(some)), [1.0] * len(some)
    seconds = best(lambda: collate_molecules(some, indices, weights), 5)
    rows.append(row("collate batches of 1,024", len(some) / seconds))
    return rows, store


def filling(store: Store) -> list[dict[str, Any]]:
    sizes = molecule_sizes(store)
    counts = np.tile(np.stack([sizes[name] for name in COUNTS], axis=1), (20, 1))
    mean = counts.mean(axis=0)
    rows = []
    for budget in BUDGETS:
        capacity = (budget * mean / mean[0] * SLACK).astype(int)
        plan = pack(counts, capacity.tolist(), 1)
        batches = [[*counts[b].sum(axis=0)[[1, 0]], len(b), counts[b, 2].sum()] for b in plan[0]]
        shapes = choose_shapes(MoleculePadding(), np.array(batches, dtype=np.int64))
        fills = dict(zip(COUNTS, plan.fills.tolist(), strict=True))
        rows.append(
            {
                "atoms of a batch": budget,
                "batches": plan.num_batches,
                **{f"fill {name} (%)": round(100 * fill, 1) for name, fill in fills.items()},
                "shapes": len(shapes.shapes),
                "padding atoms (%)": round(100 * shapes.waste["atoms"], 1),
                "padding edges (%)": round(100 * shapes.waste["edges"], 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("table", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    reader = open_molecules(arguments.table, MoleculeOptions(unlabelled=True))
    with_3d = list(reader.read(0, reader.num_samples))
    smiles = [canonical(sample["smiles"].tobytes().decode()) for sample in with_3d]
    plain = molecules_in_memory(smiles)
    raw = {"2D": list(plain.read(0, plain.num_samples)), "3D": with_3d}
    Featurizer("ying21").many(raw["2D"][:5])
    with tempfile.TemporaryDirectory() as folder:
        rows = features(raw, arguments.repeats)
        stored, store = storing(smiles, Path(folder))
        write_result(
            "data/molecules_prepare",
            rows + stored,
            "Seconds are those of one core in this process (other work ran at the same time); of "
            "the features the best of several runs over all molecules.",
        )
        write_result(
            "data/molecules_packing",
            filling(store),
            "Balanced packing of 199,900 molecules (the real ones repeated) by atoms, edges and "
            "squared atoms; then padding to at most four fixed shapes, headroom for other epochs "
            "included.",
        )


if __name__ == "__main__":
    main()
