"""The comparison with mace-torch that stands in git covers what the golden values do not."""

import importlib.util
import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

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
    directions = ("ours in mace-torch", "mace-torch's in ours", "float32 used in float64")
    assert {(name, way) for name in tool.CASES for way in directions} <= found
    assert {(name, "ours as .model") for name in tool.EXPORTED} <= found


def test_a_checkpoint_in_float32_used_in_float64_gives_the_numbers_of_mace_torch(tool):
    """Repulsion, density normalisation, Agnesi's distances, two heads, three layers."""
    golden = json.loads(tool.GOLDEN_FILES.with_suffix(".json").read_text())
    state = load_file(f"{tool.GOLDEN_FILES}.safetensors")
    assert state["node_embedding.linear.weight"].dtype == tool.torch.float32
    model = tool.from_mace_torch(state, golden["config"]).double()
    config = model.config
    assert (config.num_heads, config.num_interactions) == (2, 3)
    assert (config.interaction, config.distance_transform) == ("density_residual", "agnesi")
    assert config.pair_repulsion
    found = tool.compare(tool.evaluate(model, tool.make_structures(weighted=True)), golden)
    for name, limit in tool.LIMITS.items():
        assert found[name] <= limit, name


def test_a_wrong_number_would_be_noticed(tool):
    model = tool.MACE(tool.config_of({}), tool.torch.float64)
    structures = tool.make_structures(weighted=True)
    right = tool.evaluate(model, structures)
    wrong = json.loads(json.dumps(right))
    wrong["structures"][1]["forces"][0][0] += 1e-6
    assert tool.compare(right, right)["forces"] == 0.0
    assert tool.compare(right, wrong)["forces"] > tool.LIMITS["forces"]
