"""Measures of one predicted complex against the known one."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from bevatron.data.proteins.complex_batch import collate_complex
from bevatron.data.proteins.predicted import atom_names
from bevatron.models.alphafold3.metrics import ComplexMetrics
from bevatron.models.alphafold3.permutation import permute_truth
from bevatron.models.alphafold3.predict import Predicted
from bevatron.models.common.folding.metrics.dockq import dockq
from bevatron.models.common.folding.metrics.ligands import pocket_rmsd
from bevatron.models.common.folding.metrics.superposed import rmsd
from bevatron.typing import Arrays

PROTEIN, LIGAND = 0, 3
BACKBONE = frozenset({"N", "CA", "C", "O"})
NUCLEIC_BACKBONE = frozenset({"P", "O5'", "C5'", "C4'", "C3'", "O3'"})
SMALLEST_LIGAND = 5
"""Atoms; ions and fragments have no pocket RMSD."""


def measure(sample: Arrays, predicted: Predicted) -> dict[str, float]:
    """Compare a structure with the truth, whose equal chains and atoms are exchanged to fit best.

    Returns
    -------
    ``lddt``, ``lddt_interface`` and by kind (``lddt_protein``, ``lddt_protein_ligand``), 0 to 1;
    ``rmsd`` of the centres of residues after superposition, Å; ``dockq``, the mean over interfaces
    of two proteins; ``pocket_rmsd``, the mean over ligands, Å; ``distogram``, its cross entropy;
    ``contact_precision``; ``plddt``, ``ptm``, ``iptm``, what the model expects. What a complex
    does not have is left out.
    """
    batch = collate_complex([sample], np.zeros(1, dtype=np.int64), [1.0])
    given = batch.tensors()
    position = torch.as_tensor(predicted.position)
    truth, resolved = permute_truth(position, given)
    metrics = ComplexMetrics()
    metrics.update(batch, {
        "distogram": torch.as_tensor(predicted.distogram),
        "position": truth,
        "truth_resolved": resolved,
        "rollout": position[None],
        "plddt": torch.zeros(1, len(position), 2),  # the mean of the scores is taken
    })  # fmt: skip
    found = metrics.compute()
    del found["plddt"]
    centre = given["centre_atom"][given["molecule_type"] != LIGAND]
    if bool(resolved[centre].any()):
        found["rmsd"] = float(rmsd(position[centre], truth[centre], resolved[centre]))
    names = np.array(atom_names(sample))
    found |= _mean("dockq", _docked(given, position, truth, resolved, names))
    found |= _mean("pocket_rmsd", _pockets(given, position, truth, resolved, names))
    scores = {name: predicted.scores[name] for name in ("plddt", "ptm", "iptm")}
    return found | {name: value for name, value in scores.items() if value is not None}


def _docked(
    given: Mapping[str, Tensor], position: Tensor, truth: Tensor, resolved: Tensor, names: Any
) -> list[float]:
    """Return DockQ of every two protein chains in contact."""
    token = given["atom_to_token"]
    protein = (given["molecule_type"] == PROTEIN)[token]
    chain = given["asym_id"][token]
    backbone = protein & torch.as_tensor(np.isin(names, list(BACKBONE)))
    found = []
    for first, second in combinations(chain[protein & resolved].unique().tolist(), 2):
        partner = torch.where(chain == first, 0, torch.where(chain == second, 1, 2))
        partner = torch.where(protein, partner, 2)
        docked = dockq(position, truth, resolved, given["ref_space_uid"], partner, backbone)
        found += [docked.score] if docked is not None else []
    return found


def _pockets(
    given: Mapping[str, Tensor], position: Tensor, truth: Tensor, resolved: Tensor, names: Any
) -> list[float]:
    """Return the pocket RMSD of every ligand that has a pocket."""
    kind = given["molecule_type"][given["atom_to_token"]]
    protein = (kind == PROTEIN) & torch.as_tensor(np.isin(names, list(BACKBONE)))
    nucleic = torch.as_tensor(np.isin(names, list(NUCLEIC_BACKBONE)))
    backbone = protein | ((kind != PROTEIN) & (kind != LIGAND) & nucleic)
    residue = given["ref_space_uid"]
    ptr, listed = given["permutation_ptr"], given["permutation_atoms"]
    found = []
    for place, number in enumerate(residue.unique().tolist()):
        atoms = (residue == number).nonzero()[:, 0]
        if int(kind[atoms[0]]) != LIGAND or int(resolved[atoms].sum()) < SMALLEST_LIGAND:
            continue
        places = listed[ptr[place] : ptr[place + 1]].reshape(-1, len(atoms))
        orders = atoms[places] if len(places) else atoms[None]
        value = float(pocket_rmsd(position, truth, resolved, residue, backbone, orders))
        found += [value] if value == value else []  # noqa: PLR0124  not NaN
    return found


def _mean(name: str, values: list[float]) -> dict[str, float]:
    return {name: float(np.mean(values))} if values else {}
