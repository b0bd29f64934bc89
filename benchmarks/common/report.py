"""Writes the result of a benchmark as JSON and as a Markdown page, with date, hardware, versions.

The newest result is ``results/<area>/<name>.json``, with a page and pictures next to it; hardware
and date are inside. The result it replaces moves to
``results/history/<area>/<name>_<hardware>_<date>``, unless date and hardware are the same; if that
is taken, ``_2`` and so on follow.
"""

import json
import os
import platform
import re
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bevatron.files import write_text_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RESULTS = Path(__file__).resolve().parents[1] / "results"
AREAS = ("kernels", "mace", "gpspp", "graph", "alphafold2", "alphafold3", "data", "train")
AREAS += ("parallel",)
PICTURE = re.compile(r"\]\(([^()/\s]+\.png)\)")
"""A picture as a page shows it."""
PACKAGES = (
    *("bevatron", "torch", "triton", "numpy", "pyarrow", "xxhash"),
    *("mace-torch", "e3nn", "cuequivariance-torch"),
)


def hardware(device: str = "cpu") -> str:
    """Describe the machine in general words: ``cpu-2core``, ``nvidia-h200``, ``nvidia-h200-x2``."""
    if device != "cpu":
        import torch

        name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
        count = torch.cuda.device_count()
        return name if count == 1 else f"{name}-x{count}"
    affinity = getattr(os, "sched_getaffinity", None)
    return f"cpu-{len(affinity(0)) if affinity else os.cpu_count()}core"


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def write_result(
    name: str,
    rows: Sequence[Mapping[str, Any]],
    notes: str = "",
    *,
    device: str = "cpu",
    extra: Mapping[str, Any] | None = None,
    folder: Path = RESULTS,
    measured_on: Mapping[str, Any] | None = None,
) -> Path:
    """Write ``<area>/<name>.json`` and its page and print the table.

    Parameters
    ----------
    name : ``<area>/<name>``: what was measured, ``mace/train_step``
    rows : one mapping per row of the table; columns in the order of first appearance
    notes : text under the table: what is compared, how it was timed, what to keep in mind
    device : ``cpu`` or ``cuda``, for the hardware's name
    extra : additional plain values for the JSON alone (raw timings, configuration)
    folder : destination of the files
    measured_on
        ``hardware`` and ``versions`` of the runs, if they are collected on another machine.

    Returns
    -------
    Path
        The JSON file.
    """
    now = datetime.now(UTC)
    ran_on = measured_on or {"hardware": hardware(device), "versions": versions()}
    machine = ran_on["hardware"]
    path = make_room(name, machine, f"{now:%Y-%m-%d}", folder)
    result = {
        "name": name,
        "hardware": machine,
        "date": f"{now:%Y-%m-%d}",
        "versions": ran_on["versions"],
        "notes": notes,
        "rows": [dict(row) for row in rows],
        **({"extra": dict(extra)} if extra else {}),
    }
    written = json.dumps(result, indent=1, default=_plain)
    write_text_atomically(path, written + "\n")
    write_text_atomically(path.with_suffix(".md"), page_of(json.loads(written)))
    print(f"{markdown(rows)}\n\n{path}")
    return path


def page_of(result: Mapping[str, Any]) -> str:
    """Return the page of a result as its JSON has it; pictures follow."""
    listed = ", ".join(f"{package} {number}" for package, number in result["versions"].items())
    where = ", ".join(filter(None, (result.get("hardware"), result["date"], listed)))
    parts = (f"# {result['name']}", where, markdown(result["rows"]), result["notes"])
    return "\n\n".join(filter(None, parts)).rstrip() + "\n"


def make_room(name: str, machine: str | None, date: str, folder: Path = RESULTS) -> Path:
    """Move the result that a new one replaces to the history; return the path of the new one.

    Parameters
    ----------
    name : ``<area>/<name>``
    machine, date : of the new result
    folder : where the areas are

    Returns
    -------
    Path
        The JSON file ``<folder>/<area>/<name>.json``; its page has the suffix ``.md``.
    """
    area, _, short = name.partition("/")
    if area not in AREAS or not re.fullmatch(r"[\w-]+", short):
        raise ValueError(f"{name}: expected AREA/NAME with an area of {', '.join(AREAS)}")
    path = folder / area / f"{short}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists():
        earlier = json.loads(path.read_text())
        if (earlier.get("hardware"), earlier["date"]) != (machine, date):
            _retire(path, folder / "history" / area / history_name(short, earlier))
    return path


def history_name(name: str, result: Mapping[str, Any]) -> str:
    """Return the name of a result in the history: ``<name>_<hardware>_<date>``."""
    return "_".join(filter(None, (name, result.get("hardware"), result["date"])))


def _retire(path: Path, stem: Path) -> None:
    """Move a result, its page and the pictures there to a free stem in the history."""
    numbered = (stem.with_name(f"{stem.name}_{number}") for number in count(2))
    stem = next(s for s in chain([stem], numbered) if not s.with_name(f"{s.name}.json").exists())
    stem.parent.mkdir(parents=True, exist_ok=True)
    path.rename(stem.with_name(f"{stem.name}.json"))
    page = path.with_suffix(".md")
    if not page.exists():  # an interrupted run wrote the numbers alone
        return
    text = page.read_text()
    for picture in PICTURE.findall(text):
        renamed = picture.replace(path.stem, stem.name, 1)
        path.with_name(picture).rename(stem.with_name(renamed))
        text = text.replace(f"]({picture})", f"]({renamed})")
    write_text_atomically(stem.with_name(f"{stem.name}.md"), text)
    page.unlink()


def add_picture(figure: "Figure", result: Path, name: str = "") -> Path:
    """Write a figure next to a result and show it on the result's page.

    Parameters
    ----------
    figure : what is drawn
    result : the JSON file that `write_result` returned
    name : tells several pictures of one result apart
    """
    from bevatron.train.report import plots

    path = result.with_name("_".join([result.stem, *filter(None, [name])]) + ".png")
    plots.save(figure, path)
    page = result.with_suffix(".md")
    shown = f"![{name.replace('_', ' ') or 'the rows drawn'}]({path.name})"
    text = page.read_text()
    if shown not in text:
        write_text_atomically(page, f"{text}\n{shown}\n")
    return path


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(key, "")) for key in columns) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:.3e}"
    return str(value)


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def spread(values: Sequence[float | None], digits: int = 1, sign: str = "") -> str:
    """Write a mean and, of several values, their standard deviation; ``sign``: ``+`` or nothing.

    Examples
    --------
    >>> spread([150.0, 250.0]), spread([1.0], sign="+"), spread([None])
    ('200.0 ± 70.7', '+1.0', '-')
    """
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean = f"{statistics.mean(known):{sign}.{digits}f}"
    return mean if len(known) == 1 else f"{mean} ± {statistics.stdev(known):.{digits}f}"
