"""Diffusion module and confidence head on samples of real complexes, as they are batched."""

import importlib

import numpy as np
import pytest
import torch

from bevatron.data.padding.shape import BatchShape
from bevatron.data.padding.static_batch import pad
from bevatron.data.proteins.complex_batch import ComplexBatch, collate_complex
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.featurize import describe, featurize
from bevatron.data.proteins.poses import make_pools
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.readers.proteins.components import open_components
from bevatron.data.readers.proteins.structures import read_structure
from bevatron.models.alphafold3 import edm, noising, sampler
from bevatron.models.alphafold3.confidence import ConfidenceHead
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.diffusion import DiffusionModule
from bevatron.models.common.folding import Checkpointing
from bevatron.models.common.folding.normal import SeededNormal
from bevatron.testing import assert_close

random_complex = importlib.import_module("random_complex")

pytestmark = pytest.mark.shared

CONFIG = AlphaFold3Config.preset("small")
TOKENS, ATOMS = 48, 512
KINDS = {0, 2}
"""Protein and DNA."""


@pytest.fixture(scope="module")
def batch(shared, tmp_path_factory):
    """A crop with protein, DNA and single atoms as tokens, in float64."""
    index = tmp_path_factory.mktemp("components") / "ccd.arrow"
    dictionary = open_components(shared / "data/complexes/ccd_subset.cif.gz", index)
    structure = read_structure(shared / "data/complexes/mmcif/1pfe.cif.gz")
    entry = featurize(structure.assembly("1"), dictionary)
    poses = make_pools([dictionary[code] for code in describe(entry)["components"]], 1)
    sizes = SampleSizes(CropSizes(24, 1000, (0.0, 1.0, 0.0)), 4)
    crops = (sample(entry, seed, Sources(poses), sizes) for seed in range(100))
    arrays = next(crop for crop in crops if set(crop["molecule_type"].tolist()) >= KINDS)
    return collate_complex([arrays], np.zeros(1, np.int64), [1.0]).to("cpu", torch.float64)


@pytest.fixture(scope="module")
def filled(batch):
    """The same, padded."""
    lengths = {axis: size for axis, size in batch.sizes.items() if axis != "samples"}
    lengths |= {"tokens": TOKENS, "atoms": ATOMS}
    return pad(batch, BatchShape(**lengths, samples=1))


def trunk(num_tokens, kept):
    given = random_complex.trunk(kept, CONFIG.widths)
    more = (0, num_tokens - kept)
    return [pad_with(x, 0, 0, *more * (x.ndim - 1), value=7.0) for x in given]


def pad_with(x, *sides, value=0.0):
    return torch.nn.functional.pad(x, sides, value=value)


@pytest.fixture(scope="module")
def modules():
    diffusion = DiffusionModule(CONFIG.diffusion, CONFIG.widths).double()
    head = ConfidenceHead(CONFIG.confidence, CONFIG.widths, Checkpointing()).double()
    for module in (diffusion, head):
        random_complex.randomise(module)
    return diffusion, head


def outcome(modules, batch: ComplexBatch, kept, atoms):
    """Noise a structure, denoise it, sample one and judge it."""
    diffusion, head = modules
    tensors, given = batch.tensors(), trunk(batch.token_mask.shape[0], kept)
    normal = SeededNormal(torch.tensor(5), torch.float64)
    draw = noising.draw_copies((2, atoms), normal)
    start, steps = normal((1, atoms, 3)), list(sampler.draw_steps(2, (1, atoms), normal))

    def grow(x):
        return pad_with(x, 0, 0, 0, len(batch.atom_mask) - atoms)

    copies = noising.noisy_copies(
        batch.position, batch.resolved, draw._replace(normal=grow(draw.normal))
    )
    described = diffusion.describe(tensors, *given)
    denoised = diffusion(copies.x, copies.sigma, described)
    rollout = sampler.sample(
        lambda x, sigma: diffusion(x, sigma, described),
        edm.schedule(2, dtype=torch.float64),
        grow(start),
        [step._replace(normal=grow(step.normal)) for step in steps],
        batch.atom_mask,
    )
    return denoised[:, :atoms], rollout[:, :atoms], head(tensors, *given, rollout[0])


def test_padding_of_a_real_complex_changes_nothing(modules, batch, filled):
    N, A = len(batch.token_mask), len(batch.atom_mask)
    assert (batch.atom_to_token.bincount() == 1).any()
    assert (len(filled.token_mask), len(filled.atom_mask)) == (TOKENS, ATOMS)
    *structures, logits = outcome(modules, batch, N, A)
    *others, padded = outcome(modules, filled, N, A)
    for found, expected in zip(others, structures, strict=True):
        assert expected.isfinite().all()
        assert_close(found, expected, 1e-10)
    assert_close(padded.plddt[:A], logits.plddt, 1e-9)
    assert_close(padded.pae[:N, :N], logits.pae, 1e-9)
