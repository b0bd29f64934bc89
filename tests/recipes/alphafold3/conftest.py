"""A tiny AlphaFold3, the component dictionary, and a store of a few small complexes."""

import shutil

import pytest
import torch

from bevatron.models.alphafold3 import AlphaFold3, AlphaFold3Config, save_model
from bevatron.recipes.alphafold3.stores import prepare_complexes
from tiny_sizes import ALPHAFOLD3

CONFIG = AlphaFold3Config(**ALPHAFOLD3, cycles=1)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A folder of a model whose outputs are not all the same."""
    torch.manual_seed(1)
    model = AlphaFold3(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.2 * torch.randn_like(weight))
    folder = tmp_path_factory.mktemp("alphafold3") / "model"
    save_model(model, folder)
    return folder


@pytest.fixture(scope="session")
def components(shared, tmp_path_factory):
    """A copy of the dictionary, beside which its index may be kept."""
    source = shared / "data/complexes/ccd_subset.cif.gz"
    return str(shutil.copy(source, tmp_path_factory.mktemp("components")))


@pytest.fixture(scope="session")
def complexes(shared, components, tmp_path_factory):
    """A store of DNA, DNA with RNA, DNA with a peptide of ligands, and a file that is damaged."""
    folder = tmp_path_factory.mktemp("complexes")
    bad = folder / "bad.cif"
    bad.write_text("data_bad\n#\n")
    files = [shared / f"data/complexes/mmcif/{name}.cif.gz" for name in ("1bna", "1fix", "1pfe")]
    prepare_complexes(
        [*files, bad], folder / "store", components=components, workers=0, progress=False
    )
    return folder / "store"
