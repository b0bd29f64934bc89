"""Training: loop, optimisers, checkpoints, evaluation, reports.

`Run` is a complete run, `fit` trains it, `describe` says what it would be; `evaluate` and `predict`
use a trained model.
"""

from bevatron.train.description import describe
from bevatron.train.evaluate import evaluate, predict
from bevatron.train.loop import fit
from bevatron.train.run import FitResult, Run, Stage
from bevatron.train.settings import (
    BatchConfig,
    CheckpointConfig,
    LoaderConfig,
    OptimConfig,
    ScheduleConfig,
    Settings,
    StageConfig,
    TrainConfig,
)

__all__ = [
    "BatchConfig",
    "CheckpointConfig",
    "FitResult",
    "LoaderConfig",
    "OptimConfig",
    "Run",
    "ScheduleConfig",
    "Settings",
    "Stage",
    "StageConfig",
    "TrainConfig",
    "describe",
    "evaluate",
    "fit",
    "predict",
]
