"""`bevatron env` lists what the package needs."""

import re
import tomllib
from pathlib import Path

from bevatron.recipes.environment import OPTIONAL_PACKAGES, REQUIRED_PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def test_all_dependencies_are_listed():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.match(r"[\w.-]+", line)[0] for line in project["dependencies"]}
    assert needed == set(REQUIRED_PACKAGES)


def test_optional_packages_come_with_the_command_that_installs_them():
    for name, source in OPTIONAL_PACKAGES.items():
        assert source.startswith("pip install ") or name == "triton"
