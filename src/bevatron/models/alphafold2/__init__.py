"""AlphaFold2: structures of proteins from their alignments."""

import torch

from bevatron.data.proteins.chains import chain_entry as featurize
from bevatron.models.alphafold2.config import (
    FINE_TUNING_SIZES,
    PRESETS,
    AlphaFold2Config,
    EvoformerConfig,
    StructureConfig,
    TemplateConfig,
    TriangleConfig,
)
from bevatron.models.alphafold2.convert import (
    from_deepmind,
    from_mlperf,
    from_openfold,
    to_deepmind,
    to_openfold,
)
from bevatron.models.alphafold2.model import FEATURES, AlphaFold2, cycles_of
from bevatron.models.alphafold2.predict import PredictedChain, predict
from bevatron.models.common.model_folder import ModelKind

KIND = "alphafold2"
"""Kind of this model in model folders."""


def build(
    name: str = "alphafold2", dtype: torch.dtype | None = None, **changes: object
) -> AlphaFold2:
    """Build a model with new weights.

    Parameters
    ----------
    name
        ``alphafold2`` (93 million parameters), ``alphafold2-ptm`` or ``small``.
    dtype
        Floating-point type.
    **changes
        Entries of `AlphaFold2Config` to be changed.

    Raises
    ------
    ConfigError
        If there is no such preset, or no such entry.

    Examples
    --------
    >>> build("small", lddt_width=16).config.lddt_width
    16
    """
    return AlphaFold2(AlphaFold2Config.preset(name, **changes), dtype)


_folder = ModelKind(KIND, AlphaFold2Config, AlphaFold2)
save_model, load_model = _folder.save, _folder.load

__all__ = [
    "FEATURES",
    "FINE_TUNING_SIZES",
    "KIND",
    "PRESETS",
    "AlphaFold2",
    "AlphaFold2Config",
    "EvoformerConfig",
    "PredictedChain",
    "StructureConfig",
    "TemplateConfig",
    "TriangleConfig",
    "build",
    "cycles_of",
    "featurize",
    "from_deepmind",
    "from_mlperf",
    "from_openfold",
    "load_model",
    "predict",
    "save_model",
    "to_deepmind",
    "to_openfold",
]
