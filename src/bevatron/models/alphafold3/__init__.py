"""AlphaFold3: structures of complexes of proteins, nucleic acids and ligands."""

import torch

from bevatron.models.alphafold3.config import PRESETS, AlphaFold3Config
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.common.model_folder import ModelKind

KIND = "alphafold3"
"""Kind of this model in model folders."""


def _build(config: AlphaFold3Config, dtype: torch.dtype | None) -> AlphaFold3:
    return AlphaFold3(config).to(dtype)


_folder = ModelKind(KIND, AlphaFold3Config, _build)
save_model, load_model = _folder.save, _folder.load

__all__ = ["KIND", "PRESETS", "AlphaFold3", "AlphaFold3Config", "load_model", "save_model"]
