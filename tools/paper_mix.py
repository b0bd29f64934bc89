"""Sizes of the paper's training set: Table 3 of Firoz et al., arXiv:2504.10700.

2.65 million structures of eight sets. Sizes of MPtrj are drawn from a random sample of it
(``mptrj_random_1k.extxyz.gz``), whose largest has 192 atoms, with a tail up to the 444 of the
whole set; all other sets are uniform in the ranges of the table.

Edges are directed neighbours within 4.5 A. MPtrj's follow its sample (mean 22.4 per atom, 0.7 to
43.6). The others are estimates from the density: liquid water 37.9 (192-molecule boxes), fewer at
the surface of small water clusters; an fcc crystal of CuNi 42; layers of a dichalcogenide about
20; the open frame of a zeolite about 15.

    python tools/paper_mix.py PATH/mptrj_random_1k.extxyz.gz [--scale 0.1]
"""

import argparse
import gzip
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

CAPACITY = 3072
"""Atoms of a batch in the paper."""

TAIL_SHARE = 5e-4
"""Share of MPtrj above the 192 atoms of the sample: below one in a thousand, as none is in it."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Source:
    """One of the sets: structures, their range of atoms, neighbours per atom."""

    name: str
    count: int
    smallest: int
    largest: int
    neighbours: float


SOURCES = (
    Source("MPtrj", 1_580_000, 1, 444, 22.4),
    Source("water clusters", 460_000, 9, 75, 20.0),
    Source("TMD", 220_000, 16, 96, 20.0),
    Source("liquid water", 190_000, 768, 768, 37.9),
    Source("zeolite", 100_000, 203, 408, 15.0),
    Source("CuNi", 74_000, 492, 500, 42.0),
    Source("HEA", 26_000, 36, 48, 45.0),
    Source("Al-HCl(aq)", 884, 281, 281, 36.0),
)


@dataclass(frozen=True)
class Mix:
    """Sizes of the structures, set after set.

    Attributes
    ----------
    num_atoms, num_edges, source : int64 [n]; ``source`` is an index into `SOURCES`
    """

    num_atoms: IntArray
    num_edges: IntArray
    source: IntArray


def mptrj_sizes(path: Path) -> IntArray:
    """Read the number of atoms of every frame of an extended XYZ file (.gz or not)."""
    sizes = []
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt") as lines:
        for line in lines:
            sizes.append(int(line))
            for _ in range(sizes[-1] + 1):
                next(lines)
    return np.array(sizes, dtype=np.int64)


def paper_mix(mptrj: Path, scale: float = 1.0, seed: int = 0) -> Mix:
    """Draw the sizes of the paper's set, or of ``scale`` times as many structures."""
    random = np.random.default_rng(seed)
    sample = mptrj_sizes(mptrj)
    atoms, edges, sources = [], [], []
    for index, source in enumerate(SOURCES):
        count = round(source.count * scale)
        if source.name == "MPtrj":
            num_atoms = random.choice(sample, count)
            tail = random.random(count) < TAIL_SHARE
            low, high = np.log(sample.max() + 1), np.log(source.largest + 1)
            num_atoms[tail] = np.exp(random.uniform(low, high, int(tail.sum()))).astype(np.int64)
            neighbours = np.clip(random.normal(source.neighbours, 8.0, count), 0.7, 43.6)
        else:
            num_atoms = random.integers(source.smallest, source.largest + 1, count)
            # Small clusters are mostly surface: half of the neighbours at 9 atoms.
            surface = 1 - 1.5 / np.cbrt(num_atoms) ** 1.5 if source.name == "water clusters" else 1
            neighbours = source.neighbours * surface * random.normal(1.0, 0.03, count)
        atoms.append(num_atoms)
        edges.append(np.rint(num_atoms * neighbours).astype(np.int64))
        sources.append(np.full(count, index, dtype=np.int64))
    return Mix(np.concatenate(atoms), np.concatenate(edges), np.concatenate(sources))


def main() -> None:
    """Print a table of the mix."""
    parser = argparse.ArgumentParser(description="Sizes of the paper's training set")
    parser.add_argument("mptrj", type=Path, help="mptrj_random_1k.extxyz.gz")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    mix = paper_mix(arguments.mptrj, arguments.scale, arguments.seed)
    print(f"{'set':16}{'structures':>12}{'atoms':>14}{'min':>6}{'max':>6}{'edges/atom':>12}")
    for index, source in enumerate(SOURCES):
        here = mix.source == index
        atoms, edges = mix.num_atoms[here], mix.num_edges[here]
        if len(atoms):
            print(
                f"{source.name:16}{len(atoms):12,}{atoms.sum():14,}{atoms.min():6}{atoms.max():6}"
                f"{edges.sum() / atoms.sum():12.1f}"
            )
    batches = mix.num_atoms.sum() / CAPACITY
    print(f"{len(mix.num_atoms):,} structures, {batches:,.0f} full batches of {CAPACITY} atoms")


if __name__ == "__main__":
    main()
