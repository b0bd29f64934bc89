"""What it costs to prepare structures and alignments, and to draw a training step's samples.

Seconds are those of one core of this process.

    python -m benchmarks.data.proteins SHARED_DATA

SHARED_DATA holds ``complexes/{mmcif,msa,ccd_subset.cif.gz}`` and ``proteins/{mmcif,msa}``.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.common.report import write_result

from bevatron.data.proteins.alignments import (
    ALIGNMENT_FIELDS,
    ALIGNMENTS_VERSION,
    Alignments,
    merge_alignment,
)
from bevatron.data.proteins.chain_index import Choices, protein_sequences
from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.poses import Poses, open_poses, prepare_poses
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.proteins.stored_alignment import StoredAlignment
from bevatron.data.readers.proteins import open_components
from bevatron.data.readers.proteins.folders import StructureFiles, find_protein_files
from bevatron.data.store.prepare import prepare, write_store
from bevatron.data.store.shards import concatenate
from bevatron.data.store.store import MANIFEST, Store
from bevatron.recipes.alphafold2.data import ChainDataset, chain_table
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains
from bevatron.recipes.alphafold3.data import units_of
from bevatron.recipes.alphafold3.stores import (
    FEATURES_VERSION,
    FIELDS,
    KIND,
    ComplexFeaturizer,
    named_chains,
    summarise,
)
from bevatron.recipes.proteins.clusters import write_clusters
from bevatron.recipes.proteins.searches import ALIGNMENTS, prepare_searches

PUBLISHED_SECONDS = {"7a4d": 12.4, "721p": 14.0}
"""alphafold3-pytorch, one core."""
PUBLISHED_EACH = {"s": 1.36, "MB": 3.1}
COMPLEXES, PDB = 127_234, 245_000
"""Complexes of the published cache (48 h, 395 GB); entries of the whole archive, about."""
POSES = "poses.arrow"
DELETED = 0.01
"""Share of cells of random alignments with a deletion, as in the shared ones."""

Row = dict[str, Any]


class Clock:
    """Seconds of this process's core."""

    seconds = 0.0


@contextmanager
def timed() -> Iterator[Clock]:
    clock, begun = Clock(), time.process_time()
    yield clock
    clock.seconds = time.process_time() - begun


def row(what: str, value: float, unit: str, published: float | str = "") -> Row:
    return {"what": what, "value": value, "unit": unit, "published": published}


def megabytes(folder: Path) -> float:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) / 1e6


def prepared(
    files: Sequence[Path], out: Path, components: str
) -> tuple[Store, dict[str, float], dict[str, float]]:
    """Prepare complexes as `prepare_complexes` does; return seconds and MB of each part."""
    found = find_protein_files(files)
    settings = {"kind": KIND, "features": FEATURES_VERSION, "unit": "file"}
    seconds, size = {}, {}
    with timed() as clock:
        store = prepare(
            StructureFiles(found.structures), ComplexFeaturizer(components), out, FIELDS, settings,
            workers=0, progress=False, summarise=summarise,
        )  # fmt: skip
    seconds["entries"], size["entries"] = clock.seconds, megabytes(out)
    with timed() as clock:
        proteins, rna = named_chains(store)
        prepare_searches(
            found, store, proteins, strict=False, workers=0, overwrite=False, progress=False,
            rna=rna,
        )  # fmt: skip
    seconds["alignments"] = clock.seconds
    size["alignments"] = megabytes(out) - size["entries"]
    return store, seconds, size


def finished(store: Store, components: str) -> dict[str, float]:
    """Make poses and clusters, which the entries of a store share; return seconds of each."""
    seconds, out, dictionary = {}, store.path, open_components(components)
    codes = {code for entry in store if len(entry["restype"]) for code in codes_of(entry)}
    with timed() as clock:
        prepare_poses(out / POSES, dictionary, codes)
    seconds["poses"] = clock.seconds
    with timed() as clock:
        write_clusters(protein_sequences(store), out)
    seconds["clusters"] = clock.seconds
    return seconds


def codes_of(entry: Any) -> list[str]:
    return list(json.loads(entry["description"].tobytes())["components"])


def preparing(shared: Path, folder: Path) -> tuple[list[Row], Store]:
    """Prepare the shared complexes, together and those with alignments one by one."""
    source, components = shared / "complexes", str(shared / "complexes/ccd_subset.cif.gz")
    together, seconds, size = prepared(
        [source / "mmcif", source / "msa"], folder / "complexes", components
    )
    seconds |= finished(together, components)
    number, known = len(together), len(open_poses(together.path / POSES).keys)
    alignments = Alignments.open(together.path / ALIGNMENTS)
    depth = np.mean([alignments[i].num_rows for i in range(len(alignments))])
    alone = {}
    for msa in sorted((source / "msa").iterdir()):
        structure = source / f"mmcif/{msa.name}.cif.gz"
        _, own, bytes_ = prepared([structure, msa], folder / msa.name, components)
        alone[msa.name] = (own["entries"] + own["alignments"], sum(bytes_.values()))
    rows = [
        row(f"prepare {name} with its alignments", alone[name][0], "s", published)
        for name, published in PUBLISHED_SECONDS.items()
        if name in alone
    ]
    each = {"s": seconds["entries"] / number, "MB": size["entries"] / number}
    both = np.mean(list(alone.values()), axis=0).tolist()
    with_rows = dict(zip(("s", "MB"), both, strict=True))
    of_rows = f"alignments of {len(alignments)} sequences, {depth:,.0f} rows in the mean, each"
    for what, values in (
        (f"prepare {number} complexes without alignments, each", each),
        (f"prepare the {len(alone)} complexes that have alignments, with them, each", with_rows),
    ):
        rows += [row(what, value, unit, PUBLISHED_EACH[unit]) for unit, value in values.items()]
    rows += [
        row(f"reference poses of {known} components, once, each", seconds["poses"] / known, "s"),
        row("clusters of all sequences, built in, each complex", seconds["clusters"] / number, "s"),
        row(of_rows, seconds["alignments"] / len(alignments), "s"),
        row(of_rows, size["alignments"] / len(alignments), "MB"),
    ]
    rows += projected("without alignments", each)
    rows += projected("with alignments of their own", with_rows)
    return rows, together


def projected(kind: str, each: dict[str, float]) -> list[Row]:
    """Project what a complex costs to the published cache and to the archive."""
    rows = []
    for what, count, published in (
        (f"projected to {COMPLEXES:,} complexes {kind}", COMPLEXES, ("", 395.0)),
        (f"projected to the whole PDB, {PDB:,} entries {kind}", PDB, ("", "")),
    ):
        rows.append(row(what, each["s"] * count / 3600, "core hours", published[0]))
        rows.append(row(what, each["MB"] * count / 1000, "GB", published[1]))
    return rows


def milliseconds(draw: Callable[[int], Any], number: int) -> np.ndarray:
    found = []
    for place in range(number):
        with timed() as clock:
            draw(place)
        found.append(1000 * clock.seconds)
    return np.array(found)


def marks(what: str, found: np.ndarray, published: str = "") -> list[Row]:
    return [
        row(f"{what}, {name}", float(value), "ms", published)
        for name, value in zip(
            ("median", "99th percentile", "slowest"),
            (*np.percentile(found, [50, 99]), found.max()),
            strict=True,
        )
    ]


def complex_samples(store: Store) -> list[Row]:
    """Draw crops of chains and interfaces of all entries, each some times."""
    alignments = Alignments.open(store.path / ALIGNMENTS)
    sources = Sources(open_poses(store.path / POSES), alignments)
    entries = np.flatnonzero(store.lengths("restype"))
    units, _ = units_of(store, entries)
    sizes = SampleSizes(CropSizes(tokens=384), rows=1024)

    def draw(place: int) -> Any:
        entry, *chains = units[place % len(units)].tolist()
        return sample(store[entry], place, sources, sizes, [chain for chain in chains if chain])

    def drawn(entry: int) -> np.ndarray:
        own = np.flatnonzero(units[:, 0] == entry)
        chosen = np.random.default_rng(entry).choice(own, 6).tolist()
        deep.append(len(draw(chosen[0])["msa"]) > 1)
        return milliseconds(lambda place: draw(chosen[place]), len(chosen))

    deep: list[bool] = []
    found = np.array([drawn(int(entry)) for entry in entries])
    what = "AlphaFold3 sample, 384 tokens"
    return [
        *marks(f"{what}, all entries", found),
        *marks(f"{what}, entries with alignments", found[np.array(deep)]),
    ]


def rows_of_alignment() -> list[Row]:
    """Read what a crop needs of a deep alignment in memory, verified."""
    number, columns = 12_096, 800
    alignment = StoredAlignment.of(random_alignment(number, columns), "made up")
    crop = np.arange(200, 584)

    def read(place: int) -> None:
        rows = np.random.default_rng(place).choice(number, 1024, replace=False)
        alignment.read(np.sort(rows), crop)

    read(0)
    return marks(f"read 1,024 of {number:,} rows at 384 columns", milliseconds(read, 200))[:2]


def random_alignment(number: int, columns: int) -> Any:
    rng = np.random.default_rng(0)
    return merge_alignment({
        "rows": rng.integers(0, 20, (number, columns)).astype(np.int8),
        "deletions": (rng.random((number, columns)) < DELETED).astype(np.uint16),
        "species": rng.integers(0, 9, number), "files": np.zeros(1, np.int32),
        "file_rows": np.full(1, number),
    })  # fmt: skip


def chain_samples(shared: Path, folder: Path) -> list[Row]:
    """Draw crops of the chains of all proteins, and of the deepest alignment."""
    source, out = shared / "proteins", folder / "chains"
    deepest = [shared / "complexes/mmcif/721p.cif.gz", shared / "complexes/msa/721p"]
    with timed() as clock:
        prepare_chains([source / "mmcif", source / "msa", *deepest], out, workers=0, progress=False)
    table = chain_table(open_chains(out))
    sizes = ChainSizes(residues=256, msa_rows=128, extra_rows=1024)
    dataset = ChainDataset(out, table.units, table.length, sizes, 4)
    drawn = [dataset.sample(i, 0) for i in range(len(dataset))]
    rows = np.array([[each[name].shape[1] for name in ("true_msa", "extra_msa")] for each in drawn])
    deep, full = np.flatnonzero(rows[:, 0] > 1), (rows == (128, 1024)).all(axis=1)
    found = milliseconds(lambda place: dataset.sample(int(deep[place]), place), len(deep))
    what = "AlphaFold2 sample, 256 residues, 4 cycles"
    number = len(open_chains(out))
    return [
        row(f"prepare {number} structures of proteins with alignments, each",
            clock.seconds / number, "s"),
        row(f"prepare {number} structures of proteins with alignments, each",
            megabytes(out) / number, "MB"),
        *marks(f"{what}, up to 128 + 1,024 rows", found),
        *marks(f"{what}, 128 + 1,024 rows", found[full[deep]]),
    ]  # fmt: skip


# ---- a large store ----


def many(folder: Path, store: Store, copies: int) -> Path:
    """Make the one shard of a store many, by links."""
    manifest = json.loads((store.path / MANIFEST).read_text())
    (shard,) = manifest["shards"]
    folder.mkdir()
    for number in range(copies):
        os.link(store.path / shard["name"], folder / f"shard-{number:06d}.arrow")
    manifest["shards"] = [shard | {"name": f"shard-{n:06d}.arrow"} for n in range(copies)]
    manifest["num_samples"] = copies * shard["samples"]
    del manifest["checksum"]
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder


def large_store(store: Store, folder: Path) -> list[Row]:
    """Open, plan and sample 100,000 entries and alignments in a process of its own."""
    tokens = store.lengths("restype")
    small = np.flatnonzero((tokens > 0) & (tokens <= 300)).tolist()
    columns = concatenate([store[small[i % len(small)]] for i in range(1024)], FIELDS)
    entries = many(folder / "many", write_store(folder / "one", FIELDS, [columns]), 98)
    made = [random_alignment(301, 100 + number) for number in range(64)]
    few = write_store(
        folder / "few", ALIGNMENT_FIELDS, [concatenate(made, ALIGNMENT_FIELDS)],
        settings={"features": ALIGNMENTS_VERSION},
    )  # fmt: skip
    alignments = many(folder / "many_alignments", few, 1563)
    command = [sys.executable, "-m", "benchmarks.data.proteins", str(entries), str(alignments)]
    command += ["--poses", str(store.path / POSES)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    what = f"{found['entries']:,} entries opened, planned, 16 sampled"
    return [
        row(what, found["seconds"], "s"),
        row(f"{what}: growth of the memory", found["bytes"] / 1e6, "MB"),
    ]


def peak() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def open_large(entries: Path, alignments: Path, poses: Poses) -> None:
    before = peak()
    with timed() as clock:
        store = Store(entries, resident_limit=64 << 20)
        sources = Sources(poses, Alignments.open(alignments))
        choices = Choices.of(store)
        share = choices.weight / choices.weight.sum()
        drawn = np.random.default_rng(0).choice(len(share), 16, p=share)
        for place in drawn.tolist():
            chains = choices.chains[place]
            entry = store[int(choices.entry[place])]
            sizes = SampleSizes(CropSizes(384))
            sample(entry, place, sources, sizes, chains[chains > 0].tolist())
    print(json.dumps({"seconds": clock.seconds, "bytes": peak() - before, "entries": len(store)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("shared", type=Path)
    parser.add_argument("alignments", type=Path, nargs="?")
    parser.add_argument("--poses", type=Path)
    arguments = parser.parse_args()
    if arguments.poses:
        open_large(arguments.shared, arguments.alignments, open_poses(arguments.poses))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows, store = preparing(arguments.shared, folder)
        rows += complex_samples(store)
        rows += rows_of_alignment()
        rows += chain_samples(arguments.shared, folder)
        rows += large_store(store, folder)
    write_result(
        "data/proteins",
        rows,
        "Seconds of one core of this process; other work ran at the same time. Preparing reads the "
        "files, computes all features and writes shards with checksums; reference poses are made "
        "once for each component and are a row of their own. Published: alphafold3-pytorch's "
        "features of the two complexes on one core; MegaFold's cache, 48 hours and 395 GB for "
        "127,234 complexes, whose hours are of an unnamed number of cores. An alignment is stored "
        "once for each distinct sequence, so projections with alignments of their own for each "
        "complex are an upper bound. The 12,096 rows of 800 columns are random and in memory. A "
        "sample is drawn from the store and verified; AlphaFold3's rows are at most 1,024. Entries "
        "of the large store are small real ones, repeated; the alignments are random.",
    )


if __name__ == "__main__":
    main()
