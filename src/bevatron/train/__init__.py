"""Training: loop, optimisers, checkpoints, evaluation, reports.

Called as a function, ``bevatron.train(system, data, output, *, resume="never", **values)`` trains a
model as the command does; `bevatron.recipes.api.train` says what each argument means. Raises
BevatronError for settings and data that cannot be trained on.

In the package, `Run` is a complete run, `fit` trains it, `describe` says what it would be;
`evaluate` and `predict` use a trained model.
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
