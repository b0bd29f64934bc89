"""``bevatron demo``: the parts of the systems one after another, in a few minutes on two cores."""

import contextlib
import io
import shutil
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

import torch

from bevatron.errors import ConfigError, MissingPackageError
from bevatron.files import write_text_atomically
from bevatron.output import say
from bevatron.recipes import systems

MARK = "DEMO.txt"
"""Marks a folder as made by the demo."""

WIDTH = 80
"""Line width if standard output is not a terminal."""


@dataclass(frozen=True)
class Part:
    """Result of one system's part.

    Attributes
    ----------
    learned : what the trained model can do, on one line
    files : path within the folder and its description
    exit_code : 0, or that of a training that was stopped
    """

    learned: str = ""
    files: tuple[tuple[str, str], ...] = ()
    exit_code: int = 0


def run_demo(out: Path) -> int:
    """Run the parts of the systems; a second call resumes where the first stopped.

    Raises ConfigError if the folder holds something else.

    Returns
    -------
    The exit code: 0, or that of a training that was stopped.
    """
    began = time.monotonic()
    claim(out)
    torch.set_num_threads(1)  # more threads do not speed up such small tensors
    parts: dict[str, Part] = {}
    with folded_output():
        for system in systems():
            if system.demo is None:
                continue
            say(f"\n== {system.name}: {system.summary}")
            try:
                part = system.load(system.demo)(out)
            except MissingPackageError as error:
                part = Part(f"left out: {error}; then run `bevatron demo` again")
                say(part.learned)
            parts[system.name] = part
            if part.exit_code:
                say("stopped; run `bevatron demo` again to continue")
                return int(part.exit_code)
        width = max(len(name) for name in parts)
        say(f"\n== done in {time.monotonic() - began:.0f} s; what was learned:")
        say(*(f"{name:<{width}}  {part.learned}" for name, part in parts.items()))
        rows = [row for part in parts.values() for row in part.files]
        width = max((len(name) for name, _ in rows), default=0)
        say(f"\nin {out}:", *(f"  {name:<{width}}  {what}" for name, what in rows))
    return 0


def bundled(name: str, out: Path) -> Path:
    """Copy a bundled file into the demo's folder, for the user to look at."""
    target = out / "data" / name
    target.parent.mkdir(parents=True, exist_ok=True)
    with as_file(files("bevatron.recipes") / "demo_data" / name) as source:
        shutil.copyfile(source, target)
    return target


def claim(out: Path) -> None:
    """Create the folder, or check that it is one of the demo.

    Raises ConfigError if it holds something else.
    """
    if out.exists() and any(out.iterdir()) and not (out / MARK).exists():
        raise ConfigError(f"{out}: holds something else; choose an empty or a new folder")
    out.mkdir(parents=True, exist_ok=True)
    write_text_atomically(out / MARK, "Made by `bevatron demo`; can be deleted.\n", ConfigError)


@contextlib.contextmanager
def folded_output() -> Iterator[None]:
    """Wrap long lines of standard output, unless it is a terminal."""
    if sys.stdout.isatty():
        yield
        return
    folded = _Folded(sys.stdout)
    with contextlib.redirect_stdout(folded):
        try:
            yield
        finally:
            folded.end()


class _Folded(io.TextIOBase):
    """Forwards text, with lines wrapped at `WIDTH`."""

    def __init__(self, target: Any) -> None:
        self._target, self._line = target, ""

    def write(self, text: str) -> int:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._target.write(_fold(line) + "\n")
        return len(text)

    def flush(self) -> None:
        self._target.flush()

    def end(self) -> None:
        """Write a last line that has no newline."""
        self._target.write(_fold(self._line))


def _fold(line: str) -> str:
    if len(line.rstrip()) <= WIDTH:
        return line.rstrip()
    whole = line.replace(" %", "\xa0%")  # a number stays with its unit
    folded = textwrap.fill(
        whole, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )
    return folded.replace("\xa0", " ")
