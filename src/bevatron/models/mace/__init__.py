"""MACE: configuration, model, task, statistics of the data, conversion from and to mace-torch."""

from bevatron.models.common.model_folder import ModelKind
from bevatron.models.mace.atomic_energies import AtomicEnergies
from bevatron.models.mace.config import PRESETS, MaceConfig
from bevatron.models.mace.convert import (
    from_mace_torch,
    load_mace_torch_file,
    save_mace_torch_file,
    to_mace_torch,
)
from bevatron.models.mace.features import Statistics, statistics
from bevatron.models.mace.finetune import TransferRow, load_matching
from bevatron.models.mace.losses import LossConfig, StageTwo
from bevatron.models.mace.model import MACE, hessian
from bevatron.models.mace.task import MaceMetrics, MaceTask, per_structure_errors

KIND = "mace"
"""Kind of this model in model folders."""

_folder = ModelKind(KIND, MaceConfig, MACE)
save_model, load_model = _folder.save, _folder.load

__all__ = [
    "KIND",
    "MACE",
    "PRESETS",
    "AtomicEnergies",
    "LossConfig",
    "MaceConfig",
    "MaceMetrics",
    "MaceTask",
    "StageTwo",
    "Statistics",
    "TransferRow",
    "from_mace_torch",
    "hessian",
    "load_mace_torch_file",
    "load_matching",
    "load_model",
    "per_structure_errors",
    "save_mace_torch_file",
    "save_model",
    "statistics",
    "to_mace_torch",
]
