"""What pages refer to is there: files, headings of other pages, results, pictures."""

import functools
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from benchmarks.common.report import AREAS, PICTURE, page_of, write_result

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "examples/*.md", "src/**/*.md", "benchmarks/**/*.md")
    for path in ROOT.glob(pattern)
)
MENTION = re.compile(
    r"(?<![\w/.])(?:benchmarks|docs|examples|src|tests|tools)/[\w./*-]*(?:\.\w+|\*)", flags=re.ASCII
)
"""A file of the repository named in text or code, perhaps with a wildcard."""


def anchors(page: Path) -> set[str]:
    """The headings of a page as its links have them."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_there_are_pages():
    assert {"README.md", "docs/mace.md", "src/bevatron/kernels/graph/csr/README.md"} <= set(PAGES)


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_are_there(page):
    for mention in MENTION.findall((ROOT / page).read_text()):
        # CONTRIBUTING names files of an operator or system NAME of a FAMILY.
        assert list(ROOT.glob(re.sub(r"FAMILY|NAME\*?", "*", mention))), mention


@pytest.mark.parametrize("page", [page for page in PAGES if "/results/" not in page])
def test_dated_results_are_named_by_their_path_in_the_history(page):
    text = (ROOT / page).read_text()
    for name in re.findall(r"[\w./-]*_20\d\d-\d\d-\d\d(?:\.\w+)+", text):
        assert "results/history/" in name, name


def test_results_are_pages_next_to_their_numbers():
    """And show them; the newest of each have names without date and hardware, older ones both."""
    files = [path for path in RESULTS.rglob("*") if path.is_file()]
    pages = {path.with_suffix("") for path in files if path.suffix == ".md"}
    numbers = {path.with_suffix("") for path in files if path.suffix == ".json"}
    assert pages == numbers
    shown = set()
    for stem in pages:
        area = stem.parent.relative_to(RESULTS)
        result = json.loads(Path(f"{stem}.json").read_text())
        stamp = "_".join(filter(None, (result.get("hardware"), result["date"])))
        if area.parts[0] == "history":
            assert stem.name.endswith(f"_{stamp}"), stem
        else:
            assert not re.search(r"_20\d\d-\d\d-\d\d|_nvidia|_cpu-", stem.name), stem
        assert area.name in AREAS
        text = Path(f"{stem}.md").read_text()
        assert "rows" not in result or text.startswith(page_of(result)), stem
        shown |= {stem.parent / picture for picture in PICTURE.findall(text)}
    assert shown == {path for path in files if path.suffix == ".png"}
    assert all(path.suffix in {".md", ".json", ".png"} for path in files)


def test_a_new_result_replaces_one_of_its_day_and_moves_others_to_the_history(tmp_path):
    machine = {"hardware": "cpu-2core", "versions": {"python": "3.11"}}
    write = functools.partial(write_result, "mace/step", folder=tmp_path)
    path = write([{"ms": 1.0}], measured_on={**machine, "hardware": "nvidia-h200-x4"})
    (tmp_path / "mace" / "step_weak.png").write_text("a picture")
    page = path.with_suffix(".md")
    page.write_text(f"{page.read_text()}\n![weak](step_weak.png)\n")
    date = json.loads(path.read_text())["date"]
    for value in (2.0, 3.0):
        assert write([{"ms": value}], measured_on=machine) == path
    assert json.loads(path.read_text())["rows"] == [{"ms": 3.0}]
    history = tmp_path / "history" / "mace"
    stem = f"step_nvidia-h200-x4_{date}"
    names = {f"{stem}.json", f"{stem}.md", f"{stem}_weak.png"}
    assert {found.name for found in history.iterdir()} == names
    assert f"]({stem}_weak.png)" in (history / f"{stem}.md").read_text()
    assert {found.name for found in path.parent.iterdir()} == {"step.json", "step.md"}


@pytest.mark.parametrize("name", ["step", "elsewhere/step", "mace/a/b", "mace/../step"])
def test_a_result_outside_the_areas_is_refused(name, tmp_path):
    with pytest.raises(ValueError, match="AREA/NAME"):
        write_result(name, [], folder=tmp_path)
    assert not list(tmp_path.iterdir())
