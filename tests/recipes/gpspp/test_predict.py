"""Trained models of molecules in use: every row kept, ensembles, sizes, embeddings, formats."""

import csv
import json

import numpy as np
import pyarrow.parquet
import pytest
import torch

from bevatron import cli
from bevatron.data.readers.molecules import MoleculeOptions, molecules_in_memory
from bevatron.errors import ConfigError, DataError
from bevatron.models.gpspp import Target, build, save_model
from bevatron.recipes.gpspp import predict as gpspp_files
from bevatron.recipes.gpspp import predictor as gpspp_use
from bevatron.recipes.gpspp.embed import embed_file
from bevatron.recipes.gpspp.evaluate import errors, evaluate_files, print_errors
from bevatron.recipes.gpspp.predict import predict_file, predict_ogb
from bevatron.recipes.gpspp.predictor import MoleculePredictor
from bevatron.recipes.gpspp.stores import prepare_molecules
from tiny_sizes import GPSPP

Chem = pytest.importorskip("rdkit.Chem")

MIXED = ["CCO", "no molecule", "C", "", "[Na+].[Cl-]", "C" * 120, "c1ccccc1", "[U]"]
BAD = [1, 3]
KINDS = (
    Target("gap", unit="eV"),
    Target("toxic", "binary"),
    Target("kind", "multiclass", num_classes=3),
)


def model(seed=0, **changes):
    torch.manual_seed(seed)
    return build("gpspp-4", torch.float64, **{**GPSPP, **changes})


def exact(models, **options):
    return MoleculePredictor(models, precision="float64", **options)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Three model folders."""
    place = tmp_path_factory.mktemp("models")
    for seed in range(3):
        save_model(model(seed), place / str(seed))
    return [place / str(seed) for seed in range(3)]


@pytest.fixture
def table(tmp_path):
    """A table with columns of its own."""
    path = tmp_path / "in.csv"
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["name", "smiles", "gap"])
        writer.writerows([f"no {i}", smiles, i / 2] for i, smiles in enumerate(MIXED))
    return path


def read(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_row_keeps_its_place_and_says_why_it_has_no_value():
    one = exact(model())
    found = one.predict(MIXED)
    assert len(found) == len(MIXED)
    assert found.smiles == MIXED
    assert [bool(reason) for reason in found.reason] == [i in BAD for i in range(len(MIXED))]
    assert np.isnan(found.values[:, 0]).tolist() == [i in BAD for i in range(len(MIXED))]
    for i, smiles in enumerate(MIXED):
        if i not in BAD:
            alone = one.predict([smiles]).values
            np.testing.assert_allclose(alone[0], found.values[i], rtol=1e-9)
    backwards = one.predict(MIXED[::-1]).values[::-1]
    np.testing.assert_allclose(backwards, found.values, rtol=1e-9)


def test_batches_of_any_size_and_stores_give_the_same(monkeypatch, tmp_path):
    one = model()
    expected = exact(one).predict(MIXED).values
    np.testing.assert_allclose(exact(one, capacity=3).predict(MIXED).values, expected, rtol=1e-9)
    monkeypatch.setattr(gpspp_use, "IN_PROCESS", 2)
    found = exact(one, workers=1).predict(MIXED)
    np.testing.assert_allclose(found.values, expected, rtol=1e-9)
    assert found.smiles == MIXED
    assert found.reason == exact(one).predict(MIXED).reason
    store = prepare_molecules(molecules_in_memory(MIXED), tmp_path / "store", workers=1)
    np.testing.assert_allclose(exact(one).predict(store).values, expected, rtol=1e-9)


def test_ensemble_is_mean_and_spread_of_its_models(folders):
    single = np.stack([exact(folder).predict(MIXED).values for folder in folders])
    found = exact(folders).predict(MIXED)
    np.testing.assert_allclose(found.values, single.mean(axis=0), rtol=1e-9)
    np.testing.assert_allclose(found.spread, single.std(axis=0), rtol=1e-6)
    assert np.nanmin(found.spread) > 0
    assert exact(folders[:1]).predict(["C"]).spread is None


def test_models_of_different_feature_sets_make_one_ensemble():
    models = [model(0), model(1, feature_set="set2")]
    found = exact(models).predict(["CCO", "C"])
    single = [exact(one).predict(["CCO", "C"]).values for one in models]
    np.testing.assert_allclose(found.values, np.mean(single, axis=0), rtol=1e-9)


def test_several_kinds_of_targets_have_columns_of_their_own(tmp_path):
    models = [model(seed, targets=KINDS) for seed in (0, 1)]
    found = exact(models).predict(["CCO", "x", "c1ccccc1"])
    chances = found.probabilities["kind"]
    np.testing.assert_allclose(chances[[0, 2]].sum(axis=1), 1.0)
    np.testing.assert_array_equal(found.of("kind")[[0, 2]], chances[[0, 2]].argmax(axis=1))
    assert np.isnan(found.of("kind")[1])
    assert ((found.of("toxic")[[0, 2]] > 0) & (found.of("toxic")[[0, 2]] < 1)).all()
    with pytest.raises(ConfigError, match="no target 'mass'"):
        found.of("mass")
    (tmp_path / "in.smi").write_text("CCO\nx\nc1ccccc1 benzene\n")
    predict_file(exact(models), tmp_path / "in.smi", tmp_path / "out.csv", prefix="")
    rows = read(tmp_path / "out.csv")
    assert list(rows[0]) == [
        *("smiles", "gap", "gap_std", "toxic", "toxic_std", "kind"),
        *("kind_p0", "kind_p1", "kind_p2", "kind_std", "reason"),
    ]
    assert rows[1] == {**dict.fromkeys(rows[1], ""), "smiles": "x", "reason": found.reason[1]}
    assert int(rows[0]["kind"]) == found.of("kind")[0]


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_files_keep_their_columns_and_order(folders, table, tmp_path, suffix):
    out = tmp_path / f"out.{suffix}"
    written = predict_file(exact(folders[:2]), table, out)
    assert (written.rows, written.without) == (len(MIXED), len(BAD))
    expected = exact(folders[:2]).predict(MIXED)
    rows = read(out) if suffix == "csv" else pyarrow.parquet.read_table(out).to_pylist()
    assert [row["name"] for row in rows] == [f"no {i}" for i in range(len(MIXED))]
    assert [row["smiles"] for row in rows] == MIXED
    assert list(rows[0]) == [
        "name",
        "smiles",
        "gap",
        "predicted_gap",
        "predicted_gap_std",
        "reason",
    ]
    for row, value in zip(rows, expected.values[:, 0], strict=True):
        said = row["predicted_gap"]
        assert (said in {"", None}) == np.isnan(value)
        if said not in {"", None}:
            assert float(said) == pytest.approx(value, rel=1e-5)
    assert rows[0]["gap"] == "0.0"


def test_columns_of_the_input_are_never_overwritten(folders, tmp_path, capsys):
    path = tmp_path / "in.csv"
    path.write_text("smiles,reason\nCCO,my own\nX,too\n")
    out, again = tmp_path / "out.csv", tmp_path / "again.csv"
    assert cli.main(["predict", str(folders[0]), str(path), str(out)]) == 0
    said = capsys.readouterr().out
    assert "'reason' already, the new one is called 'reason_2'" in said
    assert "1 without a prediction (see 'reason_2')" in said
    rows = read(out)
    assert list(rows[0]) == ["smiles", "reason", "predicted_gap", "reason_2"]
    assert [row["reason"] for row in rows] == ["my own", "too"]
    assert [bool(row["reason_2"]) for row in rows] == [False, True]
    predict_file(exact(folders[1]), out, again)
    assert list(read(again)[0]) == [*rows[0], "predicted_gap_2", "reason_3"]
    assert [row["predicted_gap"] for row in read(again)] == [row["predicted_gap"] for row in rows]


def test_a_target_that_has_the_prefix_gets_no_other(tmp_path):
    (tmp_path / "in.smi").write_text("CCO\n")
    one = exact(model(targets=(Target("predicted_gap"),)))
    predict_file(one, tmp_path / "in.smi", tmp_path / "out.csv")
    assert list(read(tmp_path / "out.csv")[0]) == ["smiles", "predicted_gap", "reason"]


def test_missing_molecules_of_a_list_have_no_prediction():
    found = exact(model()).predict(["CCO", None, float("nan")])
    assert found.reason == ["", "the SMILES is empty", "the SMILES is empty"]


def test_rdkit_molecules_and_sdf_bring_their_conformers(tmp_path):
    one = model()
    ethanol = Chem.MolFromMolBlock(SDF.split("$$$$", maxsplit=1)[0])
    flat = exact(one).predict([ethanol, None, "CCO"])
    assert flat.reason[1] == "the SMILES is empty"
    assert not flat.seen_3d.any()
    assert flat.values[0] == pytest.approx(flat.values[2], rel=1e-9)
    seen = exact(one, mode="3d").predict([ethanol, None, "CCO"])
    assert seen.seen_3d.tolist() == [True, False, False]
    assert seen.values[2] == pytest.approx(flat.values[2], rel=1e-9)
    assert abs(seen.values[0] - flat.values[0]) > 1e-6
    (tmp_path / "m.sdf").write_text(SDF)
    written = predict_file(exact(one, mode="3d"), tmp_path / "m.sdf", tmp_path / "o.csv")
    assert (written.rows, written.seen_in_2d) == (1, 0)
    assert float(read(tmp_path / "o.csv")[0]["predicted_gap"]) == pytest.approx(
        seen.values[0, 0], rel=1e-5
    )


def test_predictions_keep_titles_and_data_items_of_an_sdf(tmp_path):
    first = SDF.split("$$$$", maxsplit=1)[0]
    block = first.split("M  END", maxsplit=1)[0] + "M  END\n"
    named = "aspirin\n" + block.split("\n", maxsplit=1)[1]
    nameless = "\n" + block.split("\n", maxsplit=1)[1]
    items = "> <logP>\n1.5\n\n>  <remark>  (1)\ntwo\nlines\n\n"
    (tmp_path / "m.sdf").write_text(f"{named}{items}$$$$\n{nameless}> <logP>\n\n\n$$$$\n")
    predict_file(exact(model()), tmp_path / "m.sdf", tmp_path / "o.csv")
    rows = read(tmp_path / "o.csv")
    assert list(rows[0])[:4] == ["smiles", "name", "logP", "remark"]
    assert [row["name"] for row in rows] == ["aspirin", ""]
    assert [row["logP"] for row in rows] == ["1.5", ""]
    assert [row["remark"] for row in rows] == ["two\nlines", ""]
    assert all(float(row["predicted_gap"]) for row in rows)
    (tmp_path / "n.sdf").write_text(f"{named}> <name>\nASA\n\n$$$$\n")
    predict_file(exact(model()), tmp_path / "n.sdf", tmp_path / "n.csv")
    (row,) = read(tmp_path / "n.csv")
    assert (row["title"], row["name"]) == ("aspirin", "ASA")
    (tmp_path / "t.sdf").write_text(f"{named}> <name>\nASA\n\n> <title>\nDr\n\n$$$$\n")
    predict_file(exact(model()), tmp_path / "t.sdf", tmp_path / "t.csv")
    (row,) = read(tmp_path / "t.csv")
    assert (row["title_2"], row["title"], row["name"]) == ("aspirin", "Dr", "ASA")


def test_embeddings_stand_where_their_molecules_do(table, tmp_path):
    one = model()
    found = exact(one).embed(MIXED, atoms=True)
    assert found.graph.shape == (len(MIXED), 16)
    assert found.atom_ptr.tolist() == [0, 3, 3, 4, 4, 6, 126, 132, 133]
    assert np.isnan(found.graph[BAD]).all()
    for i in set(range(len(MIXED))) - set(BAD):
        own = slice(found.atom_ptr[i], found.atom_ptr[i + 1])
        np.testing.assert_allclose(found.nodes[own].sum(axis=0), found.graph[i], rtol=1e-9)
    pieces = exact(one, capacity=4).embed(MIXED, atoms=True)
    np.testing.assert_allclose(pieces.nodes, found.nodes, rtol=1e-8, atol=1e-10)
    assert embed_file(exact(one), table, tmp_path / "e.npz") == len(MIXED)
    with np.load(tmp_path / "e.npz") as file:
        assert set(file) == {"graph", "smiles", "reason"}
        np.testing.assert_allclose(file["graph"], found.graph, rtol=1e-5, atol=1e-6)
        assert file["smiles"].tolist() == MIXED


def test_ogb_takes_what_is_written(monkeypatch, table, tmp_path):
    one = model(targets=(Target("gap", mean=5.0),))
    expected = exact(one).predict(MIXED).values[:, 0]
    with pytest.raises(DataError, match=r"8 molecules for 'test-dev', which has 147037"):
        predict_ogb(exact(one), table, tmp_path)
    monkeypatch.setitem(gpspp_files.OGB_SIZES, "test-dev", len(MIXED))
    path, absent = predict_ogb(exact(one), table, tmp_path / "new")
    assert (path.name, absent) == ("y_pred_pcqm4m-v2_test-dev.npz", 2)
    with np.load(path) as file:
        found = file["y_pred"]
    assert (found.dtype, found.shape) == (np.float32, (len(MIXED),))
    assert found[BAD].tolist() == [5.0, 5.0]
    good = np.setdiff1d(np.arange(len(MIXED)), BAD)
    np.testing.assert_allclose(found[good], expected[good], rtol=1e-5)
    with pytest.raises(ConfigError, match="one number per molecule"):
        predict_ogb(exact(model(targets=KINDS)), table, tmp_path)


def test_of_ogbs_folder_the_part_is_predicted_in_the_order_of_the_split(monkeypatch, tmp_path):
    import gzip

    (tmp_path / "pcqm/raw").mkdir(parents=True)
    rows = "".join(f"{i},{smiles},{i}\n" for i, smiles in enumerate(["C", "CC", "CCC", "CO", "N"]))
    with gzip.open(tmp_path / "pcqm/raw/data.csv.gz", "wt") as file:
        file.write("idx,smiles,homolumogap\n" + rows)
    split = {"train": [0], "valid": [], "test-dev": [3, 1], "test-challenge": [2, 4]}
    split = {name: np.array(rows, np.int64) for name, rows in split.items()}
    torch.save(split, tmp_path / "pcqm/split_dict.pt")
    for part, smiles in (("test-dev", ["CO", "CC"]), ("test-challenge", ["CCC", "N"])):
        monkeypatch.setitem(gpspp_files.OGB_SIZES, part, 2)
        path, _ = predict_ogb(exact(model()), tmp_path / "pcqm", tmp_path, part)
        with np.load(path) as file:
            expected = exact(model()).predict(smiles).values[:, 0]
            np.testing.assert_allclose(file["y_pred"], expected, rtol=1e-5)


def test_evaluation_compares_with_labels_by_name_or_order(folders, table, tmp_path, capsys):
    found = evaluate_files(exact(folders), [table], out=tmp_path / "e.json")
    metrics = found[str(table)]["gap"]
    predicted = exact(folders).predict(MIXED).values[:, 0]
    good = np.setdiff1d(np.arange(len(MIXED)), BAD)
    error = predicted[good] - good / 2
    assert metrics["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-5)
    assert metrics["rmse"] == pytest.approx(np.sqrt(np.square(error).mean()), rel=1e-5)
    assert (metrics["molecules"], metrics["without prediction"]) == (6, 2)
    assert json.loads((tmp_path / "e.json").read_text()) == found
    other = tmp_path / "other.csv"
    other.write_text(table.read_text().replace("gap", "label"))
    with pytest.raises(DataError, match="no column 'gap'"):
        evaluate_files(exact(folders), [other])
    both = evaluate_files(exact(folders), [other, other], MoleculeOptions(targets=("label",)))
    assert both["all"]["gap"]["mae"] == pytest.approx(metrics["mae"])
    print_errors(found, exact(folders).targets)
    heads, values = (line.split() for line in capsys.readouterr().out.splitlines() if "a" in line)
    row = dict(zip(heads, values, strict=False))
    assert (row["target"], row["molecules"], row["MAE"]) == ("gap", "6", f"{metrics['mae']:.4g}")


def test_metrics_of_classes():
    labels, said = np.array([0.0, 0.0, 1.0, 1.0]), np.array([0.1, 0.6, 0.6, 0.9])
    found = errors(Target("t", "binary"), labels, said)
    assert found["accuracy"] == 0.75
    assert found["auroc"] == pytest.approx((1 + 1 + 1 + 0.5) / 4)
    # Thresholds 0.9 (precision 1) and 0.6 (2 of 3), each winning half of the positives.
    assert found["ap"] == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)
    assert "auroc" not in errors(Target("t", "binary"), labels[:2], said[:2])
    kinds = Target("t", "multiclass", num_classes=3)
    assert errors(kinds, np.array([0.0, 2.0]), np.array([1.0, 2.0]))["accuracy"] == 0.5
    assert errors(Target("t"), np.zeros(0), np.zeros(0)) == {"molecules": 0}


@pytest.mark.parametrize(
    ("models", "options", "words"),
    [
        ([], {}, "at least one run"),
        ([model(), model(targets=KINDS)], {}, "need the same targets"),
        ([model()], {"device": "tpu"}, "device: expected auto, .*'tpu'"),
        (
            [model(distance_bias=False, distance_sum=False, bond_lengths=False)],
            {"mode": "3d"},
            "uses no positions",
        ),
    ],
)
def test_what_cannot_predict_is_refused(models, options, words):
    with pytest.raises(ConfigError, match=words):
        exact(models, **options)


def test_wrong_files_and_inputs_are_refused(folders, table, tmp_path):
    one = exact(folders[0])
    with pytest.raises(DataError, match=r"ends in .csv or .parquet"):
        predict_file(one, table, tmp_path / "out.txt")
    with pytest.raises(DataError, match=r"ends in .npz"):
        embed_file(one, table, tmp_path / "out.csv")
    with pytest.raises(DataError, match="a list of SMILES"):
        one.predict("CCO")
    with pytest.raises(DataError, match="expected a SMILES or an RDKit molecule, got int"):
        one.predict([3])
    with pytest.raises(DataError, match="does not exist"):
        predict_file(one, tmp_path / "absent.csv", tmp_path / "out.csv")
    store = prepare_molecules(molecules_in_memory(["C"]), tmp_path / "s", "set2", workers=1)
    with pytest.raises(DataError, match="prepared with the feature set 'set2'"):
        one.predict(store)


def test_a_model_that_was_given_stays_as_it_is():
    one = model()
    one.train()
    first = MoleculePredictor(one, precision="float32").predict(["CCO"]).values
    assert one.training
    assert next(one.parameters()).dtype == torch.float64
    assert first == pytest.approx(exact(one).predict(["CCO"]).values, rel=1e-4)


def test_commands_for_molecules(folders, table, tmp_path, capsys):
    place = str(folders[0])
    assert cli.main(["predict", place, str(table), str(tmp_path / "o.csv"), str(folders[1])]) == 0
    assert "8 rows in" in capsys.readouterr().out
    assert "predicted_gap_std" in read(tmp_path / "o.csv")[0]
    assert cli.main(["evaluate", place, str(table)]) == 0
    assert "MAE" in capsys.readouterr().out
    assert cli.main(["embed", place, str(table), str(tmp_path / "o.npz"), "--atoms"]) == 0
    with np.load(tmp_path / "o.npz") as file:
        assert file["nodes"].shape == (133, 16)
    words = ["predict", place, str(table), str(tmp_path), "--format", "ogb"]
    assert cli.main(words) == 2
    assert "147037" in capsys.readouterr().err


SDF = """ethanol
     RDKit          3D

  3  2  0  0  0  0  0  0  0  0999 V2000
   -0.8883    0.1670   -0.0273 C   0  0
    0.4658   -0.5116   -0.0368 C   0  0
    1.4311    0.3229    0.5867 O   0  0
  1  2  1  0
  2  3  1  0
M  END
$$$$
"""
