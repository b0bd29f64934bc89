"""Node classifiers train from files by the foundation's trainer and serve every vertex."""

import csv
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_data_sets import planted, write

from bevatron import cli
from bevatron.data.graphs import GraphOptions, read_graph
from bevatron.errors import ConfigError, DataError, OutOfMemoryError
from bevatron.models.graph_attention import NodeClassifier
from bevatron.recipes import SYSTEMS
from bevatron.recipes.graph.data import load_graphs
from bevatron.recipes.graph.evaluate import evaluate_graphs
from bevatron.recipes.graph.predict import load_model, predict_file, predict_graph
from bevatron.recipes.graph.run import PRESETS, GraphRun, build
from bevatron.train.loop import fit

SMALL = {
    "model": {"hidden": 4, "heads": 2, "dropout": 0.1, "attention_dropout": 0.1},
    "optim": {"lr": 0.02},
    "train": {"epochs": 25, "device": "cpu", "threads": 1},
    "report": False,
}


def config(folder, *files, **changes):
    values = {**SMALL, "output": str(folder / "run"), **changes}
    values["data"] = {"train": [str(file) for file in files], **changes.get("data", {})}
    return GraphRun.from_values(values)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run with its report."""
    folder = tmp_path_factory.mktemp("graph")
    file = write(folder / "g.npz")
    result = fit(build(config(folder, file, report=True, data={"read": {"features": "rows"}})))
    return folder / "run", file, result


def test_a_run_learns_and_tells(trained):
    run, file, result = trained
    assert result.finished == "epochs"
    table = evaluate_graphs(run, [file])
    assert list(table) == ["train", "valid", "test", "all labelled"]
    assert table["test"]["accuracy"] > 0.7
    page = (run / "report.html").read_text()
    assert "accuracy, test" in page
    assert "layers of GAT<" in page
    assert "recall" in page
    assert {p.stem for p in (run / "plots").iterdir()} == {"confusion", "learning_curves", "timing"}
    assert json.loads((run / "graph_options.json").read_text())["features"] == "rows"
    assert json.loads((run / "model.json").read_text())["kind"] == "graph_attention"


def test_metrics_of_the_run_are_those_of_an_evaluation(trained):
    run, file, result = trained
    table = evaluate_graphs(run, [file])
    assert table["valid"]["loss"] == pytest.approx(result.best, rel=1e-5)


def test_full_batch_is_one_step_per_epoch_and_copies_nothing(tmp_path):
    run = build(config(tmp_path, write(tmp_path / "g.npz"), train={**SMALL["train"], "epochs": 3}))
    first = run.task.collate([run.train[0]], np.zeros(1, int), [1.0])
    again = run.task.collate([run.train[0]], np.zeros(1, int), [1.0])
    assert first is again
    assert run.valid[0].batch().graph is first.graph
    assert fit(run).steps == 3


def test_resumed_run_ends_as_an_uninterrupted_one(tmp_path):
    file = write(tmp_path / "g.npz")
    train = {**SMALL["train"], "dtype": "float64"}
    whole = fit(build(config(tmp_path / "a", file, train={**train, "epochs": 6})))
    fit(build(config(tmp_path / "b", file, train={**train, "epochs": 3})))
    again = fit(build(config(tmp_path / "b", file, train={**train, "epochs": 6}), resume=True))
    assert again.metrics == whole.metrics
    models = [load_model(tmp_path / name / "run", "float64") for name in "ab"]
    for one, other in zip(*(m.parameters() for m in models), strict=True):
        assert torch.equal(one, other)


def test_early_stopping_by_accuracy(tmp_path):
    train = {**SMALL["train"], "epochs": 200, "patience": 4, "monitor": "-accuracy"}
    result = fit(build(config(tmp_path, write(tmp_path / "g.npz"), train=train)))
    assert result.finished == "patience"
    assert result.epochs < 200
    found = evaluate_graphs(tmp_path / "run", [tmp_path / "g.npz"])["valid"]["accuracy"]
    assert found == pytest.approx(-result.best)


def test_predictions_stand_in_the_order_of_the_file(trained, tmp_path):
    run, file, _ = trained
    found = predict_graph(run, file)
    assert found.ids.tolist() == list(range(90))
    assert np.allclose(found.probabilities.sum(1), 1)
    assert (found.classes == planted()["y"]).mean() > 0.75
    assert predict_file(run, file, tmp_path / "p.csv") == 90
    rows = list(csv.DictReader((tmp_path / "p.csv").open()))
    assert [int(row["class"]) for row in rows] == found.classes.tolist()
    assert float(rows[5]["p2"]) == pytest.approx(found.probabilities[5, 2], rel=1e-4)
    predict_file(run, file, tmp_path / "p.npz")
    assert (np.load(tmp_path / "p.npz")["predicted_class"] == found.classes).all()


def test_vertices_in_another_order_get_the_same_classes(trained, tmp_path):
    run, file, _ = trained
    order = np.random.default_rng(1).permutation(90)
    values = planted()
    place = np.argsort(order)
    moved = write(
        tmp_path / "moved.npz", edge_src=place[values["edge_src"]],
        edge_dst=place[values["edge_dst"]], x=values["x"][order], y=None, train=None, val=None,
        test=None,
    )  # fmt: skip
    ours, theirs = predict_graph(run, file), predict_graph(run, moved)
    assert np.allclose(ours.probabilities[order], theirs.probabilities, atol=1e-5)


def test_answers_to_questions_are_measured_by_their_ranking(tmp_path):
    file = write(tmp_path / "g.npz", y=(planted()["y"] == 1).astype(int))
    run = build(config(tmp_path, file, report=True, data={"questions": "yes_no"}))
    assert run.model.config.outputs == 1
    result = fit(run)
    assert result.metrics["roc_auc"] > 0.8
    assert predict_graph(tmp_path / "run", file).classes.shape == (90, 1)
    assert "ROC-AUC" in (tmp_path / "run" / "report.html").read_text()
    several = write(tmp_path / "s.npz", y=np.eye(3, dtype=np.float32)[planted()["y"]])
    data = load_graphs(config(tmp_path, several).data)
    assert (data.questions, data.outputs) == ("yes_no", 3)


def test_several_graphs_are_packed_by_their_vertices(tmp_path):
    files = [
        write(tmp_path / f"{i}.npz", seed=i, train=None, val=None, test=None) for i in range(5)
    ]
    run = build(
        config(
            tmp_path, *files[:4], data={"valid": [str(files[4])]}, batch={"capacity": 200},
            train={**SMALL["train"], "epochs": 2},
        )
    )  # fmt: skip
    assert run.settings.batch.capacities() == {"nodes": 200}
    result = fit(run)
    assert result.steps == 4  # two graphs of 90 vertices a batch, two batches an epoch
    assert "accuracy" in result.metrics
    table = evaluate_graphs(tmp_path / "run", files[:2])
    assert list(table) == [
        f"{file} {part}" for file in files[:2] for part in ("train", "all labelled")
    ]


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"data": {}}, ConfigError, "data.train: expected a graph to train on"),
        ({"preset": "gat-moon"}, ConfigError, "preset: there is no 'gat-moon' (known: gat-cora"),
        ({"model": {"heads": 0}}, ConfigError, "model.heads: expected at least 1, got 0"),
        ({"data": {"questions": "yes_no"}}, ConfigError, "needs labels 0 and 1"),
        ({"data": {"valid": ["{file}"], "splits": "s.npz"}}, ConfigError,
         "data.splits: belongs to one"),
        ({"data": {"valid": ["{file}"], "read": {"random_split": [1, 0, 0]}}}, ConfigError,
         "data.read.random_split: splits one graph"),
        ({"write": {"x": None}}, DataError, "has no features; give them with data.features"),
        ({"write": {"y": None, "train": None, "val": None, "test": None}}, DataError,
         "has no labels; give them with data.labels"),
        ({"write": {"train": None}}, DataError, "no labelled vertex is set aside to train on"),
        ({"batch": {"capacity": "auto"}, "data": {"valid": ["{file}"]}}, ConfigError,
         "batch.capacity: 'auto' is for structures; give a number of nodes"),
        ({"write": {"y": np.where(planted()["y"] == 2, 2_000_000, planted()["y"])}}, DataError,
         "g.npz: has 3 different labels up to 2,000,000, which would make a model of 2,000,001"),
        ({"data": {"questions": "classes"}, "write": {"y": np.eye(3)[planted()["y"]]}}, ConfigError,
         "'classes' needs one label per vertex, found several"),
        ({"data": {"valid": ["{other}"]}}, DataError, "has 5 features and 1 labels per vertex"),
    ],
)  # fmt: skip
def test_contradictions_are_one_sentence(changes, error, message, tmp_path):
    changes = dict(changes)
    file = write(tmp_path / "g.npz", **changes.pop("write", {}))
    other = write(tmp_path / "h.npz", x=np.ones((90, 5), np.float32))
    data = changes.get("data", {})
    files = [] if data == {} and "data" in changes else [file]
    if "valid" in data:
        data = {**data, "valid": [p.format(file=file, other=other) for p in data["valid"]]}
    with pytest.raises(error) as caught:
        build(config(tmp_path, *files, **{**changes, "data": data}))
    assert message in str(caught.value)


def test_the_device_is_the_one_there_is_or_named(trained, tmp_path):
    run, file, _ = trained
    assert predict_file(run, file, tmp_path / "p.csv", device="auto") == 90
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="device: 'cuda' cannot be used here"):
            predict_file(run, file, tmp_path / "q.csv", device="cuda")
    with pytest.raises(ConfigError, match="device: expected auto, cpu, cuda or cuda:N, got 'mps'"):
        predict_file(run, file, tmp_path / "q.csv", device="mps")
    with pytest.raises(ConfigError, match="device: expected auto, cpu, cuda or cuda:N, got 'tpu'"):
        predict_file(run, file, tmp_path / "q.csv", device="tpu")


def test_a_model_refuses_graphs_that_it_was_not_made_for(trained, tmp_path):
    run, file, _ = trained
    narrow = write(tmp_path / "n.npz", x=np.ones((90, 5), np.float32))
    with pytest.raises(
        DataError, match=r"n\.npz: has 5 features per vertex, the model was trained"
    ):
        predict_graph(run, narrow)
    more = write(tmp_path / "m.npz", y=np.arange(90))
    with pytest.raises(DataError, match=r"m\.npz: has 90 classes, the model knows 3"):
        evaluate_graphs(run, [more])
    blank = write(tmp_path / "b.npz", y=None, train=None, val=None, test=None)
    with pytest.raises(DataError, match=r"b\.npz: has no labels to compare with"):
        evaluate_graphs(run, [blank])
    with pytest.raises(DataError, match=r"expected a name that ends in \.csv or \.npz"):
        predict_file(run, file, tmp_path / "p.txt")
    with pytest.raises(ConfigError, match="dtype: expected 'float32' or 'float64', got 'int8'"):
        load_model(run, "int8")
    with pytest.raises(ConfigError, match="evaluate: expected at least one graph"):
        evaluate_graphs(run, [])


def test_a_device_without_room_is_one_sentence(trained, tmp_path, monkeypatch):
    run, file, _ = trained

    def full(*_):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried")

    monkeypatch.setattr("bevatron.recipes.graph.predict.NodeTask.predict", full)
    sentence = r"cpu ran out of memory at .*g\.npz, 90 vertices with 12 features; use float32, or"
    with pytest.raises(OutOfMemoryError, match=sentence):
        predict_graph(run, file, device="cpu")
    with pytest.raises(OutOfMemoryError, match=sentence):
        evaluate_graphs(run, [file], device="cpu")
    monkeypatch.setattr("bevatron.models.graph_attention.task.NodeTask.loss", full)
    made = build(config(tmp_path, write(tmp_path / "g.npz")))
    with pytest.raises(OutOfMemoryError, match="cpu ran out of memory at a single sample of 1 gra"):
        fit(made)


def test_a_model_in_memory_reads_a_graph_as_it_is_given(trained):
    run, file, _ = trained
    model = load_model(run)
    assert isinstance(model, NodeClassifier)
    graph = read_graph(file, GraphOptions(features="rows"))
    same = predict_graph(model, graph, dtype="float64")
    assert next(model.parameters()).dtype == torch.float32  # it is left as it was
    assert np.allclose(same.probabilities, predict_graph(run, file).probabilities)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build(name, tmp_path):
    labels = (planted()["y"] == 1).astype(int) if "heterophilous" in name else planted()["y"]
    file = write(tmp_path / "g.npz", y=labels)
    small = {"hidden": 8, "heads": 1} if "heterophilous" in name else {}
    run = build(GraphRun.from_values({"preset": name, "model": small, "output": str(tmp_path / "r"),
                                      "data": {"train": [str(file)]}}))  # fmt: skip
    assert run.settings.optim.algorithm == "adam"
    batch = run.task.collate([run.train[0]], np.zeros(1, int), [1.0]).to("cpu", torch.float32)
    assert run.task.loss(run.model, batch, run.task.normalisers(batch)).total.isfinite()


def test_presets_have_the_published_numbers():
    pubmed = GraphRun.from_values({"preset": "gat-pubmed"})
    assert (pubmed.optim.lr, pubmed.optim.weight_decay, pubmed.model.out_heads) == (0.01, 1e-3, 8)
    assert (pubmed.model.head_masks, pubmed.model.head_glorot) == (True, True)
    cora = GraphRun.from_values({"preset": "gat-cora", "optim": {"lr": 0.1}})
    assert (cora.optim.lr, cora.optim.weight_decay, cora.train.patience) == (0.1, 5e-4, 100)
    assert (cora.model.hidden, cora.model.heads, cora.model.dropout) == (8, 8, 0.6)
    for name in ("gat-cora", "gat-citeseer", "gat-pubmed"):
        gat = GraphRun.from_values({"preset": name}).model
        assert (gat.dropout, gat.attention_dropout, gat.value_dropout) == (0.6, 0.6, 0.6)
    agnn = GraphRun.from_values({"preset": "agnn-pubmed"})
    assert (agnn.model.num_layers, agnn.model.hidden, agnn.optim.lr) == (4, 16, 0.01)
    assert agnn.data.read.features == "rows"


def test_command_line_trains_evaluates_and_predicts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "g.npz")
    words = (
        "train graph --data g.npz --output run --train.epochs 3 --model.layer agnn --model.hidden 4"
    )
    assert cli.main([*words.split(), "--train.device", "cpu", "--no-report"]) == 0
    assert cli.main(["evaluate", "run", "g.npz", "--out", "table.json"]) == 0
    assert "all labelled" in capsys.readouterr().out
    assert set(json.loads((tmp_path / "table.json").read_text())) >= {"test"}
    assert cli.main(["predict", "run", "g.npz", "out.csv"]) == 0
    assert (tmp_path / "out.csv").read_text().startswith("vertex,class,p0,p1,p2\n")
    assert cli.main(["predict", "run", "no.npz", "out.csv"]) == 2
    assert capsys.readouterr().err == "error: no.npz: there is no such file\n"
    assert cli.main(["train", "graph", "--data", "no.npz", "--output", "other"]) == 2
    assert capsys.readouterr().err == "error: no.npz: there is no such file\n"
    words = ["train", "graph", "--data", "g.npz", "--output", "dry", "--dry-run"]
    assert cli.main([*words, "--train.device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "training graphs" in said
    assert "nan" not in said
    assert "graph" in SYSTEMS


def test_an_edge_list_is_trained_on_evaluated_and_predicted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = planted()
    np.savetxt("edges.txt", np.stack([values["edge_src"], values["edge_dst"]], 1), fmt="%d")
    np.save("x.npy", values["x"])
    np.save("y.npy", values["y"])
    np.savez("parts.npz", **{part: values[part] for part in ("train", "val", "test")})
    beside = {"features": "x.npy", "labels": "y.npy", "splits": "parts.npz"}
    given = [word for name, file in beside.items() for word in (f"--data.{name}", file)]
    options = ["--train.device", "cpu", "--train.epochs", "2", "--train.monitor", "-accuracy"]
    words = ["train", "graph", "--data", "edges.txt", "--output", "run", "--no-report"]
    assert cli.main([*words, *given, *options]) == 0
    given = [word.replace("--data.", "--") for word in given]
    assert cli.main(["evaluate", "run", "edges.txt", *given, "--out", "table.json"]) == 0
    assert json.loads(Path("table.json").read_text())["test"]["accuracy"] >= 0
    assert cli.main(["predict", "run", "edges.txt", "out.csv", *given[:2]]) == 0
    assert len(Path("out.csv").read_text().splitlines()) == len(values["x"]) + 1
    capsys.readouterr()
    assert cli.main(["predict", "run", "edges.txt", "out.csv"]) == 2
    said = capsys.readouterr().err
    assert said == "error: edges.txt: has no features; give them (`--features FILE.npy`)\n"
    assert cli.main(["evaluate", "run", "edges.txt", "edges.txt", *given]) == 2
    assert "features: belongs to one graph, but 2 are given" in capsys.readouterr().err


def test_options_in_messages_are_written_as_they_are_typed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = planted()
    doubled = {k: np.concatenate([values[k], values[k][:1]]) for k in ("edge_src", "edge_dst")}
    write(tmp_path / "twice.npz", **doubled)
    write(tmp_path / "blank.npz", train=None, val=None, test=None)
    said = {}
    for name in ("twice", "blank"):
        assert cli.main(["train", "graph", "--data", f"{name}.npz", "--output", "run"]) == 2
        said[name] = capsys.readouterr().err
    assert "set --data.read.duplicates merge or --data.read.duplicates sum" in said["twice"]
    assert "(--data.splits FILE.npz) or draw one (--data.read.random-split 0.6" in said["blank"]


@pytest.mark.shared
@pytest.mark.slow
def test_attention_on_cora_reaches_most_of_its_accuracy(shared, tmp_path):
    run = build(
        GraphRun.from_values({
            "preset": "gat-cora", "output": str(tmp_path / "r"), "report": False,
            "data": {"train": [str(shared / "data/graphs/cora.npz")]},
            "train": {"epochs": 40, "device": "cpu", "threads": 1}, "optim": {"lr": 0.02},
        })
    )  # fmt: skip
    fit(run)
    table = evaluate_graphs(tmp_path / "r", [shared / "data/graphs/cora.npz"])
    assert table["test"]["accuracy"] > 0.77
