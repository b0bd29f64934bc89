"""Node classifiers: stacks, features, batches, learning."""

import copy
import dataclasses
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch

from bevatron.data.samples import WholeGraph, collate_graphs
from bevatron.errors import CheckpointError, ConfigError, DataError
from bevatron.models.graph_attention import (
    PRESETS,
    GraphAttentionConfig,
    NodeClassifier,
    NodeTask,
    graph_matrix,
    load_model,
    save_model,
)

KINDS = ("gat", "gatv2", "agnn", "agnn_paper", "va", "va_scaled", "va_softmax", "gcn", "sgc", "gin")


def communities(n=40, seed=0, sparse=False, part=0):
    """Two groups of nodes, edges mostly within; features are noisy signs of the group."""
    rng = np.random.default_rng(seed)
    group = np.arange(n) % 2
    chance = np.where(group[:, None] == group[None], 0.3, 0.02)
    edges = np.argwhere(rng.random((n, n)) < chance).astype(np.int32)
    edges = edges[edges[:, 0] != edges[:, 1]]
    features = (rng.normal(size=(n, 6)) + (2 * group[:, None] - 1) * 0.7).astype(np.float32)
    masks = np.zeros((n, 3), dtype=bool)
    masks[np.arange(n), np.arange(n) // 2 % 3] = True
    fields = {
        "num_nodes": np.array(n),
        "edges": edges,
        "labels": group.astype(np.int64),
        "masks": masks,
        "part": np.array(part),
    }
    if not sparse:
        return fields | {"features": features}
    features[features < 0] = 0
    row, column = features.nonzero()
    return fields | {
        "feature_ptr": np.searchsorted(row, np.arange(n + 1)),
        "feature_columns": column.astype(np.int32),
        "feature_values": features[row, column],
        "num_features": np.array(6),
    }


def batch_of(*samples):
    return collate_graphs(samples, np.arange(len(samples)), [1.0] * len(samples))


def config_of(layer, stack="plain", **changes):
    values = {"hidden": 8, "heads": 2, "dropout": 0.1, "attention_dropout": 0.1}
    config = GraphAttentionConfig(**(values | {"layer": layer, "stack": stack} | changes))
    return config.with_data(inputs=6, outputs=2)


STACKS = [(layer, stack) for layer in KINDS for stack in ("plain", "residual")]
STACKS.remove(("sgc", "residual"))  # a single linear map


@pytest.mark.parametrize(("layer", "stack"), STACKS)
def test_every_parameter_learns_and_graphs_of_a_batch_do_not_mix(layer, stack):
    model = NodeClassifier(config_of(layer, stack, norm="layer")).double()
    one, other = communities(20, 1), communities(14, 2)
    both = batch_of(one, other).to("cpu", torch.float64)
    loss = NodeTask("classes", 2).loss(model, both, {"cross_entropy": torch.tensor(5.0)}).total
    loss.backward()
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None, name
            assert parameter.grad.isfinite().all(), name
    model.eval()
    apart = [model(batch_of(s).to("cpu", torch.float64))["logits"] for s in (one, other)]
    torch.testing.assert_close(model(both)["logits"], torch.cat(apart))


@pytest.mark.parametrize("layer", ["gat", "agnn", "gcn", "sgc"])
def test_sparse_features_give_what_dense_ones_do(layer):
    fields = communities(sparse=True)
    dense = {k: v for k, v in fields.items() if not k.startswith("feature_")}
    sparse_batch = batch_of(fields)
    dense_batch = batch_of(dense | {"features": sparse_batch.features.dense().numpy()})
    model = NodeClassifier(config_of(layer, norm="none")).eval()
    torch.testing.assert_close(model(sparse_batch)["logits"], model(dense_batch)["logits"])
    model.train()
    model(sparse_batch)["logits"].sum().backward()


def test_the_matrix_is_made_once_with_self_loops_where_there_are_none():
    fields = communities(5)
    fields["edges"] = np.array([[0, 1], [2, 2], [3, 1]])
    fields["edge_values"] = np.array([2.0, 3.0, 4.0], dtype=np.float32)
    graph = batch_of(fields).graph
    csr = graph_matrix(graph, self_loops=True)
    assert graph_matrix(graph, self_loops=True) is csr
    dense = torch.zeros(5, 5).index_put((csr.row_index.long(), csr.col.long()), csr.values)
    expected = torch.eye(5)
    expected[1, 0], expected[2, 2], expected[1, 3] = 2.0, 3.0, 4.0
    assert torch.equal(dense, expected)
    assert graph_matrix(graph, self_loops=False).nnz == 3


def test_residuals_norms_and_depth_of_plain_stacks():
    for norm in ("none", "layer", "batch"):
        config = config_of("gat", num_layers=4, residual=True, norm=norm)
        model = NodeClassifier(config)
        assert model(batch_of(communities()))["logits"].shape == (40, 2)
    assert "kernel: graph_attention" in model.explain()
    assert model.explain().count("psi:") == 4


@pytest.mark.parametrize("layer", ["gat", "agnn", "gcn"])
def test_communities_are_learned_transductively(layer):
    torch.manual_seed(1)
    graph = WholeGraph(communities(60))
    model = NodeClassifier(config_of(layer, dropout=0.0, attention_dropout=0.0))
    task = NodeTask("classes", 2)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.02)
    train = graph.part("train").batch()
    losses = []
    for _ in range(60):
        loss = task.loss(model, train, task.normalisers(train)).total
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    model.eval()
    metrics = task.metrics()
    test = graph.part("test").batch()
    metrics.update(test, task.predict(model, test))
    assert losses[-1] < 0.5 * losses[0]
    assert metrics.compute()["accuracy"] > 0.9


def test_the_trainer_trains_it(tmp_path):
    from bevatron.data.dataset import InMemory
    from bevatron.train.logger import read_journal
    from bevatron.train.loop import fit
    from bevatron.train.run import Run
    from bevatron.train.settings import (
        BatchConfig,
        CheckpointConfig,
        LoaderConfig,
        OptimConfig,
        ScheduleConfig,
        Settings,
        TrainConfig,
    )

    graph = WholeGraph(communities(40))
    sizes = {"nodes": np.array([40]), "edges": np.array([len(graph["edges"])])}
    run = Run(
        model=NodeClassifier(config_of("gat")),
        task=NodeTask("classes", 2),
        train=InMemory([graph.part("train")], "graph {}".format),
        sizes=sizes,
        folder=tmp_path / "run",
        settings=Settings(
            optim=OptimConfig(lr=0.05),
            schedule=ScheduleConfig(kind="constant"),
            batch=BatchConfig(capacity={"nodes": 100}),
            loader=LoaderConfig(),
            checkpoint=CheckpointConfig(),
            train=TrainConfig(epochs=12, device="cpu", dtype="float32", monitor="accuracy"),
        ),
        valid=InMemory([graph.part("valid")], "graph {}".format),
        valid_sizes=sizes,
        identity={"model": "tiny"},
    )
    fit(run)
    journal = read_journal(tmp_path / "run" / "metrics.jsonl")
    found = [record for record in journal if record["kind"] == "epoch"]
    assert found[-1]["valid"]["accuracy"] > 0.8, found[-1]


def test_autocast_is_close_to_float32():
    model = NodeClassifier(config_of("gat", stack="residual", norm="layer", hidden=32)).eval()
    batch = batch_of(communities())
    with torch.autocast("cpu", torch.bfloat16):
        low = model(batch)["logits"]
    assert low.dtype == torch.float32
    torch.testing.assert_close(low, model(batch)["logits"], rtol=0.05, atol=0.05)
    assert NodeTask("classes", 2).allows_autocast is True


@pytest.mark.parametrize("layer", ["gat", "agnn"])
def test_autocast_reaches_sparse_features(layer):
    model = NodeClassifier(config_of(layer, hidden=32)).eval()
    batch = batch_of(communities(sparse=True))
    exact = model(batch)["logits"]
    with torch.autocast("cpu", torch.bfloat16):
        low = model(batch)["logits"]
    torch.testing.assert_close(low, exact, rtol=0.05, atol=0.05)
    assert not torch.equal(low, exact)
    with torch.autocast("cpu", torch.bfloat16):
        model(batch)["logits"].sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("layer", ["gat", "gcn"])
def test_what_prediction_left_behind_serves_training(layer, sparse):
    model = NodeClassifier(config_of(layer))
    graph = WholeGraph(communities(sparse=sparse)).part("train")
    with torch.inference_mode():
        model(graph.batch().to("cpu", torch.float32))
    batch = graph.batch().to("cpu", torch.float32)
    NodeTask("classes", 2).loss(model, batch, {"cross_entropy": torch.tensor(1.0)}).total.backward()


@pytest.mark.parametrize("residual", [False, True])
def test_heads_that_drop_get_inputs_of_which_nothing_is_dropped(residual):
    model = NodeClassifier(config_of("gat", dropout=0.5, head_masks=True, residual=residual))
    given = []
    for layer in model.stack.layers:
        layer.register_forward_pre_hook(lambda layer, inputs: given.append(inputs[1]))
    model(batch_of(communities()))
    assert all((x != 0).all() for x in given)
    assert [layer.input_dropout for layer in model.stack.layers] == [0.5, 0.5]


def test_dropout_repeats_with_the_seed():
    model, batch = NodeClassifier(config_of("gat", dropout=0.5)), batch_of(communities())
    torch.manual_seed(3)
    first = model(batch)["logits"]
    torch.manual_seed(3)
    assert torch.equal(model(batch)["logits"], first)
    assert not torch.equal(model(batch)["logits"], first)


def test_a_compiled_model_gives_the_same():
    model, batch = NodeClassifier(config_of("gat")).eval(), batch_of(communities())
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(compiled(batch)["logits"], model(batch)["logits"])


def test_the_compiler_is_imported_only_to_compile():
    code = "import sys, bevatron.models.graph_attention; print('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_models_are_copied_and_pickled(copied):
    model, batch = NodeClassifier(config_of("gat")).eval(), batch_of(communities())
    again = copied(model)
    assert torch.equal(again(batch)["logits"], model(batch)["logits"])
    assert again.explain() == model.explain()


def test_a_model_folder_brings_the_model_back(tmp_path):
    model, batch = NodeClassifier(config_of("agnn")).eval(), batch_of(communities())
    save_model(model, tmp_path)
    again = load_model(tmp_path).eval()
    assert again.config == model.config
    assert torch.equal(again(batch)["logits"], model(batch)["logits"])
    text = (tmp_path / "model.json").read_text()
    (tmp_path / "model.json").write_text(text.replace('"graph_attention"', '"mace"'))
    with pytest.raises(CheckpointError, match="holds a model of kind 'mace'"):
        load_model(tmp_path)
    (tmp_path / "model.json").write_text(text.replace('"hidden": 8', '"hidden": 9'))
    with pytest.raises(CheckpointError, match="do not fit the configuration"):
        load_model(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_complete(name):
    config = GraphAttentionConfig.preset(name)
    small = dataclasses.replace(config, hidden=16) if config.hidden > 16 else config
    model = NodeClassifier(small.with_data(inputs=6, outputs=2)).eval()
    assert model(batch_of(communities()))["logits"].shape == (40, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers: expected at least 1, got 0"),
        ({"dropout": 1.0}, "dropout: expected 0 <= p < 1, got 1.0"),
        ({"layer": "agnn", "value_dropout": 0.5}, "value_dropout: is of gat, the layer is agnn"),
        ({"layer": "gatv2", "head_masks": True}, "head_masks: is of plain stacks of gat"),
        ({"stack": "residual", "head_glorot": True}, "head_glorot: is of plain stacks of gat"),
        ({"stack": "residual", "hidden": 9, "heads": 2}, "hidden: 9 cannot be shared by heads: 2"),
        ({"stack": "residual", "layer": "sgc"}, "sgc is one linear map"),
        ({"slope": 2.0}, "slope: expected 0 to 1"),
    ],
)
def test_values_out_of_range_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        GraphAttentionConfig(**changes)


def test_wrong_widths_are_refused():
    with pytest.raises(ConfigError, match=r"with_data\(...\)"):
        NodeClassifier(GraphAttentionConfig())
    model = NodeClassifier(GraphAttentionConfig().with_data(inputs=5, outputs=2))
    with pytest.raises(DataError, match="6 features per node, the model was made for 5"):
        model(batch_of(communities()))
