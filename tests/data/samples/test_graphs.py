"""Samples and batches of graphs with labelled nodes."""

import pickle

import numpy as np
import pytest
import torch

from bevatron.data.samples import WholeGraph, check_graph, collate_graphs


def sample(n=4, seed=0, sparse=False, **changes):
    rng = np.random.default_rng(seed)
    features = rng.normal(size=(n, 3)).astype(np.float32) * (rng.random((n, 3)) < 0.6)
    fields = {
        "num_nodes": np.array(n),
        "edges": np.array([[0, 1], [1, n - 1], [n - 1, 0]], dtype=np.int32),
        "edge_values": np.zeros(0, dtype=np.float32),
        "labels": np.arange(n) % 2,
        "masks": np.eye(n, 3, dtype=bool),
        "part": np.array(0, dtype=np.int32),
    }
    if sparse:
        row, column = features.nonzero()
        fields |= {
            "feature_ptr": np.searchsorted(row, np.arange(n + 1)),
            "feature_columns": column.astype(np.int32),
            "feature_values": features[row, column],
            "num_features": np.array(3),
        }
    else:
        fields["features"] = features
    return fields | changes


@pytest.mark.parametrize("sparse", [False, True])
def test_graphs_stand_side_by_side(sparse):
    parts = [sample(4, 0, sparse), sample(3, 1, sparse), sample(5, 2, sparse)]
    batch = collate_graphs(parts, np.array([7, 2, 5]), [1.0, 0.0, 1.0])
    assert batch.edges.T.tolist() == [
        *([0, 1], [1, 3], [3, 0]),
        *([4, 5], [5, 6], [6, 4]),
        *([7, 8], [8, 11], [11, 7]),
    ]
    features = batch.features.dense() if sparse else batch.features
    expected = np.concatenate([sample(n, s)["features"] for n, s in ((4, 0), (3, 1), (5, 2))])
    torch.testing.assert_close(features, torch.as_tensor(expected))
    assert batch.mask.nonzero()[:, 0].tolist() == [0, 7]
    assert batch.owner.tolist() == [0] * 4 + [1] * 3 + [2] * 5
    assert batch.sizes == {"graphs": 3, "nodes": 12, "edges": 9}
    assert batch.sample_indices.tolist() == [7, 2, 5]


def test_edge_values_of_some_graphs_are_one_in_the_others():
    weighted = sample(edge_values=np.array([2.0, 3.0, 4.0], dtype=np.float32))
    batch = collate_graphs([sample(), weighted], np.arange(2), [1.0, 1.0])
    assert batch.graph.edge_values.tolist() == [1, 1, 1, 2, 3, 4]
    assert collate_graphs([sample()], np.arange(1), [1.0]).graph.edge_values is None


def test_edge_values_that_are_doubles_stay_doubles():
    exact = sample(edge_values=np.array([0.1, 0.2, 0.3]))
    single = sample(edge_values=np.array([0.1, 0.2, 0.3], dtype=np.float32))
    batch = collate_graphs([exact, sample(), single], np.arange(3), [1.0, 1.0, 1.0])
    assert batch.graph.edge_values.dtype == torch.float64
    assert batch.graph.edge_values[:4].tolist() == [0.1, 0.2, 0.3, 1.0]
    half = batch.to("cpu", torch.float32)
    assert half.graph.edge_values.dtype == torch.float32
    assert collate_graphs([single], np.arange(1), [1.0]).graph.edge_values.dtype == torch.float32


def test_a_whole_graph_is_one_object_in_every_step_and_part():
    whole = WholeGraph(sample())
    train, valid = whole.part("train"), whole.part("valid")
    first = collate_graphs([train], np.array([0]), [1.0])
    assert collate_graphs([train], np.array([0]), [1.0]) is first
    other = collate_graphs([valid], np.array([0]), [1.0])
    assert other.graph is first.graph
    assert (first.mask.tolist(), other.mask.tolist()) == (
        [True, False, False, False],
        [False, True, False, False],
    )
    moved = first.to("cpu", torch.float64)
    assert moved is first.to("cpu", torch.float64)
    assert moved.graph is other.to("cpu", torch.float64).graph
    assert moved.features.dtype == torch.float64
    calls = []

    def build(graph):
        calls.append(graph)
        return 5

    assert (first.graph.derived("x", build), other.graph.derived("x", build)) == (5, 5)
    assert len(calls) == 1


def test_a_repeated_whole_graph_does_not_count():
    whole = WholeGraph(sample()).part("train")
    assert not collate_graphs([whole], np.array([0]), [0.0]).mask.any()


def test_batches_travel_between_processes_without_what_was_derived():
    whole = WholeGraph(sample()).part("valid")
    batch = collate_graphs([whole], np.array([0]), [1.0])
    batch.graph.derived("x", lambda graph: 5)
    again = pickle.loads(pickle.dumps(batch))
    assert torch.equal(again.edges, batch.edges)
    assert torch.equal(again.mask, batch.mask)
    assert again.graph.derived("x", lambda graph: 6) == 6
    assert pickle.loads(pickle.dumps(whole)).batch().mask.tolist() == batch.mask.tolist()


def test_read_only_arrays_are_left_alone():
    fields = sample()
    for array in fields.values():
        array.flags.writeable = False
    batch = collate_graphs([fields], np.array([0]), [1.0])
    batch.features.zero_()
    assert fields["features"].any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"edges": np.array([[0, 4]])}, r"edge 0 is \(0, 4\), but nodes are 0..3"),
        ({"edges": np.array([[0, 1], [-1, 0]])}, r"edge 1 is \(-1, 0\)"),
        ({"edges": np.zeros((2, 3), dtype=int)}, r"expected whole numbers \[E, 2\]"),
        ({"labels": np.zeros(3)}, "labels have 3 rows, but there are 4 nodes"),
        ({"masks": np.zeros((5, 3), dtype=bool)}, "masks have 5 rows"),
        ({"edge_values": np.ones(2)}, "2 edge_values do not go with 3 edges"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(changes, message):
    from bevatron.errors import DataError

    with pytest.raises(DataError, match=message):
        check_graph(sample(**changes))
