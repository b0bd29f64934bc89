"""Permutation alignment against reference values, on crops, with padding, and without harm."""

import importlib

import numpy as np
import pytest
import torch

from bevatron.maths.superposition import superposed
from bevatron.models.alphafold3.permutation import (
    _anchor,
    _members,
    exchange_atoms,
    exchange_copies,
    permute_truth,
)
from bevatron.testing import assert_close

complexes = importlib.import_module("complexes")

NAMES = ("permutation_1bna", "permutation_1pfe")


def sample_of(g, kept=None):
    """The form that the module asks for, from the reference's arrays; ``kept`` atoms only."""
    molecule_id, entity = g["in__mol_id"], g["in__entity_mol_id"]
    index = {
        (m, i): a for a, (m, i) in enumerate(zip(molecule_id, g["in__mol_atom_index"], strict=True))
    }
    kept = np.arange(len(molecule_id)) if kept is None else kept
    centre = np.flatnonzero(g["in__pae_rep_atom_mask"][kept])
    ids = list(dict.fromkeys(molecule_id[kept].tolist()))
    entity_of = dict(zip(molecule_id.tolist(), entity.tolist(), strict=True))
    copies = {e: [m for m in sorted(entity_of) if entity_of[m] == e] for e in set(entity.tolist())}
    most = max(map(len, copies.values()))
    position = np.zeros((most, len(kept), 3), np.float32)
    resolved = np.zeros((most, len(kept)), bool)
    for a, atom in enumerate(kept):
        for k, other in enumerate(copies[int(entity[atom])]):
            twin = index[other, g["in__mol_atom_index"][atom]]
            position[k, a] = g["in__coordinate"][twin]
            resolved[k, a] = g["in__coordinate_mask"][twin]
    uid, listed, ptr = g["in__ref_space_uid"][kept], [], [0]
    spaces = np.unique(uid, return_inverse=True)[1]
    for u in range(spaces.max() + 1):
        rows = g["in__atom_perm_list"][kept][spaces == u].T
        rows = rows[(rows >= 0).all(1)]
        whole = (g["in__ref_space_uid"] == uid[spaces == u][0]).sum() == rows.shape[1]
        if len(rows) > 1 and whole:
            identity = (rows == np.arange(rows.shape[1])).all(1)
            listed.append(np.concatenate([rows[identity][:1], rows[~identity]]).ravel())
        else:
            listed.append(np.zeros(0, int))
        ptr.append(ptr[-1] + len(listed[-1]))
    token = np.searchsorted(centre, np.arange(len(kept)), "right") - 1
    token = token.clip(min=0)
    molecule = np.array([ids.index(m) for m in molecule_id[kept]])
    arrays = {
        "molecule": molecule[centre],
        "molecule_entity": np.array([entity_of[m] for m in ids]),
        "molecule_copies": np.array([len(copies[entity_of[m]]) for m in ids]),
        "molecule_copy": np.array([copies[entity_of[m]].index(m) for m in ids]),
        "copy_position": position,
        "copy_resolved": resolved,
        "permutation_ptr": np.array(ptr),
        "permutation_atoms": np.concatenate(listed).astype(np.int64),
        "ref_space_uid": spaces,
        "atom_mask": np.ones(len(kept), bool),
        "atom_to_token": molecule_tokens(molecule, centre),
        "token_mask": np.ones(len(centre), bool),
        "centre_atom": centre,
        "molecule_type": np.where(g["in__is_ligand"][kept][centre] > 0, 3, 2),
        "position": g["in__coordinate"][kept],
        "resolved": g["in__coordinate_mask"][kept] > 0,
    }
    return {name: torch.from_numpy(np.asarray(value)) for name, value in arrays.items()}


def molecule_tokens(molecule, centre):
    """A token of the atom's own molecule: which one does not matter here."""
    first = {m: t for t, m in reversed(list(enumerate(molecule[centre].tolist())))}
    return np.array([first[m] for m in molecule.tolist()])


@pytest.fixture(scope="module", params=NAMES)
def golden(request, shared):
    return complexes.reference(shared, request.param)


@pytest.mark.shared
def test_copies_and_atoms_are_exchanged_as_in_the_reference(golden):
    sample = sample_of(golden)
    rollout = torch.from_numpy(golden["in__pred_coordinate"])
    position, resolved = exchange_copies(rollout, sample)
    assert torch.equal(position, torch.from_numpy(golden["out__chain_coordinate"]))
    assert np.array_equal(resolved.numpy(), golden["out__chain_coordinate_mask"] > 0)
    source = exchange_atoms(rollout, position, resolved, sample)
    # The order of atoms that are not resolved, or lie as well, is free; where they lie is not.
    expected = golden["out__atom_coordinate_mask"] > 0
    assert np.array_equal(resolved[source].numpy(), expected)
    wanted = torch.from_numpy(golden["out__atom_coordinate"])
    assert torch.equal(position[source][expected], wanted[expected])
    assert np.array_equal(source.numpy(), golden["out__atom_permutation"])
    position, resolved = permute_truth(rollout, sample)
    assert torch.equal(position[expected], wanted[expected])


@pytest.mark.shared
@pytest.mark.parametrize("seed", range(3))
def test_a_crop_is_matched_as_the_whole(golden, seed):
    """Tokens near a random atom: the other copies are outside the crop, and found there."""
    random = np.random.default_rng(seed)
    centre = golden["in__coordinate"][random.integers(len(golden["in__mol_id"]))]
    near = np.linalg.norm(golden["in__coordinate"] - centre, axis=1) < 14
    kept = np.flatnonzero(np.isin(golden["in__ref_space_uid"], golden["in__ref_space_uid"][near]))
    sample = sample_of(golden, kept)
    rollout = torch.from_numpy(golden["in__pred_coordinate"][kept])
    position, resolved = permute_truth(rollout, sample)
    assert len(set(sample["molecule"].tolist())) > 1
    wanted = torch.from_numpy(golden["out__atom_coordinate"][kept])
    mask = torch.from_numpy(golden["out__atom_coordinate_mask"][kept] > 0)
    # Of equal copies in a symmetric complex a crop may take others than the whole.
    assert deviation(position, rollout, resolved) <= deviation(wanted, rollout, mask) + 1e-4
    assert deviation(sample["position"], rollout, sample["resolved"]) > 1


def deviation(truth, rollout, mask):
    moved = superposed(truth, rollout, mask.float())
    return (moved - rollout)[mask].square().sum(-1).mean().sqrt()


@pytest.mark.shared
def test_an_exact_prediction_is_left_as_it_is(golden):
    sample = sample_of(golden)
    position, resolved = permute_truth(sample["position"].double(), sample)
    assert torch.equal(resolved, sample["resolved"])
    assert torch.equal(position, sample["position"])


@pytest.mark.shared
def test_padding_and_a_leading_axis_change_nothing(golden):
    sample = sample_of(golden)
    rollout = torch.from_numpy(golden["in__pred_coordinate"])
    position, resolved = permute_truth(rollout, sample)
    more = {name: pad(name, value, sample) for name, value in sample.items()}
    longer = torch.cat([rollout, torch.full((3, 3), 50.0)])
    many = {name: torch.stack([value, value]) for name, value in more.items()}
    found, known = permute_truth(torch.stack([longer, longer]), many)
    for b in range(2):
        assert torch.equal(found[b, :-3], position)
        assert torch.equal(known[b, :-3], resolved)
        assert not known[b, -3:].any()


def pad(name, value, sample):
    """Three more atoms, two more tokens, one more molecule and copy, four more entries."""
    atoms = len(sample["atom_mask"])
    if name in ("copy_position", "copy_resolved"):
        extra = torch.ones(value.shape[0], 3, *value.shape[2:], dtype=value.dtype)
        value = torch.cat([value, extra], 1)
        return torch.cat([value, value[:1]])
    if name == "permutation_ptr":
        return torch.cat([value, value[-1:]])
    if name == "permutation_atoms":
        return torch.cat([value, torch.zeros(4, dtype=value.dtype)])
    count = 1 if name.startswith("molecule_") and name != "molecule_type" else 2
    count = 3 if len(value) == atoms else count
    extra = torch.zeros(count, *value.shape[1:], dtype=value.dtype)
    return torch.cat([value, extra])


def four_copies(seed=0, residues=14):
    """Four copies of one chain and of its ion, four places apart; the order is shuffled."""
    random = np.random.default_rng(seed)
    chain, ion = random.normal(size=(residues, 3)) * 6, random.normal(size=3) * 6
    q = np.linalg.qr(random.normal(size=(4, 3, 3)))[0]
    q[:, 0] *= np.linalg.det(q)[:, None]
    place = random.normal(size=(4, 1, 3)) * 40
    chains = np.einsum("kij,nj->kni", q, chain) + place
    ions = np.einsum("kij,j->ki", q, ion)[:, None] + place
    position = np.concatenate([*chains, *ions]).astype(np.float32)
    twins = np.concatenate([np.tile(chains, (1, 4, 1)), np.tile(ions, (1, 4, 1))], 1)
    size, atoms = np.array([residues] * 4 + [1] * 4), 4 * residues + 4
    return {
        "molecule": torch.from_numpy(np.repeat(np.arange(8), size)),
        "molecule_entity": torch.tensor([5, 5, 5, 5, 9, 9, 9, 9]),
        "molecule_copies": torch.tensor([4] * 8),
        "molecule_copy": torch.tensor([0, 1, 2, 3] * 2),
        "copy_position": torch.from_numpy(twins.astype(np.float32)),
        "copy_resolved": torch.ones(4, atoms, dtype=torch.bool),
        "permutation_ptr": torch.zeros(atoms + 1, dtype=torch.int64),
        "permutation_atoms": torch.zeros(0, dtype=torch.int64),
        "ref_space_uid": torch.arange(atoms),
        "atom_mask": torch.ones(atoms, dtype=torch.bool),
        "atom_to_token": torch.arange(atoms),
        "token_mask": torch.ones(atoms, dtype=torch.bool),
        "centre_atom": torch.arange(atoms),
        "molecule_type": torch.from_numpy(np.repeat([0] * 4 + [3] * 4, size)),
        "position": torch.from_numpy(position),
        "resolved": torch.ones(atoms, dtype=torch.bool),
    }


@pytest.mark.parametrize("order", [(1, 0, 3, 2), (3, 2, 0, 1), (2, 3, 1, 0)])
@pytest.mark.parametrize("ions", [(0, 1, 2, 3), (1, 3, 0, 2)])
def test_chains_and_ions_of_a_tetramer_find_their_places(order, ions):
    sample = four_copies()
    molecule = sample["molecule"]
    mixed = torch.tensor([*order, *(4 + i for i in ions)])
    taken = torch.cat([torch.nonzero(molecule == m)[:, 0] for m in mixed])
    noise = torch.randn(len(taken), 3, generator=torch.Generator().manual_seed(0))
    rollout = sample["position"][taken] + 0.3 * noise - 20
    position, _ = permute_truth(rollout, sample)
    assert torch.equal(position, sample["position"][taken])


@pytest.mark.parametrize(
    ("copies", "seen", "expected"),
    [
        ([4, 4, 2, 4], [14, 14, 14, 14], 2),  # the fewest copies
        ([4, 4, 4, 4], [9, 14, 12, 14], 1),  # of as many the most seen, then the first
        ([4, 4, 1, 4], [9, 14, 3, 14], 1),  # too few seen to be superposed
    ],
)
def test_the_anchor_has_few_copies_and_is_well_resolved(copies, seen, expected):
    """Ions with the fewest copies of all are no anchors while there is a chain."""
    sample = four_copies()
    sample["molecule_copies"] = torch.tensor([*copies, 1, 1, 1, 1])
    counts = torch.tensor([*seen, 1, 1, 1, 1]).expand(4, 8)
    assert _anchor(sample, _members(sample), counts).tolist() == [expected]


def test_a_peptide_is_no_anchor_while_there_is_a_longer_chain():
    sample = four_copies()
    sample["molecule_copies"] = torch.tensor([4, 4, 4, 1, 1, 1, 1, 1])
    last = torch.nonzero(sample["molecule"] == 3)[11:, 0]
    sample["token_mask"] = sample["token_mask"].index_fill(0, last, False)
    counts = torch.tensor([14, 14, 14, 11, 1, 1, 1, 1]).expand(4, 8)
    assert _anchor(sample, _members(sample), counts).tolist() == [0]


def test_copies_that_are_not_resolved_are_taken_last():
    sample = four_copies()
    sample["copy_resolved"][2] = False
    sample["resolved"] = sample["resolved"].clone()
    position, resolved = permute_truth(sample["position"], sample)
    assert torch.equal(position, sample["position"])
    assert not resolved[sample["molecule"] == 2].any()
    assert resolved[sample["molecule"] == 1].all()


def test_where_an_unresolved_atom_lies_does_not_choose_the_order():
    """Eight atoms and two that may be exchanged, the second unresolved, are predicted exchanged."""
    x = torch.randn(10, 3, generator=torch.Generator().manual_seed(0)) * 10
    position = x.clone()
    position[9] = 11 * x[8] - 10 * x[9]  # much nearer to the first's place than to its own
    batch = {
        "permutation_ptr": torch.tensor([0] * 9 + [4]),
        "permutation_atoms": torch.tensor([0, 1, 1, 0]),
        "ref_space_uid": torch.arange(10).clamp(max=8),
        "atom_mask": torch.ones(10, dtype=torch.bool),
    }
    order = torch.tensor([*range(8), 9, 8])
    found = exchange_atoms(x[order], position, torch.arange(10) < 9, batch)
    assert torch.equal(found, order)


def test_the_assignment_does_not_depend_on_where_the_prediction_lies():
    sample = four_copies(seed=3)
    x = sample["position"].double()
    turn = torch.tensor([[0.0, -1, 0], [1, 0, 0], [0, 0, 1]], dtype=torch.float64)
    position, _ = permute_truth(x @ turn.T + 100, sample)
    assert_close(position.double(), x, 1e-12)


def test_it_never_waits_for_the_device():
    """Tensors without data: asking one for a number is an error."""
    sample = {name: value.to("meta") for name, value in four_copies().items()}
    sample["permutation_atoms"] = torch.zeros(8, dtype=torch.int64, device="meta")
    position, resolved = permute_truth(sample["position"], sample)
    assert position.shape == sample["position"].shape
    assert resolved.dtype == torch.bool


def test_no_copy_is_taken_twice():
    """Two chains and their ions predicted in one place: one of them must look elsewhere."""
    sample = four_copies()
    molecule, x = sample["molecule"], sample["position"]
    rollout = x.clone()
    for twin, original in ((1, 0), (5, 4)):
        rollout[molecule == twin] = x[molecule == original] + 0.5
    position, _ = permute_truth(rollout, sample)
    assert torch.equal(position.sum(-1).sort().values, x.sum(-1).sort().values)
