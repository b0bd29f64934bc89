"""Names of predicted files, of what users call their inputs."""

import pytest

from bevatron.recipes.proteins.inputs import file_names


@pytest.mark.parametrize("letter", ["n", "ü", "蛋"])
def test_long_names_are_shortened_to_what_file_systems_take(letter, tmp_path):
    made = file_names([letter * 300, letter * 300, "short"])
    assert len(set(made)) == 3
    assert made[2] == "short"
    for name in made[:2]:
        assert name.startswith(letter * 60)
        (tmp_path / f"{name}-pae.npz").touch()
