"""What docs/alphafold2.md tells a user to type is understood."""

import functools
import re
import shlex
from pathlib import Path

import pytest

from bevatron import arguments, cli

PAGE = (Path(__file__).parents[1] / "docs" / "alphafold2.md").read_text()
COMMANDS = [
    line[line.index("bevatron ") :]
    for block in re.findall(r"^```\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
]


def test_the_page_goes_from_files_to_errors():
    named = {line.split()[1] for line in COMMANDS}
    assert named == {"prepare", "inspect", "train", "predict", "convert", "evaluate"}


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_understood(line, tmp_path, monkeypatch):
    called = []
    parse = arguments.call

    def call(function, *rest):
        @functools.wraps(function)
        def record(*args, **kwargs):
            called.append(kwargs)
            return 0

        return parse(record, *rest)

    monkeypatch.chdir(tmp_path)
    for folder in ("runs/folds", "models/alphafold2"):
        Path(folder).mkdir(parents=True)
        Path(folder, "model.json").write_text('{"kind": "alphafold2"}')
    monkeypatch.setattr(arguments, "call", call)
    monkeypatch.setattr("bevatron.recipes.training.start", lambda *a, **k: called.append(k) or 0)
    assert cli.main(shlex.split(line)[1:]) == 0
    assert called
