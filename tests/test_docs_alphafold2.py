"""What docs/alphafold2.md tells a user to type is understood."""

import shlex
from pathlib import Path

import pytest

from bevatron import cli
from doc_pages import blocks, only_parsed

COMMANDS = [
    line[line.index("bevatron ") :]
    for block in blocks("docs/alphafold2.md")
    for line in block.splitlines()
]


def test_the_page_goes_from_files_to_errors():
    named = {line.split()[1] for line in COMMANDS}
    assert named == {"prepare", "inspect", "train", "predict", "convert", "evaluate"}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_understood(line, tmp_path, monkeypatch):
    called = only_parsed(monkeypatch)
    monkeypatch.chdir(tmp_path)
    for folder in ("runs/folds", "models/alphafold2"):
        Path(folder).mkdir(parents=True)
        Path(folder, "model.json").write_text('{"kind": "alphafold2"}')
    assert cli.main(shlex.split(line)[1:]) == 0
    assert called
