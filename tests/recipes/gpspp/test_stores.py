"""Data sets of molecules: rows in order, rejects listed, divisions, preparation that resumes."""

import csv
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from bevatron.cli import main
from bevatron.data.packing import pack
from bevatron.data.readers.molecules import MoleculeOptions, molecules_in_memory
from bevatron.data.samples import collate_molecules
from bevatron.data.store.store import Store
from bevatron.errors import ConfigError, DataError, StoreError
from bevatron.files import SCRATCH
from bevatron.models.gpspp.features import Featurizer, canonical, scaffold
from bevatron.recipes.gpspp.data import MoleculeDataConfig, load_molecules, molecule_sizes
from bevatron.recipes.gpspp.splits import _cut_groups, warn_of_duplicates
from bevatron.recipes.gpspp.stores import prepare_molecules, rejects, rejects_file

Chem = pytest.importorskip("rdkit.Chem")

ROWS = [
    ("CCO", "1.5"),
    ("C(C", "2"),
    ("[Na+].[Cl-]", ""),
    ("C*", "3"),
    ("", "4"),
    ("[He]", "1"),
    ("CC(C)(C)(C)C", "1"),
    ("c1ccccc1", "2.5"),
]
USABLE = [0, 2, 5, 7]


def write(path, rows, header=("smiles", "y")):
    with Path(path).open("w", newline="") as file:
        csv.writer(file).writerows([header, *rows])
    return path


def prepared(files, out, **options):
    return prepare_molecules(files, out, workers=0, progress=False, **options)


@pytest.fixture
def store(tmp_path):
    return prepared([write(tmp_path / "m.csv", ROWS)], tmp_path / "store")


def names(dataset):
    return [dataset[i]["smiles"].tobytes().decode() for i in range(len(dataset))]


def test_rows_keep_their_places_and_bad_ones_their_reasons(store):
    assert names(store) == [smiles for smiles, _ in ROWS]
    assert np.flatnonzero(store.lengths("atom_features")).tolist() == USABLE
    found = {row[0].rsplit(" ", 1)[1]: row[2] for row in rejects(store)}
    assert set(found) == {"3", "5", "6", "8"}
    assert "parsed" in found["3"]
    assert "not an element" in found["5"]
    assert "empty" in found["6"]
    assert "valence" in found["8"]
    with rejects_file(store).open() as file:
        listed = list(csv.DictReader(file))
    assert [row["smiles"] for row in listed] == ["C(C", "C*", "", "CC(C)(C)(C)C"]
    assert store.manifest["summary"]["unusable"] == 4
    assert store.manifest["summary"]["disconnected"] == 1
    assert store.describe(3).endswith("m.csv, line 5")


def test_no_rejects_leave_no_list(tmp_path):
    store = prepared([write(tmp_path / "m.csv", ROWS[:1])], tmp_path / "store")
    assert not rejects_file(store).exists()


def test_commands_for_structures_refuse_a_store_of_molecules(store, tmp_path, capsys):
    run = ["--output", str(tmp_path / "run")]
    for command in (["bench", "cost"], ["bench", "loader"], ["train", "mace", *run, "--data"]):
        assert main([*command, str(store.path)]) == 2
        assert "not a store of structures" in capsys.readouterr().err


def test_only_usable_rows_with_labels_are_trained_on(store):
    data = load_molecules(MoleculeDataConfig(train=(store.path,), valid_size=1), Path("unused"))
    assert sorted(names(data.train) + names(data.valid)) == ["CCO", "[He]", "c1ccccc1"]
    assert data.targets == ("y",)
    assert any(
        line.startswith("molecules without any label, left out: 1 ") and "m.csv, line 4" in line
        for line in data.report
    )


def test_where_nothing_can_be_trained_on_the_first_reason_is_told(tmp_path):
    bad = write(tmp_path / "bad.csv", [("X", "1"), ("Y", "2")])
    config = MoleculeDataConfig(train=(bad,), prepare_workers=0)
    with pytest.raises(DataError, match=r"bad.csv, line 2: .* none of the 2 rows .*rejects.csv"):
        load_molecules(config, tmp_path / "a")
    with pytest.raises(DataError, match=r"a molecule with a label$"):
        load_molecules(config, tmp_path / f"a{SCRATCH}")
    empty = prepared([write(tmp_path / "n.csv", [("C", ""), ("CC", "")])], tmp_path / "n",
                     options=MoleculeOptions(targets=("y",)))  # fmt: skip
    with pytest.raises(DataError, match="none of the 2 molecules has a label"):
        load_molecules(MoleculeDataConfig(train=(empty.path,)), tmp_path / "b")


def test_a_store_trains_batches(store):
    data = load_molecules(MoleculeDataConfig(train=(store.path,), valid_size=0), Path("unused"))
    batch = collate_molecules([data.train[i] for i in range(3)], np.arange(3), [1.0] * 3)
    assert batch.num_graphs == 3
    assert {name: sum(v) for name, v in molecule_sizes(data.train).items()} == dict(batch.sizes)


MANY = ["C" * n + "O" + "C" * m for n in range(1, 8) for m in range(1, 6)] + [
    f"{'C' * n}{ring}" for n in range(1, 6) for ring in ("c1ccccc1", "C1CC1", "c1ccncc1", "C1CCC1")
]


@pytest.fixture
def many(tmp_path):
    rows = [(smiles, i) for i, smiles in enumerate(MANY)]
    return prepared([write(tmp_path / "many.csv", rows)], tmp_path / "many")


def loaded(store, **options):
    return load_molecules(MoleculeDataConfig(train=(store.path,), **options), Path("unused"))


def test_random_parts_are_disjoint_and_repeat(many):
    first = loaded(many, split="random", valid_size=10, test_size=0.2, split_seed=3)
    again = loaded(many, split="random", valid_size=10, test_size=0.2, split_seed=3)
    parts = [first.train, first.valid, first.test]
    assert [len(part) for part in parts] == [len(MANY) - 10 - 11, 10, 11]
    assert sorted(name for part in parts for name in names(part)) == sorted(MANY)
    assert names(first.test) == names(again.test)
    assert first.fingerprint == again.fingerprint
    other = loaded(many, split="random", valid_size=10, test_size=0.2, split_seed=4)
    assert names(other.test) != names(first.test)
    assert other.fingerprint != first.fingerprint


def test_numbers_may_be_asked_for(many):
    data = loaded(many, split="random", train_size=20, valid_size=5, test_size=5)
    assert [len(data.train), len(data.valid), len(data.test)] == [20, 5, 5]
    with pytest.raises(ConfigError, match="are requested"):
        loaded(many, split="random", train_size=50, valid_size=10)


def test_scaffolds_stay_together(many):
    data = loaded(many, split="scaffold", valid_size=5, test_size=5)
    scaffolds = [{scaffold(s) for s in names(p)} for p in (data.train, data.valid, data.test)]
    assert not scaffolds[0] & scaffolds[1]
    assert not scaffolds[0] & scaffolds[2]
    assert not scaffolds[1] & scaffolds[2]
    assert len(data.train) + len(data.valid) + len(data.test) == len(MANY)


def test_a_set_takes_no_scaffold_that_is_larger_than_its_room():
    groups = [np.arange(0, 4), np.arange(4, 7), np.arange(7, 9), np.arange(9, 10)]
    parts = _cut_groups(np.arange(10), groups, {"train": 5, "valid": 3, "test": 2})
    assert [part.tolist() for part in parts.values()] == [[0, 1, 2, 3, 9], [4, 5, 6], [7, 8]]


def test_data_items_that_may_be_targets_are_named(tmp_path):
    molecule = Chem.MolFromSmiles("CO")
    molecule.SetProp("gap", "1.5")
    with Chem.SDWriter(str(tmp_path / "m.sdf")) as file:
        file.write(molecule)
    config = MoleculeDataConfig(train=(tmp_path / "m.sdf",), prepare_workers=0)
    with pytest.raises(DataError, match=r"m\.sdf: .*may name gap\); training needs a target"):
        load_molecules(config, tmp_path / "prepared")


def test_the_files_own_division_is_kept(tmp_path):
    rows = [("CC", 1, "train"), ("CCC", 2, "valid"), ("CCCC", "", "test"), ("C", 1, "")]
    path = write(tmp_path / "m.csv", rows, ("smiles", "y", "split"))
    data = loaded(prepared([path], tmp_path / "store"))
    assert [names(p) for p in (data.train, data.valid, data.test)] == [["CC"], ["CCC"], ["CCCC"]]
    assert "split as given in the files" in data.report
    with pytest.raises(ConfigError, match="no molecule to train"):
        loaded(prepared([write(tmp_path / "n.csv", ROWS)], tmp_path / "other"), split="given")


def test_molecules_in_two_parts_are_reported(tmp_path):
    train = write(tmp_path / "a.csv", [("OCC", 1), ("C[C@H](N)O", 2), ("CC", 3)])
    valid = write(tmp_path / "b.csv", [("CCO", 1), ("C[C@@H](N)O", 2)])
    config = MoleculeDataConfig(train=(train,), valid=(valid,), prepare_workers=0)
    report = load_molecules(config, tmp_path).report
    warning = next(line for line in report if line.startswith("warning"))
    # The mirror image is another molecule.
    assert "1 molecules of valid are in train too" in warning
    assert "CCO" in warning


def test_without_rdkit_the_warning_of_duplicates_says_how_to_install_it(tmp_path, monkeypatch):
    store = prepared([write(tmp_path / "m.csv", ROWS[:1])], tmp_path / "store")
    monkeypatch.setitem(sys.modules, "rdkit.rdBase", None)
    (warning,) = warn_of_duplicates({"train": store, "valid": store})
    assert "which is not checked: the package 'rdkit' is not installed; `pip inst" in warning


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"valid_size": 0.6, "test_size": 0.5}, "nothing to train on"),
        ({"valid_size": -1}, "fractions below 1 or whole numbers"),
        ({"valid_size": 10.5}, "fractions below 1 or whole numbers"),
        ({"feature_set": "set9"}, "expected one of"),
    ],
)
def test_configurations_that_make_no_sense_are_refused(options, sentence):
    with pytest.raises(ConfigError, match=sentence):
        MoleculeDataConfig(**options)


def test_a_store_of_another_feature_set_is_refused(store):
    with pytest.raises(DataError, match="feature set 'set1', the model needs 'ying21'"):
        loaded(store, feature_set="ying21")


def test_other_inputs_do_not_go_into_a_store(store, tmp_path):
    with pytest.raises(StoreError, match="feature_set was"):
        prepared([tmp_path / "m.csv"], store.path, feature_set_name="set2")


def test_rdkit_molecules_are_prepared_too(tmp_path):
    reader = molecules_in_memory([Chem.MolFromSmiles("CCO"), "CC"], [1.0, 2.0])
    store = prepare_molecules(reader, tmp_path / "store", workers=0, progress=False)
    assert names(store) == ["CCO", "CC"]


def test_structures_follow_the_order_of_the_smiles(tmp_path):
    """An SDF whose atoms stand in another order, and one of another molecule."""
    from rdkit.Chem import AllChem

    molecule = Chem.AddHs(Chem.MolFromSmiles("OC(=O)CN"))
    AllChem.EmbedMolecule(molecule, randomSeed=1)
    heavy = molecule.GetConformer().GetPositions()[:5]
    block = Chem.MolToMolBlock(molecule) + "$$$$\n"
    (tmp_path / "m.sdf").write_text(block * 3)
    path = write(tmp_path / "m.csv", [("OC(=O)CN", 1), ("NCC(O)=O", 1), ("CCO", 1)])
    store = prepared(
        [path], tmp_path / "store", options=MoleculeOptions(geometry=tmp_path / "m.sdf")
    )
    np.testing.assert_allclose(store[0]["positions"], heavy, atol=1e-3)
    np.testing.assert_allclose(store[1]["positions"], heavy[[4, 3, 1, 0, 2]], atol=1e-3)
    assert len(store[2]["positions"]) == 0
    assert "another molecule" in store[2]["reason"].tobytes().decode()
    assert store.manifest["summary"]["with_3d"] == 2


@pytest.mark.shared
def test_real_molecules_fill_their_batches(shared, tmp_path):
    path = shared / "data" / "gpspp" / "pcqm4mv2_2k_3d.csv.gz"
    store = prepared([path], tmp_path / "store", options=MoleculeOptions(targets=("homo",)))
    assert store.manifest["summary"]["with_3d"] == len(store) == 1999
    data = loaded(store, valid_size=10)
    counts = molecule_sizes(data.train)
    columns = np.stack([counts[name] for name in ("atoms", "edges", "pairs")], axis=1)
    columns = np.tile(columns, (20, 1))
    mean = columns.mean(axis=0)
    capacity = (8192 * mean / mean[0] * [1.0, 1.03, 1.05]).astype(int)
    plan = pack(columns, capacity.tolist(), 1)
    assert plan.fills[0] >= 0.97
    loads = np.array([columns[batch].sum(axis=0) for batch in plan[0]])
    assert (loads <= capacity).all()


def test_killed_it_continues_and_ends_the_same(tmp_path):
    path = write(tmp_path / "m.csv", [(smiles, i) for i, smiles in enumerate(MANY)])
    expected = prepared([path], tmp_path / "expected", samples_per_shard=16)
    script = (
        "import os, signal\n"
        "from pathlib import Path\n"
        "from bevatron import files\n"
        "from bevatron.recipes.gpspp.stores import prepare_molecules\n"
        "renames = []\n"
        "def hook(step, path):\n"
        "    renames.append(step == 'rename')\n"
        "    if sum(renames) == 3: os.kill(os.getpid(), signal.SIGKILL)\n"
        "files.crash_hooks.append(hook)\n"
        f"prepare_molecules([Path({str(path)!r})], Path({str(tmp_path / 'out')!r}),\n"
        "    samples_per_shard=16, workers=0, progress=False)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], check=False, env=dict(os.environ))
    assert done.returncode == -signal.SIGKILL
    with pytest.raises(StoreError, match="did not finish"):
        Store.open(tmp_path / "out")
    store = prepared([path], tmp_path / "out", samples_per_shard=16)
    for file in expected.path.glob("*.arrow"):
        assert file.read_bytes() == (store.path / file.name).read_bytes()


def test_a_store_without_any_molecule_is_an_error_that_names_the_list(tmp_path, refused):
    path, out = write(tmp_path / "m.csv", [("C(C", 1.0)]), tmp_path / "s"
    said = refused("prepare", path, "--out", out, "--workers", "0")
    listed = tmp_path / "s-rejects.csv"
    assert said == f"{out}: holds no molecule: 1 row left out, listed with the reasons in {listed}"
    assert "C(C" in listed.read_text()
    assert main(["inspect", str(out)]) == 0


def test_the_featurizer_pickles():
    assert pickle.loads(pickle.dumps(Featurizer("set2"))) == Featurizer("set2")
    assert canonical("C(C") == "C(C"


# ---- the command line ----


def test_prepare_and_inspect_from_the_command_line(tmp_path, capsys):
    path, out = write(tmp_path / "m.csv", ROWS), tmp_path / "store"
    assert main(["prepare", str(path), "--out", str(out), "--workers", "0"]) == 0
    said = capsys.readouterr().out
    assert "molecules: 4 of 8 rows" in said
    assert "store-rejects.csv" in said
    assert main(["inspect", str(out), "--plan"]) == 0
    said = capsys.readouterr().out
    assert "unusable rows" in said
    assert "Elements" in said
    assert (tmp_path / "store-inspect" / "inspect.html").exists()


def test_structures_still_need_a_cutoff(tmp_path, capsys):
    xyz = tmp_path / "s.xyz"
    xyz.write_text("1\nenergy=-1.0 Properties=species:S:1:pos:R:3\nH 0 0 0\n")
    assert main(["prepare", str(xyz), "--out", str(tmp_path / "s")]) == 2
    assert "--cutoff" in capsys.readouterr().err
    path = write(tmp_path / "m.csv", ROWS)
    assert main(["prepare", str(xyz), str(path), "--out", str(tmp_path / "s")]) == 2
    assert "cannot go into one store" in capsys.readouterr().err


def test_a_misspelt_system_is_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("m.csv").write_text("smiles,gap\nCC,1\n")
    assert main(["prepare", "gppspp", "m.csv", "--out", "store"]) == 2
    assert "gppspp: there is no such file; did you mean 'gpspp'?" in capsys.readouterr().err
