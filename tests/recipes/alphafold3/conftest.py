"""A tiny AlphaFold3, the component dictionary, and a store of a few small complexes."""

import shutil
from dataclasses import replace

import pytest
import torch

from bevatron.models.alphafold3 import AlphaFold3, AlphaFold3Config, save_model
from bevatron.models.alphafold3.config import TOKEN_FEATURES
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    ConfidenceConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.config_trunk import (
    MsaConfig,
    PairConfig,
    PairformerConfig,
    TemplateConfig,
)
from bevatron.recipes.alphafold3.stores import prepare_complexes

PAIR = PairConfig(hidden=8, num_heads=2, head_width=4, transition=1, dropout=0.0)
ATOMS = AtomConfig(width=8, pair_width=4, num_heads=2, num_blocks=1)
CONFIG = AlphaFold3Config(
    widths=TrunkWidths(inputs=TOKEN_FEATURES + 8, single=8, pair=8),
    atoms=ATOMS,
    templates=TemplateConfig(num_blocks=1, width=8, pair=PAIR),
    msa=MsaConfig(num_blocks=1, width=8, outer_width=4, num_heads=2, pair=PAIR),
    pairformer=PairformerConfig(2, 2, 4, 1, PAIR),
    diffusion=DiffusionConfig(
        encoder=ATOMS,
        transformer=TokenTransformerConfig(width=8, num_heads=2, num_blocks=2),
        decoder=ATOMS,
        noise_width=8,
    ),
    confidence=ConfidenceConfig(replace(PairformerConfig(1, 2, 4, 1, PAIR))),
    cycles=1,
)


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
