"""Starter configurations: they hold the defaults, run once they are filled in, and not before."""

import gzip
import re
import shutil
from importlib.resources import files
from itertools import islice
from pathlib import Path

import pytest
import yaml

from bevatron.cli import main
from bevatron.config import from_dict, merged, to_dict
from bevatron.errors import ConfigError
from bevatron.recipes import SYSTEMS, recipe, system
from bevatron.recipes.starter import check_filled, starter_keys

DATA = files("bevatron.recipes") / "demo_data"

SHORT = {
    "mace": "--preset small --model.r-max 3 --model.num-channels 4 --model.l-max 1 --model.max-L 0 "
    "--model.correlation 1 --data.prepare-workers 1",
    "gpspp": "--model.num-layers 1 --model.node-width 16 --model.edge-width 8 --model.num-heads 2 "
    "--data.prepare-workers 1",
    "graph": "--data.read.features rows",
    "alphafold2": "--preset small --stages.initial.steps 1 --stages.initial.samples-per-step 1 "
    "--stages.initial.crop 8 --data.valid-size 0",
    "alphafold3": "--preset small --stages.initial.steps 1 --stages.initial.samples-per-step 1 "
    "--stages.initial.crop 8 --data.valid-size 0",
}
COMPLEXES = Path(__file__).resolve().parents[3] / "shared/data/complexes"


@pytest.fixture
def data(tmp_path):
    """Some bundled data of each system."""

    def head(name, lines):
        with gzip.open(str(DATA / name), "rt") as file:
            path = tmp_path / name.removesuffix(".gz")
            path.write_text("".join(islice(file, lines)))
        return path

    return {
        "mace": head("structures.extxyz.gz", 8 * 14),
        "gpspp": head("molecules.csv.gz", 40),
        "graph": DATA / "communities.npz",
        "alphafold2": COMPLEXES.parent / "proteins/mmcif/1crn.cif.gz",
        "alphafold3": COMPLEXES / "mmcif/1bna.cif.gz",
    }


@pytest.mark.parametrize("name", SYSTEMS)
def test_a_starter_configuration_is_refused_until_it_is_filled_in_and_then_runs(
    name, data, tmp_path, capsys, refused
):
    if name in {"gpspp", "alphafold3"}:
        pytest.importorskip("rdkit")
    length = [] if "stages" in SHORT[name] else ["--train.epochs", "1"]
    short = [*SHORT[name].split(), *length, "--train.device", "cpu", "--no-report"]
    if name.startswith("alphafold") and not COMPLEXES.is_dir():
        pytest.skip("needs the folder ../shared with real data")
    if name == "alphafold3":
        dictionary = shutil.copy(
            COMPLEXES / "ccd_subset.cif.gz", tmp_path
        )  # its index is beside it
        short += ["--data.components", str(dictionary)]
    assert main(["init", name]) == 0
    path = tmp_path / "run.yaml"
    path.write_text(capsys.readouterr().out)
    said = refused("train", path)
    assert said == "output: is still the placeholder <RUN>; put your own there"
    said = refused("train", path, "--output", tmp_path / "a", "--dry-run")
    assert said == "data.train: is still the placeholder <DATA>; put your own there"
    assert not (tmp_path / "a").exists()
    given = ["--data", str(data[name]), "--output", str(tmp_path / "run")]
    assert main(["init", name, *given]) == 0
    path.write_text(capsys.readouterr().out)
    assert main(["train", str(path), *short]) == 0
    assert (tmp_path / "run" / "model.json").is_file()


@pytest.mark.parametrize("name", SYSTEMS)
def test_the_values_of_a_starter_configuration_are_the_defaults(name):
    text = system(name).starter_text()
    cls, _ = recipe(name)
    plain = to_dict(cls.from_values({}))
    # As it is, and with the keys that are in comments.
    for written in (
        text,
        re.sub(r"^( *)# ([\w-]+:(?: .* #|$))", r"\1\2", text, flags=re.MULTILINE),
    ):
        values = yaml.safe_load(written)
        assert values.pop("recipe") == name
        assert (values.pop("output"), values["data"].pop("train")) == ("<RUN>", ["<DATA>"])
        assert to_dict(from_dict(cls, merged(plain, values))) == plain
    for key in starter_keys(text):
        assert key.meaning


def test_the_starter_configurations_of_proteins_have_shares_and_deleted_blocks():
    keys = {name: starter_keys(system(name).starter_text()) for name in SYSTEMS}
    for name in ("alphafold2", "alphafold3"):
        assert "data.shares" in {key.path for key in keys[name]}
    cls, _ = recipe("alphafold2")
    found = {key.path: key.value for key in keys["alphafold2"] if "stages" in key.path}
    assert found == {
        f"stages.{name}.deleted_blocks": str(stage.deleted_blocks)
        for name, stage in cls.from_values({}).stages.items()
    }


def test_a_name_with_spaces_is_quoted(capsys):
    assert main(["init", "mace", "--data", "my, file.xyz"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["train"] == ["my, file.xyz"]


def test_init_names_the_systems_that_there_are(refused):
    assert "known: alphafold2, alphafold3, gpspp, graph, mace" in refused("init", "water")


def test_a_placeholder_is_named_by_its_key():
    check_filled({"data": {"e0": {"H": -13.6}, "train": ["a<b.xyz", "x > y"]}})
    with pytest.raises(ConfigError, match=r"^data\.heads\.a\.train: is still .* <FILE>; put"):
        check_filled({"data": {"heads": {"a": {"train": [str(Path("<FILE>"))]}}}})
