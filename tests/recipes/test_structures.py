"""Data of a run: where it is read from."""

import numpy as np
import pytest

from bevatron.recipes.structures import DataConfig, load_structures


@pytest.fixture
def water(tmp_path):
    """Ten labelled water molecules in an extended XYZ file."""
    random = np.random.default_rng(0)
    lines = []
    for _ in range(10):
        positions = np.array([[0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]])
        positions += random.normal(scale=0.05, size=(3, 3))
        forces = random.normal(size=(3, 3))
        lines += ["3", f"Properties=species:S:1:pos:R:3:forces:R:3 energy={random.normal():.6f}"]
        lines += [
            " ".join([name, *(f"{value:.6f}" for value in [*positions[i], *forces[i]])])
            for i, name in enumerate("OHH")
        ]
    path = tmp_path / "water.xyz"
    path.write_text("\n".join(lines) + "\n")
    return path


def store_of(dataset):
    """The store below a choice of samples."""
    while not hasattr(dataset, "path"):
        dataset = dataset.dataset if hasattr(dataset, "dataset") else dataset.datasets[0]
    return dataset


def test_staged_data_are_read_from_the_local_disk_and_are_the_same(water, tmp_path):
    config = DataConfig(train=(water,), prepare_workers=1)
    local = tmp_path / "local"
    plain = load_structures(config, 3.0, tmp_path / "prepared")
    staged = load_structures(config, 3.0, tmp_path / "prepared", stage_to=local)
    assert store_of(staged.train).path.is_relative_to(local)
    assert not store_of(plain.train).path.is_relative_to(local)
    assert len(staged.train) == len(plain.train)
    for i in range(len(plain.train)):
        for name, value in plain.train[i].items():
            np.testing.assert_array_equal(staged.train[i][name], value)
