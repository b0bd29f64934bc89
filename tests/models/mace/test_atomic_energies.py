"""The smallest change of E0 that a model's errors determine."""

import numpy as np
import pytest

from bevatron.models.mace.atomic_energies import least_change

WATER, HYDROXYL = [128.0, 64.0], [127.0, 64.0]
"""Atoms of H and O in 64 molecules, and with one proton gone."""


def known(number):
    return np.ones(number, dtype=bool)


@pytest.fixture
def errors():
    """Errors of a good model, eV per atom, for 500 structures."""
    return np.random.default_rng(3).normal(0, 0.003, 500)


def test_what_the_compositions_determine_is_recovered(errors):
    counts = np.random.default_rng(0).integers(1, 9, (500, 3)).astype(float)
    shift = np.array([0.0, -40.0, 0.5])
    change = least_change(counts, counts @ shift + errors * counts.sum(1), known(3))
    np.testing.assert_allclose(change.values, shift, atol=0.005)
    assert change.rank == 3
    assert change.separate.all()


def test_one_composition_changes_its_energy_and_no_more():
    change = least_change(np.array([WATER] * 9), np.full(9, 19.2), known(2))
    assert change.values @ WATER == pytest.approx(19.2)
    np.testing.assert_allclose(change.values, np.array(WATER) * 19.2 / (128**2 + 64**2))
    assert change.rank == 1
    assert not change.separate.any()


def test_an_element_that_varies_by_itself_is_separate():
    """Water and gold: gold is determined, hydrogen and oxygen only together."""
    counts = np.array([[2.0, 1.0, 0.0], [4.0, 2.0, 3.0], [2.0, 1.0, 5.0]])
    change = least_change(counts, counts @ [0.1, 0.2, 7.0], known(3))
    assert change.rank == 2
    assert change.separate.tolist() == [False, False, True]
    assert change.values[2] == pytest.approx(7.0)


def test_an_error_on_a_rare_composition_is_not_amplified_into_e0(errors):
    """Solved exactly, 3 eV that the model errs on an ion become 3 eV for every proton."""
    counts = np.array([WATER] * 499 + [HYDROXYL])
    residuals = errors * counts.sum(1)
    residuals[-1] = 1.5 * counts[-1].sum() * 0.003
    change = least_change(counts, residuals, known(2))
    assert np.abs(change.values).max() < 0.001
    assert change.rank == 2


def test_a_real_shift_shows_even_in_one_structure(errors):
    counts = np.array([WATER] * 499 + [HYDROXYL])
    shift = np.array([10.0, -430.0])
    change = least_change(counts, counts @ shift + errors * counts.sum(1), known(2))
    np.testing.assert_allclose(change.values, shift, atol=1.5)
    xenon = np.column_stack([np.array([WATER] * 500), np.arange(500) == 7])
    change = least_change(xenon, xenon @ [0.0, 0.0, -2000.0] + errors * xenon.sum(1), known(3))
    np.testing.assert_allclose(change.values, [0, 0, -2000], atol=2.0)
    np.testing.assert_allclose(change.values[:2], 0, atol=0.01)


def test_a_new_element_explains_what_it_can_and_old_ones_stay():
    ammonia = np.array([[3.0, 1.0]] * 4)
    change = least_change(ammonia, np.full(4, -1500.0), np.array([True, False]))
    np.testing.assert_allclose(change.values, [0, -1500], atol=1e-9)
    all_new = least_change(ammonia, np.full(4, -1500.0), np.zeros(2, dtype=bool))
    assert all_new.values @ [3, 1] == pytest.approx(-1500)


def test_labels_that_are_the_models_own_change_nothing():
    counts = np.random.default_rng(0).integers(0, 9, (50, 4)) + np.eye(4)[0]
    assert least_change(counts, np.zeros(50), known(4)).values.tolist() == [0] * 4


@pytest.mark.parametrize(("change", "expected"), [(4.9, 0.0), (5.1, 5.1)])
def test_a_change_is_significant_beyond_five_times_the_noise(change, expected):
    """Four energies less the means of a known and of a new element leave two to see noise in."""
    counts = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0]])
    residuals = np.array([change + 1, change - 1, 8.0, 6.0])
    found = least_change(counts, residuals, np.array([True, False])).values
    np.testing.assert_allclose(found, [expected, 7.0], atol=1e-12)
