"""The identity of a run: settings that must match on resume, and those that may differ."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bevatron.config import to_dict
from bevatron.errors import CheckpointError
from bevatron.parallel.mesh import Mesh
from bevatron.train.run import Run
from bevatron.train.settings import Settings

HARMLESS = frozenset(
    {
        "optim.lr", "optim.clip", "optim.clip_norm", "optim.accumulate", "optim.fused", "schedule",
        "batch", "loader", "checkpoint", "train.epochs", "train.device", "train.monitor",
        "train.patience", "train.evaluate_every", "train.evaluation_ranks",
        "train.evaluate_beside", "train.threads", "train.affinity", "train.explode_factor",
        "train.deterministic", "train.tf32", "train.autocast", "train.compile",
        "train.cuda_graphs", "train.collect_every", "train.log_every", "train.tensorboard",
        "train.wandb", "train.wandb_project", "train.timeout_minutes",
    }
)  # fmt: skip
"""Keys (or whole groups) that may differ when a run is resumed; all others belong to the run."""

IDLE_KEYS = (
    "loader.",
    "checkpoint.",
    "train.log_every",
    "train.tensorboard",
    "train.wandb",
    "train.affinity",
)
"""Settings whose change cannot alter a number."""


def identity_of(run: Run) -> dict[str, Any]:
    """Return the flat settings that may not differ on resume."""
    return flatten({**run.identity, **_own(run.settings, harmless=False)})


def harmless_settings(run: Run, mesh: Mesh) -> dict[str, Any]:
    """Return the flat settings that may differ on resume and are then reported."""
    own = flatten(_own(run.settings, harmless=True))
    identity = identity_of(run)
    rest = {k: v for k, v in flatten(run.config).items() if k not in identity and k not in own}
    drawn = flatten({"draws": {stage.name: stage.train.summary() for stage in run.stages}})
    return {"ranks": mesh.world, **own, **rest, **(drawn if run.stages else {})}


def _own(settings: Settings, *, harmless: bool) -> dict[str, Any]:
    flat = flatten(to_dict(settings))
    return {
        key: value
        for key, value in flat.items()
        if (key in HARMLESS or key.split(".")[0] in HARMLESS) == harmless
    }


def check_identity(path: Path, before: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Refuse to resume a run with another model, loss or data.

    Numbers computed from the data (E0) may differ in their last digits on another kind of CPU; that
    is the same run, which resumes with those of the checkpoint. Raises CheckpointError naming the
    first setting that differs.
    """
    now = json.loads(json.dumps(dict(identity)))
    for key, was, value in differences(before, now):
        if key in before and key in now and _equal_but_for_rounding(before[key], now[key]):
            continue
        data = "the data have changed, " if key.startswith("data.fingerprint") else ""
        raise CheckpointError(
            f"{path}: cannot be resumed, {data}'{key}' was {was} and is {value} now; use the run's "
            f"own {'data' if data else 'settings'} or begin a new run in another folder"
        )


def _equal_but_for_rounding(before: Any, now: Any) -> bool:
    if isinstance(before, list) and isinstance(now, list):
        return len(before) == len(now) and all(map(_equal_but_for_rounding, before, now))
    if isinstance(before, float) and isinstance(now, float):
        return math.isclose(before, now, rel_tol=1e-7, abs_tol=1e-12)
    return bool(before == now)


def changes_since(before: Mapping[str, Any], run: Run, mesh: Mesh) -> list[tuple[str, str, str]]:
    """List (key, before, now) of settings that another start of the run has changed.

    An option that the earlier version did not have and that is not used is not a change.
    """
    return [
        change
        for change in differences(before, harmless_settings(run, mesh))
        if change[1:] not in {("absent", "null"), ("absent", "false"), ("absent", "0")}
    ]


def matters(key: str) -> bool:
    """Whether a changed setting can alter the numbers of the run."""
    return not key.startswith(IDLE_KEYS)


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """List (key, value before, value now) of flat settings that differ.

    Examples
    --------
    >>> differences({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": None})
    [('b', '2', '3'), ('c', 'absent', 'null')]
    """
    plain_now = json.loads(json.dumps(dict(now)))
    return [
        (
            key,
            json.dumps(before[key]) if key in before else "absent",
            json.dumps(plain_now[key]) if key in plain_now else "absent",
        )
        for key in dict.fromkeys([*before, *plain_now])
        if key not in before or key not in plain_now or before[key] != plain_now[key]
    ]


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested settings into flat ones with dotted keys.

    Examples
    --------
    >>> flatten({"model": {"channels": 16}, "seed": 1})
    {'model.channels': 16, 'seed': 1}
    """
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat
