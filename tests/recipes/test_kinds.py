"""Where the model of a folder is, also while its run is under way."""

import pytest

from bevatron.errors import CheckpointError
from bevatron.recipes.kinds import kind_of_model, newest_model


def test_of_a_run_under_way_the_best_model_is_taken_until_its_own_is_there(tmp_path):
    best = tmp_path / "best"
    best.mkdir()
    (best / "model.json").write_text('{"kind": "mace"}')
    assert newest_model(tmp_path) == best
    assert kind_of_model([str(tmp_path)]) == "mace"
    (tmp_path / "model.json").write_text('{"kind": "gpspp"}')
    assert newest_model(tmp_path) == tmp_path
    assert kind_of_model([str(tmp_path)]) == "gpspp"
    assert newest_model(best) == best


def test_a_run_that_was_stopped_early_has_no_model_yet(tmp_path):
    with pytest.raises(CheckpointError, match=r"is not a model folder, it has no model\.json"):
        kind_of_model([str(tmp_path)])
    (tmp_path / "config.yaml").touch()
    with pytest.raises(CheckpointError, match=r"the run has no model yet.*with `resume=\"auto\"`"):
        kind_of_model([str(tmp_path)])


def test_a_file_in_place_of_a_model_is_refused_before_its_options_are(tmp_path):
    (tmp_path / "a.fasta").touch()
    with pytest.raises(CheckpointError, match=r"a.fasta: is a file, expected a run or a model fol"):
        kind_of_model([str(tmp_path / "a.fasta"), "out"])
    for name in ("model.json", "weights.safetensors"):
        (tmp_path / name).touch()
        with pytest.raises(CheckpointError, match=f"{name}: is a .*, such as {tmp_path}$"):
            kind_of_model([str(tmp_path / name), "a.fasta"])
    (tmp_path / "a.model").touch()
    assert kind_of_model([str(tmp_path / "a.model")]) is None


def test_a_file_is_no_folder_with_a_model(tmp_path):
    file = tmp_path / "a.model"
    file.touch()
    with pytest.raises(CheckpointError, match=r"a\.model: is a file, expected a run or a model"):
        newest_model(file)
    with pytest.raises(CheckpointError, match=r"model folder; convert it$"):
        newest_model(file, "; convert it")
