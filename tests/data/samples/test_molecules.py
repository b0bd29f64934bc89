"""Batches of molecules: concatenated right, weighted right, padded without touching a number."""

import pickle
from dataclasses import fields

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.padding import BatchShape, StaticBatch, pad_molecules
from bevatron.data.padding.atoms import MAX_PADDING_MOLECULE, MoleculePadding
from bevatron.data.padding.size_buckets import choose_shapes, smallest_shape
from bevatron.data.samples import MoleculeBatch, collate_molecules, molecule_fields

SIZES = [4, 1, 7, 2]


def molecule(num, seed=0, positions=True, targets=(1.0, float("nan"))):
    """A random chain with a few more bonds."""
    rng = np.random.default_rng([seed, num])
    pairs = [(i, i + 1) for i in range(num - 1)]
    pairs += [(0, num - 1)] if num > 3 else []
    bonds = np.array([end for a, b in pairs for end in ((a, b), (b, a))], dtype=np.int32)
    features = rng.integers(0, 5, (len(pairs), 3)).repeat(2, axis=0).astype(np.int16)
    return {
        "atom_features": rng.integers(0, 9, (num, 11)).astype(np.int16),
        "bonds": bonds.reshape(-1, 2),
        "bond_features": features,
        "shortest_paths": rng.integers(0, 9, num * num).astype(np.uint8),
        "random_walk": rng.random((num, 16)).astype(np.float32),
        "laplacian_vectors": rng.random((num, 7)).astype(np.float32),
        "laplacian_values": rng.random(7).astype(np.float32),
        "positions": rng.random((num if positions else 0, 3)).astype(np.float32),
        "targets": np.array(targets, dtype=np.float32),
        "smiles": np.frombuffer(b"C", np.uint8),
        "reason": np.zeros(0, np.uint8),
        "key": np.array(1),
        "split": np.array(-1, np.int8),
        "source": np.zeros(2, np.int64),
    }


def batch_of(sizes, weights=None, **options):
    samples = [molecule(num, seed, **options) for seed, num in enumerate(sizes)]
    weights = np.ones(len(sizes)) if weights is None else weights
    return collate_molecules(samples, np.arange(len(sizes)), weights)


@pytest.fixture
def batch():
    return batch_of(SIZES)


def test_a_sample_has_the_fields_that_a_store_keeps():
    sample = molecule(3)
    for field in molecule_fields("set1", 2):
        field.check(sample[field.name])


def test_counts(batch):
    assert dict(batch.sizes) == {"graphs": 4, "atoms": 14, "edges": 24, "pairs": 16 + 1 + 49 + 4}
    assert batch.graph_ptr.tolist() == [0, 4, 5, 12, 14]
    assert batch.pair_ptr.tolist() == [0, 16, 17, 66, 70]
    assert batch.graph.tolist() == [0] * 4 + [1] + [2] * 7 + [3] * 2


def check_links(batch):
    """Every index array agrees with the edges."""
    senders, receivers = batch.edges
    assert torch.equal(batch.edges[:, torch.arange(batch.num_edges) ^ 1], batch.edges.flip(0))
    assert torch.equal(batch.graph[receivers], batch.edge_graph)
    assert torch.equal(batch.graph[senders], batch.edge_graph)
    for atom in range(batch.num_atoms):
        own = batch.incoming[batch.incoming_ptr[atom] : batch.incoming_ptr[atom + 1]]
        assert sorted(own.tolist()) == torch.nonzero(receivers == atom).flatten().tolist()
    sizes = batch.graph_ptr.diff()
    assert torch.equal(batch.pair_ptr.diff(), sizes**2)
    assert torch.equal(batch.graph, torch.repeat_interleave(torch.arange(len(sizes)), sizes))


def test_index_arrays_agree_with_the_edges(batch):
    check_links(batch)
    assert torch.equal(batch.degree, batch.incoming_ptr.diff())


def test_pairs_are_rows_and_columns_of_each_molecule(batch):
    first, second, graph = batch.pairs()
    expected = [
        (begin + i, begin + j, g)
        for g, (begin, num) in enumerate(zip(batch.graph_ptr.tolist(), SIZES, strict=False))
        for i in range(num)
        for j in range(num)
    ]
    found = list(zip(first.tolist(), second.tolist(), graph.tolist(), strict=True))
    assert found == expected


def test_every_molecule_keeps_its_own_numbers(batch):
    for g, num in enumerate(SIZES):
        sample = molecule(num, g)
        own = slice(batch.graph_ptr[g], batch.graph_ptr[g + 1])
        for name in ("atom_features", "random_walk", "laplacian_vectors", "positions"):
            np.testing.assert_array_equal(getattr(batch, name)[own], sample[name])
        paths = batch.shortest_paths[batch.pair_ptr[g] : batch.pair_ptr[g + 1]]
        np.testing.assert_array_equal(paths, sample["shortest_paths"])
        edges = batch.edges.T[batch.edge_graph == g] - batch.graph_ptr[g]
        np.testing.assert_array_equal(edges, sample["bonds"])
        features = batch.bond_features[batch.edge_graph == g]
        np.testing.assert_array_equal(features, sample["bond_features"])


def test_missing_labels_and_repeats_weigh_nothing():
    batch = batch_of(SIZES, weights=[1, 0, 1, 1])
    assert batch.target_weight.tolist() == [[1, 0], [0, 0], [1, 0], [1, 0]]
    assert batch.graph_weight.tolist() == [1, 0, 1, 1]
    assert batch.targets[:, 1].tolist() == [0, 0, 0, 0]


def test_molecules_without_structure_have_zeros():
    samples = [molecule(3), molecule(2, positions=False), molecule(1)]
    batch = collate_molecules(samples, np.arange(3), np.ones(3))
    assert batch.has_positions.tolist() == [True, False, True]
    assert not batch.positions[3:5].any()
    np.testing.assert_array_equal(batch.positions[5:], samples[2]["positions"])


def test_molecules_to_predict_have_no_targets():
    sample = {name: value for name, value in molecule(3).items() if name != "targets"}
    batch = collate_molecules([sample], np.arange(1), [1.0])
    assert batch.targets.shape == batch.target_weight.shape == (1, 0)


def test_types_after_a_move(batch):
    moved = batch.to("cpu", torch.float64)
    assert moved.positions.dtype == moved.targets.dtype == torch.float64
    assert moved.atom_features.dtype == torch.int64
    assert moved.shortest_paths.dtype == torch.uint8
    assert isinstance(moved.indices, np.ndarray)


def test_collating_pickles_and_batches_do(batch):
    assert pickle.loads(pickle.dumps(collate_molecules)) is collate_molecules
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again.edges, batch.edges)


# ---- padding ----

RULE = MoleculePadding()


def shape_for(batch):
    sizes = [[batch.num_edges, batch.num_atoms, batch.num_graphs, batch.num_pairs]]
    return choose_shapes(RULE, np.array(sizes), 1).shapes[0]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30))
def test_padding_keeps_every_number_and_links_nothing_real(sizes):
    batch = batch_of(sizes)
    shape = shape_for(batch)
    padded = pad_molecules(batch, shape)
    assert (padded.num_atoms, padded.num_edges) == (shape.atoms, shape.edges)
    assert (padded.num_graphs, padded.num_pairs) == (shape.graphs, shape.pairs)
    for field in fields(MoleculeBatch):
        before, after = getattr(batch, field.name), getattr(padded, field.name)
        if not isinstance(before, torch.Tensor):
            continue
        kept = after[:, : batch.num_edges] if field.name == "edges" else after[: len(before)]
        assert torch.equal(kept, before), field.name
    check_links(padded)
    assert padded.graph_ptr[-1] == shape.atoms
    assert padded.pair_ptr[-1] <= shape.pairs
    assert int(padded.graph_ptr.diff()[batch.num_graphs :].max()) <= 16
    assert (padded.edges[:, batch.num_edges :] >= batch.num_atoms).all()
    for name in ("target_weight", "graph_weight", "has_positions"):
        assert not getattr(padded, name)[batch.num_graphs :].any()
    first, second, _ = padded.pairs()
    assert torch.equal(padded.graph[first], padded.graph[second])
    np.testing.assert_array_equal(padded.indices, batch.indices)


def test_a_batch_that_is_too_large_is_refused(batch):
    shape = shape_for(batch)
    for less in (
        BatchShape(22, shape.atoms, shape.graphs, shape.pairs),
        BatchShape(shape.edges, 14, shape.graphs, shape.pairs),
        BatchShape(shape.edges, shape.atoms, 4, shape.pairs),
        BatchShape(shape.edges, shape.atoms, shape.graphs, 70),
    ):
        assert not less.fits(batch)
        with pytest.raises(ValueError, match="does not fit"):
            pad_molecules(batch, less)


def test_a_static_batch_is_filled_again_and_again(batch):
    shape = shape_for(batch)
    static = StaticBatch(shape, torch.float32, like=batch)
    place = static.batch.edges.data_ptr()
    other = batch_of([2, 3])
    static.fill(batch)
    static.fill(other)
    assert static.batch.edges.data_ptr() == place
    expected = pad_molecules(other, shape)
    for field in fields(MoleculeBatch):
        after = getattr(static.batch, field.name)
        if isinstance(after, torch.Tensor):
            assert torch.equal(after, getattr(expected, field.name)), field.name


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_a_rounded_shape_of_molecules_holds_them_and_little_more(atoms):
    size = (2 * sum(atoms), sum(atoms), len(atoms), sum(n**2 for n in atoms))
    shape = RULE.rounded(size)
    assert RULE.holds(shape, size)
    assert shape.edges % 2 == 0
    assert (shape.atoms - size[1]) / (shape.graphs - size[2]) <= MAX_PADDING_MOLECULE
    padding = (shape.atoms - size[1]) * MAX_PADDING_MOLECULE
    assert shape.pairs <= max(128, 1.25 * (size[3] + padding + 128))


def test_few_shapes_hold_all_batches_and_waste_little():
    rng = np.random.default_rng(0)
    sizes = []
    for _ in range(50):
        atoms = rng.integers(8, 20, 500)
        total = int(atoms.sum())
        sizes.append([2 * total + 1000, total, 500, int((atoms**2).sum())])
    buckets = choose_shapes(RULE, np.array(sizes), 3)
    assert len(buckets.shapes) <= 3
    assert all(smallest_shape(RULE, buckets.shapes, size) for size in sizes)
    assert buckets.waste["atoms"] < 0.03
