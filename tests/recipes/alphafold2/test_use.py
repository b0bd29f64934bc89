"""Chains are predicted and compared with known structures, by command and in Python."""

import gzip
import json

import numpy as np
import pytest
import torch

import bevatron as bv
from bevatron.cli import main
from bevatron.config import from_dict
from bevatron.data.readers.proteins import read_structure
from bevatron.errors import ConfigError, DataError, OutOfMemoryError
from bevatron.models.alphafold2 import AlphaFold2, AlphaFold2Config, save_model
from bevatron.recipes.alphafold2.evaluate import evaluate_stores
from bevatron.recipes.alphafold2.predict import predict_files
from bevatron.recipes.alphafold2.predictor import ChainPredictor

CRAMBIN = "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"


@pytest.fixture(scope="module")
def model(tiny_model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny"
    made = AlphaFold2(from_dict(AlphaFold2Config, tiny_model))
    torch.manual_seed(0)
    for weight in made.parameters():  # the last layers start at zero, which hides all else
        torch.nn.init.normal_(weight, std=0.2)
    save_model(made, folder)
    return folder


def test_a_chain_is_written_with_all_its_atoms_and_confidences(model, tmp_path, capsys):
    source = tmp_path / "chains.fasta"
    source.write_text(f">A\n{CRAMBIN}\n")
    assert main(["predict", str(model), str(source), str(tmp_path / "out"), "--device", "cpu"]) == 0
    assert "pLDDT" in capsys.readouterr().out
    (file,) = (tmp_path / "out").glob("*.cif")
    found = read_structure(file)
    assert found.sequence(0) == CRAMBIN
    assert f"polypeptide(L) A {CRAMBIN}" in " ".join(file.read_text().split())
    heavy = {"G": 4, "A": 5, "S": 6, "C": 6, "P": 7, "V": 7, "T": 7, "I": 8, "L": 8, "N": 8,
             "D": 8, "E": 9, "R": 11, "Y": 12, "F": 11}  # fmt: skip
    assert np.diff(found.residues.atom_ptr).tolist() == [heavy[letter] for letter in CRAMBIN]
    assert ((found.atoms.b_factor > 0) & (found.atoms.b_factor < 100)).all()
    as_pdb = read_structure(file.with_suffix(".pdb"))
    assert as_pdb.sequence(0) == CRAMBIN
    assert as_pdb.atoms.name.tolist() == found.atoms.name.tolist()
    assert np.array_equal(as_pdb.atoms.position, found.atoms.position)
    assert np.array_equal(as_pdb.atoms.b_factor, found.atoms.b_factor)
    assert "createViewer" in file.with_suffix(".html").read_text()


def test_the_progress_counts_the_blocks_that_a_prediction_calls(model, counted_calls, tmp_path):
    source = tmp_path / "chains.fasta"
    source.write_text(f">A\n{CRAMBIN}\n")
    predictor = ChainPredictor(model, "cpu")
    calls = counted_calls(predictor.stages)
    predict_files(predictor, source, tmp_path)
    assert calls == {what: total for what, (_, total) in predictor.stages.items()}
    assert min(calls.values()) > 1


def test_a_head_for_the_aligned_error_gives_errors_of_pairs(tiny_model, tmp_path, capsys):
    torch.manual_seed(0)
    made = AlphaFold2(from_dict(AlphaFold2Config, {**tiny_model, "aligned_error": True}))
    torch.nn.init.constant_(made.aux_heads.tm.linear.bias[4:5], 50.0)  # errors of 2 to 2.5 Å
    save_model(made, tmp_path / "model")
    source = tmp_path / "chains.fasta"
    source.write_text(f">A\n{CRAMBIN}\n")
    out = tmp_path / "out"
    command = ["predict", str(tmp_path / "model"), str(source), str(out), "--device", "cpu"]
    assert main(command) == 0
    assert "pTM 0.46" in capsys.readouterr().out
    (row,) = predict_files(tmp_path / "model", source, out, device="cpu")["chains"]
    pae = np.load(out / f"{row['name']}-pae.npz")["pae"]
    assert pae.shape == (46, 46)
    np.testing.assert_allclose(pae, 2.25, atol=1e-3)
    d_0 = 1.24 * (46 - 15) ** (1 / 3) - 1.8
    assert row["ptm"] == pytest.approx(1 / (1 + (2.25 / d_0) ** 2), rel=1e-3)
    page = (out / f"{row['name']}.html").read_text()
    assert "column's residue" in page.replace("&#x27;", "'")


def test_the_alignment_of_the_input_reaches_the_model(model, folder, tmp_path):
    files = sorted(folder.glob("some/1ckb/*.a3m*"))
    text = gzip.decompress(files[0].read_bytes()).decode()
    sequence = text.splitlines()[1]
    chain = {"protein": {"id": "A", "sequence": sequence}}
    job = {"name": "x", "modelSeeds": [1], "dialect": "alphafold3", "version": 1}
    plddt = []
    for number, unpaired in enumerate(("", text)):
        chain["protein"]["unpairedMsa"] = unpaired
        source = tmp_path / f"{number}.json"
        source.write_text(json.dumps({**job, "sequences": [chain]}))
        (row,) = predict_files(model, source, tmp_path / str(number), device="cpu")["chains"]
        plddt.append(row)
    assert plddt[0]["rows"] == 1 < plddt[1]["rows"]
    assert plddt[0]["plddt"] != plddt[1]["plddt"]
    chain["protein"]["unpairedMsa"] = ">q\nACDE\n"
    source.write_text(json.dumps({**job, "sequences": [chain]}))
    with pytest.raises(DataError, match=r"unpaired alignment: its first sequence has 4 resid"):
        predict_files(model, source, tmp_path / "no", device="cpu")


def test_templates_of_the_input_reach_the_model(model, tmp_path, monkeypatch):
    found, shown = {"template_released": np.zeros(6)}, []

    def predict(self, chain, rows, seed=0, run=ChainPredictor.predict):
        shown.append(chain.pop("template_released"))
        return run(self, chain, rows, seed)

    monkeypatch.setattr("bevatron.recipes.alphafold2.predict.templates_of", lambda *_: found)
    monkeypatch.setattr(ChainPredictor, "predict", predict)
    source = tmp_path / "chains.fasta"
    source.write_text(f">A\n{CRAMBIN}\n")
    predictor = ChainPredictor(model, "cpu")
    assert predictor.activations is None
    (row,) = predict_files(predictor, source, tmp_path)["chains"]
    assert shown[0] is found["template_released"]
    assert row["templates"] == 4


def test_what_alphafold2_does_not_predict_is_said(model, tmp_path, capsys):
    protein = {"id": "A", "sequence": "MKVU" + "X" * 6}
    protein["modifications"] = [{"ptmType": "MSE", "ptmPosition": 1}]
    bond = [["A", 1, "CG"], ["A", 3, "CB"]]
    job = {"name": "x", "modelSeeds": [1], "dialect": "alphafold3", "version": 1}
    job |= {"sequences": [{"protein": protein}], "bondedAtomPairs": [bond]}
    source = tmp_path / "x.json"
    source.write_text(json.dumps(job))
    predict_files(model, source, tmp_path / "out", device="cpu")
    notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note")]
    assert notes[0] == "note: x: not used here: bonds, modifications of chain A"
    assert notes[1].startswith(
        "note: x, chain A: AlphaFold2 has no atoms of U4, X5, X6, X7, X8 and 2 more, only"
    )
    assert read_structure(tmp_path / "out/x_A.cif").sequence(0) == "MKVXXXXXXX"


def test_an_alignment_in_a_folder_that_nearly_fits_is_named(model, tmp_path, capsys):
    source, near = tmp_path / "chains.fasta", tmp_path / "searches/near.a3m"
    source.write_text(f">A\n{CRAMBIN}\n")
    near.parent.mkdir()
    near.write_text(f">q\n{CRAMBIN[:20]}{CRAMBIN[21:]}\n")
    (near.parent / "other.a3m").write_text(">q\nMKVLAAGIVGACDEFGHIKLMNPQ\n")
    predict_files(model, source, tmp_path / "out", device="cpu", searches=[near.parent])
    note, lacking = (x for x in capsys.readouterr().err.splitlines() if x.startswith("note"))
    assert lacking == "note: chains: the searches hold no alignment of chain A"
    assert f"{near} is not used: its first sequence has 45 residues, that of chain A 46" in note
    assert note.endswith("residue 21 is the first to differ (P, not T)")
    (near.parent / "own.a3m").write_text(f">q\n{CRAMBIN}\n")
    predict_files(model, source, tmp_path / "both", device="cpu", searches=[near.parent])
    said = capsys.readouterr().err
    assert "is not used" not in said, "it may be that of a mutant"
    assert "no alignment" not in said


def test_a_chain_that_needs_more_memory_than_there_is_is_named(model, tmp_path, monkeypatch):
    def too_much(*_):
        torch.empty(2**50)

    monkeypatch.setattr("bevatron.recipes.alphafold2.predictor.predict", too_much)
    source = tmp_path / "one.fasta"
    source.write_text(">A|protein\nACDE\n")
    predictor = ChainPredictor(model, "cpu")
    with pytest.raises(OutOfMemoryError, match="at one_A, 4 residues"):
        predict_files(predictor, source, tmp_path / "out")


def test_names_of_inputs_become_files_of_the_folder_none_of_them_twice(model, tmp_path):
    jobs = [
        {"name": "../a/b", "sequences": [{"proteinChain": {"sequence": sequence, "count": 1}}]}
        for sequence in ("ACDE", "ACDEF")
    ]
    source = tmp_path / "jobs.json"
    source.write_text(json.dumps(jobs))
    out = tmp_path / "out"
    found = predict_files(ChainPredictor(model, "cpu"), source, out)
    written = [read_structure(row["file"]).sequence(0) for row in found["chains"]]
    assert written == ["ACDE", "ACDEF"]
    assert {path.suffix for path in out.iterdir()} >= {".cif", ".html"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["jobs.json", "out"]


def test_what_is_no_protein_is_named_and_left_out(model, tmp_path, capsys):
    source = tmp_path / "some.fasta"
    source.write_text(">A|protein\nACDE\n>B|dna\nACGT\n>C|smiles\nCCO\n")
    found = predict_files(ChainPredictor(model, "cpu"), source, tmp_path / "out")
    assert [row["name"] for row in found["chains"]] == ["some_A"]
    assert "note: some: only proteins are predicted, not B, C" in capsys.readouterr().err


def test_a_seed_out_of_range_is_refused(model, tmp_path):
    with pytest.raises(
        ConfigError, match=r"seed: expected a whole number from 0 to 2\^63 - 1, got -1"
    ):
        predict_files(ChainPredictor(model, "cpu"), tmp_path, tmp_path, seed=-1)


def test_a_file_without_a_protein_is_refused(model, tmp_path):
    source = tmp_path / "dna.fasta"
    source.write_text(">A|dna\nACGT\n")
    with pytest.raises(DataError, match="holds no protein"):
        predict_files(ChainPredictor(model, "cpu"), source, tmp_path / "out")


def test_chains_of_a_store_are_compared_with_their_structures(model, store, tmp_path):
    options = {"out": tmp_path / "table.json", "pictures": tmp_path / "drawn"}
    found = bv.evaluate(model, store, device="cpu", most=2, **options)
    assert len(found["chains"]) == 2
    drawn = sorted(path.name for path in (tmp_path / "drawn").iterdir())
    assert len(drawn) == 2
    assert all(name.endswith(".png") and "cif" in name for name in drawn)
    assert 0 <= found["mean"]["lddt_ca"] < 0.5
    means = [row["lddt_ca"] for row in found["chains"]]
    assert found["mean"]["lddt_ca"] == pytest.approx(np.mean(means))
    assert json.loads((tmp_path / "table.json").read_text()) == found


def test_what_cannot_be_evaluated_is_said_before_the_work(tmp_path):
    (tmp_path / "file").touch()
    files = [tmp_path]
    with pytest.raises(ConfigError, match="most: expected 1 or more, got 0"):
        evaluate_stores("no model", files, most=0)
    with pytest.raises(DataError, match="it is a folder"):
        evaluate_stores("no model", files, out=tmp_path)
    with pytest.raises(DataError, match="a file is where a folder should be"):
        evaluate_stores("no model", files, pictures=tmp_path / "file")
