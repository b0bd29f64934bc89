"""Weights of chains and interfaces by hand, and interfaces by all distances."""

import numpy as np

from bevatron.data.proteins.weights import chain_weights, complex_weights, find_interfaces


def test_weights_of_a_small_data_set_by_hand():
    # Two proteins of one cluster, one of another, DNA, a ligand.
    kind = np.array([0, 0, 0, 2, 3])
    cluster = np.array([7, 7, 9, 11, 20])
    interfaces = np.array([[0, 2], [2, 1], [0, 4], [3, 2]])
    weights = complex_weights(kind, cluster, interfaces)
    np.testing.assert_allclose(weights.chains, [0.75, 0.75, 1.5, 1.5, 0.5])
    # The first two interfaces are between the clusters 7 and 9, whichever comes first.
    np.testing.assert_allclose(weights.interfaces, [3.0, 3.0, 4.0, 6.0])


def test_no_interface_is_no_weight():
    weights = complex_weights(np.array([1]), np.array([0]), np.empty((0, 2), dtype=np.int64))
    assert weights.chains.tolist() == [1.5]
    assert weights.interfaces.shape == (0,)


def test_weights_of_chains_are_bounded_in_length_and_fall_with_the_cluster():
    weights = chain_weights(np.array([10, 384, 900, 900, 900, 900]), np.array([1, 2, 3, 3, 3, 3]))
    np.testing.assert_allclose(weights, [0.5, 0.75, 0.5, 0.5, 0.5, 0.5])


def test_interfaces_are_the_pairs_of_chains_with_observed_atoms_near():
    rng = np.random.default_rng(0)
    for _ in range(20):
        num_atoms = rng.integers(1, 8, 40).astype(np.int32)
        asym_id = np.sort(rng.integers(1, 7, 40)).astype(np.int32)
        chain = np.repeat(asym_id, num_atoms)
        position = (rng.normal(size=(len(chain), 3)) * 6 + 11.0 * (chain[:, None] % 3)).astype("f4")
        resolved = rng.random(len(chain)) < 0.7
        entry = {
            "asym_id": asym_id,
            "num_atoms": num_atoms,
            "position": position,
            "resolved": resolved,
        }
        distance = np.linalg.norm(position[:, None].astype(float) - position, axis=-1)
        near = (distance < 5.0) & resolved[:, None] & resolved & (chain[:, None] < chain)
        expected = np.unique(
            np.stack(
                [
                    np.broadcast_to(chain[:, None], near.shape)[near],
                    np.broadcast_to(chain, near.shape)[near],
                ],
                axis=1,
            ),
            axis=0,
        )
        np.testing.assert_array_equal(find_interfaces(entry), expected)


def test_an_interface_may_span_a_gap_between_the_boxes_of_its_chains():
    entry = {
        "asym_id": np.array([1, 2, 3]),
        "num_atoms": np.ones(3, dtype=np.int64),
        "position": np.array([[0.0, 0, 0], [4.9, 0, 0], [10.0, 0, 0]]),
        "resolved": np.ones(3, dtype=bool),
    }
    assert find_interfaces(entry).tolist() == [[1, 2]]
