"""What is built: an sdist whose tests run, a typed wheel, a page whose links lead somewhere."""

import re
from pathlib import Path

import pytest

pytest.importorskip("hatchling", reason="what is packed is asked of the build backend, hatchling")
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder

ROOT = Path(__file__).resolve().parents[1]


def packed(builder):
    """Names of the files that a builder packs."""
    return {file.distribution_path for file in builder(str(ROOT)).recurse_included_files()}


def kept(folder, pattern="*"):
    """Files of the checkout that are no caches."""
    found = (ROOT / folder).rglob(pattern)
    files = (path.relative_to(ROOT) for path in found if path.is_file())
    return {path.as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.mark.parametrize(
    "folder", ["src", "tests", "benchmarks", "docs", "examples", "tools"], ids=str
)
def test_an_sdist_holds_what_its_tests_read(folder):
    assert kept(folder) <= packed(SdistBuilder)


def test_an_sdist_holds_files_of_the_first_folder_that_tests_read():
    named = {"Makefile", "README.md", "CONTRIBUTING.md", "CITATION.cff", "constraints.txt"}
    assert named <= packed(SdistBuilder)


def test_a_wheel_holds_the_package_alone_and_says_that_it_is_typed():
    names = packed(WheelBuilder)
    assert "bevatron/py.typed" in names
    assert {f"src/{name}" for name in names} == kept("src")


def test_the_page_of_the_package_has_no_relative_link_and_all_the_text():
    metadata = WheelBuilder(str(ROOT)).metadata.core
    assert metadata.readme_content_type == "text/markdown"
    readme = (ROOT / "README.md").read_text()
    for link in re.findall(r"\]\(([^)\s]+)\)", metadata.readme):
        assert "://" in link
    for heading in re.findall(r"^#+ .*$", readme, flags=re.MULTILINE):
        assert heading in metadata.readme
    assert "All figures, peers' wins first." in metadata.readme
