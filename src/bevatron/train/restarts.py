"""Runs that torchrun (``--max-restarts``) or Slurm (requeue) starts again go on by themselves.

Both start the same command once more. What tells a restart from a second run that was meant for
another folder is the launch that has begun the run there, which the folder remembers.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from bevatron.errors import ConfigError
from bevatron.files import write_json_atomically

LAUNCH = "launch.json"
"""File of a run's folder: the launches that this process belongs to."""


def launches(environment: Mapping[str, str]) -> dict[str, tuple[str, int]]:
    """Return (identity, restarts so far) of each launcher that has started this process.

    Examples
    --------
    >>> launches({"SLURM_JOB_ID": "71", "SLURM_RESTART_COUNT": "2"})
    {'Slurm': ('71', 2)}
    >>> launches({})
    {}
    """
    found = {}
    if "TORCHELASTIC_RESTART_COUNT" in environment:
        name = environment.get("TORCHELASTIC_RUN_ID", "none")
        # Without a rendezvous id only the parent process tells one torchrun from another.
        identity = f"process {os.getppid()}" if name == "none" else name
        found["torchrun"] = identity, int(environment["TORCHELASTIC_RESTART_COUNT"])
    if "SLURM_JOB_ID" in environment:
        restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
        found["Slurm"] = environment["SLURM_JOB_ID"], restarts
    return found


def restarted(folder: Path, environment: Mapping[str, str]) -> str | None:
    """Say that this process continues the run in ``folder``, None unless a launcher wants it to."""
    begun: dict[str, str] = {}
    with suppress(OSError, ValueError):
        begun = json.loads((folder / LAUNCH).read_text(encoding="utf-8"))
    for launcher, (identity, restarts) in launches(environment).items():
        if restarts > 0 and begun.get(launcher) == identity:
            times = "once" if restarts == 1 else f"{restarts} times"
            return f"restarted by {launcher} ({times} so far): the run continues"
    return None


def note_launch(folder: Path, environment: Mapping[str, str]) -> None:
    """Remember in the folder which launch its run belongs to."""
    names = {launcher: identity for launcher, (identity, _) in launches(environment).items()}
    if names:
        write_json_atomically(folder / LAUNCH, names, ConfigError)
