"""Data of a run: where it is read from."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest

from bevatron.config import from_dict, to_dict
from bevatron.errors import ConfigError
from bevatron.models.mace import LossConfig, MaceConfig
from bevatron.recipes.mace.data import DataConfig, load_structures
from bevatron.recipes.mace.run import MaceRun, build
from bevatron.recipes.mace.stores import prepare_structures


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


@pytest.mark.parametrize("cutoff", [float("inf"), float("nan"), 0.0])
def test_a_cutoff_that_is_no_length_is_refused(water, tmp_path, cutoff):
    with pytest.raises(ConfigError, match=f"cutoff: expected a length above 0 Å, got {cutoff}"):
        prepare_structures([water], tmp_path / "store", cutoff)


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


def test_what_has_an_element_of_its_own_is_trained_on_whatever_the_seed(water, tmp_path):
    with water.open("a") as file:
        file.write("2\nProperties=species:S:1:pos:R:3:forces:R:3 energy=-3.0\n")
        file.write("N 0 0 0 0.1 0 0\nN 0 0 1.1 -0.1 0 0\n")
    for seed in range(6):
        config = DataConfig(
            train=(water,),
            prepare_workers=1,
            valid_size=0.3,
            test_size=0.3,
            split_seed=seed,
        )
        data = load_structures(config, 3.0, tmp_path / "prepared")
        parts = {"train": data.train, "valid": data.valid, "test": data.test}
        assert sum(len(part) for part in parts.values()) == 11
        for name, part in parts.items():
            elements = {z for i in range(len(part)) for z in part[i]["atomic_numbers"].tolist()}
            assert (7 in elements) == (name == "train")


def test_a_number_of_structures_is_set_aside(water, tmp_path):
    config = DataConfig(train=(water,), prepare_workers=1, valid_size=2, test_size=3)
    data = load_structures(config, 3.0, tmp_path / "prepared")
    assert [len(part) for part in (data.train, data.valid, data.test)] == [5, 2, 3]
    config = dataclasses.replace(config, valid_size=7)
    with pytest.raises(ConfigError, match=r"data\.valid_size and data\.test_size: 7 and 3 of 10"):
        load_structures(config, 3.0, tmp_path / "prepared")


def test_old_names_of_sizes_are_taken_with_a_warning(caplog):
    values = {"train": ["a"], "valid_fraction": 0.3, "heads": {"b": {"test_fraction": 0.2}}}
    config = from_dict(DataConfig, values, "data")
    assert (config.valid_size, config.heads["b"].test_size) == (0.3, 0.2)
    assert "data.valid_fraction is now data.valid_size: 0.3" in caplog.messages
    assert from_dict(DataConfig, to_dict(config)) == config


def test_isolated_atoms_give_e0_and_are_in_no_batch_and_no_report(water, tmp_path):
    with water.open("a") as file:
        for name, energy in (("H", -13.6), ("O", -432.1)):
            file.write("1\nProperties=species:S:1:pos:R:3:forces:R:3 config_type=IsolatedAtom ")
            file.write(f"energy={energy}\n{name} 0 0 0 0 0 0\n")
    data = DataConfig(train=(water,), prepare_workers=1)
    model = MaceConfig(num_channels=4, max_L=0, r_max=3.0)
    weights = LossConfig(stress_weight=0.0)
    run = build(MaceRun(output=tmp_path / "run", data=data, model=model, loss=weights))
    assert run.model.config.atomic_energies == ((-13.6, -432.1),)
    for part in (run.train, run.on_end.values[0].train):
        assert part.lengths("atomic_numbers").tolist() == [3] * 9


def test_other_labels_or_another_division_are_another_fingerprint(tmp_path):
    def fingerprint(energy, **changes):
        path = tmp_path / "data.xyz"
        frame = "2\nenergy={} Properties=species:S:1:pos:R:3\nH 0 0 0\nH 0 0 {}\n"
        path.write_text("".join(frame.format(energy - i, 0.7 + 0.01 * i) for i in range(10)))
        config = DataConfig(train=(path,), prepare_workers=0, **changes)
        with tempfile.TemporaryDirectory() as prepared:
            return load_structures(config, 3.0, Path(prepared)).fingerprint

    assert fingerprint(-31.0) == fingerprint(-31.0)
    others = [fingerprint(-31.5), fingerprint(-31.0, split_seed=1)]
    assert len({fingerprint(-31.0), *others}) == 3
