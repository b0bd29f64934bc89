"""Statistics of the training data."""

import numpy as np
import pytest

from bevatron.errors import DataError
from bevatron.models.mace import features, statistics

E0 = {1: -13.6, 6: -1029.0, 8: -2041.0}


def labelled(structures, seed, n, head=0, shift=0.25, e0=E0):
    sample = structures.molecule(n, seed=seed, head=head)
    energy = sum(e0[int(z)] for z in sample["atomic_numbers"]) + shift * n
    forces = np.random.default_rng(seed).normal(0, 2.0, (n, 3))
    return {**sample, "energy": np.float64(energy), "forces": forces}


@pytest.fixture
def samples(structures):
    return [labelled(structures, seed, 2 + seed % 6) for seed in range(40)]


class Flat(list):
    """A data set of two shards with flat columns, as a store has them."""

    ragged = ("atomic_numbers", "edges", "forces", "group")

    def flat(self, field):
        half = len(self) // 2
        for shard in (self[:half], self[half:]):
            rows = [np.atleast_1d(sample[field]) for sample in shard]
            if field not in self.ragged:
                yield np.array([sample[field] for sample in shard]), np.arange(len(shard) + 1)
                continue
            yield np.concatenate(rows), np.cumsum([0, *map(len, rows)])


def test_neighbours_are_averaged_over_atoms_that_have_some(structures, samples):
    alone = {**structures.sample([8], [0, 0, 0]), "energy": np.float64(-2041.0)}
    found = statistics([*samples, alone])
    degrees = [np.bincount(s["edges"][:, 1], minlength=len(s["atomic_numbers"])) for s in samples]
    degrees = np.concatenate(degrees)
    assert found.avg_num_neighbors == pytest.approx(degrees[degrees > 0].mean())
    assert statistics([alone]).avg_num_neighbors == 1.0


def test_e0_is_the_least_squares_solution(samples):
    found = statistics(samples, e0="least_squares")
    assert found.atomic_numbers == (1, 6, 8)
    counts = np.array([[np.sum(s["atomic_numbers"] == z) for z in (1, 6, 8)] for s in samples])
    energies = np.array([float(s["energy"]) for s in samples])
    expected = np.linalg.lstsq(counts, energies, rcond=None)[0]
    assert found.atomic_energies[0] == pytest.approx(expected, rel=1e-9)
    # The shift of 0.25 eV an atom is within E0 then.
    assert found.mean_shift[0] == pytest.approx(0.0, abs=1e-6)


def test_given_energies_leave_the_shift(samples):
    found = statistics(samples, e0=E0)
    assert found.atomic_energies == ((-13.6, -1029.0, -2041.0),)
    assert found.mean_shift[0] == pytest.approx(0.25)
    forces = np.concatenate([s["forces"] for s in samples])
    assert found.force_rms[0] == pytest.approx(np.sqrt((forces**2).mean()))


def test_isolated_atoms_give_e0_and_are_named(structures, samples):
    atoms = [
        {**structures.sample([z], [0, 0, 0], group=b"IsolatedAtom"), "energy": np.float64(e)}
        for z, e in E0.items()
    ]
    found = statistics([*samples, *atoms])
    assert found.atomic_energies == ((-13.6, -1029.0, -2041.0),)
    assert found.isolated == (40, 41, 42)
    with pytest.raises(DataError, match=r"isolated atom .* elements \[8\]"):
        statistics([*samples, *atoms[:2]], e0="isolated")


def test_compositions_that_do_not_fix_e0_are_reported(structures):
    samples = [{**structures.molecule(4, seed=2), "energy": np.float64(-100.0)}] * 5
    found = statistics(samples)
    assert "determine only 1 of" in found.e0[0].origin
    counts = [np.sum(samples[0]["atomic_numbers"] == z) for z in found.atomic_numbers]
    assert np.dot(found.atomic_energies[0], counts) == pytest.approx(-100.0)


def test_flat_columns_and_single_samples_give_the_same(samples, structures, monkeypatch):
    alone = structures.sample([1], [0, 0, 0], group=b"IsolatedAtom")
    samples = [*samples, {**alone, "energy": np.float64(-13.6)}, structures.molecule(3, seed=9)]
    whole = statistics(Flat(samples))
    monkeypatch.setattr(features, "BLOCK", 7)
    parts = statistics(samples)
    assert whole.isolated == parts.isolated == (40,)
    assert whole.num_edges == parts.num_edges
    assert whole.atomic_energies[0] == pytest.approx(parts.atomic_energies[0], rel=1e-9)
    assert whole.force_rms == pytest.approx(parts.force_rms)
    assert whole.avg_num_neighbors == parts.avg_num_neighbors


def test_heads_have_statistics_of_their_own(structures, samples):
    other = {z: e + 5.0 for z, e in E0.items()}
    second = [labelled(structures, s, 3 + s % 5, head=1, e0=other, shift=0) for s in range(30)]
    found = statistics([*samples, *second], heads=("a", "b"), e0={"a": E0, "b": "least_squares"})
    assert found.atomic_energies[0] == (-13.6, -1029.0, -2041.0)
    assert found.atomic_energies[1] == pytest.approx([other[z] for z in (1, 6, 8)])
    assert found.mean_shift == pytest.approx((0.25, 0.0), abs=1e-6)


def test_a_part_of_the_data_can_be_chosen(samples):
    found = statistics(samples, indices=[3, 5])
    assert found.num_structures == 2
    assert found.num_atoms == len(samples[3]["atomic_numbers"]) + len(samples[5]["atomic_numbers"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"e0": {1: -1.0}}, r"not for the elements \[6, 8\]"),
        ({"e0": "guess"}, "expected auto"),
        ({"heads": ("a", "b"), "e0": "least_squares"}, "head 'b': no structure has an energy"),
        ({"indices": []}, "no structures"),
    ],
)
def test_what_cannot_be_found_is_said(samples, arguments, message):
    with pytest.raises(DataError, match=message):
        statistics(samples, **arguments)
