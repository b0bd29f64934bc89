"""The split lives with the model: its test holds no label that it was trained on."""

import numpy as np
import pytest
from graph_data_sets import planted, write

from bevatron import cli
from bevatron.data.graphs import GraphOptions, read_graph
from bevatron.errors import CheckpointError, DataError
from bevatron.recipes.graph.evaluate import evaluate_graphs
from bevatron.recipes.graph.predict import load_model
from bevatron.recipes.graph.run import GraphRun, build
from bevatron.recipes.graph.split import SPLIT_FILE, TrainedSplit
from bevatron.train.loop import fit

RNG = np.random.default_rng(7)
RANDOM_LABELS = RNG.integers(0, 3, 90)
"""Cannot be learned: whoever is better than chance on a test has seen its labels."""

ORDERS = [RNG.permutation(90) for _ in range(3)]
SPLITS = {
    name: np.stack([np.isin(np.arange(90), order[part]) for order in ORDERS], axis=1)
    for name, part in (("train_mask", slice(45)), ("val_mask", slice(45, 60)),
                       ("test_mask", slice(60, 90)))
}  # fmt: skip
OWN = {
    "train": None, "val": None, "test": None, "y": RANDOM_LABELS, "x": np.eye(90, dtype=np.float32),
    "edge_src": np.arange(90), "edge_dst": np.arange(90),
}  # fmt: skip
"""Vertices that know their number and nothing of each other: easy to learn by heart."""


def train(folder, *files, **data):
    """Learn the training labels by heart."""
    values = {
        "data": {"train": [str(file) for file in files], **data}, "output": str(folder / "run"),
        "model": {"hidden": 32, "heads": 2, "dropout": 0.0, "attention_dropout": 0.0},
        "optim": {"lr": 0.02}, "report": False,
        "train": {"epochs": 60, "device": "cpu", "threads": 1},
    }  # fmt: skip
    run = build(GraphRun.from_values(values))
    fit(run)
    return folder / "run", run


def counts(lines):
    """Sizes of the parts in the line of a graph."""
    return lines[0].rpartition("(")[2].rstrip(")")


def test_a_graph_with_several_splits_is_evaluated_on_the_one_of_the_training(tmp_path, capsys):
    masks = {name: SPLITS[name] for name in ("train_mask", "test_mask")}  # no early stopping
    file = write(tmp_path / "g.npz", **OWN, **masks)
    run, _ = train(tmp_path, file, read={"split": 2})
    lines = []
    table = evaluate_graphs(run, [file], tell=lines.append)
    graph = read_graph(file, GraphOptions(split=2))
    trained = TrainedSplit.load(run).roles(graph)
    assert (trained == graph.roles).all()
    assert lines == [
        f"{file}: the split used in training, split 2 of {file} (45 train, 0 valid, 30 test)"
    ]
    assert cli.main(["evaluate", str(run), str(file)]) == 0
    assert "the split used in training, split 2 of" in capsys.readouterr().out
    # Of what split 0 tests, half was trained on.
    first = tmp_path / "s.npz"
    np.savez(first, **{k: v[:, 0] for k, v in masks.items()})
    with pytest.raises(DataError, match=r"s\.npz: split 'test' holds \d+ vertices that the model"):
        evaluate_graphs(run, [file], splits=first)
    assert table["train"]["accuracy"] > 0.8
    assert table["test"]["accuracy"] < 0.5


def test_the_test_of_random_labels_is_chance_whatever_the_split(tmp_path):
    """The number that told: far above 1/3 on labels that nobody can learn."""
    file = write(tmp_path / "g.npz", **OWN, **SPLITS)
    run, made = train(tmp_path, file, read={"random_split": [0.5, 0, 0.5], "split_seed": 5})
    lines = []
    table = evaluate_graphs(run, [file], tell=lines.append)
    assert "drawn at random (0.5 0 0.5, seed 5) (45 train, 0 valid, 45 test)" in lines[0]
    roles = TrainedSplit.load(run).roles(read_graph(file))
    batch = made.train[0].batch()
    assert (batch.masks.numpy() == (roles[:, None] == [1, 2, 3])).all()
    assert table["test"]["accuracy"] < 0.45
    own = evaluate_graphs(load_model(run), [file])
    assert own["test"]["accuracy"] > 0.55, "the file's own split holds what was trained on"


def test_a_separate_file_of_splits_is_not_needed_again(tmp_path):
    file = write(tmp_path / "g.npz", **OWN, **{k: v[:, 0] for k, v in SPLITS.items()})
    splits = tmp_path / "s.npz"
    np.savez(splits, **{k: v[:, 1] for k, v in SPLITS.items()})
    run, _ = train(tmp_path, file, splits=str(splits))
    lines = []
    without = evaluate_graphs(run, [file], tell=lines.append)
    assert f"split 0 of {splits}" in lines[0]
    assert evaluate_graphs(run, [file], splits=splits) == without


def test_labels_that_were_added_later_are_tested_on(tmp_path):
    hidden = np.where(SPLITS["test_mask"][:, 0], -1, RANDOM_LABELS)
    masks = {k: v[:, 0] for k, v in SPLITS.items() if k != "test_mask"}
    run, _ = train(tmp_path, write(tmp_path / "g.npz", **{**OWN, "y": hidden}, **masks))
    everything = {k: v[:, 0] for k, v in SPLITS.items()}
    lines = []
    full = write(tmp_path / "full.npz", **OWN, **everything)
    table = evaluate_graphs(run, [full], tell=lines.append)
    assert counts(lines) == "45 train, 15 valid, 30 test"
    assert set(table) == {"train", "valid", "test", "all labelled"}
    # Vertices that the file calls training, and were not trained on, are no part.
    shifted = write(tmp_path / "other.npz", **OWN, train_mask=SPLITS["test_mask"][:, 0])
    evaluate_graphs(run, [shifted], tell=lines.append)
    assert counts(lines[1:]) == "45 train, 15 valid, 0 test"


def test_whole_training_graphs_are_training_whatever_masks_their_files_hold(tmp_path):
    files = [write(tmp_path / f"{n}.npz", seed=n) for n in range(3)]
    run, _ = train(tmp_path, *files[:2], valid=[str(files[2])])
    lines = []
    table = evaluate_graphs(run, [files[0]], tell=lines.append)
    assert list(table) == ["train", "all labelled"]
    assert lines == [
        f"{files[0]}: the split used in training, by whole graphs (90 train, 0 valid, 0 test)"
    ]
    assert list(evaluate_graphs(run, [files[2]])) == ["valid", "all labelled"]


def test_graphs_with_equal_features_are_told_apart_by_their_labels(tmp_path):
    ones = np.ones((90, 4), np.float32)
    files = [
        write(tmp_path / f"{n}.npz", x=ones, seed=n, train=None, val=None, test=None)
        for n in range(3)
    ]
    run, _ = train(tmp_path, files[0], test=[str(files[1])])
    assert list(evaluate_graphs(run, [files[1]])) == ["test", "all labelled"]
    unlike = {k: v for k, v in planted(2).items() if k in {"train", "val", "test"}}
    other = write(tmp_path / "o.npz", x=ones, seed=2, **unlike)
    assert "train" in evaluate_graphs(run, [other]), "in doubt, what was trained on is training"


def test_a_graph_of_training_and_test_is_refused(tmp_path):
    file = write(tmp_path / "g.npz")
    with pytest.raises(DataError, match=r"g\.npz: is given for training and for test"):
        train(tmp_path, file, test=[str(write(tmp_path / "h.npz", seed=1)), str(file)])


def test_models_and_graphs_without_a_known_split_are_told_of(tmp_path, capsys):
    file = write(tmp_path / "g.npz")
    run, _ = train(tmp_path, file)
    lines = []
    other = write(tmp_path / "o.npz", seed=1)
    evaluate_graphs(run, [other], tell=lines.append)
    assert lines[-1] == (
        f"{other}: its own split (30 train, 30 valid, 30 test); it is not one of the "
        "training graphs"
    )
    (run / SPLIT_FILE).write_bytes(b"PK no zip")
    with pytest.raises(CheckpointError, match=r"split\.npz: is damaged \("):
        evaluate_graphs(run, [file])
    assert cli.main(["evaluate", str(run), str(file)]) == 2
    assert capsys.readouterr().err.count("error:") == 1
    (run / SPLIT_FILE).unlink()
    evaluate_graphs(run, [file], tell=lines.append)
    assert "the model does not record which vertices it was trained on" in lines[-1]
