"""What docs/alphafold3.md tells a user to type works as it is written."""

import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from bevatron import cli
from bevatron.data.readers.proteins import read_inputs
from bevatron.recipes.alphafold3.run import AlphaFold3Run
from doc_pages import blocks, lines, only_parsed

PAGE = "docs/alphafold3.md"
SHORT = {
    "prepare": "--workers 1",
    "train": "--stages.initial.steps 1 --stages.initial.samples-per-step 1 "
    "--stages.initial.crop 16 --validation-steps 1 --train.device cpu --no-report "
    "--model.cycles 1",
    "predict": "--steps 1 --device cpu --components components.cif",
    "evaluate": "--steps 1 --device cpu --most 1",
    "inspect": "",
}


def commands():
    words = [shlex.split(line) for line in lines(PAGE) if "bevatron " in line]
    return [each[each.index("bevatron") + 1 :] for each in words]


def test_its_commands_are_all_of_the_system():
    assert {each[0] for each in commands()} == {
        "prepare", "inspect", "train", "init", "predict", "convert", "evaluate",
    }  # fmt: skip


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_command_is_understood(words, tmp_path, monkeypatch):
    called = only_parsed(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for folder in ("small", "complexes"):
        Path("runs", folder).mkdir(parents=True)
        Path("runs", folder, "model.json").write_text('{"kind": "alphafold3"}')
    Path("pdb").mkdir()
    Path("pdb/a.cif").write_text("")
    Path("alignments").mkdir()
    Path("alignments/a.a3m").write_text("")
    assert cli.main(words) == 0
    assert called or words[-1] == "--help-all"


def test_its_configuration_is_read():
    values, kept = map(yaml.safe_load, blocks(PAGE, "yaml"))
    model = AlphaFold3Run.from_values(kept).model
    assert {model.checkpointing.kind, model.diffusion.checkpointing.kind} == {"none"}
    assert values.pop("recipe") == "alphafold3"
    stages = AlphaFold3Run.from_values(values).stages
    assert [(name, stage.crop, stage.steps) for name, stage in stages.items()] == [
        ("initial", 256, 5000)
    ]


@pytest.mark.shared
def test_the_commands_and_the_python_run_one_after_the_other(shared, tmp_path, monkeypatch):
    pytest.importorskip("rdkit")
    monkeypatch.chdir(tmp_path)
    data = shared / "data/complexes"
    shutil.copy(data / "ccd_subset.cif.gz", "components.cif.gz")
    Path("pdb").mkdir()
    Path("alignments").mkdir()
    for name in ("1bna", "1fix"):
        shutil.copy(data / f"mmcif/{name}.cif.gz", "pdb")
    Path("alignments/a.a3m").write_text(">a\nMKV\n")
    Path("complex.fasta").write_text(next(each for each in blocks(PAGE) if each.startswith(">")))
    (entity,) = [each for each in read_inputs("complex.fasta")[0].entities if each.smiles]
    assert entity.smiles == "CCO"
    for words in commands():
        if words[0] not in SHORT or "--help-all" in words or "runs/complexes" in words:
            continue
        line = " ".join([*words, SHORT[words[0]]]) if len(words) > 1 else ""
        line = line.replace("components.cif", "components.cif.gz")
        line = line.replace("--seeds 1 2", "--seeds 1").replace("--samples 5", "--samples 1")
        line = line.replace("test-store", "complexes")
        assert not line or cli.main(shlex.split(line)) == 0, line
    assert Path("predicted/complex/report.html").is_file()
    assert Path("errors.json").is_file()
    code = blocks(PAGE, "python")[1]
    code = code.replace("samples=1", 'samples=1, steps=1, components="components.cif.gz"')
    exec(compile(code, PAGE, "exec"), {})


@pytest.mark.shared
def test_the_parts_are_used_alone(shared, tmp_path, monkeypatch, capsys):
    pytest.importorskip("rdkit")
    monkeypatch.chdir(tmp_path)
    data = shared / "data/complexes"
    shutil.copy(data / "ccd_subset.cif.gz", "components.cif")
    Path("pdb").mkdir()
    shutil.copy(data / "mmcif/1bna.cif.gz", "pdb")
    code, _ = blocks(PAGE, "python")
    exec(compile(code, PAGE, "exec"), {})
    assert capsys.readouterr().out.startswith("(16,) (")
