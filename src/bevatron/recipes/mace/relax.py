"""Relaxation of many structures at once: FIRE for each, one model evaluation for all.

Every structure has its own state (velocities, time step, mixing), so it moves as it would alone
in `ase.optimize.FIRE`; only the evaluations are shared. A structure that has converged
leaves the batch.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import full_3x3_to_voigt_6_stress

from bevatron.data.samples import unlabelled_structure
from bevatron.data.verlet import VerletList
from bevatron.errors import ConfigError, DataError
from bevatron.recipes.finite import check_finite
from bevatron.recipes.mace.potential import Potential, Results
from bevatron.typing import Array, BoolArray, FloatArray, IntArray


@dataclass(frozen=True)
class Relaxation:
    """Result of a relaxation.

    Attributes
    ----------
    structures
        Copies of the given ones at their last positions (and cells), each with a calculator that
        holds its energy, forces and, with a relaxed cell, stress.
    converged : [S]
        Whether the largest force (with a relaxed cell, generalised force) is below fmax.
    steps : [S]
        Number of steps of each.
    energies : [S] eV
    fmax : [S] eV/Å
        The largest remaining force.
    """

    structures: list[Atoms]
    converged: BoolArray
    steps: IntArray
    energies: FloatArray
    fmax: FloatArray


def relax(
    model: Potential | torch.nn.Module | Path | str,
    structures: Atoms | Iterable[Atoms],
    fmax: float = 0.05,
    steps: int = 500,
    cell: bool = False,
    *,
    head: str | None = None,
    device: torch.device | str = "auto",
    dtype: str = "float64",
    max_atoms: int = 2048,
    skin: float = 0.5,
    progress: Callable[[int, int], None] | None = None,
) -> Relaxation:
    """Relax structures to a minimum of their energy with FIRE (Bitzek et al., PRL 97, 170201).

    Constraints of the structures (``FixAtoms`` and others of ASE) are obeyed. With ``cell=True``
    the cell relaxes together with the atoms, as ASE's ``UnitCellFilter`` does it (Tadmor et al.,
    PRB 59, 235): the deformation gradient times the number of atoms acts as three more atoms.
    Raises DataError if the model does not know an element, or there is no cell to relax;
    DivergenceError if a prediction is not finite.

    Parameters
    ----------
    model : a potential, a model, a model folder or a run folder
    structures : one or several; not changed
    fmax : eV/Å
        Converged when no force is larger.
    steps : maximum number of steps; unconverged structures are returned as they are
    cell : whether cells relax too; all structures must then be periodic in three directions
    head
        Readout for all structures; by default the one that a structure names as ``head``, and the
        model's default head for those that name none.
    device, dtype
        As for `bevatron.recipes.mace.potential.Potential`, which is made with them and `head`.
    max_atoms : maximum number of atoms in an evaluation of the model
    skin : Å
        Skin of the neighbour lists, see `bevatron.data.verlet.VerletList`.
    progress : called after each step with the numbers of converged and of all structures

    Examples
    --------
    >>> result = relax("runs/water", structures, fmax=0.01)              # doctest: +SKIP
    >>> result.converged.all()                                           # doctest: +SKIP
    """
    if not fmax > 0:
        raise ConfigError(f"fmax: expected a force above 0 eV/Å, got {fmax}")
    if steps < 0:
        raise ConfigError(f"steps: expected 0 or more, got {steps}")
    potential = model if isinstance(model, Potential) else Potential(model, device, dtype, head)
    # A generator would be empty the second time, and a structure is a sequence of its atoms.
    structures = [structures] if isinstance(structures, Atoms) else list(structures)
    for number, atoms in enumerate(structures):
        potential.check_elements(atoms.numbers, f"structure {number} ({atoms.symbols})")
        if cell and not (atoms.pbc.all() and atoms.cell.rank == 3):
            raise DataError(
                f"structure {number} ({atoms.symbols}) is not periodic in three directions; "
                "relax it with cell=False"
            )
    kind = _WithCell if cell else _Path
    paths = [kind(atoms, potential, skin) for atoms in structures]
    active = list(paths)
    for step in range(steps + 1):
        compute = ("energy", "forces", "stress") if cell else ("energy", "forces")
        samples = [path.sample() for path in active]
        for path, result in zip(
            active, potential.evaluate(samples, compute, max_atoms), strict=True
        ):
            check_finite(result, lambda path=path: _named(paths, path))  # type: ignore[misc]
            path.take(result)
        active = [path for path in active if path.fmax >= fmax]
        if progress is not None:
            progress(len(paths) - len(active), len(paths))
        if not active or step == steps:
            break
        for path in active:
            path.step()
    return Relaxation(
        structures=[path.finished() for path in paths],
        converged=np.array([path.fmax < fmax for path in paths], dtype=bool),
        steps=np.array([path.num_steps for path in paths], dtype=np.int64),
        energies=np.array([path.energy for path in paths], dtype=np.float64),
        fmax=np.array([path.fmax for path in paths], dtype=np.float64),
    )


def _named(paths: "Sequence[_Path]", path: "_Path") -> str:
    return f"structure {paths.index(path)} ({path.atoms.symbols}), step {path.num_steps}"


class Fire:
    """The state of FIRE for one structure, with the parameters that ASE uses.

    Parameters
    ----------
    max_step : Å
        Maximum length of a step, over all atoms.
    """

    def __init__(self, max_step: float = 0.2) -> None:
        self.max_step = max_step
        self.time_step, self.mixing, self.downhill = 0.1, 0.1, 0
        self.velocities: FloatArray | None = None

    def step(self, forces: FloatArray) -> FloatArray:
        """Return the displacements for the forces at the current positions."""
        if self.velocities is None:
            self.velocities = np.zeros_like(forces)
        elif np.vdot(forces, self.velocities) > 0:
            length = np.sqrt(np.vdot(self.velocities, self.velocities) / np.vdot(forces, forces))
            self.velocities += self.mixing * (length * forces - self.velocities)
            if self.downhill > 5:
                self.time_step = min(1.1 * self.time_step, 1.0)
                self.mixing *= 0.99
            self.downhill += 1
        else:
            self.velocities = np.zeros_like(forces)
            self.time_step, self.mixing, self.downhill = 0.5 * self.time_step, 0.1, 0
        self.velocities += self.time_step * forces
        displacements = self.time_step * self.velocities
        length = np.sqrt(np.vdot(displacements, displacements))
        return displacements * (min(1.0, self.max_step / length) if length > 0 else 1.0)


class _Path:
    """One structure: atoms relax, the cell is fixed."""

    def __init__(self, atoms: Atoms, potential: Potential, skin: float) -> None:
        self.atoms = atoms.copy()
        self.head = potential.head_of(atoms.info, str(atoms.symbols))
        self.verlet = VerletList(potential.cutoff, skin)
        self.fire = Fire()
        self.num_steps = 0
        self.energy = self.fmax = np.inf
        self.results: Results = {}
        self.generalised: FloatArray = np.zeros((0, 3))

    def sample(self) -> dict[str, Array]:
        """Return the sample for the model."""
        atoms = self.atoms
        sample = unlabelled_structure(
            atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, self.head
        )
        sample["edges"], sample["edge_shifts"] = self.verlet.edges(
            atoms.positions, atoms.cell.array, atoms.pbc
        )
        return sample

    def take(self, results: Results) -> None:
        """Store the results of the model for the current positions."""
        self.results, self.energy = results, float(results["energy"])
        self.generalised = self._generalised_forces()
        norms = np.linalg.norm(self.generalised, axis=1)
        self.fmax = float(norms.max(initial=0.0))

    def step(self) -> None:
        """Move by one step of FIRE."""
        self._move(self.fire.step(self.generalised))
        self.num_steps += 1

    def finished(self) -> Atoms:
        """Return the structure with its results."""
        named = {"energy": self.energy, "forces": self.results["forces"]}
        if "stress" in self.results:
            named["stress"] = full_3x3_to_voigt_6_stress(self.results["stress"])
        self.atoms.calc = SinglePointCalculator(self.atoms, **named)
        return self.atoms

    def _forces(self) -> FloatArray:
        forces: FloatArray = self.results["forces"].copy()
        for constraint in self.atoms.constraints:
            constraint.adjust_forces(self.atoms, forces)
        return forces

    def _generalised_forces(self) -> FloatArray:
        return self._forces()

    def _move(self, displacements: FloatArray) -> None:
        self.atoms.set_positions(self.atoms.positions + displacements)


class _WithCell(_Path):
    """One structure: atoms and cell relax together.

    The coordinates are the positions pulled back to the first cell, and the deformation gradient F
    (cell = first cell . F^T) times the number of atoms. Their forces are f . F and
    (F^-1 . virial^T)^T / N.
    """

    def __init__(self, atoms: Atoms, potential: Potential, skin: float) -> None:
        super().__init__(atoms, potential, skin)
        self.first_cell = self.atoms.cell.array.copy()
        self.deformation = np.eye(3)

    def _generalised_forces(self) -> FloatArray:
        virial = -self.atoms.get_volume() * self.results["stress"]
        on_cell = np.linalg.solve(self.deformation, virial).T / len(self.atoms)
        return np.concatenate([self._forces() @ self.deformation, on_cell])

    def _move(self, displacements: FloatArray) -> None:
        num_atoms = len(self.atoms)
        pulled_back = np.linalg.solve(self.deformation, self.atoms.positions.T).T
        pulled_back += displacements[:num_atoms]
        self.deformation = self.deformation + displacements[num_atoms:] / num_atoms
        self.atoms.set_cell(self.first_cell @ self.deformation.T, scale_atoms=True)
        self.atoms.set_positions(pulled_back @ self.deformation.T)
