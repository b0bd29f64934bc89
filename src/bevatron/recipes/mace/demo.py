"""`bevatron demo`: from bundled structures to molecular dynamics in a few minutes on two cores."""

import time
from collections.abc import Callable
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bevatron.data.dataset import Dataset
from bevatron.errors import ConfigError
from bevatron.files import write_text_atomically
from bevatron.recipes.gpspp.demo import gpspp_demo
from bevatron.recipes.graph.demo import graph_demo
from bevatron.recipes.mace.data import load_structures
from bevatron.recipes.mace.evaluate import evaluate_dataset, print_tables
from bevatron.recipes.mace.potential import Potential
from bevatron.recipes.mace.run import MaceRun, build
from bevatron.train.loop import fit
from bevatron.train.report import plots

MARK = "DEMO.txt"
"""Says that a folder was made by this demonstration."""

DATA = "structures.extxyz.gz"

SETTINGS: dict[str, Any] = {
    "preset": "small",
    "model": {"num_channels": 16, "r_max": 4.5},
    "data": {"valid_fraction": 0.1, "test_fraction": 0.1},
    "loss": {"energy_weight": 300.0, "forces_weight": 100.0, "stress_weight": 3000.0},
    "optim": {"lr": 0.01, "ema": 0.99},
    "schedule": {"kind": "cosine", "warmup_epochs": 0.5},
    "batch": {"capacity": 160},
    "train": {"epochs": 32, "dtype": "float32", "device": "cpu", "threads": 1},
}
"""What the demonstration changes of the defaults."""


def run_demo(out: Path, calculator: Callable[[Path], Any]) -> int:
    """Train, evaluate, draw and simulate; started again, what is done is not done again.

    Parameters
    ----------
    out
        Folder for everything.
    calculator
        Makes an ASE calculator of a run's folder.

    Returns
    -------
    The exit code: 0, or that of a training which was stopped.

    Raises
    ------
    ConfigError
        If the folder holds something else.
    """
    began = time.monotonic()
    _claim(out)
    torch.set_num_threads(1)  # such small tensors gain nothing from more
    config = MaceRun.from_values({**SETTINGS, "output": str(out / "run"), **_data()})
    _say("1. training a small MACE on bundled structures (GFN2-xTB labels)")
    result = fit(build(config, resume=True))
    if result.stopped_by is not None:
        _say("stopped; `bevatron demo` again goes on")
        return result.exit_code
    _say("2. errors on structures that it has not seen")
    data = load_structures(config.data, config.model.r_max, config.output / "prepared")
    assert data.test is not None
    evaluation = evaluate_dataset(Potential(config.output, dtype="float32"), data.test)
    print_tables(evaluation)
    _say("3. molecular dynamics of a water cluster, 0.5 ps at constant energy, through ASE")
    drift = run_dynamics(calculator(config.output), data.test, out)
    _say(f"   drift of the total energy: {drift * 1e3:.3f} meV/atom/ps")
    if stopped := graph_demo(out):
        return stopped
    if stopped := gpspp_demo(out):
        return stopped
    _say(
        f"done in {time.monotonic() - began:.0f} s; everything is in {out}:",
        "   run/report.html   learning curves, parity plots, errors, batch balance, timing",
        "   run/plots/*.png   the same pictures",
        "   run/              configuration, metrics, log, weights, checkpoints",
        "   dynamics.extxyz   the trajectory;  dynamics.png   energies and temperature",
        "   graph/            attention on a graph: report.html, classes.csv, times.csv, times.png",
        "   molecules/        gaps of molecules from SMILES: report.html, predicted.csv",
        "use it: from bevatron.ase import BevatronCalculator; "
        f'atoms.calc = BevatronCalculator("{out / "run"}")',
    )
    return 0


def run_dynamics(
    calculator: Any, structures: Dataset, out: Path, steps: int = 1000, timestep_fs: float = 0.5
) -> float:
    """Run Verlet dynamics of the cluster nearest to 18 atoms; write trajectory and picture.

    Returns
    -------
    Drift of the total energy in eV/atom/ps, by a straight line through it.
    """
    import ase.io
    from ase import Atoms, units
    from ase.md.verlet import VelocityVerlet

    sizes = structures.lengths("atomic_numbers")
    chosen = int(np.argmin(np.abs(sizes - 18)))
    sample = structures[chosen]
    atoms = Atoms(sample["atomic_numbers"], sample["positions"])
    atoms.calc = calculator
    # Maxwell-Boltzmann momenta at 300 K, the cluster as a whole at rest.
    masses = atoms.get_masses()[:, None]
    velocities = np.random.default_rng(0).normal(size=(len(atoms), 3))
    velocities *= np.sqrt(300 * units.kB / masses)
    atoms.set_velocities(velocities - (masses * velocities).sum(axis=0) / masses.sum())
    rows: list[tuple[float, float, float, float]] = []
    frames: list[Atoms] = []

    def record() -> None:
        fs = dynamics.get_time() / units.fs
        potential = atoms.get_potential_energy()
        rows.append((fs, potential, atoms.get_kinetic_energy(), atoms.get_temperature()))
        frames.append(atoms.copy())

    dynamics = VelocityVerlet(atoms, timestep_fs * units.fs)
    dynamics.attach(record, interval=20)
    dynamics.run(steps)
    ase.io.write(out / "dynamics.extxyz", frames, format="extxyz")
    values = np.array(rows)
    ps, total = values[:, 0] / 1e3, values[:, 1] + values[:, 2]
    energies = (
        plots.Curve("potential", ps, values[:, 1] - total[0]),
        plots.Curve("kinetic", ps, values[:, 2]),
        plots.Curve("total", ps, total - total[0]),
    )
    temperature = (plots.Curve("", ps, values[:, 3]),)
    figure = plots.curves(
        [
            plots.Panel("Energy", "energy - first total energy (eV)", energies, logarithmic=False),
            plots.Panel("Temperature", "temperature (K)", temperature, logarithmic=False),
        ],
        "time (ps)",
    )
    plots.save(figure, out / "dynamics.png")
    return float(np.polyfit(ps, total, 1)[0] / len(atoms))


def _data() -> dict[str, Any]:
    with as_file(files("bevatron.recipes") / "demo_data" / DATA) as path:
        return {"data": {**SETTINGS["data"], "train": [str(path)]}}


def _claim(out: Path) -> None:
    """Make the folder, or recognise it."""
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out}: holds something else; choose an empty or a new folder")
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(out / MARK, "Made by `bevatron demo`; can be deleted.\n", ConfigError)


def _say(*lines: str) -> None:
    print(*lines, sep="\n")  # noqa: T201
