"""An ASE calculator of trained models, alone or as a committee.

``atoms.calc = BevatronCalculator("runs/water")``, then ``atoms.get_potential_energy()``.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from ase import Atoms
from ase.calculators.calculator import (
    Calculator,
    CalculatorSetupError,
    PropertyNotImplementedError,
    all_changes,
)
from ase.stress import full_3x3_to_voigt_6_stress

from bevatron.data.samples import unlabelled_structure
from bevatron.data.verlet import VerletList
from bevatron.errors import ConfigError
from bevatron.recipes.devices import announce
from bevatron.recipes.mace.potential import Potential, Results

Model = torch.nn.Module | Path | str


class BevatronCalculator(Calculator):  # type: ignore[misc]
    """Energy, free energy, forces, stress and atomic energies from a trained model.

    Several models are a committee: every property is the mean of theirs, and ``results`` also holds
    their standard deviation (``energy_std``, ``forces_std`` [N, 3], ``stress_std`` [6],
    ``energies_std`` [N]), a measure of how far the structure is from what they were trained on.

    Parameters
    ----------
    model
        A run folder, a model folder or a model object; or several of them.
    device
        Where torch computes: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``,
        ``"cuda:1"``.
    dtype
        ``"float64"``, for relaxations, phonons and energy differences; or ``"float32"``, which is
        faster and enough for most dynamics. Both are printed once.
    head
        Which readout of a multi-head model; its default head if not given. Names of heads in
        ``atoms.info`` have no effect.
    skin : Å
        The neighbour list extends this far beyond the cutoff and is reused until an atom has moved
        by half of it. It changes only the speed; 0 builds a list for every step.
    capture
        Whether evaluations are captured as CUDA graphs and replayed, see
        `bevatron.recipes.mace.potential.Potential`; None = on a GPU, where it is possible.

    Raises
    ------
    BevatronError
        If there is no such model, dtype, head or device; on evaluation, if the model does not know
        an element.

    Notes
    -----
    Stress is in ASE's sign and order (xx, yy, zz, yz, xz, xy), eV/Å^3. It is always computed for a
    structure that is periodic in three directions, and on request for one with three lattice
    vectors. ``energies`` are the model's energies of the atoms, E0 included; their sum is the
    energy.
    """

    implemented_properties: ClassVar[list[str]] = [
        "energy",
        "free_energy",
        "energies",
        "forces",
        "stress",
    ]
    # The model does not see them, so setting them must not cost an evaluation.
    ignored_changes: ClassVar[set[str]] = {"initial_charges", "initial_magmoms"}

    def __init__(
        self,
        model: Model | Sequence[Model],
        device: torch.device | str = "auto",
        dtype: str = "float64",
        *,
        head: str | None = None,
        skin: float = 0.5,
        capture: bool | None = None,
        **kwargs: Any,
    ) -> None:
        several = isinstance(model, Sequence) and not isinstance(model, str)
        models: list[Any] = list(model) if several else [model]  # type: ignore[arg-type]
        if not models:
            raise ConfigError("the calculator needs at least one model")
        self.potentials = [Potential(each, device, dtype, head, capture=capture) for each in models]
        announce(self.potentials[0].device, self.potentials[0].dtype)
        cutoffs = {potential.cutoff for potential in self.potentials}
        self.neighbours = {cutoff: VerletList(cutoff, skin) for cutoff in sorted(cutoffs)}
        super().__init__(**kwargs)

    def calculate(
        self,
        atoms: Atoms | None = None,
        properties: Sequence[str] = ("energy",),
        system_changes: Sequence[str] = tuple(all_changes),
    ) -> None:
        """Evaluate the model when ASE asks for properties."""
        super().calculate(atoms, list(properties), list(system_changes))
        if not self.atoms:
            raise CalculatorSetupError("the calculator was given no atoms")
        compute = ["energy", "forces", "node_energy"]
        if self.atoms.pbc.all() or "stress" in properties:
            if self.atoms.cell.rank < 3:
                raise PropertyNotImplementedError("stress needs three lattice vectors")
            compute.append("stress")
        self.results = as_properties([self._evaluate(each, compute) for each in self.potentials])

    def _evaluate(self, potential: Potential, compute: list[str]) -> Results:
        potential.check_elements(self.atoms.numbers, str(self.atoms.symbols))
        sample = unlabelled_structure(
            self.atoms.numbers,
            self.atoms.positions,
            self.atoms.cell.array,
            self.atoms.pbc,
            potential.head,
        )
        sample["edges"], sample["edge_shifts"] = self.neighbours[potential.cutoff].edges(
            sample["positions"], sample["cell"], sample["pbc"]
        )
        return next(potential.evaluate([sample], compute))


def as_properties(results: Sequence[Results]) -> dict[str, Any]:
    """Turn the outputs of one or several models into ASE's properties."""
    named = [_as_ase(each) for each in results]
    mean: dict[str, Any] = {
        name: np.mean([each[name] for each in named], axis=0) for name in named[0]
    }
    if len(named) > 1:
        spread = {name: np.std([each[name] for each in named], axis=0) for name in mean}
        mean |= {f"{name}_std": value for name, value in spread.items()}
    for name in ("energy", "energy_std"):
        if name in mean:
            mean[name] = float(mean[name])
    mean["free_energy"] = mean["energy"]
    return mean


def _as_ase(results: Results) -> dict[str, npt.NDArray[np.float64]]:
    named = {
        "energy": results["energy"],
        "forces": results["forces"],
        "energies": results["node_energy"],
    }
    if "stress" in results:
        named["stress"] = full_3x3_to_voigt_6_stress(results["stress"])
    return named
