"""The comparison with mace-torch that stands in git covers what the golden values do not."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("parity", ROOT / "tools" / "parity_mace.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def result():
    return json.loads((ROOT / "benchmarks" / "results" / "mace" / "parity.json").read_text())


def test_the_last_result_is_within_its_limits(result, tool):
    assert result["passed"]
    assert result["limits"] == tool.LIMITS
    for case in result["cases"]:
        for name, limit in tool.LIMITS.items():
            assert case["largest_differences"][name] <= limit, case


def test_the_last_result_has_every_case_both_ways(result, tool):
    found = {(case["case"], case["direction"]) for case in result["cases"]}
    directions = ("ours in mace-torch", "mace-torch's in ours")
    assert {(name, way) for name in tool.CASES for way in directions} <= found
    assert {(name, "ours as .model") for name in tool.EXPORTED} <= found


def test_a_wrong_number_would_be_noticed(tool):
    model = tool.MACE(tool.config_of({}), tool.torch.float64)
    structures = tool.make_structures(weighted=True)
    right = tool.evaluate(model, structures)
    wrong = json.loads(json.dumps(right))
    wrong["structures"][1]["forces"][0][0] += 1e-6
    assert tool.compare(right, right)["forces"] == 0.0
    assert tool.compare(right, wrong)["forces"] > tool.LIMITS["forces"]
