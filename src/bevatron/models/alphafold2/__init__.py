"""AlphaFold2: structures of proteins from their alignments."""

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
from bevatron.models.common.model_folder import ModelKind

KIND = "alphafold2"
"""Kind of this model in model folders."""

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
    "StructureConfig",
    "TemplateConfig",
    "TriangleConfig",
    "cycles_of",
    "from_deepmind",
    "from_mlperf",
    "from_openfold",
    "load_model",
    "save_model",
    "to_deepmind",
    "to_openfold",
]
