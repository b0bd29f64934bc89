"""Predictions of an AlphaFold3: structures of a sample, judged and ranked."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from bevatron.data.proteins.complex_batch import collate_complex
from bevatron.errors import ConfigError
from bevatron.models.alphafold3.model import AlphaFold3, Representation
from bevatron.models.common.folding.metrics.confidence import (
    expected_error,
    expected_lddt,
    has_clash,
    iptm,
    ptm,
    ranking_score,
)
from bevatron.models.common.folding.metrics.contacts import contact_probability
from bevatron.models.common.folding.normal import SeededNormal
from bevatron.typing import Array, Arrays

LIGAND = 3
"""Type of molecule of a token that is not a residue of a polymer."""


@dataclass(frozen=True)
class Predicted:
    """One structure of A atoms and N tokens.

    Attributes
    ----------
    seed : seed of the random numbers
    number : index among the samples of this seed, from 0
    position : float32 [A, 3]
        Å.
    plddt : float32 [A]
        Expected lDDT, 0 to 100.
    pae : float32 [N, N]
        Expected error of token j in the frame of token i, Å.
    contacts : float32 [N, N]
        Probability that representative atoms are within 8 Å.
    distogram : float32 [N, N, bins]
        Logits.
    scores
        ``ranking_score``, ``ptm``, ``iptm`` (None for one chain), ``plddt`` (the mean), ``clash``
        and ``chain_pair_iptm``.
    """

    seed: int
    number: int
    position: npt.NDArray[np.float32]
    plddt: npt.NDArray[np.float32]
    pae: Array
    contacts: Array
    distogram: Array
    scores: dict[str, Any]


def predict(
    model: AlphaFold3,
    sample: Arrays,
    samples: int = 5,
    steps: int = 200,
    activations: torch.dtype | None = None,
) -> list[Predicted]:
    """Sample structures and judge them; the best ranked first.

    Raises ConfigError if a number is below 1.

    Parameters
    ----------
    sample
        As `bevatron.data.proteins.sample.sample` returns it; its seed is that of the random
        numbers.
    samples, steps : structures, and steps of the sampling of each
    activations : type of trunk and diffusion; None for that of the weights
    """
    check_numbers(samples=samples, steps=steps)
    batch = collate_complex([sample], np.zeros(1, dtype=np.int64), [1.0])
    given = batch.to(next(model.parameters()).device).tensors()
    with torch.no_grad():
        trunk: Representation = model(given, dtype=activations)
        shared = model.condition(given, trunk)
        structures = model.sample(
            given, shared, samples, steps, SeededNormal(given["seed"])
        ).float()
        distogram = model.distogram(trunk.z).float()
        contacts = contact_probability(distogram)
        pairs = {"contacts": _array(contacts), "distogram": _array(distogram)}
        found = [
            _judged(model, given, trunk, structure, int(sample["seed"]), number, pairs)
            for number, structure in enumerate(structures)
        ]
    return ranked(found)


def _judged(
    model: AlphaFold3,
    given: Mapping[str, Tensor],
    trunk: Representation,
    structure: Tensor,
    seed: int,
    number: int,
    pairs: Mapping[str, Array],
) -> Predicted:
    logits = model.judge(given, trunk, structure)
    plddt = expected_lddt(logits.plddt)
    return Predicted(
        seed=seed,
        number=number,
        position=_array(structure),
        plddt=_array(plddt),
        pae=_array(expected_error(logits.pae)),
        scores=_scores(given, logits.pae, plddt, structure),
        **pairs,
    )


def ranked(structures: Sequence[Predicted]) -> list[Predicted]:
    """Sort structures by their ranking score, the best first."""
    return sorted(structures, key=lambda each: -each.scores["ranking_score"])


def _scores(
    given: Mapping[str, Tensor], pae: Tensor, plddt: Tensor, structure: Tensor
) -> dict[str, Any]:
    """Score a structure; the fraction of disordered residues is taken as 0."""
    frames, chain = given["has_frame"], given["asym_id"]
    everything = given["token_mask"]
    chains = chain.unique().tolist()
    whole = float(ptm(pae, frames, everything))
    between = float(iptm(pae, frames, everything, chain)) if len(chains) > 1 else None
    token = given["atom_to_token"]
    polymer = (given["molecule_type"] != LIGAND)[token]
    clash = has_clash(structure, chain[token], polymer)
    return {
        "ranking_score": ranking_score(whole, between, clash=clash),
        "ptm": whole,
        "iptm": between,
        "plddt": float(plddt.mean()),
        "clash": clash,
        "chain_pair_iptm": [
            [_pair(pae, frames, chain, a, b) for b in chains] for a in chains
        ],
    }  # fmt: skip


def _pair(pae: Tensor, frames: Tensor, chain: Tensor, a: int, b: int) -> float:
    """Return the ipTM of two chains, or the pTM of one."""
    rows = ((chain == a) | (chain == b)).nonzero()[:, 0]
    logits, frames, chain = pae[rows][:, rows], frames[rows], chain[rows]
    counts = torch.ones_like(frames)
    return float(ptm(logits, frames, counts) if a == b else iptm(logits, frames, counts, chain))


def check_numbers(**numbers: int) -> None:
    """Refuse numbers of structures or steps below 1, with a ConfigError."""
    for name, value in numbers.items():
        if value < 1:
            raise ConfigError(f"{name}: expected 1 or more, got {value}")


def _array(tensor: Tensor) -> npt.NDArray[np.float32]:
    found: npt.NDArray[np.float32] = tensor.float().cpu().numpy()
    return found
