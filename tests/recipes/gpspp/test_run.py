"""Runs on molecules: learning, normalisation, kinds of targets, resuming, fine-tuning, report."""

import csv
import json
from dataclasses import replace
from importlib.resources import files

import numpy as np
import pytest
import torch

from bevatron import cli
from bevatron.errors import CheckpointError, ConfigError, DataError
from bevatron.parallel.mesh import Mesh
from bevatron.recipes.gpspp import run as recipe
from bevatron.recipes.gpspp.data import MoleculeData, load_molecules, molecule_sizes
from bevatron.recipes.gpspp.finetune import trained_model
from bevatron.recipes.gpspp.predictor import MoleculePredictor
from bevatron.recipes.gpspp.run import GpsppRun, build
from bevatron.recipes.gpspp.stores import prepare_molecules
from bevatron.recipes.gpspp.targets import TargetConfig, labels_of, targets_of
from bevatron.train.evaluate import make_loader
from bevatron.train.loop import fit
from bevatron.train.step import out_of_memory, size_of_batches
from tiny_sizes import GPSPP

DEMO = files("bevatron.recipes") / "demo_data" / "molecules.csv.gz"
TRAIN = {"epochs": 2, "device": "cpu", "threads": 1, "log_every": 100}
SMILES = [
    *("C", "CC", "CCC", "CCO", "CCN", "CO", "c1ccccc1", "CC(=O)O", "C1CC1", "CF", "C=C", "C#N"),
    *("CCCC", "CCCO", "C1CCC1", "CNC", "COC", "C=O", "CC=O", "NC=O", "OCCO", "C#C", "CCF", "N"),
]


def write(path, columns):
    """Write a table."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
    return path


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    """Molecules with three targets: a number, yes or no, one of three classes."""
    size = [len([c for c in s if c.isalpha()]) for s in SMILES]
    columns = {
        "smiles": SMILES,
        "size": [100 + 10 * n for n in size],
        "big": [int(n > 2) for n in size],
        "kind": [n % 3 for n in size],
    }
    return write(tmp_path_factory.mktemp("molecules") / "m.csv", columns)


def config(folder, *sources, **changes):
    values = {"output": str(folder / "run"), "model": GPSPP, "molecules": 12, "report": False}
    values |= {"train": TRAIN, **changes}
    values["data"] = {
        "train": [str(s) for s in sources], "prepare_workers": 1, **changes.get("data", {}),
    }  # fmt: skip
    return GpsppRun.from_values(values)


def size_only(folder, table, **changes):
    data = {"columns": {"targets": ["size"]}, **changes.pop("data", {})}
    return config(folder, table, data=data, **changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, table):
    """A finished run with its report and a test set."""
    folder = tmp_path_factory.mktemp("run")
    made = build(size_only(folder, table, report=True, data={"test_size": 4, "valid_size": 4}))
    return folder / "run", fit(made), made


def test_a_run_leaves_a_model_that_describes_itself(trained):
    run, result, made = trained
    assert result.finished == "epochs"
    stored = json.loads((run / "model.json").read_text())
    assert (stored["kind"], stored["config"]["feature_set"]) == ("gpspp", "set1")
    (target,) = stored["config"]["targets"]
    labels = labels_of(made.train)[:, 0]
    assert target["name"] == "size"
    assert target["mean"] == pytest.approx(labels.mean())
    assert target["std"] == pytest.approx(labels.std())
    page = (run / "report.html").read_text()
    for words in ("Learning curves", "size MAE, test", "size R²", "by number of heavy atoms"):
        assert words in page
    assert (run / "plots" / "parity_0.png").is_file()
    assert made.monitor == "size_mae"


def test_defaults_are_those_of_the_paper():
    found = GpsppRun.from_values({"preset": "gpspp-8-mpnn", "optim": {"lr": 1e-3}})
    assert (found.model.num_layers, found.model.attention) == (8, False)
    optim = found.optim
    assert (optim.algorithm, optim.clip, optim.clip_norm) == ("adam", 5.0, "tensor")
    assert (optim.lr, optim.weight_decay, optim.ema) == (1e-3, 0.0, None)
    assert (found.schedule.kind, found.schedule.warmup_epochs) == ("linear", 10.0)
    assert found.corruption.masking == (1.0, 3.0, 1.0)
    small = GpsppRun.from_values({"preset": "gpspp-small", "optim": {"ema": None}})
    assert (small.model.node_width, small.optim.lr, small.optim.ema) == (64, 2e-3, None)
    assert (small.optim.algorithm, small.model.dropout.node) == ("adam", 0.1)
    with pytest.raises(ConfigError, match="no 'gpspp-5'"):
        GpsppRun.from_values({"preset": "gpspp-5"})


def test_batches_are_filled_to_atoms_bonds_and_pairs(trained):
    _, _, made = trained
    capacity = made.settings.batch.capacities()
    assert set(capacity) == {"atoms", "edges", "pairs"}
    sizes = molecule_sizes(made.train)
    for name, most in capacity.items():
        assert most == pytest.approx(12 * sizes[name].mean(), rel=0.2)
    assert made.settings.schedule.warmup_epochs == pytest.approx(0.2)
    loader = make_loader(made.train, [], made.task.collate, made.settings.loader, Mesh())
    assert loader.workers == 0  # on a CPU


def test_products_are_in_the_type_that_is_asked_for():
    def chosen(on_gpu, **values):
        return recipe._matmul_dtype(GpsppRun.from_values(values), on_gpu=on_gpu)

    assert (chosen(True), chosen(False)) == ("bfloat16", None)
    assert chosen(True, precision="float32") is None
    assert chosen(False, precision="float16") == "float16"
    assert chosen(True, train={"autocast": "float16"}) == "float16"
    assert chosen(True, train={"dtype": "float64"}) is None
    with pytest.raises(ConfigError, match="bfloat16 needs train"):
        chosen(True, precision="bfloat16", train={"dtype": "float64"})


def test_three_kinds_of_targets_are_learnt_at_once(tmp_path, table):
    columns = {"targets": ["size", "big", "kind"]}
    targets = {"binary": ["big"], "multiclass": ["kind"], "units": {"size": "u"}}
    made = build(config(tmp_path, table, data={"columns": columns}, targets=targets, report=True))
    kinds = [(t.kind, t.num_classes, t.unit) for t in made.model.config.targets]
    assert kinds == [("regression", 0, "u"), ("binary", 0, ""), ("multiclass", 3, "")]
    assert made.monitor == "loss"
    result = fit(made)
    assert {"size_mae", "big_accuracy", "kind_accuracy"} <= set(result.metrics)
    assert "scores_1" in {path.stem for path in (tmp_path / "run/plots").iterdir()}


def test_one_yes_or_no_target_is_judged_by_auroc(tmp_path, table):
    data = {"columns": {"targets": ["big"]}, "valid_size": 8}
    made = build(config(tmp_path, table, data=data, targets={"binary": ["big"]}))
    assert made.monitor == "-big_auroc"
    assert np.isfinite(fit(made).best)


def fake(labels, valid=None):
    class Labels:
        def __init__(self, values):
            self.values = np.asarray(values, np.float32).reshape(len(values), -1)

        def describe(self, index):
            return f"a.csv, row {index}"

        def flat(self, field):
            assert field == "targets"
            yield self.values, np.arange(len(self.values) + 1)

    other = None if valid is None else Labels(valid)
    return MoleculeData(Labels(labels), other, None, ("y",), "set1", 2, "", ())


def test_targets_are_described_by_the_training_labels_alone():
    (target,), notes = targets_of(TargetConfig(), fake([1.0, 3.0, np.nan], [100.0]))
    assert (target.mean, target.std) == (2.0, 1.0)
    assert "mean 2 and spread 1" in notes[0]
    (target,), _ = targets_of(TargetConfig(normalise=False), fake([1.0, 3.0]))
    assert (target.mean, target.std) == (0.0, 1.0)
    (target,), notes = targets_of(TargetConfig(), fake([5.0, 5.0]))
    assert target.std == 1.0
    assert notes[0] == "warning: target 'y': all training labels are 5"
    labels = [*np.linspace(4, 8, 60), 6000.0, np.nan]
    _, notes = targets_of(TargetConfig(), fake(labels))
    assert notes[0].startswith("warning: target 'y': a.csv, row 60 has the label 6000, the median ")
    assert "makes up 98% of the variance" in notes[0]
    for fine in (labels[:60], [1.0, 1.1, 6000.0]):  # three labels say little of their spread
        assert not any("variance" in note for note in targets_of(TargetConfig(), fake(fine))[1])
    _, notes = targets_of(TargetConfig(), fake([0.0, 1.0, 1.0]))
    assert "targets.binary: [y]" in notes[0]
    (target,), _ = targets_of(TargetConfig(multiclass=("y",)), fake([0.0, 1.0], [4.0]))
    assert target.num_classes == 5


@pytest.mark.parametrize(
    ("settings", "labels", "words"),
    [
        ({"binary": ("y",)}, [0.0, 2.0], "'y': has the label 2, expected 0 or 1"),
        ({"multiclass": ("y",)}, [0.5, 2.0], "the label 0.5, expected whole numbers from 0"),
        ({"binary": ("z",)}, [0.0, 1.0], "no target 'z' .the data have y."),
        ({}, [np.nan], "no molecule of the training set has a label"),
    ],
)
def test_labels_that_cannot_be_learnt_are_refused(settings, labels, words):
    with pytest.raises((DataError, ConfigError), match=words):
        targets_of(TargetConfig(**settings), fake(labels))


def test_resumed_run_ends_as_an_uninterrupted_one(tmp_path, table):
    train = {**TRAIN, "dtype": "float64"}
    schedule = {"kind": "constant", "warmup_epochs": 0}
    whole = fit(build(size_only(tmp_path / "a", table, train=train, schedule=schedule)))
    once = {**train, "epochs": 1}
    fit(build(size_only(tmp_path / "b", table, train=once, schedule=schedule)))
    again = size_only(tmp_path / "b", table, train=train, schedule=schedule)
    ends = fit(build(again, resume=True))
    assert ends.metrics == pytest.approx(whole.metrics, rel=1e-12)
    assert ends.steps == whole.steps


def test_fine_tuning_keeps_the_read_out_of_the_same_targets(tmp_path, table, trained):
    run, _, _ = trained
    made = build(size_only(tmp_path, table, start_from=str(run)))
    source = trained_model(run).state_dict()
    assert all(torch.equal(value, source[name]) for name, value in made.model.state_dict().items())
    assert made.model.config.targets == trained_model(run).config.targets
    assert any("readout is kept" in line for line in made.notes)


def test_fine_tuning_for_other_targets_makes_a_new_read_out(tmp_path, table, trained):
    run, _, _ = trained
    data = {"columns": {"targets": ["kind"]}}
    frozen = {"frozen": ["encoders.*"]}
    made = build(config(tmp_path, table, data=data, start_from=str(run), finetune=frozen))
    source, now = trained_model(run), made.model
    assert [t.name for t in now.config.targets] == ["kind"]
    for name, value in now.state_dict().items():
        same = torch.equal(value, source.state_dict()[name])
        assert same or name.startswith("decoder."), name
    first = "decoder.mlp.first.weight"
    assert not torch.equal(now.state_dict()[first], source.state_dict()[first])
    before = {n: p.detach().clone() for n, p in now.named_parameters()}
    fit(made)
    for name, parameter in now.named_parameters():
        assert torch.equal(parameter, before[name]) == name.startswith("encoders."), name


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": {**GPSPP, "num_layers": 3}}, "model.num_layers: is 3"),
        ({"finetune": {"frozen": ["nothing.*"]}}, "no parameter matches 'nothing"),
        ({"finetune": {"frozen": ["*"]}}, "nothing would be learnt"),
        ({"data": {"feature_set": "set2"}}, "feature_set: is 'set2', but the model's is 'set1'"),
    ],
)
def test_what_cannot_be_fine_tuned_is_refused(tmp_path, table, trained, changes, words):
    with pytest.raises(ConfigError, match=words):
        build(size_only(tmp_path, table, start_from=str(trained[0]), **changes))
    with pytest.raises(CheckpointError, match="no model"):
        trained_model(tmp_path)


def test_dropouts_are_the_sources_unless_given(tmp_path, table):
    own = {**GPSPP, "dropout": {"node": 0.05, "global_": 0.02}}
    source = tmp_path / "source"
    fit(build(size_only(source, table, model=own, train={**TRAIN, "epochs": 0})))
    kept = build(size_only(tmp_path / "a", table, start_from=str(source / "run")))
    assert kept.model.config.dropout == trained_model(source / "run").config.dropout
    assert any("node 0.05" in line for line in kept.notes)
    given = {**GPSPP, "dropout": {"attention": 0.2}}
    made = build(size_only(tmp_path / "b", table, start_from=str(source / "run"), model=given))
    rates = made.model.config.dropout
    assert (rates.node, rates.attention, rates.global_, rates.edge) == (0.05, 0.2, 0.02, 0.0035)


def test_a_run_keeps_its_split_and_the_predictions_of_its_tests(trained, table, tmp_path):
    run, _, _ = trained
    rows = list(csv.DictReader((run / "split.csv").open()))
    assert {row["file"] for row in rows} == {str(table)}
    assert sorted(int(row["row"]) for row in rows) == list(range(len(SMILES)))
    counts = {
        part: sum(row["split"] == part for row in rows) for part in ("train", "valid", "test")
    }
    assert counts == {"train": len(SMILES) - 8, "valid": 4, "test": 4}
    tests = list(csv.DictReader((run / "test_predictions.csv").open()))
    assert {row["row"] for row in tests} == {row["row"] for row in rows if row["split"] == "test"}
    found = MoleculePredictor(run).predict([row["smiles"] for row in tests]).values[:, 0]
    for row, value in zip(tests, found, strict=True):
        assert row["smiles"] == SMILES[int(row["row"])]
        assert float(row["size"]) == 100 + 10 * len([c for c in row["smiles"] if c.isalpha()])
        assert float(row["predicted_size"]) == pytest.approx(value, rel=1e-5)
    two = [write(tmp_path / f"{n}.csv", {"smiles": SMILES[:6], "y": range(6)}) for n in "ab"]
    stores = [path.with_suffix("") for path in two]
    for path, store in zip(two, stores, strict=True):
        prepare_molecules([path], store, workers=0, progress=False)
    fit(build(config(tmp_path, *stores, data={"valid_size": 0.0})))
    rows = list(csv.DictReader((tmp_path / "run/split.csv").open()))
    assert [(row["file"], int(row["row"])) for row in rows] == [
        (str(path), i) for path in two for i in range(6)
    ]


def test_few_molecules_get_small_steps(tmp_path, table):
    made = build(size_only(tmp_path / "a", table, molecules=None))
    assert any("about 8 molecules, chosen for 22 training" in line for line in made.notes)
    capacity = made.settings.batch.capacity
    data = load_molecules(size_only(tmp_path / "b", table).data, tmp_path / "b")
    assert capacity == recipe.capacities(data, 8)
    assert size_of_batches(made) == "`molecules` (now 8)"
    two = made.task.collate([made.train[0], made.train[1]], np.arange(2), [1.0, 1.0])
    said = str(out_of_memory(made, two, Mesh()))
    assert "a batch of 2 molecules, " in said
    assert "lower `molecules` (now 8) and raise" in said
    given = build(size_only(tmp_path / "c", table, batch={"capacity": {"atoms": 99}}))
    assert size_of_batches(given) == "batch.capacity (now 99 atoms)"


def test_a_run_of_few_steps_has_one_warning_of_it(trained):
    lines = (trained[0] / "log.txt").read_text().splitlines()
    (warning,) = [line for line in lines if " steps " in line and "warning" in line]
    assert "lower `molecules` (now " in warning


def test_only_a_new_model_of_the_default_size_is_too_large_for_a_cpu(tmp_path, table, trained):
    new = size_only(tmp_path, table, model={})
    data = load_molecules(new.data, tmp_path)
    assert any("is slow on a CPU" in line for line in recipe._complete(new, data)[1])
    started = replace(new, start_from=trained[0])
    assert not any("is slow on a CPU" in line for line in recipe._complete(started, data)[1])


def test_positions_are_validated_in_both_modes_unless_nothing_reads_them(tmp_path):
    data = {"valid_size": 20, "train_size": 40}
    both = build(config(tmp_path / "a", DEMO, data=data))
    assert {"gap_mae", "3d/gap_mae"} <= set(fit(both).metrics)
    blind = dict.fromkeys(("distance_bias", "distance_sum", "bond_lengths"), False)
    flat = build(config(tmp_path / "b", DEMO, data=data, model={**GPSPP, **blind}))
    assert flat.task.modes == ("2d",)
    first = build(config(tmp_path / "c", DEMO, data=data, mode="3d"))
    assert first.task.modes == ("3d", "2d")
    with pytest.raises(ConfigError, match="needs a model that uses positions"):
        build(config(tmp_path / "d", DEMO, data=data, mode="3d", model={**GPSPP, **blind}))
    assert not any("no training molecule has a 3D" in line for line in (*both.notes, *flat.notes))


@pytest.mark.parametrize("mode", ["3d", "both"])
def test_a_mode_without_positions_to_see_is_refused(tmp_path, table, mode):
    with pytest.raises(ConfigError, match=f"mode: '{mode}' needs positions, but no training"):
        build(size_only(tmp_path, table, mode=mode))


def test_parts_for_positions_without_positions_are_warned_of(tmp_path, table):
    told = [line for line in build(size_only(tmp_path, table)).notes if "3D structure, so" in line]
    assert len(told) == 1
    assert told[0].startswith("warning: no training molecule has a 3D structure")
    blind = dict.fromkeys(("distance_bias", "distance_sum", "bond_lengths"), False)
    flat = build(size_only(tmp_path / "flat", table, model={**GPSPP, **blind}))
    assert not any("3D structure, so" in line for line in flat.notes)


def test_feature_set_of_data_or_model_is_enough(tmp_path, table):
    made = build(size_only(tmp_path, table, model={**GPSPP, "feature_set": "set3"}))
    assert made.model.config.feature_set == "set3"
    assert made.train[0]["atom_features"].shape[1] == len(made.model.config.features.atom)
    changes = {"model": {**GPSPP, "feature_set": "set3"}, "data": {"feature_set": "set2"}}
    with pytest.raises(ConfigError, match=r"model.feature_set: is 'set3'"):
        build(size_only(tmp_path, table, **changes))


def test_duplicates_across_the_division_are_told_in_the_report(tmp_path):
    pytest.importorskip("rdkit.Chem")
    smiles = ["CCO", "CCC", "OCC", "CCN", "CO", "CN"]
    split = ["train", "train", "valid", "train", "train", "valid"]
    table = write(tmp_path / "m.csv", {"smiles": smiles, "y": range(6), "split": split})
    fit(build(config(tmp_path, table, report=True)))
    assert "1 molecules of valid are in train too" in (tmp_path / "run/report.html").read_text()


def test_training_from_the_command_line(tmp_path, table, capsys):
    words = f"train gpspp --data {table} --data.columns.targets size --output {tmp_path / 'r'}"
    tiny = "".join(f" --model.{k.replace('_', '-').rstrip('-')} {v}" for k, v in GPSPP.items())
    more = " --train.epochs 1 --train.device cpu --data.prepare-workers 1 --precision bfloat16"
    assert cli.main((words + tiny + more).split()) == 0
    assert "size_mae" in capsys.readouterr().out
    assert (tmp_path / "r" / "report.html").is_file()
