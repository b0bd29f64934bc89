"""Options that scripts of several calls share: rows of each call in a folder, joined at the end."""

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from benchmarks.common.report import RESULTS


def script_parser(about: str | None) -> argparse.ArgumentParser:
    """Make the parser of a script, whose help shows the script's docstring line by line."""
    return argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)


def add_rows(parser: argparse.ArgumentParser, folder: str) -> None:
    """Add ``--out`` for the rows of a call, and what joins them: ``--collect`` and its options."""
    parser.add_argument("--out", type=Path, default=Path(folder), help="folder for the rows")
    parser.add_argument("--collect", type=Path, metavar="FOLDER", help="join the rows in it")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where --collect writes")
    parser.add_argument("--note", default="", help="more to say under a collected table")


def add_crops(parser: argparse.ArgumentParser) -> None:
    """Add what steps of AlphaFold3 over crops share: store, rows, copies, preset and device."""
    parser.add_argument("store", type=Path, nargs="?", help="of complexes; the largest is cropped")
    parser.add_argument("--rows", type=int, default=1024, help="of the alignment")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--preset", default="alphafold3")
    parser.add_argument("--device", default="cuda")


def add_after(parser: argparse.ArgumentParser) -> None:
    """Add ``--after``: a call gets ready beside others, then `wait_for` holds it back."""
    parser.add_argument("--after", type=Path, help="measure once this file exists")


def wait_for(file: Path | None) -> None:
    """Wait until a file exists; None = do not wait."""
    while file is not None and not file.exists():
        time.sleep(0.1)


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add ``--out`` for the result of a script that needs one call."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")


def add_set(parser: argparse.ArgumentParser) -> None:
    """Add ``--set`` for settings of a run, which `change` sets."""
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="of the recipe")


def change(values: dict[str, Any], settings: Sequence[str]) -> None:
    """Set values of a configuration, given as ``optim.lr=0.001``."""
    for setting in settings:
        key, _, value = setting.partition("=")
        place = values
        *groups, name = key.split(".")
        for group in groups:
            place = place.setdefault(group, {})
        place[name] = yaml.safe_load(value)


def read_all(folder: Path, pattern: str = "*.json") -> list[Any]:
    """Read every JSON file below a folder, sorted by path; exit if there is none."""
    found = [json.loads(path.read_text()) for path in sorted(folder.rglob(pattern))]
    if not found:
        raise SystemExit(f"{folder}: holds no {pattern}")
    return found


def read_rows(folder: Path) -> list[Any]:
    """Read the lists of rows of ``rows-*.json`` and join them."""
    return [row for rows in read_all(folder, "rows-*.json") for row in rows]
