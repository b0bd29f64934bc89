"""A small model of AlphaFold3, its task and a crop of a real complex."""

from dataclasses import replace

import numpy as np
import torch

from bevatron.data.proteins.complex_batch import collate_complex
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.featurize import describe, featurize
from bevatron.data.proteins.poses import make_pools
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.readers.proteins import open_components, read_structure
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.config_trunk import MsaConfig, PairConfig, PairformerConfig
from bevatron.models.alphafold3.losses import LossWeights
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.task import AlphaFold3Task, StepOptions
from bevatron.task import StepNumbers

PAIR = PairConfig(hidden=16, num_heads=2, head_width=8, transition=2)
SMALL = AlphaFold3Config.preset("small")
TINY = replace(
    SMALL,
    msa=MsaConfig(num_blocks=1, width=16, outer_width=4, num_heads=2, pair=PAIR),
    pairformer=PairformerConfig(num_blocks=1, num_heads=4, transition=2, pair=PAIR),
    diffusion=replace(
        SMALL.diffusion, transformer=replace(SMALL.diffusion.transformer, num_blocks=1)
    ),
)


def crop_of_1pfe(shared, index, tokens=29):
    """A crop of a complex of DNA and a peptide with modified residues and a ligand's bonds."""
    folder = shared / "data" / "complexes"
    components = open_components(folder / "ccd_subset.cif.gz", index)
    structure = read_structure(folder / "mmcif" / "1pfe.cif.gz").assembly("1")
    entry = featurize(structure, components)
    pools = make_pools((components[code] for code in describe(entry)["components"]), 1)
    sizes = SampleSizes(CropSizes(tokens=tokens, atoms=260), rows=8)
    made = sample(entry, 5, Sources(pools), sizes)
    return collate_complex([made], np.array([3]), [1.0]).to("cpu", torch.float64)


def model_of(seed=0):
    torch.manual_seed(seed)
    model = AlphaFold3(TINY).double()
    for weight in model.parameters():  # the last layers start at zero, which hides all else
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.1)
    return model


def task_of(step=0, **options):
    options = {"copies": 3, "loss": LossWeights(bond=1.0, pae=1.0), **options}
    task = AlphaFold3Task(2, [StepOptions(**options)])
    chosen = task.begin_step(StepNumbers(step, 77 + step))
    return task, chosen
