"""Make the bundled data of `make demo`: molecules and ice, labelled with GFN2-xTB.

Needs tblite (``pip install "bevatron[tblite]"``) and a few minutes on one core::

    OMP_NUM_THREADS=1 python tools/make_demo_data.py

Geometries of molecules are frames of short Langevin dynamics with GFN2-xTB itself, from relaxed
starting structures, far enough apart to differ; those of ice are shaken. Positions are rounded as
they are written before the label is computed, so energy, forces and stress belong exactly to the
coordinates of the file. All random numbers derive from one seed; another machine or version of
tblite follows other trajectories after some hundred steps, but the same distribution.
"""

import argparse
import gzip
import io
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import ase.io
import numpy as np
from ase import Atoms, units
from ase.build import molecule
from ase.md.langevin import Langevin
from ase.neighborlist import neighbor_list
from ase.optimize import FIRE
from scipy.spatial.transform import Rotation
from tblite.ase import TBLite

OUT = Path(__file__).parents[1] / "src/bevatron/recipes/demo_data/structures.extxyz.gz"
SEED = 20250
LEVEL = "GFN2-xTB"
DECIMALS = 6

MOLECULES = {
    "methanol": "CH3OH",
    "ethanol": "CH3CH2OH",
    "methylamine": "H3CNH2",
    "acetic_acid": "CH3COOH",
    "acetamide": "CH3CONH2",
}
WATER_CLUSTERS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 14, 16, 20)


@dataclass(frozen=True)
class Sampling:
    """How one trajectory is sampled.

    Attributes
    ----------
    temperature : K, of the thermostat and of the first velocities
    frames : how many frames are kept
    interval : steps between two of them
    warm_up : steps before the first
    """

    temperature: float
    frames: int
    interval: int
    warm_up: int = 100


def calculator(accuracy: float = 1.0) -> TBLite:
    return TBLite(method=LEVEL, accuracy=accuracy, verbosity=0)


def sample(start: Atoms, how: Sampling, rng: np.random.Generator) -> Iterator[Atoms]:
    """Yield frames of Langevin dynamics (0.5 fs) begun at a relaxed copy of ``start``."""
    atoms = start.copy()
    atoms.calc = calculator()
    FIRE(atoms, logfile=None).run(fmax=0.1, steps=150)
    deviation = np.sqrt(atoms.get_masses() * units.kB * how.temperature)
    atoms.set_momenta(rng.normal(size=(len(atoms), 3)) * deviation[:, None])
    dynamics = Langevin(
        atoms,
        0.5 * units.fs,
        temperature_K=how.temperature,
        friction=0.02 / units.fs,
        fixcm=False,
        rng=rng,
    )
    dynamics.run(how.warm_up)
    for _ in range(how.frames):
        dynamics.run(how.interval)
        yield atoms.copy()


def label(atoms: Atoms, group: str) -> Atoms:
    """Return the structure, rounded as it will be written, with energy, forces and stress."""
    frame = Atoms(
        numbers=atoms.numbers,
        positions=np.round(atoms.positions, DECIMALS),
        cell=np.round(atoms.cell.array, DECIMALS),
        pbc=atoms.pbc,
    )
    frame.calc = calculator(accuracy=0.05)
    energy, forces = frame.get_potential_energy(), frame.get_forces()
    stress = frame.get_stress(voigt=False) if frame.pbc.all() else None
    frame.calc = None
    frame.info = {"config_type": group, "level_of_theory": LEVEL}
    frame.info["REF_energy"] = round(float(energy), 7)
    frame.arrays["REF_forces"] = np.round(forces, DECIMALS)
    if stress is not None:
        frame.info["REF_stress"] = np.round((stress + stress.T) / 2, 8)
    return frame


def water_cluster(size: int, rng: np.random.Generator) -> Atoms:
    """Put molecules at random into the smallest ball in which no two oxygens are within 2.7 Å."""
    cluster, radius = Atoms(), 1.2 * size ** (1 / 3)
    centres: list[np.ndarray] = []
    tries = 0
    while len(centres) < size:
        direction = rng.normal(size=3)
        centre = direction / np.linalg.norm(direction) * radius * rng.random() ** (1 / 3)
        if all(np.linalg.norm(centre - other) > 2.7 for other in centres):
            water = molecule("H2O")
            water.rotate(float(rng.uniform(0, 360)), rng.normal(size=3))
            water.translate(centre - water.positions[0])
            cluster += water
            centres.append(centre)
        tries += 1
        if tries % 200 == 0:
            radius *= 1.02
    return cluster


def ice() -> Atoms:
    """Build hexagonal ice with ordered protons: 8 molecules in an orthorhombic cell.

    The oxygens of ice XI (Leadbetter et al., J. Chem. Phys. 82, 424 (1985)); hydrogens at a usual
    distance along the hydrogen bonds, in the order that obeys the ice rules and is least polar.
    """
    cell = np.diag([4.465, 7.858, 7.292])
    oxygens = {"a": (0.0, 0.6648, 0.0631), "b": (0.5, 0.8255, -0.0631)}
    fractional = []
    for x, y, z in oxygens.values():
        for point in ((x, y, z), (-x, -y, z + 0.5)):
            fractional += [point, (point[0] + 0.5, point[1] + 0.5, point[2])]
    oxygen = Atoms("O8", scaled_positions=np.array(fractional) % 1, cell=cell, pbc=True)
    return _ordered_hydrogens(oxygen)


def _ordered_hydrogens(oxygen: Atoms) -> Atoms:
    """Give each oxygen two hydrogens along its four bonds, one per bond, with the least dipole."""
    i_bond, j_bond, vectors = neighbor_list("ijD", oxygen, 3.0)
    half = [tuple(vector) > (0, 0, 0) for vector in vectors]
    i_bond, j_bond, vectors = i_bond[half], j_bond[half], vectors[half]
    choices = (np.arange(2 ** len(i_bond))[:, None] >> np.arange(len(i_bond))) & 1
    given = np.zeros((len(choices), len(oxygen)), dtype=int)
    for bond, (i, j) in enumerate(zip(i_bond, j_bond, strict=True)):
        given[:, i] += 1 - choices[:, bond]
        given[:, j] += choices[:, bond]
    choices = choices[(given == 2).all(axis=1)]
    dipoles = np.linalg.norm((1 - 2 * choices) @ vectors, axis=1).round(6)
    to_j = choices[np.argmin(dipoles)].astype(bool)
    along = np.where(to_j, -1.0, 1.0)[:, None] * vectors
    along *= 0.98 / np.linalg.norm(along, axis=1, keepdims=True)
    owner = np.where(to_j, j_bond, i_bond)
    return oxygen + Atoms(f"H{len(owner)}", oxygen.positions[owner] + along)


def ice_frames(rng: np.random.Generator, number: int = 40) -> Iterator[Atoms]:
    """Yield relaxed ice, strained by up to 3 % and shaken about as much as at 250 K.

    Dynamics would take an hour here: GFN2-xTB needs seconds for each step of a small periodic cell.
    Molecules are moved and turned as a whole, and their atoms a little within them.
    """
    relaxed = ice()
    relaxed.calc = calculator()
    FIRE(relaxed, logfile=None).run(fmax=0.1, steps=50)
    to_oxygen = relaxed.get_all_distances(mic=True)
    for _ in range(number):
        strain = rng.uniform(-0.03, 0.03, size=(3, 3))
        frame = Atoms(relaxed.symbols, cell=relaxed.cell, pbc=True)
        frame.set_cell(relaxed.cell.array @ (np.eye(3) + (strain + strain.T) / 2))
        centres = relaxed.get_scaled_positions() @ frame.cell.array
        for oxygen in np.flatnonzero(relaxed.numbers == 8):
            molecule_atoms = np.argsort(to_oxygen[oxygen])[:3]
            arms = relaxed.get_distances(oxygen, molecule_atoms, mic=True, vector=True)
            turned = Rotation.from_rotvec(rng.normal(0, 0.1, 3)).apply(arms)
            place = centres[oxygen] + rng.normal(0, 0.08, 3)
            frame.positions[molecule_atoms] = place + turned + rng.normal(0, 0.025, (3, 3))
        yield frame


def molecule_frames(name: str, rng: np.random.Generator) -> Iterator[Atoms]:
    """Yield a molecule at 300 and at 600 K."""
    for temperature in (300, 600):
        yield from sample(molecule(name), Sampling(temperature, 14, 60), rng)


def cluster_frames(size: int, rng: np.random.Generator) -> Iterator[Atoms]:
    """Yield two clusters of ``size`` molecules, both at 300 K."""
    for _ in range(2):
        start = water_cluster(size, rng)
        yield from sample(start, Sampling(300, 6, 60), rng)


def make() -> list[Atoms]:
    """Build all frames, group by group; each group has random numbers of its own."""
    frames: list[Atoms] = []
    groups: dict[str, Callable[[np.random.Generator], Iterator[Atoms]]] = {
        name: partial(molecule_frames, formula) for name, formula in MOLECULES.items()
    }
    groups |= {f"water_cluster_{n}": partial(cluster_frames, n) for n in WATER_CLUSTERS}
    groups["ice"] = ice_frames
    for index, (group, source) in enumerate(groups.items()):
        begin = time.perf_counter()
        frames += [label(atoms, group) for atoms in source(np.random.default_rng([SEED, index]))]
        print(f"{group}: {len(frames)} frames so far, {time.perf_counter() - begin:.0f} s")
    return frames


def write(frames: list[Atoms], path: Path) -> None:
    """Write extended XYZ, compressed without a time stamp: equal frames give equal files."""
    text = io.StringIO()
    ase.io.write(text, frames, format="extxyz", write_results=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(text.getvalue().encode(), compresslevel=9, mtime=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT)
    path = parser.parse_args().out
    frames = make()
    write(frames, path)
    forces = np.concatenate([frame.arrays["REF_forces"] for frame in frames])
    print(
        f"{path}: {len(frames)} frames, {len(forces)} atoms, {path.stat().st_size / 1e3:.0f} kB, "
        f"force RMS {np.sqrt(np.mean(forces**2)):.2f} eV/Å, largest {np.abs(forces).max():.1f}"
    )


if __name__ == "__main__":
    main()
