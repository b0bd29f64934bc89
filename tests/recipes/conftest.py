"""What tests of several systems share; files beside the tests can be imported by all of them."""

import sys
from pathlib import Path

import pytest

from bevatron.data.proteins import conformers

sys.path.insert(0, str(Path(__file__).parent))
POSES = {}
"""Of components by their keys and numbers of poses, on which alone they depend."""


@pytest.fixture(scope="module", autouse=True)
def _poses_are_made_once():
    embed = conformers._embed

    def embedded(molecule, number, key):
        if (key, number) not in POSES:
            POSES[key, number] = embed(molecule, number, key)
        return POSES[key, number]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conformers, "_embed", embedded)
        yield


@pytest.fixture
def counted_calls():
    """Count how often the modules of each stage of a progress are called while a model runs."""

    def count(stages):
        calls = dict.fromkeys(stages, 0)
        for what, (modules, _) in stages.items():
            for module in modules:
                module.register_forward_pre_hook(lambda *_, what=what: add(calls, what))
        return calls

    def add(calls, what):
        calls[what] += 1

    return count
