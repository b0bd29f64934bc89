"""Structures, a store and runs for tests of the command line."""

import gzip
from itertools import islice

import pytest

from bevatron.cli import main
from cli_runs import CUTOFF, DATA, TINY


@pytest.fixture(scope="session")
def frames():
    """Fourteen bundled structures of methanol as text, two lines and the atoms each."""
    with gzip.open(str(DATA), "rt") as file:
        return ["".join(islice(file, 8)) for _ in range(14)]


@pytest.fixture
def structures(frames, tmp_path):
    """A file of structures."""
    path = tmp_path / "structures.xyz"
    path.write_text("".join(frames))
    return path


@pytest.fixture(scope="session")
def shelf(frames, tmp_path_factory):
    """A folder with a file, its store and a finished run, for tests that only read them."""
    folder = tmp_path_factory.mktemp("shelf")
    (folder / "data.xyz").write_text("".join(frames))
    file, store, run = (str(folder / name) for name in ("data.xyz", "store", "run"))
    assert main(["prepare", file, "--out", store, "--cutoff", CUTOFF, "--workers", "1"]) == 0
    assert main(["train", "mace", "--data", store, "--output", run, *TINY]) == 0
    return folder


@pytest.fixture
def train(structures, tmp_path):
    """Trains a tiny model on a file; returns the exit code."""

    def run(*arguments, data=structures, output=tmp_path / "run"):
        given = ["--data", str(data), "--output", str(output), *TINY, *map(str, arguments)]
        return main(["train", "mace", *given])

    return run
