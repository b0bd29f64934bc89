"""Pieces of the demonstration; the whole of it takes a minute and is what `make demo` runs."""

import ase.io
import numpy as np
import pytest
from ase.calculators.lj import LennardJones

from bevatron.errors import ConfigError
from bevatron.recipes.demo import claim
from bevatron.recipes.mace import demo
from bevatron.recipes.mace.data import prepare_structures


def test_settings_are_a_valid_configuration_of_bundled_data(tmp_path):
    config = demo.configuration(tmp_path)
    assert config.data.train[0].is_file()
    assert config.data.test_fraction > 0


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    out = tmp_path / "demo"
    claim(out)
    claim(out)  # its own folder is taken again
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="holds something else"):
        claim(other)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_dynamics_conserve_energy_and_are_drawn(tmp_path):
    places = np.stack(np.meshgrid(*[np.arange(2.0)] * 3), -1).reshape(-1, 3) * 1.3
    lines = "".join("Ar {:.3f} {:.3f} {:.3f} 0.1 0 0\n".format(*place) for place in places)
    source = tmp_path / "argon.xyz"
    source.write_text(f"8\nProperties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy=-1.0\n{lines}")
    store = prepare_structures([source], tmp_path / "store", 3.0, workers=1)
    calculator = LennardJones(sigma=1.1, epsilon=0.05, rc=6.0)
    drift = demo.run_dynamics(calculator, store, tmp_path, steps=100)
    assert abs(drift) < 1e-3
    assert len(ase.io.read(tmp_path / "dynamics.extxyz", ":")) == 6
    assert (tmp_path / "dynamics.png").stat().st_size > 1000
