"""Batches padded to fixed shapes, and the choice of the shapes."""

import copy
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bevatron.data.neighbours import add_neighbours
from bevatron.data.padding import BatchShape, StaticBatch, pad_structures
from bevatron.data.padding.atoms import MAX_NEIGHBOURS, AtomPadding
from bevatron.data.padding.size_buckets import choose_shapes, grow_shapes, smallest_shape, waste
from bevatron.data.samples import collate_structures, unlabelled_structure


def clusters(*num_atoms, seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for n in num_atoms:
        sample = unlabelled_structure(np.full(n, 8), rng.uniform(0, 3, (n, 3)))
        sample |= {"energy": np.array(1.0), "forces": rng.normal(size=(n, 3))}
        samples.append(add_neighbours(sample, 3.0))
    return collate_structures(samples, np.arange(len(samples)), [1.0] * len(samples))


RULE = AtomPadding()
SHAPE = BatchShape(edges=120, atoms=24, graphs=7)


def test_real_structures_come_first_and_unchanged():
    batch = clusters(4, 1, 5)
    padded = pad_structures(batch, SHAPE)
    assert torch.equal(padded.positions[:10], batch.positions)
    assert torch.equal(padded.edges[:, : batch.num_edges], batch.edges)
    assert torch.equal(padded.edge_shifts[: batch.num_edges], batch.edge_shifts)
    assert torch.equal(padded.energy[:3], batch.energy)
    assert padded.sample_indices.tolist() == [0, 1, 2]


def test_a_padded_batch_is_a_valid_batch():
    batch = clusters(4, 1, 5)
    padded = pad_structures(batch, SHAPE)
    assert (padded.num_edges, padded.num_atoms, padded.num_graphs) == (120, 24, 7)
    assert (padded.edges[1].diff() >= 0).all()
    assert (padded.graph.diff() >= 0).all()
    assert padded.graph_ptr.tolist() == [0, 4, 5, 10, 24, 24, 24, 24]
    counted = torch.bincount(padded.graph, minlength=7)
    assert torch.equal(counted, padded.graph_ptr.diff())
    assert (padded.graph[padded.edges[0]] == padded.graph[padded.edges[1]]).all()
    sender, receiver = padded.edges
    shift = torch.einsum("ei,eij->ej", padded.edge_shifts, padded.cell[padded.graph[sender]])
    vectors = padded.positions[receiver] - padded.positions[sender] + shift
    assert (torch.linalg.vector_norm(vectors, dim=1) > 1e-3).all()


def test_padding_carries_no_label():
    padded = pad_structures(clusters(4, 1, 5), SHAPE)
    for name in ("has_energy", "has_forces", "energy_weight", "forces_weight", "stress_weight"):
        assert not getattr(padded, name)[3:].any()
    assert not padded.has_stress.any()


def test_padding_edges_are_spread_over_padding_atoms():
    batch = clusters(3)
    padded = pad_structures(batch, BatchShape(edges=batch.num_edges + 70, atoms=10, graphs=2))
    assert torch.bincount(padded.edges[1])[3:].tolist() == [10] * 7


def test_what_is_too_large_is_refused():
    batch = clusters(4, 4)
    assert not BatchShape(batch.num_edges, 8, 3).fits(batch)
    assert not BatchShape(batch.num_edges, 9, 2).fits(batch)
    assert BatchShape(batch.num_edges, 9, 3).fits(batch)
    with pytest.raises(ValueError, match=r"does not fit into \d+ edges, 8 atoms"):
        pad_structures(batch, BatchShape(batch.num_edges, 8, 3))
    rounded = replace(batch, edges=batch.edges.double())
    with pytest.raises(ValueError, match="edges: float64 does not fit into int"):
        StaticBatch(SHAPE, like=batch).fill(rounded)


def test_a_static_batch_stays_where_it_is_and_forgets_what_was_in_it():
    static = StaticBatch(SHAPE, torch.float32, like=clusters(2))
    address = static.batch.edges.data_ptr()
    static.fill(clusters(6, 6, 6, seed=1))
    static.fill(clusters(2, 3))
    assert static.batch.edges.data_ptr() == address
    expected = pad_structures(clusters(2, 3).to("cpu", torch.float32), SHAPE)
    for name, value in vars(expected).items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(getattr(static.batch, name), value), name
            assert getattr(static.batch, name).dtype == value.dtype


def test_a_shape_has_named_lengths_in_the_order_of_its_axes():
    shape = BatchShape(edges=120, atoms=24, graphs=7)
    assert shape == BatchShape(120, 24, 7)
    assert [*shape] == ["edges", "atoms", "graphs"]
    assert pickle.loads(pickle.dumps(shape)) == copy.copy(shape) == shape
    assert len({shape, BatchShape(120, 24, 7)}) == 1
    assert BatchShape(edges=119, atoms=99, graphs=9) < shape < BatchShape(120, 24, 8)
    with pytest.raises(AttributeError, match="pairs"):
        shape.pairs  # noqa: B018


def test_one_copy_moves_everything():
    source, target = (StaticBatch(SHAPE, like=clusters(2)) for _ in range(2))
    source.fill(clusters(2, 3))
    target.copy_from(source)
    assert torch.equal(target.batch.forces, source.batch.forces)
    assert torch.equal(target.batch.has_energy, source.batch.has_energy)


def random_sizes(seed, num):
    rng = np.random.default_rng(seed)
    atoms = rng.integers(1, 600, num)
    return np.stack([atoms * rng.integers(0, 60, num), atoms, rng.integers(1, 40, num)], axis=1)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 400), st.integers(1, 4))
def test_every_batch_has_a_shape_with_room(seed, num, max_shapes):
    sizes = random_sizes(seed, num)
    buckets = choose_shapes(RULE, sizes, max_shapes)
    assert 1 <= len(buckets.shapes) <= max_shapes
    for size in sizes.tolist():
        shape = smallest_shape(RULE, buckets.shapes, size)
        assert shape is not None
        spare_edges, spare_atoms = shape.edges - size[0], shape.atoms - size[1]
        assert spare_atoms >= 1
        assert spare_edges / spare_atoms <= 128
        assert shape.graphs > size[2]


@given(st.integers(0, 10_000))
@settings(max_examples=20, deadline=None)
def test_more_shapes_waste_less(seed):
    sizes = random_sizes(seed, 100)
    wasted = [
        sum(waste(RULE, sizes, choose_shapes(RULE, sizes, n, 0.0).shapes).values()) for n in (1, 4)
    ]
    assert wasted[1] <= wasted[0] + 1e-12


def test_two_kinds_of_batches_get_a_shape_each():
    rng = np.random.default_rng(0)
    small = np.stack([rng.integers(1900, 2000, 50), rng.integers(90, 100, 50), [8] * 50], axis=1)
    large = np.stack([rng.integers(38000, 40000, 50), rng.integers(900, 1000, 50), [3] * 50], 1)
    buckets = choose_shapes(RULE, np.concatenate([small, large]), 2, headroom=0.0)
    assert [shape.edges for shape in buckets.shapes] == [2048, 40064]
    assert buckets.waste["edges"] < 0.04
    assert "are padding" in str(buckets)


def test_batches_that_fit_nowhere_are_told_apart():
    shapes = [BatchShape(100, 10, 3)]
    assert smallest_shape(RULE, shapes, (100, 9, 2)) == shapes[0]
    assert smallest_shape(RULE, shapes, (101, 9, 2)) is None
    assert waste(RULE, np.array([[101, 9, 2]]), shapes) == {"edges": 0.0, "atoms": 0.0}
    with pytest.raises(ValueError, match="no batches"):
        choose_shapes(RULE, np.zeros((0, 3), dtype=np.int64))


def many_batches(scale=1):
    """Edges, atoms and structures of batches of many sizes."""
    edges = np.sort(np.random.default_rng(1).integers(40_000, 60_000, 80))
    return np.stack([scale * edges, edges // 20, 4 + edges % 9], axis=1)


def test_a_larger_batch_changes_one_shape():
    shapes = choose_shapes(RULE, many_batches()).shapes
    larger = np.concatenate([many_batches(), [[61_500, 3080, 9]]])
    grown = grow_shapes(RULE, shapes, larger).shapes
    assert all(smallest_shape(RULE, grown, size) for size in larger.tolist())
    assert len(set(grown) - set(shapes)) == 1
    assert (
        len(set(choose_shapes(RULE, larger).shapes) - set(shapes)) == 3
    )  # the best would be new ones


def test_batches_of_another_kind_get_the_best_shapes():
    shapes = choose_shapes(RULE, many_batches()).shapes
    others = many_batches(scale=4)
    assert grow_shapes(RULE, shapes, others) == choose_shapes(RULE, others)


SIZES = st.tuples(st.integers(0, 10**7), st.integers(1, 10**5), st.integers(1, 5000))


@given(size=SIZES)
def test_a_rounded_shape_holds_the_batch_and_little_more(size):
    edges, atoms, graphs = size
    shape = RULE.rounded(size)
    spare_edges, spare_atoms = shape.edges - edges, shape.atoms - atoms
    assert spare_edges >= 0
    assert spare_atoms >= 1
    assert shape.graphs > graphs
    assert spare_edges <= MAX_NEIGHBOURS * spare_atoms
    assert shape.edges <= max(128, (1.0625 if edges >= 2**16 else 1.25) * edges + 1)
    assert shape.graphs <= max(8, 2 * graphs)
    needed = spare_edges / MAX_NEIGHBOURS + 2
    assert spare_atoms <= needed + max(16, (1 / 16 if atoms > 2**11 else 1 / 4) * shape.atoms)


@given(atoms=st.integers(64, 2000), neighbours=st.integers(10, 60))
def test_structures_that_move_have_few_shapes(atoms, neighbours):
    middle = atoms * neighbours
    around = np.linspace(0.95, 1.05, 40) * middle
    assert len({RULE.rounded((int(edges), atoms, 1)) for edges in around}) <= 6
