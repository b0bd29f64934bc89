"""An ASE calculator of trained models, alone or as a committee.

``atoms.calc = BevatronCalculator("runs/water")``, then ``atoms.get_potential_energy()``.
"""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
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
from bevatron.output import note
from bevatron.recipes.devices import announce
from bevatron.recipes.finite import check_finite
from bevatron.recipes.mace.potential import Potential, Results, committee
from bevatron.typing import Arrays, FloatArray

Model = torch.nn.Module | Path | str

OF_ASE = frozenset({"restart", "ignore_bad_restart_file", "label", "atoms", "directory"})
"""Arguments of a calculator of ASE."""


@cache
def tell_of_recording() -> None:
    """Say, once, why the first evaluations on a GPU take longer."""
    note("first evaluations compile kernels and capture CUDA graphs that later ones replay")


class BevatronCalculator(Calculator):  # type: ignore[misc]
    """Energy, free energy, forces, stress and atomic energies from a trained model.

    Several models are a committee: every property is the mean of theirs, and ``results`` also holds
    their standard deviation (``energy_std``, ``forces_std`` [N, 3], ``stress_std`` [6],
    ``energies_std`` [N]), a measure of how far the structure is from what they were trained on.
    Raises BevatronError if there is no such model, dtype, head or device; on evaluation, if the
    model does not know an element or its prediction is not finite.

    Parameters
    ----------
    model : a run folder, a model folder or a model object; or several of them
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
    **kwargs : arguments of a calculator of ASE; no others

    Notes
    -----
    Stress is in ASE's sign and order (xx, yy, zz, yz, xz, xy), eV/Å^3. It is always computed for a
    structure that is periodic in three directions, and on request for one with three lattice
    vectors. ``energies`` are the model's energies of the atoms, E0 included; their sum is the
    energy. `get_descriptors` and `get_hessian` compute what is not a property of ASE.
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
        for name in kwargs.keys() - OF_ASE:  # which keeps anything without a word
            raise TypeError(f"BevatronCalculator got an unexpected keyword argument '{name}'")
        several = isinstance(model, Sequence) and not isinstance(model, str)
        models: list[Any] = list(model) if several else [model]  # type: ignore[arg-type]
        if not models:
            raise ConfigError("the calculator needs at least one model")
        self.potentials = committee(models, device, dtype, head, capture=capture)
        announce(self.potentials[0].device, self.potentials[0].dtype)
        if self.potentials[0].captured:
            tell_of_recording()
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
        self._structure(None)
        compute = ["energy", "forces", "node_energy"]
        if self.atoms.pbc.all() or "stress" in properties:
            if self.atoms.cell.rank < 3:
                raise PropertyNotImplementedError("stress needs three lattice vectors")
            compute.append("stress")
        self.results = as_properties([self._evaluate(each, compute) for each in self.potentials])

    def get_descriptors(
        self, atoms: Atoms | None = None, invariants_only: bool = True, num_layers: int = -1
    ) -> FloatArray | list[FloatArray]:
        """Return descriptors of the surroundings of every atom, from the model's layers.

        Raises BevatronError for a number of layers that the model does not have, and as on
        evaluation.

        Parameters
        ----------
        atoms : the structure; by default that of the last evaluation
        invariants_only
            Only the scalars of each layer, which no rotation changes; otherwise also its vectors
            and tensors, in e3nn's order (``128x0e+128x1o``: the scalars, then x, y, z of the first
            channel, ...). The last layer has only scalars.
        num_layers : how many layers, from the first on; -1 = all

        Returns
        -------
        [N, features], layer after layer; invariants have ``num_layers * num_channels`` columns.
        A committee returns a list, because features of different models are not comparable.
        """
        atoms = self._structure(atoms)
        name = "descriptors" if invariants_only else "features"
        found = []
        for potential in self.potentials:
            config: Any = potential.model.config
            layers = config.num_interactions if num_layers == -1 else num_layers
            if not 1 <= layers <= config.num_interactions:
                raise ConfigError(
                    f"num_layers: the model has {config.num_interactions} layers, got {num_layers}"
                )
            degrees = [config.layer_degrees(layer)[1] for layer in range(layers)]
            per_channel = layers if invariants_only else sum((top + 1) ** 2 for top in degrees)
            sample = self._sample(potential, atoms)
            values = next(potential.evaluate([sample], [name]))[name]
            found.append(values[:, : per_channel * config.num_channels])
        return found if len(found) > 1 else found[0]

    def get_hessian(self, atoms: Atoms | None = None) -> FloatArray:
        """Return the second derivatives of the energy by positions; of a committee the mean.

        They are exact: computed by automatic differentiation, not by displacements.
        ``VibrationsData.from_2d(atoms, calculator.get_hessian(atoms))`` of ASE turns them into
        frequencies. Raises BevatronError as on evaluation.

        Parameters
        ----------
        atoms : the structure; by default that of the last evaluation

        Returns
        -------
        [3N, 3N] eV/Å^2, symmetric; row 3 i + a is atom i along axis a. For a periodic structure it
        gives the phonons at the centre of the Brillouin zone.
        """
        atoms = self._structure(atoms)
        several = [each.hessian(self._sample(each, atoms)) for each in self.potentials]
        mean: FloatArray = np.mean(several, axis=0).reshape(2 * (3 * len(atoms),))
        return mean

    def _structure(self, atoms: Atoms | None) -> Atoms:
        """Return the structure to compute, by default that of the last evaluation."""
        atoms = self.atoms if atoms is None else atoms
        if not atoms:
            raise CalculatorSetupError("the calculator was given no atoms")
        return atoms

    def _evaluate(self, potential: Potential, compute: list[str]) -> Results:
        results = next(potential.evaluate([self._sample(potential, self.atoms)], compute))
        check_finite(results, lambda: str(self.atoms.symbols))
        return results

    def _sample(self, potential: Potential, atoms: Atoms) -> Arrays:
        potential.check_elements(atoms.numbers, str(atoms.symbols))
        sample = unlabelled_structure(
            atoms.numbers, atoms.positions, atoms.cell.array, atoms.pbc, potential.head
        )
        sample["edges"], sample["edge_shifts"] = self.neighbours[potential.cutoff].edges(
            sample["positions"], sample["cell"], sample["pbc"]
        )
        return sample


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


def _as_ase(results: Results) -> dict[str, FloatArray]:
    named = {
        "energy": results["energy"],
        "forces": results["forces"],
        "energies": results["node_energy"],
    }
    if "stress" in results:
        named["stress"] = full_3x3_to_voigt_6_stress(results["stress"])
    return named
