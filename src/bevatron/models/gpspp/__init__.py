"""GPS++: configuration, features, model, task, conversion from the official weights."""

from bevatron.models.common.model_folder import ModelKind
from bevatron.models.gpspp.config import (
    FROM_DATA,
    PRESETS,
    DropoutConfig,
    GPSPlusPlusConfig,
    Target,
    TrainedOn,
)
from bevatron.models.gpspp.convert import from_official
from bevatron.models.gpspp.corruption import CorruptionConfig, Inputs, Mode, corrupt, observe
from bevatron.models.gpspp.features import Featurizer, featurize
from bevatron.models.gpspp.losses import LossConfig
from bevatron.models.gpspp.metrics import PropertyMetrics
from bevatron.models.gpspp.model import OUTPUTS, GPSPlusPlus
from bevatron.models.gpspp.task import GPSPlusPlusTask

KIND = "gpspp"
"""Kind of this model in model folders."""

# Models that record no version of their features are older than the second.
_folder = ModelKind(KIND, GPSPlusPlusConfig, GPSPlusPlus, absent={"features_version": 1})
build, save_model, load_model = _folder.build, _folder.save, _folder.load

__all__ = [
    "FROM_DATA",
    "KIND",
    "OUTPUTS",
    "PRESETS",
    "CorruptionConfig",
    "DropoutConfig",
    "Featurizer",
    "GPSPlusPlus",
    "GPSPlusPlusConfig",
    "GPSPlusPlusTask",
    "Inputs",
    "LossConfig",
    "Mode",
    "PropertyMetrics",
    "Target",
    "TrainedOn",
    "build",
    "corrupt",
    "featurize",
    "from_official",
    "load_model",
    "observe",
    "save_model",
]
