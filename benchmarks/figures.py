"""Writes the tables of figures in README.md and benchmarks/README.md from the JSON of the results.

    python -m benchmarks.figures            writes the tables
    python -m benchmarks.figures --check    exits with 1 where a page and the results differ

`figures/SECTION.yaml` declares the rows: which result, which of its rows, which column, unit and
digits. No number is typed. A page marks the place of a table with ``<!-- figures: NAME -->`` and
``<!-- end of figures -->``; NAME is a section, ``overview`` for the rows of all sections that have
this key, or ``behind`` for those where the peer is ahead.

A row::

    - what: Training step of {title}                # a row for each item of the lists under `each`
      each: {model: [paper, mp-0-medium], title: [the paper's MACE, MP-0-medium]}
      result: mace/train_step                       # what stands here holds for ours and the peer
      value: train ms
      where: {model: "{model}"}
      ours: {where: {what: "bevatron, triton, captured"}}
      peer: {where: {what: [A, B]}, named: what}    # the best of two, named by a column
      unit: ms
      better: lower                                 # without it there is no ratio
"""

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import yaml

from benchmarks.common.report import RESULTS
from bevatron.files import write_text_atomically

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
SECTIONS = {
    "mace": "MACE",
    "mace_accuracy": "MACE",
    "mace_scaling": "MACE",
    "gpspp": "GPS++",
    "graph": "Graph attention",
    "alphafold2": "AlphaFold2",
    "alphafold3": "AlphaFold3",
    "parallel": "Several GPUs per sample",
    "pair": "Pair operators",
    "data": "Data",
    "optimizer": "Optimiser",
}
"""The sections in order, and the name of each in a table of rows from several."""
TABLE = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", flags=re.DOTALL)
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")
EVEN = 0.995
"""The smallest ratio that is printed as 1.00."""
BEHIND = ", peer ahead**"
"""How a smaller ratio ends."""

Load = Callable[[str], Mapping[str, Any]]
"""Gives a result by its name."""


@dataclass(frozen=True)
class Measured:
    """A value of a result.

    Parameters
    ----------
    result : ``<area>/<name>`` below ``results``
    value : the column; dots descend into nested values
    where : what the other columns of the row hold; a list means any of its items
    among : the list of rows in the JSON; dots descend
    take : ``max`` or ``min``, where several rows match. Without it exactly one row must.
    """

    result: str
    value: str
    where: Mapping[str, Any]
    among: str = "rows"
    take: str | None = None

    def read(self, load: Load) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
        """Return the value, the row it is from and the whole result."""
        whole = load(self.result)
        found = [
            (value, row)
            for row in descend(whole, self.among)
            if all(_matches(row.get(key), wanted) for key, wanted in self.where.items())
            and (value := descend(row, self.value)) not in {None, ""}
        ]
        if not found or (len(found) > 1 and self.take is None):
            raise LookupError(
                f"{self.result}: {len(found)} rows have {self.where} and a {self.value}"
            )
        if self.take is not None:
            found.sort(key=lambda pair: number(pair[0]) or 0.0, reverse=self.take == "max")
        return *found[0], whole


@dataclass(frozen=True)
class Figure:
    """A row of a table.

    Parameters
    ----------
    what : what was measured
    ours, peer : the values, and ``name`` or, to read it from a column, ``named`` of the peer
    unit, scale, digits
        How values are printed: number times scale, significant digits. A value that is text
        stays.
    better : ``lower`` or ``higher``; without it there is no ratio
    overview : the system whose row in README.md it is
    """

    what: str
    ours: Measured
    peer: Measured | None = None
    name: str = ""
    named: str = ""
    names: Mapping[str, str] | None = None
    unit: str = ""
    scale: float = 1.0
    digits: int | None = None
    better: str | None = None
    overview: str = ""


def figures(folder: Path = ROOT / "benchmarks" / "figures") -> dict[str, list[Figure]]:
    """Read the declared rows of every section."""
    declared = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    order = sorted(declared, key=lambda name: [*SECTIONS, name].index(name))
    return {
        name: [figure(row) for given in declared[name] for row in expanded(given)] for name in order
    }


def expanded(declared: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Repeat a row for the values under ``each``, which stand in braces in its texts."""
    each = declared.get("each", {})
    plain = {key: value for key, value in declared.items() if key != "each"}
    for values in zip(*each.values(), strict=True) if each else [()]:
        yield _filled(plain, dict(zip(each, values, strict=True)))


def figure(declared: Mapping[str, Any]) -> Figure:
    """Make a row; ``result``, ``value``, ``where`` and so on hold for both values."""
    own = {f.name for f in fields(Figure)} - {"ours", "peer", "name", "named", "names"}
    common = {"result", "value", "among", "take"}
    if unknown := set(declared) - own - common - {"ours", "peer", "where"}:
        raise LookupError(f"{declared['what']}: unknown key {', '.join(sorted(unknown))}")
    shared = {key: declared[key] for key in common if key in declared}
    peer = dict(declared.get("peer", {}))
    best = {"lower": "min", "higher": "max"}
    shared_peer = shared | ({"take": best[declared["better"]]} if "named" in peer else {})
    more = {key: peer.pop(key) for key in ("name", "named", "names") if key in peer}

    def value(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> Measured:
        where = {**declared.get("where", {}), **given.get("where", {})}
        return Measured(**{**defaults, **given, "where": where})

    return Figure(
        **{key: given for key, given in declared.items() if key in own},
        **more,
        ours=value(declared["ours"], shared),
        peer=value(peer, shared_peer) if peer or more else None,
    )


def cells(row: Figure, load: Load) -> dict[str, str]:
    """Read the results and return the cells of a row."""
    ours, found, whole = row.ours.read(load)
    text = {"what": row.what, "ours": shown(ours, row), "best peer": "", "ratio": ""}
    pages = [row.ours.result]
    stamps = [stamp(whole, found)]
    if row.peer is not None:
        theirs, found, whole = row.peer.read(load)
        name = row.name or str(found[row.named])
        text["best peer"] = f"{shown(theirs, row)}, {(row.names or {}).get(name, name)}"
        text["ratio"] = ratio(number(ours), number(theirs), row.better)
        pages.append(row.peer.result)
        stamps.append(stamp(whole, found))
    text["page"] = ", ".join(dict.fromkeys(pages))
    text["measured"] = "; ".join(dict.fromkeys(stamps))
    return text


def ratio(ours: float | None, theirs: float | None, better: str | None) -> str:
    """How many times better ours is; below 1 the peer is ahead."""
    if better is None or not ours or not theirs:
        return ""
    times = theirs / ours if better == "lower" else ours / theirs
    text = f"{times:.0f}" if times >= 10 else f"{times:.2f}"
    return text if times >= EVEN else f"**{text}{BEHIND}"


def shown(value: Any, row: Figure) -> str:
    """Print a value with its unit; text that is more than a number, as ``82.8 ± 0.9``, as it is."""
    try:
        text = printed(float(value) * row.scale, row.digits)
    except ValueError:
        text = str(value)
    return f"{text} {row.unit}".strip()


def printed(value: float, digits: int | None) -> str:
    """Print a number: to significant digits, else to three but in full before the point."""
    if value == 0.0:
        return "0"
    if digits is None and value.is_integer():
        return f"{value:,.0f}"
    if abs(value) < 1e-3:
        return f"{value:.{(digits or 3) - 1}e}"
    decimals = (digits or 3) - 1 - math.floor(math.log10(abs(value)))
    if digits is None:
        decimals = max(decimals, 0)
    return f"{round(value, decimals):,.{max(decimals, 0)}f}"


def number(value: Any) -> float | None:
    """Return the number that a value is or begins with."""
    if isinstance(value, int | float):
        return float(value)
    found = NUMBER.match(str(value))
    return float(found[0]) if found else None


def stamp(result: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Date and hardware of a result; of a row measured on another day or elsewhere, its own."""
    machine = str(row.get("on", result.get("hardware", "")))
    machine = re.sub(r"-\d+gb-hbm\w+", "", machine)
    machine = re.sub(r"^nvidia-(\w+)$", lambda m: m[1].upper(), machine)
    machine = re.sub(r"^nvidia-(\w+)-x(\d+)$", lambda m: f"{m[2]} x {m[1].upper()}", machine)
    machine = re.sub(r"^cpu-(\d+)core$", r"\1 CPU cores", machine)
    return ", ".join(filter(None, (row.get("date", result["date"]), machine)))


def table(rows: list[dict[str, str]]) -> str:
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)])


def linked(row: dict[str, str], page: Path) -> dict[str, str]:
    """Make links of the names of a row's results, seen from a page."""
    folder = Path("results") if page.parent.name == "benchmarks" else Path("benchmarks/results")
    links = [
        f"[{name.removeprefix('history/')}]({folder / name}.md)" for name in row["page"].split(", ")
    ]
    return row | {"page": ", ".join(links)}


def overview(row: dict[str, str], system: str) -> dict[str, str]:
    """Shorten a row for README.md: the system's name is the link, nothing says when and where."""
    short = {"system": f"[{system}]({row['page'].partition('](')[2]}"}
    return short | {key: row[key] for key in ("what", "ours", "best peer", "ratio")}


def written(
    text: str,
    page: Path,
    sections: Mapping[str, list[Figure]] | None = None,
    results: Path = RESULTS,
) -> str:
    """Return a page's text with its tables made anew."""
    sections = figures() if sections is None else sections

    @functools.cache
    def load(name: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = json.loads((results / f"{name}.json").read_text())
        return found

    def fill(found: re.Match[str]) -> str:
        name = found[2]
        every = name in {"overview", "behind"}
        chosen = sections if every else {name: sections[name]}
        rows = [
            (row, linked(cells(row, load), page), SECTIONS.get(section, section))
            for section, rows in chosen.items()
            for row in rows
        ]
        if name == "overview":
            shown = [overview(text, row.overview) for row, text, _ in rows if row.overview]
        elif name == "behind":
            shown = [
                {"section": section, **text}
                for _, text, section in rows
                if text["ratio"].endswith(BEHIND)
            ]
        else:
            shown = [text for _, text, _ in rows]
        return f"{found[1]}{table(shown)}\n{found[3]}"

    return TABLE.sub(fill, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    sections, stale = figures(), 0
    for page in PAGES:
        text = page.read_text()
        new = written(text, page, sections)
        if new == text:
            continue
        stale += 1
        if not check:
            write_text_atomically(page, new)
        print(f"{page.relative_to(ROOT)}: {'differs from the results' if check else 'written'}")
    sys.exit(1 if stale and check else 0)


def descend(value: Any, path: str) -> Any:
    """Follow a key, or keys joined by dots, into nested mappings."""
    if isinstance(value, Mapping) and path in value:
        return value[path]
    head, dot, rest = path.partition(".")
    return descend(value[head], rest) if dot and isinstance(value, Mapping) else None


def _matches(value: Any, wanted: Any) -> bool:
    return str(value) in [str(one) for one in (wanted if isinstance(wanted, list) else [wanted])]


def _filled(value: Any, names: Mapping[str, Any]) -> Any:
    if isinstance(value, Mapping):
        return {_filled(key, names): _filled(one, names) for key, one in value.items()}
    if isinstance(value, list):
        return [_filled(one, names) for one in value]
    if isinstance(value, str):
        for name, one in names.items():
            if value == f"{{{name}}}":  # a number stays one
                return one
            value = value.replace(f"{{{name}}}", str(one))
    return value


if __name__ == "__main__":
    main()
