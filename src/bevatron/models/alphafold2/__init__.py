"""AlphaFold2: structures of proteins from their alignments."""

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
    to_mlperf,
    to_openfold,
)
from bevatron.models.alphafold2.model import FEATURES, AlphaFold2, cycles_of
from bevatron.models.alphafold2.predict import PredictedChain, predict
from bevatron.models.common.model_folder import ModelKind

KIND = "alphafold2"
"""Kind of this model in model folders."""

_folder = ModelKind(KIND, AlphaFold2Config, AlphaFold2)
build, save_model, load_model = _folder.build, _folder.save, _folder.load

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
    "to_mlperf",
    "to_openfold",
]
