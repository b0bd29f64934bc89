"""Nearest centres and sums of clusters, against plain counting."""

import numpy as np
import pytest

from bevatron.data.proteins import clusters_of_rows
from bevatron.data.proteins.clusters_of_rows import cluster_sums, nearest_centres


def drawn(rows, columns, classes, seed=0):
    return np.random.default_rng(seed).integers(0, classes, (rows, columns)).astype(np.int8)


@pytest.mark.parametrize("columns", [1, 2, 7, 254, 255, 520])
def test_the_nearest_centre_agrees_in_most_columns(columns, monkeypatch):
    monkeypatch.setattr(clusters_of_rows, "_BLOCK", 16)
    rows = drawn(37, columns, 22)
    groups = [drawn(5, columns, 23, seed=1), drawn(9, columns, 23, seed=2)]
    for centres, found in zip(groups, nearest_centres(rows, groups), strict=True):
        equal = (rows[:, None] == centres) & (rows[:, None] < 21)
        assert np.array_equal(found, equal.sum(-1).argmax(1))


def test_gaps_and_masks_agree_with_nothing():
    rows = np.full((1, 4), 21, dtype=np.int8)
    centres = np.array([[0, 0, 0, 0], [21, 21, 22, 22]], dtype=np.int8)
    assert nearest_centres(rows, [centres]).tolist() == [[0]]


def test_all_columns_of_a_long_chain_count():
    rows = np.zeros((1, 500), dtype=np.int8)
    centres = np.zeros((2, 500), dtype=np.int8)
    centres[0, 250:] = 1
    assert nearest_centres(rows, [centres]).tolist() == [[1]]


def test_sums_of_clusters_are_those_of_their_rows():
    rows, deletions = drawn(50, 11, 22), drawn(50, 11, 9, seed=3).astype(np.uint8)
    cluster = np.random.default_rng(4).choice([0, 2, 3, 9], 50)
    profile, totals = cluster_sums(rows, deletions, cluster, 10)
    for number in range(10):
        own = cluster == number
        counted = (rows[own][..., None] == np.arange(22)).sum(0)
        assert np.array_equal(profile[number], counted)
        assert np.array_equal(totals[number], deletions[own].sum(0, dtype=int))


def test_no_rows_sum_to_nothing():
    none = np.zeros((0, 3), dtype=np.int8)
    profile, totals = cluster_sums(none, none.astype(np.uint8), np.zeros(0, dtype=np.int64), 2)
    assert not profile.any()
    assert not totals.any()
