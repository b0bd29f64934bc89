"""AlphaFold3: structures of complexes of proteins, nucleic acids and ligands."""

import torch

from bevatron.data.proteins.featurize import featurize
from bevatron.models.alphafold3.config import PRESETS, AlphaFold3Config
from bevatron.models.alphafold3.convert import from_protenix, to_protenix
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.predict import Predicted, predict
from bevatron.models.common.model_folder import ModelKind

KIND = "alphafold3"
"""Kind of this model in model folders."""


def _of(config: AlphaFold3Config, dtype: torch.dtype | None) -> AlphaFold3:
    return AlphaFold3(config).to(dtype)


_folder = ModelKind(KIND, AlphaFold3Config, _of)
build, save_model, load_model = _folder.build, _folder.save, _folder.load

__all__ = [
    "KIND",
    "PRESETS",
    "AlphaFold3",
    "AlphaFold3Config",
    "Predicted",
    "build",
    "featurize",
    "from_protenix",
    "load_model",
    "predict",
    "save_model",
    "to_protenix",
]
