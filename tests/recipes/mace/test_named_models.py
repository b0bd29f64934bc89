"""Models by name: folders of the user's collection, and published files."""

import shutil

import ase.io
import pytest

from bevatron.cli import main
from bevatron.errors import CheckpointError
from bevatron.recipes.mace.calculator import BevatronCalculator
from bevatron.recipes.mace.run import MaceRun, build
from bevatron.recipes.named_models import PUBLISHED, named_model, published_file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("BEVATRON_MODELS", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def models(converted, tmp_path, monkeypatch):
    """A folder of models that holds one."""
    folder = tmp_path / "models"
    shutil.copytree(converted, folder / "solvent")
    monkeypatch.setenv("BEVATRON_MODELS", str(folder))
    return folder


def test_every_use_takes_a_model_by_its_name(models, acac, converted, tmp_path, capsys):
    atoms = ase.io.read(acac, 0)
    atoms.calc = BevatronCalculator("solvent", device="cpu")
    by_name = atoms.get_potential_energy()
    atoms.calc = BevatronCalculator(converted, device="cpu")
    assert by_name == atoms.get_potential_energy()
    out = tmp_path / "out.xyz"
    assert main(["predict", "solvent", str(acac), str(out), "--device", "cpu"]) == 0
    assert ase.io.read(out, 0).info["predicted_energy"] == pytest.approx(by_name)
    assert main(["evaluate", "solvent", str(acac), "--device", "cpu"]) == 0
    data = {"train": [str(acac)], "prepare_workers": 1}
    values = {"output": str(tmp_path / "run"), "start_from": "solvent", "data": data}
    made = build(MaceRun.from_values({**values, "train": {"device": "cpu"}}))
    assert made.model.config.r_max == 3.0


def test_a_path_that_exists_is_not_a_name(models, converted, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(converted, "solvent")
    assert str(named_model("solvent")) == "solvent"
    assert named_model(tmp_path / "none") == tmp_path / "none"


def test_a_published_file_that_is_absent_is_named_with_its_place(cache, capsys):
    url = PUBLISHED["mace-mp-0-small"]
    file = "2023-12-10-mace-128-L0_energy_epoch-249.model"
    expected = (
        f"mace-mp-0-small: there is no {file} in {cache}/bevatron or {cache}/mace; download it "
        f"from {url} into one of them"
    )
    with pytest.raises(CheckpointError) as error:
        BevatronCalculator("mace-mp-0-small", device="cpu")
    assert str(error.value) == expected
    for command in (["evaluate", "mace-mp-0-small", "x.xyz"], ["convert", "mace-torch"]):
        arguments = command if command[0] == "evaluate" else [*command, "mace-mp-0-small"]
        assert main(arguments) == 2
        assert expected in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "kept",
    [
        "mace/20231210mace128L0_energy_epoch249model",
        "bevatron/2023-12-10-mace-128-L0_energy_epoch-249.model",
    ],
)
def test_a_published_file_that_is_there_is_found_and_must_be_trusted(cache, kept, capsys):
    file = cache / kept
    file.parent.mkdir(parents=True)
    file.write_bytes(b"a pickle")
    assert published_file("mace-mp-0-small") == file
    with pytest.raises(CheckpointError, match="bevatron convert mace-torch mace-mp-0-small --tru"):
        BevatronCalculator("mace-mp-0-small", device="cpu")
    assert main(["convert", "mace-torch", "mace-mp-0-small"]) == 2
    assert f"{file}: is a pickle" in " ".join(capsys.readouterr().err.split())


def test_a_converted_model_goes_to_the_users_folder(cache, checkpoint):
    state, config = checkpoint
    assert main(["convert", "mace-torch", str(state), "--config", str(config)]) == 0
    assert (cache / "bevatron" / state.stem / "model.json").is_file()
    BevatronCalculator(state.stem, device="cpu")


def test_an_unknown_name_is_refused_with_the_folder_that_was_looked_in(cache, capsys):
    assert main(["predict", "mace-mp-9", "x.xyz", "y.xyz"]) == 2
    assert f"nor a model of that name in {cache}/bevatron" in capsys.readouterr().err
