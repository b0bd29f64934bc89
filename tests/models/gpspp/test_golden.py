"""Values of the official TensorFlow layers: a three-block model on four real molecules.

The official forward ran in three masking modes (m0 shortest paths only, m1 positions only, m2
both), each molecule in a pack of its own whose slot 0 of nodes, edges and graphs is a dummy. The
values of m1 are those of molecules that do not see their pack (the official leak is not in them),
so that all three modes are compared in full: the first nodes and edges, the bias, nodes, edges and
globals after every block, logits and the prediction. Here the four are one batch.
"""

import json

import numpy as np
import pytest
import torch

from bevatron.data.samples import collate_molecules
from bevatron.errors import CheckpointError
from bevatron.models.gpspp import from_official, observe
from bevatron.models.gpspp.graphs import Drops, Graphs
from bevatron.models.gpspp.layers import Stream


@pytest.fixture(scope="module")
def golden(shared):
    folder = shared / "golden/gpspp"
    names = [name for name, _ in json.loads((folder / "small.json").read_text())["weights"]]
    inputs, values = np.load(folder / "small_inputs.npz"), np.load(folder / "small_tanh.npz")
    return names, np.load(folder / "small_weights.npz"), inputs, values


def molecule(inputs, i):
    def of(name):
        return inputs[f"{i}_{name}"]

    return {
        "atom_features": of("node_feat").astype(np.int16),
        "bonds": np.stack([of("senders"), of("receivers")], 1).astype(np.int32),
        "bond_features": of("edge_feat").astype(np.int16),
        "shortest_paths": (of("shortest_path_distances") - 1).astype(np.uint8).ravel(),
        "random_walk": of("random_walk_landing_probs").astype(np.float32),
        "laplacian_vectors": of("lap_eig_vecs"),
        "laplacian_values": of("lap_eig_vals")[0, :, 0],
        "positions": of("ogb_conformer"),
        "targets": np.zeros(1, np.float32),
    }


def batch_of(inputs, members):
    return collate_molecules(
        [molecule(inputs, i) for i in members], np.array(list(members)), [1.0] * len(members)
    )


def states(model, batch, mode):
    """All states of a model by the names of the reference."""
    inputs, graphs = observe(batch, mode), Graphs.of(batch)
    x, e, g, bias = model.encoders(batch, inputs, graphs)
    found = {"x0": x, "e0": e, "bias": bias}
    for layer, block in enumerate(model.blocks, 1):
        x, (e, _), (g, _), bias = block(x, Stream(e, e), Stream(g, g), bias, graphs, Drops())
        found |= {f"x{layer}": x, f"e{layer}": e, f"g{layer}": g}
    noise = model.noise(x, e)
    found |= {"nn": noise["node_logits"], "ne": noise["edge_logits"]}
    return found | {"y": model.decoder(x, g, graphs)["raw"]}


def expected(values, key, i, batch):
    """The official numbers of molecule i of the batch, without dummy and padding."""
    n = int(batch.graph_ptr.diff()[i])
    found = torch.from_numpy(values[i]).double()
    if key == "bias":
        return found[:, 1 : n + 1, 1 : n + 1].permute(1, 2, 0).reshape(n * n, -1)
    if key[0] in "gy":
        return found[1:2]
    edges = int((batch.edge_graph == i).sum())
    return found[1 : 1 + (edges if key in {"ne", "e0", "e1", "e2", "e3"} else n)]


@pytest.mark.parametrize(("mode", "name"), [("2d", "m0"), ("3d", "m1"), ("both", "m2")])
def test_every_layer_has_the_official_values(golden, mode, name):
    names, weights, inputs, values = golden
    model = from_official(dict(weights), names, torch.float64)
    batch = batch_of(inputs, range(4)).to("cpu", torch.float64)
    with torch.no_grad():
        found = states(model, batch, mode)
    assert len(found) == 15
    for key, value in found.items():
        parts = [expected(values[f"{name}_{key}"], key, i, batch) for i in range(4)]
        official = torch.cat(parts)
        error = float((value - official).abs().max() / official.abs().max())
        assert error < 1e-5, f"{key}: {error}"


def test_hyperparameters_are_read_off_the_official_weights(golden):
    names, weights, _, _ = golden
    config = from_official(dict(weights), names).config
    assert (config.node_width, config.edge_width, config.global_width) == (64, 32, 16)
    assert (config.num_layers, config.num_heads, config.ffn_width) == (3, 8, 256)
    assert (config.num_kernels, config.encoder_width, config.feature_set) == (16, 8, "set1")


def test_official_weights_that_do_not_fit_are_refused(golden):
    names, weights, _, _ = golden
    pairs = [(name, weights[key]) for name, key in zip(names, weights.files, strict=True)]
    with pytest.raises(CheckpointError, match="first that is missing is 'NEdge_aux/bias'"):
        from_official(pairs[:-1])
    swapped = [*pairs[:11], pairs[12], pairs[11], *pairs[13:]]
    with pytest.raises(CheckpointError, match="node_encoder_1/bias:0' where"):
        from_official(swapped)
    with pytest.raises(CheckpointError, match="185 names were given for 186"):
        from_official(dict(weights), names[:-1])
