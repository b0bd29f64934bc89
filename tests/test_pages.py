"""What pages refer to is there: files, headings of other pages, results, pictures."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "docs/*.md", "examples/*.md", "src/**/*.md", "benchmarks/results/*.md")
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
        assert list(ROOT.glob(mention)), mention


def test_results_are_pages_beside_their_numbers():
    pages = {path.stem for path in RESULTS.glob("*.md")}
    numbers = {path.stem for path in RESULTS.glob("*.json")}
    assert pages == numbers
    for path in RESULTS.glob("*.json"):
        json.loads(path.read_text())
    for picture in RESULTS.glob("*.png"):
        own = max((page for page in pages if picture.name.startswith(page)), key=len)
        assert f"]({picture.name})" in (RESULTS / f"{own}.md").read_text()
    for page in pages:
        assert re.search(r"_20\d\d-\d\d-\d\d$", page), page
