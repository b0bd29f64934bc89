"""Permutation alignment: name the atoms of the truth so that it is nearest to a prediction.

Copies of a chain may be swapped, and so may atoms of a residue or ligand if its bonds stay the
same: section 4.2 of the AlphaFold3 supplement. This runs once per step, on the coordinates of the
mini-rollout, before any loss. Nothing here waits for the device.

A **molecule** is a chain, or several joined by covalent bonds; molecules of one entity are copies
of each other. A sample brings, for its A cropped atoms, N tokens and M molecules of which
something is in the crop:

========================  =================================================================
``molecule``              int64 [N]: the molecule of a token, 0 to M - 1
``molecule_entity``       int64 [M]: equal for copies of each other
``molecule_copies``       int64 [M]: number of copies in the whole assembly, cropped or not
``molecule_copy``         int64 [M]: which of those copies the molecule itself is, from 0
``copy_position``         float32 [K, A, 3]: row k has, for every cropped atom, the position
                          of the same atom in copy k of the atom's entity, Å. K is the
                          largest number of copies; anything beyond ``molecule_copies``.
``copy_resolved``         bool [K, A]: whether that atom is resolved; no where there is none
``permutation_ptr``       int64 [U + 1]: for each residue or ligand u of the sample (the
                          number in ``ref_space_uid``, from 0, atoms of one next to each
                          other) where its entries in ``permutation_atoms`` begin
``permutation_atoms``     int64: for residue u with n cropped atoms [permutations, n], row
                          after row: places in the residue, from 0, that the n atoms may be
                          taken from; the identity first. Nothing if there is no other.
========================  =================================================================

So copy ``molecule_copy`` of ``copy_position`` is ``position``. A permutation that takes a cropped
atom from outside the crop is left out by whoever crops. Padding: ``token_mask`` and ``atom_mask``
are False, ``molecule_copies`` is 0, ``permutation_ptr`` repeats its last entry.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.maths.superposition import moved, superposition

_ENOUGH_TO_SUPERPOSE = 4
_ENOUGH_OF_A_POLYMER = 12
"""Tokens with a resolved centre for an anchor, and tokens of a polymer that is preferred as one."""

_UNRESOLVED = 1e6
"""Å; distance to a copy without resolved atoms, which is chosen after all others."""


_AS_GOOD = 1e-4
"""Relative difference of two squared deviations that rounding explains."""


@torch.no_grad()
def permute_truth(
    rollout: Float[Tensor, "*batch A 3"], batch: Mapping[str, Tensor]
) -> tuple[Float[Tensor, "*batch A 3"], Bool[Tensor, "*batch A"]]:
    """Return the position of every atom in the renamed truth, and whether it is resolved.

    Parameters
    ----------
    rollout : the prediction, Å
    batch : a sample, or several with a leading axis
    """
    if rollout.ndim > 2:
        each = [
            permute_truth(x, {name: value[b] for name, value in batch.items()})
            for b, x in enumerate(rollout)
        ]
        return torch.stack([x for x, _ in each]), torch.stack([r for _, r in each])
    rollout = rollout.to(torch.promote_types(rollout.dtype, torch.float32))
    position, resolved = exchange_copies(rollout, batch)
    source = exchange_atoms(rollout, position, resolved, batch)
    return position[source], resolved[source]


def exchange_copies(
    rollout: Float[Tensor, "A 3"], batch: Mapping[str, Tensor]
) -> tuple[Float[Tensor, "A 3"], Bool[Tensor, "A"]]:
    """Return the truth after giving each molecule the copy of its entity that fits best.

    The anchor is the molecule with the fewest copies, and among those the one with the most
    resolved tokens. The truth is superposed on each copy of it in turn; every other molecule, large
    ones first, takes the nearest free copy, by centre. Of all assignments, including that of the
    file, the one with the smallest deviation of all centres after superposition is returned; among
    equals, as in a symmetric complex, the one with the fewest swaps.
    """
    x_KA3, seen_KA = batch["copy_position"].to(rollout.dtype), batch["copy_resolved"]
    centre = batch["centre_atom"]
    seen = seen_KA[:, centre] & batch["token_mask"]
    truth, predicted = x_KA3[:, centre], rollout[centre]
    members = _members(batch)
    count_KM = _sum_over_molecules(seen.to(rollout.dtype), members)
    anchor = _anchor(batch, members, count_KM)
    # One candidate for each copy k of the anchor: the truth superposed so that it lies on it.
    in_anchor = members.index_select(0, anchor)
    rotation, translation = superposition(truth, predicted[None], (seen & in_anchor).to(truth))
    distance = _centre_distances(truth, predicted, seen, members, count_KM, rotation, translation)
    assigned = _assign(distance, anchor, batch, members)
    candidates = torch.cat([batch["molecule_copy"][None], assigned])
    deviation = _deviations(candidates, truth, predicted, seen, batch["molecule"])
    exists = torch.arange(len(x_KA3), device=x_KA3.device) < batch["molecule_copies"].index_select(
        0, anchor
    )
    deviation[1:].masked_fill_(~exists, torch.inf)
    as_good = deviation <= deviation.amin() * (1 + _AS_GOOD) + _AS_GOOD**2
    exchanged = (candidates != batch["molecule_copy"]).sum(-1)
    chosen = torch.where(as_good, exchanged, candidates.shape[1] + 1).argmin(keepdim=True)
    of_molecule = candidates.index_select(0, chosen).squeeze(0)
    copy_of_atom = of_molecule[batch["molecule"]][batch["atom_to_token"]]
    atoms = torch.arange(len(rollout), device=rollout.device)
    position = batch["copy_position"][copy_of_atom, atoms]
    return position, seen_KA[copy_of_atom, atoms] & batch["atom_mask"]


def _members(batch: Mapping[str, Tensor]) -> Bool[Tensor, "M N"]:
    molecules = torch.arange(len(batch["molecule_entity"]), device=batch["molecule"].device)
    return (batch["molecule"] == molecules[:, None]) & batch["token_mask"]


def _sum_over_molecules(
    value: Float[Tensor, "*batch N"], members: Bool[Tensor, "M N"]
) -> Float[Tensor, "*batch M"]:
    """Sum over the tokens of each molecule, in the same order whatever the device."""
    return (value[..., None, :] * members).sum(-1)


def _anchor(batch: Mapping[str, Tensor], members: Tensor, count_KM: Tensor) -> Int[Tensor, "1"]:
    """Choose the molecule to superpose on: a polymer with few copies and many resolved tokens."""
    size = members.sum(-1)
    ligand = (members & (batch["molecule_type"] == 3)).sum(-1)
    polymer = (2 * ligand <= size) & (size >= _ENOUGH_OF_A_POLYMER)
    seen = count_KM.amax(0).long()
    copies = batch["molecule_copies"]
    last = len(size) - 1 - torch.arange(len(size), device=size.device)
    # Packed into one number, so that they are compared lexicographically.
    merit = (seen >= _ENOUGH_TO_SUPERPOSE).long() * 2 + polymer
    for more in (len(count_KM) - copies, seen, last):
        merit = (merit << 18) + more
    return torch.where(copies > 0, merit, -1).argmax(keepdim=True)


def _centre_distances(
    truth: Float[Tensor, "K N 3"],
    predicted: Float[Tensor, "N 3"],
    seen: Bool[Tensor, "K N"],
    members: Bool[Tensor, "M N"],
    count_KM: Float[Tensor, "K M"],
    rotation: Float[Tensor, "K 3 3"],
    translation: Float[Tensor, "K 3"],
) -> Float[Tensor, "K M K"]:
    """Measure how far molecule m is from copy k of its entity in candidate c.

    The distance is between their centres, each over the tokens that the copy resolves.
    """
    centres = []
    for points in (truth, predicted[None]):
        columns = [_sum_over_molecules(points[..., i] * seen, members) for i in range(3)]
        centres.append(torch.stack(columns, -1) / count_KM.clamp(min=1)[..., None])
    of_truth, of_prediction = centres
    on_anchor = moved(of_truth.flatten(0, 1), rotation, translation)
    on_anchor = on_anchor.unflatten(1, of_truth.shape[:2])
    distance = (on_anchor - of_prediction).square().sum(-1).sqrt()
    return torch.where(count_KM > 0, distance, _UNRESOLVED).mT


def _assign(
    distance: Float[Tensor, "K M K"],
    anchor: Int[Tensor, "1"],
    batch: Mapping[str, Tensor],
    members: Bool[Tensor, "M N"],
) -> Int[Tensor, "K M"]:
    """Give every molecule a copy in every candidate, the largest first, none twice."""
    entity, copies = batch["molecule_entity"], batch["molecule_copies"]
    molecules = torch.arange(len(entity), device=entity.device)
    copy = torch.arange(len(distance), device=entity.device)
    is_anchor = molecules == anchor
    free = (copy < copies[:, None]).expand(distance.shape)
    # In candidate c the anchor itself takes copy c.
    away = torch.where(copy[:, None] == copy, 0.0, _UNRESOLVED).to(distance.dtype)
    distance = torch.where(is_anchor[:, None], away[:, None, :], distance)
    size = torch.where(is_anchor, members.shape[1] + 1, members.sum(-1))
    assigned = torch.zeros_like(distance[..., 0], dtype=torch.int64)
    for m in size.argsort(descending=True, stable=True).split(1):
        open_to_it = free.index_select(1, m).squeeze(1)
        far = distance.index_select(1, m).squeeze(1)
        pick = torch.where(open_to_it, far, torch.inf).argmin(-1)
        assigned = assigned.index_copy(1, m, pick[:, None])
        taken = (entity == entity[m])[:, None] & (copy == pick[:, None, None])
        free = free & ~taken
    return assigned


def _deviations(
    assigned: Int[Tensor, "C M"],
    truth: Float[Tensor, "K N 3"],
    predicted: Float[Tensor, "N 3"],
    seen: Bool[Tensor, "K N"],
    molecule: Int[Tensor, "N"],
) -> Float[Tensor, "C"]:
    """Mean squared deviation of all centres after superposition, infinite if none is resolved."""
    copy = assigned[:, molecule]
    tokens = torch.arange(len(molecule), device=molecule.device)
    x, weight = truth[copy, tokens], seen[copy, tokens].to(truth.dtype)
    rotation, translation = superposition(x, predicted[None], weight)
    squared = (moved(x, rotation, translation) - predicted).square().sum(-1)
    number = weight.sum(-1)
    return torch.where(number > 0, (squared * weight).sum(-1) / number, torch.inf)


def exchange_atoms(
    rollout: Float[Tensor, "A 3"],
    position: Float[Tensor, "A 3"],
    resolved: Bool[Tensor, "A"],
    batch: Mapping[str, Tensor],
) -> Int[Tensor, "A"]:
    """Return for every atom the atom whose true position it takes: the best order per residue.

    The truth is superposed as a whole; in each residue the order of the smallest squared deviation
    wins, of equal ones the first listed.
    """
    atoms = torch.arange(len(rollout), device=rollout.device)
    wanted, entries = batch["permutation_atoms"], len(batch["permutation_atoms"])
    if not entries:
        return atoms
    rotation, translation = superposition(position, rollout, resolved.to(rollout.dtype))
    position = moved(position.to(rollout.dtype), rotation, translation)
    residue, order, place, listed = _rows(batch)
    first = _first_atoms(batch)[residue]
    target = torch.where(listed, first + place, 0)
    source = torch.where(listed, first + wanted, 0)
    squared = (position[source] - rollout[target]).square().sum(-1)
    # In integer units of 1e-6 Å^2, because a sum of integers is the same in any order.
    cost = (squared.clamp(max=2**30).double() * 2**20).long() * (resolved[source] & listed)
    cost = torch.zeros_like(order).index_add(0, order, cost)[order]
    cost = torch.where(listed, cost, torch.iinfo(torch.int64).max)
    residues = len(batch["permutation_ptr"]) - 1
    best = _smallest(residues, residue, cost)
    candidates = torch.where(cost == best, order, entries)
    chosen = listed & (order == _smallest(residues, residue, candidates))
    # What is not chosen is written behind the end.
    target = torch.where(chosen, target, len(atoms))
    padded = torch.cat([atoms, atoms[:1]])
    return padded.scatter(0, target, torch.where(chosen, source, 0))[:-1]


def _rows(batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return residue, row over all residues, place in the row, and whether an entry is listed."""
    ptr = batch["permutation_ptr"]
    entry = torch.arange(len(batch["permutation_atoms"]), device=ptr.device)
    residue = torch.searchsorted(ptr, entry, right=True) - 1
    listed = residue < len(ptr) - 1
    residue = residue.clamp(max=len(ptr) - 2)
    size = _residue_sizes(batch).clamp(min=1)
    rows = ptr.diff() // size
    row_start = rows.cumsum(0) - rows
    inside = entry - ptr[residue]
    order = row_start[residue] + inside // size[residue]
    # Entries of padding are in a row of their own or share one: nothing is read from it.
    return residue, torch.where(listed, order, 0), inside % size[residue], listed


def _residue_sizes(batch: Mapping[str, Tensor]) -> Int[Tensor, "U"]:
    """Count the cropped atoms of each residue."""
    sizes = torch.zeros_like(batch["permutation_ptr"][1:])
    return sizes.index_add(0, batch["ref_space_uid"], batch["atom_mask"].to(sizes.dtype))


def _first_atoms(batch: Mapping[str, Tensor]) -> Int[Tensor, "U"]:
    """Find the first atom of each residue; 0 for a residue without atoms."""
    residue, mask = batch["ref_space_uid"], batch["atom_mask"]
    atoms = torch.arange(len(mask), device=mask.device)
    none = torch.full_like(batch["permutation_ptr"][1:], len(mask))
    first = none.scatter_reduce(0, residue, torch.where(mask, atoms, len(mask)), "amin")
    return torch.where(first < len(mask), first, 0)


def _smallest(residues: int, residue: Tensor, value: Tensor) -> Tensor:
    """Return, for every entry, the smallest value among those of its residue."""
    largest = torch.iinfo(torch.int64).max
    smallest = torch.full((residues,), largest, device=value.device, dtype=torch.int64)
    return smallest.scatter_reduce(0, residue, value, "amin")[residue]
