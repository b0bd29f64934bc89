"""Options that scripts of several calls share: rows of each call in a folder, joined at the end."""

import argparse
import json
from pathlib import Path
from typing import Any

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


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add ``--out`` for the result of a script that needs one call."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")


def read_all(folder: Path, pattern: str = "*.json") -> list[Any]:
    """Read every JSON file below a folder, sorted by path; exit if there is none."""
    found = [json.loads(path.read_text()) for path in sorted(folder.rglob(pattern))]
    if not found:
        raise SystemExit(f"{folder}: holds no {pattern}")
    return found


def read_rows(folder: Path, pattern: str = "*.json") -> list[Any]:
    """Read lists of rows and join them."""
    return [row for rows in read_all(folder, pattern) for row in rows]
