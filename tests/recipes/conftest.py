"""What tests of several systems share; files beside the tests can be imported by all of them."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


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
