"""Prediction and relaxation of structures in files: extended XYZ out, order and columns kept."""

import json
from collections.abc import Callable, Iterator, Sequence
from io import TextIOWrapper
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.stress import voigt_6_to_full_3x3_stress

from bevatron import files
from bevatron.data.neighbours import add_neighbours
from bevatron.data.readers.ase_files import format_of, is_pickle
from bevatron.data.readers.labels import COMMON_NAMES
from bevatron.data.samples import unlabelled_structure
from bevatron.errors import DataError, TrustError
from bevatron.recipes.devices import announce
from bevatron.recipes.finite import check_finite
from bevatron.recipes.mace.calculator import as_properties
from bevatron.recipes.mace.potential import Potential, Results, committee
from bevatron.recipes.mace.relax import Relaxation, relax
from bevatron.typing import Arrays

CHUNK = 256
"""Number of structures read before they are batched."""


def predict_file(
    models: Sequence[torch.nn.Module | Path | str],
    source: Path | str,
    out: Path | str,
    *,
    prefix: str = "predicted_",
    head: str | None = None,
    device: str = "auto",
    dtype: str = "float64",
    capacity: int = 1024,
    progress: Callable[[int], None] | None = None,
) -> int:
    """Predict every structure of a file and write it with the results added.

    ``PREFIX + energy`` (eV), ``forces`` (eV/Å), ``energies`` (eV per atom) and, with a cell,
    ``stress`` (eV/Å^3) are added; with several models their mean, and ``energy_std`` and
    ``forces_std`` for the spread. Raises DataError for a frame that cannot be read or has unknown
    elements; names file and frame.

    Parameters
    ----------
    models : potentials, one or a committee
    source : any format that ASE reads; read in pieces
    out : extended XYZ; appears only when it is complete
    prefix : prefix of the names of the results, so that labels in the input are kept
    head
        Readout for all structures; by default the one that a structure names as ``head``, and the
        model's default head for those that name none.
    device, dtype : where and in which precision to compute
    capacity : maximum number of atoms per batch
    progress : called with the number of structures done

    Returns
    -------
    Number of structures.
    """
    out, done = _extxyz(out), 0
    potentials = committee(models, device, dtype, head)
    announce(potentials[0].device, potentials[0].dtype)
    structures = _read(Path(source))
    with files.atomic_write(out, DataError) as raw:
        file = TextIOWrapper(raw, "utf-8")
        while chunk := list(islice(structures, CHUNK)):
            results = [_evaluate(each, chunk, Path(source), capacity) for each in potentials]
            for (_, atoms), *found in zip(chunk, *results, strict=True):
                _annotate(atoms, found, prefix)
                _write(file, atoms)
            done += len(chunk)
            if progress is not None:
                progress(done)
        if not done:
            raise DataError(f"{source}: holds no structures")
        for potential in potentials:
            potential.warn_of_unused_heads(source)
        file.flush()
        file.detach()  # the file below is closed by atomic_write, after fsync
    return done


def predict_structures(
    models: Sequence[torch.nn.Module | Path | str],
    source: Path | str | Atoms | Sequence[Atoms],
    *,
    head: str | None = None,
    device: str = "auto",
    dtype: str = "float64",
    capacity: int = 1024,
) -> list[Atoms]:
    """Predict structures in batches and return copies that hold the results.

    ``atoms.get_potential_energy()`` and so on give the results; of several models their mean, and
    ``atoms.calc.results`` has the spread too, as in `BevatronCalculator`. Raises DataError naming
    the structure, for what cannot be read or has elements unknown to the model.

    Parameters
    ----------
    models, head, device, dtype, capacity : as in `predict_file`
    source : a file that ASE reads, a structure, or several
    """
    if isinstance(source, str | Path):
        where, structures = Path(source), list(_read(Path(source)))
    else:
        given = [source] if isinstance(source, Atoms) else source
        where, structures = Path("structures"), list(enumerate(given))
    potentials = committee(models, device, dtype, head)
    announce(potentials[0].device, potentials[0].dtype)
    results = [_evaluate(each, structures, where, capacity) for each in potentials]
    predicted = []
    for (_, atoms), *found in zip(structures, *results, strict=True):
        copy = atoms.copy()
        values = as_properties(found)
        if copy.cell.rank < 3:
            values = {name: value for name, value in values.items() if "stress" not in name}
        copy.calc = SinglePointCalculator(copy)
        copy.calc.results = values
        predicted.append(copy)
    return predicted


def relax_file(
    model: torch.nn.Module | Path | str,
    source: Path | str,
    out: Path | str,
    fmax: float = 0.05,
    steps: int = 500,
    cell: bool = False,
    *,
    head: str | None = None,
    device: str = "auto",
    dtype: str = "float64",
) -> Relaxation:
    """Relax all structures of a file and write them with energy, forces and stress.

    See `bevatron.recipes.mace.relax.relax`; ``relax_converged`` and ``relax_steps`` are added.
    Labels that the input has under common names (``REF_energy``, ``forces``) are left out: they
    belong to the structures before relaxation and must not be trained on by mistake. Raises
    DataError for a frame that cannot be read or has unknown elements; names file and frame.

    Parameters
    ----------
    model : a model, a model folder or a run
    source : structures in any format that ASE reads
    out : extended XYZ to write
    fmax : eV/Å
        Converged once no force is larger.
    steps : maximum number of steps
    cell : relax the cells too
    head : readout for all structures, as in `predict_file`
    device, dtype : where and in which precision to compute
    """
    out = _extxyz(out)
    potential = Potential(model, device, dtype, head)
    announce(potential.device, potential.dtype)
    structures = []
    for number, atoms in _read(Path(source)):
        if cell and not (atoms.pbc.all() and atoms.cell.rank == 3):
            raise DataError(
                f"{source}, frame {number}: is not periodic in three directions, so there is no "
                "cell to relax; leave `cell=True` out"
            )
        _drop_labels(atoms)
        _sample(atoms, potential, f"{source}, frame {number}")  # refused before work begins
        structures.append(atoms)
    if not structures:
        raise DataError(f"{source}: holds no structures")
    potential.warn_of_unused_heads(source)
    try:
        result = relax(potential, structures, fmax, steps, cell)
    except DataError as error:
        raise DataError(f"{source}: {error}") from None
    with files.atomic_write(out, DataError) as raw:
        file = TextIOWrapper(raw, "utf-8")
        for i, atoms in enumerate(result.structures):
            atoms.info["relax_converged"] = bool(result.converged[i])
            atoms.info["relax_steps"] = int(result.steps[i])
            _write(file, atoms)
        file.flush()
        file.detach()
    return result


def _write(file: TextIOWrapper, atoms: Atoms) -> None:
    """Write a structure so that texts are read again as they are.

    ASE would end the line at a line break in one, drop its backslashes, and read what follows an
    empty one as its value; as JSON they are kept.
    """
    import ase.io

    kept = atoms.info
    atoms.info = {
        key: "_JSON " + json.dumps(text).replace("\\", "\\\\")
        if isinstance(text, str) and ("\\" in text or text.splitlines() != [text])
        else text
        for key, text in kept.items()
    }
    ase.io.write(file, atoms, format="extxyz")
    atoms.info = kept


def _extxyz(out: Path | str) -> Path:
    """Reject a path that is a folder or has the extension of another format."""
    path = Path(out)
    if path.is_dir():
        raise DataError(f"{path}: is a folder, expected the name of a file to write")
    if path.suffix.lower() not in {".extxyz", ".xyz"}:
        raise DataError(f"{path}: extended XYZ is written; name it {path.stem}.extxyz")
    return path


def _read(path: Path) -> Iterator[tuple[int, Any]]:
    import ase.io

    if path.is_dir():
        raise DataError(f"{path}: is a folder, expected a file of structures")
    if not path.is_file():
        raise DataError(f"{path}: the file does not exist")
    if path.stat().st_size == 0:
        raise DataError(f"{path}: the file is empty")
    if is_pickle(path):
        raise TrustError(
            f"{path}: is a pickle, which can run any code when it is read; convert it to extended "
            "XYZ"
        )
    frame = 0
    structures = ase.io.iread(path, index=":", format=format_of(path))
    while True:
        try:
            atoms = next(structures)
        except StopIteration:
            return
        except Exception as error:
            # ASE's parsers raise whatever they meet.
            reason = f"unknown name {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}, frame {frame}: cannot be read ({reason})") from error
        if atoms.calc is not None:
            _keep_labels(atoms)
        yield frame, atoms
        frame += 1


PER_ATOM_RESULTS = frozenset({"forces", "energies", "stresses", "charges", "magmoms"})
"""Per-atom results of an ASE calculator."""


def _keep_labels(atoms: Any) -> None:
    """Move the results of an input's calculator into columns, so that they are written."""
    for name, value in atoms.calc.results.items():
        if name in PER_ATOM_RESULTS:
            atoms.arrays.setdefault(name, value)
        else:
            full = voigt_6_to_full_3x3_stress(value) if np.shape(value) == (6,) else value
            atoms.info.setdefault(name, full if name == "stress" else value)
    atoms.calc = None


def _drop_labels(atoms: Any) -> None:
    """Drop energies, forces and stress of the structure before relaxation."""
    common = {name for tiers in COMMON_NAMES.values() for tier in tiers for name in tier}
    for columns in (atoms.info, atoms.arrays):
        for name in [name for name in columns if name.lower() in common]:
            del columns[name]


def _sample(atoms: Any, potential: Potential, where: str) -> Arrays:
    """Build a sample; an error, such as an unknown element, names the frame."""
    potential.check_elements(atoms.numbers, where)
    head = potential.head_of(atoms.info, where)
    raw = unlabelled_structure(
        atoms.numbers, atoms.positions, np.asarray(atoms.cell), atoms.pbc, head
    )
    try:
        return add_neighbours(raw, potential.cutoff)
    except DataError as error:
        raise DataError(f"{where}: {error}") from None


def _evaluate(
    potential: Potential, chunk: Sequence[tuple[int, Any]], source: Path, capacity: int
) -> list[Results]:
    samples = [_sample(atoms, potential, f"{source}, frame {n}") for n, atoms in chunk]
    compute = ["energy", "forces", "node_energy"]
    if any(atoms.cell.rank == 3 for _, atoms in chunk):
        compute.append("stress")
    results = list(potential.evaluate(samples, compute, capacity))
    for (number, _), found in zip(chunk, results, strict=True):
        check_finite(found, lambda number=number: f"{source}, frame {number}")  # type: ignore[misc]
    return results


def _annotate(atoms: Any, found: Sequence[Results], prefix: str) -> None:
    """Write the mean of all models' results, and their spread, into a structure."""
    mean = {name: np.mean([one[name] for one in found], axis=0) for name in found[0]}
    atoms.info[f"{prefix}energy"] = float(mean["energy"])
    atoms.arrays[f"{prefix}forces"] = mean["forces"]
    atoms.arrays[f"{prefix}energies"] = mean["node_energy"]
    if "stress" in mean and atoms.cell.rank == 3:
        # Nine numbers, as usual in extended XYZ; a matrix would be written as JSON.
        atoms.info[f"{prefix}stress"] = mean["stress"].reshape(9)
    if len(found) > 1:
        energies = [float(one["energy"]) for one in found]
        forces = np.stack([one["forces"] for one in found])
        atoms.info[f"{prefix}energy_std"] = float(np.std(energies))
        atoms.arrays[f"{prefix}forces_std"] = np.linalg.norm(forces.std(axis=0), axis=1)
