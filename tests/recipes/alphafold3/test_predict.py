"""Predicted complexes: files of a folder, what they say, and inputs that cannot be predicted."""

import errno
import inspect
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import bevatron as bv
from bevatron import cli
from bevatron.data.proteins.featurize import featurize
from bevatron.data.proteins.mmcif import format_mmcif
from bevatron.data.proteins.predicted import predicted_structure
from bevatron.data.readers.proteins import (
    open_components,
    parse_structure,
    read_inputs,
    read_structure,
)
from bevatron.errors import ConfigError, DataError, OutOfMemoryError
from bevatron.models.alphafold3 import predict
from bevatron.recipes import forward_progress
from bevatron.recipes.alphafold3.evaluate import evaluate_stores
from bevatron.recipes.alphafold3.inputs import prepared_input
from bevatron.recipes.alphafold3.predict import predict_files
from bevatron.recipes.alphafold3.predictor import ComplexPredictor
from bevatron.recipes.proteins.figures import NO_CONFIDENCES

pytestmark = pytest.mark.shared

FASTA = ">A|protein\nMKVG\n>B|dna\nAC\n>C|ccd\nATP\n"


def job(sequence="MKVGM", seeds=(3,), **protein):
    chain = {"id": "A", "sequence": sequence, **protein}
    return {
        "name": "my job", "modelSeeds": list(seeds), "dialect": "alphafold3", "version": 1,
        "sequences": [{"protein": chain}],
    }  # fmt: skip


@pytest.fixture(scope="module")
def predicted(tiny_model, components, tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicted")
    (folder / "three.fasta").write_text(FASTA)
    done = predict_files(
        tiny_model, folder / "three.fasta", folder / "out", samples=2, seeds=(0, 7), steps=2,
        device="cpu", components=components,
    )  # fmt: skip
    return done["complexes"][0], folder / "out/three"


def test_every_structure_of_every_seed_is_written_in_the_order_of_its_score(predicted):
    row, folder = predicted
    names = {"rank1.cif", "rank2.cif", "rank3.cif", "rank4.cif"}
    assert {path.name for path in folder.iterdir()} == {
        *names, "scores.json", "pae.npz", "report.html",
    }  # fmt: skip
    scores = json.loads((folder / "scores.json").read_text())
    assert scores == row["structures"]
    assert {(each["seed"], each["sample"]) for each in scores} == {(0, 0), (0, 1), (7, 0), (7, 1)}
    values = [each["ranking_score"] for each in scores]
    assert values == sorted(values, reverse=True)
    assert len(set(values)) > 1
    for each in scores:
        expected = 0.8 * each["iptm"] + 0.2 * each["ptm"] - 100 * each["clash"]
        assert each["ranking_score"] == pytest.approx(expected)
    assert row["best"] == str(folder / "rank1.cif")


@pytest.mark.parametrize("function", [predict, predict_files, evaluate_stores])
def test_the_sampling_has_the_published_200_steps(function):
    assert inspect.signature(function).parameters["steps"].default == 200


def test_the_structure_holds_the_chains_of_the_input_with_plddt_as_b_factors(predicted):
    row, folder = predicted
    structure = read_structure(folder / "rank1.cif")
    assert structure.chains.label.tolist() == ["A", "B", "C"]
    assert structure.chains.kind.tolist() == ["protein", "dna", "ligand"]
    assert [structure.sequence(0), structure.sequence(1)] == ["MKVG", "AC"]
    assert structure.residues.component.tolist()[-3:] == ["DA", "DC", "ATP"]
    plddt = structure.atoms.b_factor
    assert plddt.mean() == pytest.approx(row["structures"][0]["plddt"], abs=0.01)
    assert plddt.std() > 0
    assert np.isfinite(structure.atoms.position).all()
    assert structure.atoms.position.std() > 0
    assert "_bevatron.clash no\n" in (folder / "rank1.cif").read_text()


def test_the_progress_counts_what_a_prediction_calls(
    tiny_model, components, counted_calls, tmp_path, monkeypatch, capsys
):
    (tmp_path / "one.fasta").write_text(FASTA)
    predictor = ComplexPredictor(tiny_model, "cpu")
    predictor.model.config = replace(predictor.model.config, cycles=2)
    stages = predictor.stages(samples=2, steps=3)
    calls = counted_calls(stages)
    monkeypatch.setattr(forward_progress, "SECONDS", 0.0)
    predict_files(
        predictor, tmp_path / "one.fasta", tmp_path, samples=2, steps=3, components=components
    )
    assert calls == {what: total for what, (_, total) in stages.items()}
    assert min(calls.values()) > 1
    assert "one, 37 tokens, step of the diffusion" in capsys.readouterr().err


def test_errors_and_contacts_are_of_all_pairs_of_tokens(predicted):
    found = np.load(predicted[1] / "pae.npz")
    tokens = 4 + 2 + 31
    assert found["pae"].shape == found["contacts"].shape == (tokens, tokens)
    assert 0 <= found["pae"].min() < found["pae"].max() <= 32
    assert np.allclose(found["contacts"], found["contacts"].T)


def test_the_page_carries_the_structure_and_pictures_and_loads_nothing(predicted):
    page = (predicted[1] / "report.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "_atom_site" in page
    for words in ("pLDDT", "ipTM", "rank1.cif", "rank4.cif"):
        assert words in page
    assert 'src="http' not in page
    assert NO_CONFIDENCES not in page


def test_a_structure_of_an_entry_is_read_back_as_the_same_entry(shared, components):
    dictionary = open_components(components)
    path = shared / "data/complexes/mmcif/1pfe.cif.gz"
    entry = featurize(read_structure(path).assembly("1"), dictionary)
    number = len(entry["ref_element"])
    rng = np.random.default_rng(0)
    position = np.where(
        entry["resolved"][:, None], entry["position"], rng.normal(size=(number, 3)) + 100
    )
    text = format_mmcif(
        predicted_structure(entry, dictionary, position.astype(np.float32), np.full(number, 50.0))
    )
    again = featurize(parse_structure(text.encode(), "1pfe.cif"), dictionary)
    for name in (
        "restype", "residue_index", "asym_id", "entity_id", "sym_id", "molecule_type", "num_atoms",
        "column", "ref_element", "ref_atom_name_chars", "ref_space_uid", "component", "token_bonds",
        "bonds", "polymer_ligand_bonds", "molecule_id",
    ):  # fmt: skip
        assert np.array_equal(entry[name], again[name]), name
    assert np.abs(again["position"] - position).max() < 1e-3


def test_a_folder_that_cannot_be_written_is_refused_before_the_work(
    tiny_model, components, tmp_path, monkeypatch
):
    def refuse(self, *_):
        raise OSError(errno.EROFS, "read-only", str(self))

    (tmp_path / "one.fasta").write_text(FASTA)
    (tmp_path / "out/one").mkdir(parents=True)
    predictor = ComplexPredictor(tiny_model, "cpu")
    monkeypatch.setattr(predictor, "predict", lambda *_: pytest.fail("worked for nothing"))
    monkeypatch.setattr(Path, "touch", refuse)
    with pytest.raises(DataError, match=r"out/one: cannot be written, .* read-only"):
        predict_files(predictor, tmp_path / "one.fasta", tmp_path / "out", components=components)


def test_an_alignment_that_is_not_there_is_named_with_its_chain(tmp_path, components):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job(unpairedMsaPath="gone.a3m", pairedMsa="", templates=[])))
    (given,) = read_inputs(path)
    where = r"job\.json, chain A, unpaired alignment: .*gone\.a3m: cannot be read"
    with pytest.raises(DataError, match=where), prepared_input(given, open_components(components)):
        pass


def test_alignments_of_the_input_reach_the_sample(tmp_path, components):
    from bevatron.data.readers.proteins import read_inputs

    unpaired = ">query\nMKVGM\n>other\nMRV-M\n"
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job(unpairedMsa=unpaired, pairedMsa="", templates=[])))
    (given,) = read_inputs(path)
    with prepared_input(given, open_components(components)) as prepared:
        msa = prepared.sample(0)["msa"]
    assert msa.shape == (2, 5)
    assert (msa[0] != msa[1]).tolist() == [False, True, False, True, False]


def test_the_seeds_of_the_file_count_where_none_are_given(tmp_path, tiny_model, components):
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job(seeds=(3, 4))))
    done = predict_files(
        tiny_model, path, tmp_path / "out", samples=1, steps=1, device="cpu", components=components
    )
    row = done["complexes"][0]
    assert {each["seed"] for each in row["structures"]} == {3, 4}
    assert row["folder"] == str(tmp_path / "out/my_job")
    assert [each["iptm"] for each in row["structures"]] == [None, None]


def test_the_same_seed_gives_the_same_structure(tmp_path, tiny_model, components):
    path = tmp_path / "one.fasta"
    path.write_text(">A|protein\nMKVG\n")
    texts = []
    for out, seed in (("a", 1), ("b", 1), ("c", 2)):
        command = ["predict", str(tiny_model), str(path), str(tmp_path / out), "--seeds", str(seed)]
        command += ["--samples", "1", "--steps", "1", "--device", "cpu", "--components", components]
        assert cli.main(command) == 0
        texts.append((tmp_path / out / "one/rank1.cif").read_text())
    assert texts[0] == texts[1] != texts[2]


def test_a_loaded_model_predicts(tmp_path, tiny_model, components):
    path = tmp_path / "one.fasta"
    path.write_text(">A|protein\nMKVG\n")
    model = bv.load(tiny_model, device="cpu")
    done = bv.predict(model, path, tmp_path / "out", samples=1, steps=1, components=components)
    assert (tmp_path / "out/one/rank1.cif").is_file()
    assert len(done["complexes"]) == 1


def test_a_model_that_has_learnt_no_confidences_says_so(tmp_path, tiny_model, components, capsys):
    path = tmp_path / "one.fasta"
    path.write_text(">A|protein\nMKVG\n")
    model = bv.load(tiny_model, device="cpu")
    model.model.confidence.plddt.data.zero_()  # as it begins
    bv.predict(model, path, tmp_path / "out", samples=1, steps=1, components=components)
    assert NO_CONFIDENCES in (tmp_path / "out/one/report.html").read_text()
    assert "pLDDT is meaningless" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "name", "message"),
    [
        (">A|protein\nMK1\n", "a.fasta", "'1' at position 3 is not a residue of protein"),
        (">A|ccd\nQQQQQ\n", "a.fasta", "QQQQQ"),
        (
            json.dumps(job(unpairedMsa=">q\nMMMMM\n", pairedMsa="")),
            "a.json",
            "residue 2 is the first",
        ),
        ("ATOM", "a.txt", "not in a known format"),
    ],
)
def test_what_cannot_be_predicted_is_said_in_a_sentence(
    content, name, message, tmp_path, tiny_model, components
):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(DataError, match=message) as raised:
        predict_files(tiny_model, path, tmp_path / "out", steps=1, components=components)
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


def test_a_mistake_in_an_input_names_the_input_not_a_copy_of_it(tiny_model, components, tmp_path):
    template = {"mmcif": "nonsense", "queryIndices": [0], "templateIndices": [0]}
    mistakes = {
        "chain A, unpaired alignment, line 3": {"unpairedMsa": ">q\nMKVGM\n>h\nMK\n"},
        "chain A, unpaired alignment: its first": {"unpairedMsa": ">q\nMKVGG\n"},
        "chain A, template 1": {"templates": [template]},
        f"chain A, template 1: {tmp_path / 'nowhere.cif'}: ": {
            "templates": [{**template, "mmcif": None, "mmcifPath": "nowhere.cif"}]
        },
    }
    source = tmp_path / "typed.json"
    for where, given in mistakes.items():
        source.write_text(json.dumps(job(**given)))
        with pytest.raises(DataError) as told:
            predict_files(tiny_model, source, tmp_path / "out", samples=1, components=components)
        assert str(told.value).startswith(f"{source}, {where}")
    source.write_text(json.dumps({**job(), "userCCD": "nonsense"}))
    with pytest.raises(DataError) as told:
        predict_files(tiny_model, source, tmp_path / "out", samples=1, components=components)
    assert str(told.value).startswith(f"{source}, userCCD, line 1")


def test_a_job_without_a_name_is_called_after_its_file(tmp_path):
    source = tmp_path / "nameless.json"
    source.write_text(json.dumps({**job(), "name": ""}))
    assert [each.name for each in read_inputs(source)] == ["nameless"]


def test_what_cannot_be_written_is_said_before_the_work(
    tiny_model, components, tmp_path, monkeypatch
):
    monkeypatch.setattr(ComplexPredictor, "predict", None)
    source = tmp_path / "three.fasta"
    source.write_text(FASTA)
    with pytest.raises(DataError, match=r"three.fasta/three: cannot be written, a file is where"):
        predict_files(tiny_model, source, source, components=components)


def test_numbers_below_one_are_said_before_the_work(tiny_model, tmp_path):
    source = tmp_path / "three.fasta"
    source.write_text(FASTA)
    for name in ("samples", "steps"):
        with pytest.raises(ConfigError, match=f"{name}: expected 1 or more, got 0"):
            predict_files(tiny_model, source, tmp_path / "out", components="none", **{name: 0})
        with pytest.raises(ConfigError, match=f"{name}: expected 1 or more, got 0"):
            evaluate_stores(tiny_model, [tmp_path], components="none", **{name: 0})
    assert not (tmp_path / "out").exists()


def test_fewer_structures_leave_none_of_an_earlier_prediction(tiny_model, components, tmp_path):
    source = tmp_path / "one.fasta"
    source.write_text(">A|protein\nMKV\n")
    for samples in (3, 1):
        predict_files(tiny_model, source, tmp_path, samples=samples, steps=1, components=components)
        written = {path.name for path in (tmp_path / "one").glob("*.cif")}
        assert written == {f"rank{number}.cif" for number in range(1, samples + 1)}


def test_seeds_are_different_and_in_range(tiny_model, components, tmp_path):
    source = tmp_path / "job.json"
    for seed in (-1, 2**63):
        source.write_text(json.dumps(job(seeds=(1, seed))))
        given = {"components": components, "device": "cpu"}
        said = f"seeds: expected a whole number from 0 to 2\\^63 - 1, got {seed}"
        with pytest.raises(ConfigError, match=f"^{said}"):
            predict_files(tiny_model, source, tmp_path, seeds=(seed,), **given)
        with pytest.raises(ConfigError, match=f"job.json, {said}"):
            predict_files(tiny_model, source, tmp_path, **given)
    with pytest.raises(ConfigError, match="seeds: 7 is given more than once"):
        predict_files(tiny_model, tmp_path, tmp_path, seeds=(7, 1, 7), components=components)


def test_what_needs_more_memory_than_there_is_is_named(
    tiny_model, components, tmp_path, monkeypatch
):
    def too_much(*_):
        torch.empty(2**50)

    monkeypatch.setattr("bevatron.recipes.alphafold3.predictor.predict", too_much)
    source = tmp_path / "three.fasta"
    source.write_text(FASTA)
    with pytest.raises(OutOfMemoryError, match=r"^cpu ran out of memory at three, 37 tokens$"):
        predict_files(tiny_model, source, tmp_path, device="cpu", components=components)
