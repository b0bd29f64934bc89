"""Print the tests of what changed since the branch left ``main``, for ``make check``.

    python tools/changed_tests.py [BASE]

A test belongs to a changed file if it is that file, mirrors its path, or names its module.
Uncommitted and untracked files count. Doctests of changed modules come along.
"""

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = {"__init__", "reference", "triton"}
"""Modules that are named by their folder."""


def git(*arguments: str) -> list[str]:
    """Return the lines that git prints; none where it fails."""
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.splitlines() if done.returncode == 0 else []


def changed_files(base: str) -> list[Path]:
    """Return what differs from the commit where this branch left ``base``, relative to the root."""
    left = git("merge-base", "HEAD", base) or ["HEAD"]
    names = git("diff", "--name-only", left[0]) + git("ls-files", "-o", "--exclude-standard")
    return sorted({Path(name) for name in names if (ROOT / name).is_file()})


def matching_tests(changed: Iterable[Path], sources: dict[Path, str]) -> list[Path]:
    """Return the tests, among ``sources`` (path to text), that belong to some changed files."""
    found: set[Path] = set()
    for path in changed:
        if path in sources:
            found.add(path)
        elif path.suffix == ".md":
            found |= {test for test in sources if re.search(r"docs|pages", test.stem)}
        elif path.suffix == ".py" and path.name != "conftest.py":
            found |= {test for test, text in sources.items() if belongs(test, text, path)}
        if path.parts[0] == "src" and path.suffix == ".py" and "triton" not in path.stem:
            found.add(path)
    return sorted(found)


def belongs(test: Path, text: str, changed: Path) -> bool:
    """Whether a test mirrors the path of a changed file or names its module."""
    names = [part for part in changed.with_suffix("").parts if part not in {"src", "bevatron"}]
    while len(names) > 1 and (names[-1] in PARTS or names[-1].startswith("triton_")):
        names.pop()
    elsewhere = set(test.parts[1:-1]) - set(names)
    mirrored = "|".join(names[1:] or names)
    if not elsewhere and re.fullmatch(rf"test_({mirrored})(_\w+)?", test.stem):
        return True
    if changed.parts[0] != "src":
        return re.search(rf"\b{names[-1]}\b", text) is not None
    parent, _, last = ".".join(["bevatron", *names]).rpartition(".")
    plain = rf"{re.escape(parent)}\.{last}\b"
    return re.search(rf"{plain}|from {re.escape(parent)} import [^\n]*\b{last}\b", text) is not None


def main() -> None:
    """Print the paths, one on each line."""
    tests = (ROOT / "tests").rglob("test_*.py")
    sources = {path.relative_to(ROOT): path.read_text() for path in tests}
    base = sys.argv[1] if len(sys.argv) > 1 else "main"
    print("\n".join(map(str, matching_tests(changed_files(base), sources))))


if __name__ == "__main__":
    main()
