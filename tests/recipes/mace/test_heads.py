"""Which head of a model is used: the one asked for, the one a structure names, the default."""

import json
import logging
import shutil
from dataclasses import replace

import ase.io
import numpy as np
import pytest

from bevatron.data.readers import LabelOptions, open_reader
from bevatron.errors import ConfigError, DataError
from bevatron.models.mace import MACE, load_matching, load_model, save_model
from bevatron.recipes.mace import potential
from bevatron.recipes.mace.calculator import BevatronCalculator
from bevatron.recipes.mace.evaluate import evaluate_files
from bevatron.recipes.mace.predict import predict_file, relax_file
from bevatron.recipes.mace.run import MaceRun, build
from bevatron.recipes.mace.stores import prepare_structures
from bevatron.recipes.training import start

SHIFTS = {"old": 0.0, "new": 1.0}
"""eV an atom by which the heads differ."""


@pytest.fixture(scope="module")
def two_heads(converted, tmp_path_factory):
    """The checkpoint with a second head, which is the default."""
    one = load_model(converted)
    rows = [[e + shift for e in one.config.atomic_energies[0]] for shift in SHIFTS.values()]
    config = replace(
        one.config,
        heads=tuple(SHIFTS),
        default_head="new",
        atomic_energies=tuple(map(tuple, rows)),
        scale=one.config.scale * 2,
        shift=one.config.shift * 2,
    )
    model = MACE(config, one.embedding.weight.dtype)
    load_matching(model, one.state_dict(), ("old",), keep_energies=True)
    out = tmp_path_factory.mktemp("two") / "model"
    save_model(model, out)
    return out


@pytest.fixture
def before_defaults(two_heads, tmp_path, monkeypatch):
    """The same as earlier versions wrote it."""
    folder = shutil.copytree(two_heads, tmp_path / "old-model")
    description = json.loads((folder / "model.json").read_text())
    del description["config"]["default_head"]
    (folder / "model.json").write_text(json.dumps(description))
    monkeypatch.setattr(potential, "_said", set())
    return folder


@pytest.fixture
def files(acac, converted, tmp_path):
    """Structures with the labels of the old head; of three, two name a head."""
    frames = ase.io.read(acac, ":3")
    calculator = BevatronCalculator(converted, device="cpu")
    for atoms, head in zip(frames, (None, "old", "new"), strict=True):
        atoms.calc = calculator
        atoms.info = {"energy": atoms.get_potential_energy()}
        atoms.arrays["forces"] = atoms.get_forces()
        atoms.calc = None
        if head is not None:
            atoms.info["head"] = head
    named, plain = tmp_path / "named.xyz", tmp_path / "plain.xyz"
    ase.io.write(named, frames, columns=["symbols", "positions", "forces"])
    for atoms in frames:
        atoms.info.pop("head", None)
    ase.io.write(plain, frames, columns=["symbols", "positions", "forces"])
    return {"named": named, "plain": plain}


def shifts_of_predict(model, file, out, **options):
    """Predicted less old energies, eV an atom."""
    predict_file([model], file, out, device="cpu", **options)
    return [
        round((atoms.info["predicted_energy"] - atoms.get_potential_energy()) / len(atoms), 4)
        for atoms in ase.io.read(out, ":")
    ]


def shifts_of_evaluate(model, *files, **options):
    found = evaluate_files(model, files, device="cpu", **options).predictions
    errors = (found.predicted_energy - found.energy) / found.num_atoms
    return errors.round(4).tolist(), found.head


def test_structures_without_a_name_belong_to_the_default_head_everywhere(
    two_heads, files, tmp_path
):
    plain, out = files["plain"], tmp_path / "out.xyz"
    assert shifts_of_evaluate(two_heads, plain) == ([1, 1, 1], ["new"] * 3)
    assert shifts_of_predict(two_heads, plain, out) == [1, 1, 1]
    atoms = ase.io.read(plain, 0)
    old = atoms.get_potential_energy()
    atoms.calc = BevatronCalculator(two_heads, device="cpu")
    assert atoms.get_potential_energy() == pytest.approx(old + len(atoms), abs=1e-4)
    relaxed = relax_file(two_heads, plain, tmp_path / "relaxed.xyz", steps=0, device="cpu")
    assert relaxed.energies[0] == pytest.approx(old + len(atoms), abs=1e-4)


def test_structures_choose_by_name_and_an_option_chooses_for_all(two_heads, files, tmp_path):
    named, out = files["named"], tmp_path / "out.xyz"
    assert shifts_of_evaluate(two_heads, named) == ([1, 0, 1], ["new", "old", "new"])
    assert shifts_of_predict(two_heads, named, out) == [1, 0, 1]
    relaxed = relax_file(two_heads, named, tmp_path / "relaxed.xyz", steps=0, device="cpu")
    labels = [atoms.get_potential_energy() for atoms in ase.io.read(named, ":")]
    np.testing.assert_allclose(relaxed.energies - labels, [15, 0, 15], atol=1e-3)
    assert shifts_of_evaluate(two_heads, named, head="old") == ([0, 0, 0], ["old"] * 3)
    assert shifts_of_predict(two_heads, named, out, head="old") == [0, 0, 0]


def test_a_store_may_name_its_heads_in_another_order(two_heads, files, tmp_path):
    for heads, expected in ((("old", "new"), [0, 0, 1]), (("new", "old"), [1, 0, 1])):
        out = tmp_path / heads[0]
        prepare_structures([files["named"]], out, 3.0, LabelOptions(heads=heads), workers=1)
        assert shifts_of_evaluate(two_heads, out)[0] == expected
    out = tmp_path / "none"
    prepare_structures([files["plain"]], out, 3.0, LabelOptions(), workers=1)
    assert shifts_of_evaluate(two_heads, out)[0] == [1, 1, 1]
    both = shifts_of_evaluate(two_heads, tmp_path / "old", files["named"])
    assert both[0] == [0, 0, 1, 1, 0, 1]


def test_names_that_no_head_has_are_refused(two_heads, files, tmp_path):
    strange = tmp_path / "strange.xyz"
    strange.write_text(files["named"].read_text().replace("head=old", "head=ccsd"))
    with pytest.raises(DataError, match=r"frame 1 names the head 'ccsd', the model has old, new"):
        predict_file([two_heads], strange, tmp_path / "out.xyz", device="cpu")
    with pytest.raises(
        DataError, match="frame 1: the head 'ccsd' in 'head' is not one of new, old"
    ):
        evaluate_files(two_heads, [strange], device="cpu")
    with pytest.raises(ConfigError, match=r"the model has no 'ccsd' \(it has old, new\)"):
        BevatronCalculator(two_heads, device="cpu", head="ccsd")


def test_models_of_earlier_versions_keep_their_rule(before_defaults, files, tmp_path, caplog):
    with pytest.raises(ConfigError, match=r"several \(old, new\) and none is its default"):
        predict_file([before_defaults], files["plain"], tmp_path / "out.xyz", device="cpu")
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert shifts_of_evaluate(before_defaults, files["plain"])[1] == ["old"] * 3
    told = [r for r in caplog.records if "several heads (old, new)" in r.getMessage()]
    assert len(told) == 1


def test_heads_that_a_model_of_one_head_does_not_use_are_reported(
    converted, files, tmp_path, caplog
):
    with caplog.at_level(logging.WARNING):
        predict_file([converted], files["named"], tmp_path / "out.xyz", device="cpu")
    assert "('old' in 1, 'new' in 1) but the model has the one head 'default'" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        evaluate_files(converted, [files["named"]], device="cpu")
    assert "'head' ('old' in 1, 'new' in 1 frames) is not used" in caplog.text


def test_columns_that_nothing_reads_are_reported_by_name_and_count(files, tmp_path):
    (told,) = open_reader(files["named"]).report()[1:]
    assert told.startswith(f"warning: {files['named']}: 'head' ('old' in 1, 'new' in 1 frames)")
    (told,) = open_reader(files["named"], LabelOptions(heads=("old", "new"))).report()[1:]
    assert told.endswith("1 of 3 frames have no 'head' and belong to 'old'")
    grouped = tmp_path / "grouped.xyz"
    grouped.write_text(files["named"].read_text().replace("head=old", "group=bulk"))
    group, head = open_reader(grouped).report()[1:]
    assert "'group' ('bulk' in 1 frames) is not used: groups are read from 'config_type'" in group
    assert "'head' ('new' in 1 frames)" in head
    assert len(open_reader(grouped, LabelOptions(group_key="group")).report()) == 2
    assert len(open_reader(files["plain"]).report()) == 1


@pytest.fixture
def configuration(acac_store, tmp_path):
    def make(source, data=None, **changes):
        return MaceRun.from_values(
            {
                "output": str(tmp_path / "run"),
                "start_from": None if source is None else str(source),
                "data": {"prepare_workers": 1, **(data or {"train": [str(acac_store)]})},
                "report": False,
                "train": {"epochs": 0, "device": "cpu", "dtype": "float64"},
                **changes,
            }
        )

    return make


def test_a_run_stores_the_head_that_it_fine_tuned_and_names_it(converted, configuration, capsys):
    config = configuration(converted, finetune={"keep_heads": True})
    assert start(config) == 0
    folder, last = config.output, capsys.readouterr().out.strip().splitlines()[-1]
    assert json.loads((folder / "model.json").read_text())["config"]["default_head"] == "finetuned"
    assert f"bevatron evaluate {folder} DATA --head finetuned" in last
    assert f"bevatron predict {folder} FILE OUT --head finetuned" in last


def test_replayed_heads_are_not_the_default(converted, acac_store, configuration):
    heads = {name: {"train": [str(acac_store)]} for name in ("default", "fine")}
    data = {"heads": heads}
    run = build(configuration(converted, data, finetune={"keep_heads": True}))
    made = run.model
    assert (made.config.heads, made.config.default_head) == (("default", "fine"), "fine")
    told = "heads: 'default' continues, 'fine' starts from 'default'; 'fine' is the default"
    assert told in run.notes
    made = build(configuration(None, data, preset="small", model={"r_max": 3.0})).model
    assert made.config.default_head == "default"
    made = build(configuration(converted)).model
    assert made.config.default_head == "default"


@pytest.mark.parametrize(("head", "shift"), [(None, 1.0), ("old", 0.0), ("new", 1.0)])
def test_fine_tuning_starts_from_the_head_that_is_asked_for(
    two_heads, converted, configuration, head, shift
):
    finetune = {"e0": "keep"} if head is None else {"e0": "keep", "head": head}
    made = build(configuration(two_heads, finetune=finetune))
    old = load_model(converted).config.atomic_energies[0]
    np.testing.assert_allclose(made.model.config.atomic_energies, [[e + shift for e in old]])
    assert f"kept, those of the old model's head '{head or 'new'}'" in " ".join(made.notes)


def test_a_head_to_start_from_must_exist(two_heads, configuration):
    with pytest.raises(ConfigError, match=r"finetune.head: .* no 'dft' \(it has old, new\)"):
        build(configuration(two_heads, finetune={"head": "dft"}))
