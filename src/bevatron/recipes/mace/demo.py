"""The part of ``bevatron demo`` on structures: from files to molecular dynamics."""

from pathlib import Path
from typing import Any

import numpy as np

from bevatron.data.dataset import Dataset
from bevatron.output import say
from bevatron.recipes.demo import WIDTH, Part, bundled
from bevatron.recipes.mace.calculator import BevatronCalculator
from bevatron.recipes.mace.data import load_structures
from bevatron.recipes.mace.evaluate import evaluate_dataset, print_tables
from bevatron.recipes.mace.potential import Potential
from bevatron.recipes.mace.run import MaceRun, build
from bevatron.train.loop import fit
from bevatron.train.report import plots

DATA = "structures.extxyz.gz"

SETTINGS: dict[str, Any] = {
    "preset": "small",
    "model": {"num_channels": 16, "r_max": 4.5},
    "data": {"valid_size": 0.1, "test_size": 0.1},
    "loss": {"energy_weight": 300.0, "forces_weight": 100.0, "stress_weight": 3000.0},
    "optim": {"lr": 0.01, "ema": 0.99},
    "schedule": {"kind": "cosine", "warmup_epochs": 0.5},
    "batch": {"capacity": 160},
    "train": {"epochs": 32, "dtype": "float32", "device": "cpu", "threads": 1},
}
"""Settings of the demo that differ from the defaults."""


def run_demo(out: Path) -> Part:
    """Train, evaluate, draw and simulate.

    Parameters
    ----------
    out : the demo's folder; a run in it is resumed
    """
    config = configuration(out)
    say("1. train a small MACE on bundled structures (GFN2-xTB labels)")
    result = fit(build(config, resume=True))
    if result.stopped_by is not None:
        return Part(exit_code=result.exit_code)
    say("2. errors on unseen structures")
    data = load_structures(config.data, config.model.r_max, config.output / "prepared")
    assert data.test is not None
    evaluation = evaluate_dataset(Potential(config.output, dtype="float32"), data.test)
    print_tables(evaluation, WIDTH)
    say("3. molecular dynamics of a water cluster through ASE, 0.5 ps at constant energy")
    drift = run_dynamics(BevatronCalculator(config.output), data.test, out)
    force = evaluation.total["forces_rmse"] * 1e3
    return Part(
        f"forces to {force:.0f} meV/Å (test RMSE); drift {drift * 1e3:.2f} meV/atom/ps",
        (
            ("run/report.html", "learning curves, parity plots, errors, timing"),
            ("run/", "weights, checkpoints, metrics, log, plots"),
            ("dynamics.extxyz", "the trajectory"),
            ("dynamics.png", "its energies and temperature"),
        ),
    )


def configuration(out: Path) -> MaceRun:
    """Return the configuration of the run, on a copy of the bundled structures."""
    data = {"data": {**SETTINGS["data"], "train": [str(bundled(DATA, out))]}}
    return MaceRun.from_values({**SETTINGS, "output": str(out / "run"), **data})


def run_dynamics(
    calculator: Any, structures: Dataset, out: Path, steps: int = 1000, timestep_fs: float = 0.5
) -> float:
    """Run Verlet dynamics of the cluster nearest to 18 atoms; write trajectory and figure.

    Returns
    -------
    Drift of the total energy in eV/atom/ps, from a linear fit.
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
