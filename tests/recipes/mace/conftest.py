"""Small real data and a converted checkpoint for the tests of recipes."""

import gzip
import json
from itertools import islice

import pytest

from bevatron.data.readers import LabelOptions
from bevatron.recipes.mace.convert import from_mace_torch_file
from bevatron.recipes.mace.stores import prepare_structures

CHECKPOINT = "real_mace_tutorial_solvent_f32"
"""A trained checkpoint of mace-torch: H, C, O; 16 scalar channels; cutoff 3 Å; GFN2-xTB."""


def first_frames(source, target, count):
    """Copy the first frames of an extended XYZ file."""
    with gzip.open(source, "rt") as file, target.open("w") as out:
        for _ in range(count):
            size = file.readline()
            out.write(size)
            out.writelines(islice(file, int(size) + 1))
    return target


@pytest.fixture(scope="session")
def acac(shared, tmp_path_factory):
    """Twelve structures of acetylacetone, H, C and O, of a level of theory that is not GFN2."""
    target = tmp_path_factory.mktemp("data") / "acac.xyz"
    return first_frames(shared / "data/mace/acac_train.extxyz.gz", target, 12)


@pytest.fixture(scope="session")
def alcohols(shared, tmp_path_factory):
    """Twelve structures of methanol and ethanol."""
    target = tmp_path_factory.mktemp("data") / "alcohols.xyz"
    return first_frames(shared / "data/mace/ethanol_methanol_train.extxyz.gz", target, 12)


@pytest.fixture(scope="session")
def acac_store(acac, tmp_path_factory):
    """The structures of acetylacetone, prepared with the checkpoint's cutoff."""
    out = tmp_path_factory.mktemp("data") / "acac-store"
    prepare_structures([acac], out, 3.0, LabelOptions(), workers=1)
    return out


@pytest.fixture(scope="session")
def checkpoint(shared, tmp_path_factory):
    """State dict and JSON configuration of a checkpoint of mace-torch."""
    golden = json.loads((shared / "golden/mace_reference.json").read_text())
    config = tmp_path_factory.mktemp("checkpoint") / "config.json"
    config.write_text(json.dumps(golden["models"][CHECKPOINT]["config"]))
    return shared / f"data/mace/models/{CHECKPOINT}.state_dict.pt", config


@pytest.fixture(scope="session")
def converted(checkpoint, tmp_path_factory):
    """The checkpoint as a model folder."""
    state, config = checkpoint
    out = tmp_path_factory.mktemp("checkpoint") / "converted"
    from_mace_torch_file(state, out, config=config)
    return out
