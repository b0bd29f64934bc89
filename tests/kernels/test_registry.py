"""Which implementation runs, why, and how it is chosen."""

import logging
import os
import subprocess
import sys

import pytest
import torch

from bevatron import kernels
from bevatron.config import from_dict, to_dict
from bevatron.errors import ConfigError, KernelError
from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.launch import planned_for_gpu

X = torch.ones(2)


def fast(*arguments):
    return "fast"


def plain(*arguments):
    return "plain"


@pytest.fixture
def operator():
    """An operator with a fast implementation that runs in float32 only."""
    registry.register("test_op", "reference", f"{__name__}:plain")
    registry.register(
        "test_op",
        "triton",
        "a_module_that_does_not_exist:fast",
        lambda device, dtype: None if dtype == torch.float32 else f"{dtype} is not supported",
    )
    with kernels.use("auto"):
        yield "test_op"
    for table in (registry._operators, registry._launches):
        for key in [key for key in table if key == "test_op" or "test_op" in key]:
            del table[key]
    registry._logged.discard("test_op")


@pytest.fixture(autouse=True)
def _restored():
    before = kernels.current()
    yield
    kernels.use(before)
    kernels.reset_launches()


def test_use_is_a_setting_and_a_context():
    kernels.use("reference")
    assert kernels.current().choice("scatter_sum") == "reference"
    with kernels.use("auto", scatter_sum="reference"):
        assert kernels.current().choice("scatter_sum") == "reference"
        assert kernels.current().choice("symmetric_contraction") == "auto"
        with kernels.use(symmetric_contraction="triton"):
            assert kernels.current().choice("scatter_sum") == "reference"
            assert kernels.current().choice("symmetric_contraction") == "triton"
        with kernels.use("triton"):
            assert kernels.current().choice("scatter_sum") == "triton"
    assert kernels.current() == kernels.KernelConfig("reference")


def test_the_context_restores_after_an_error():
    with pytest.raises(RuntimeError), kernels.use("triton"):
        raise RuntimeError
    assert kernels.current().default == "auto"


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="'default' is 'cuda', expected one of auto"):
        kernels.use("cuda")
    with pytest.raises(ConfigError, match=r"no operator 'scater_sum' \(known: .*scatter_sum"):
        kernels.use(scater_sum="auto")
    with pytest.raises(ConfigError, match="'scatter_sum' is 'fast'"):
        kernels.use(scatter_sum="fast")


def test_a_configuration_is_read_written_and_used():
    config = from_dict(kernels.KernelConfig, {"ops": {"scatter_sum": "reference"}})
    assert to_dict(config) == {"default": "auto", "ops": {"scatter_sum": "reference"}}
    with kernels.use(config):
        assert kernels.current() == config


def test_requested_triton_that_cannot_run_is_an_error_with_the_reason(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with (
        kernels.use("triton"),
        pytest.raises(KernelError, match="scatter_sum: 'triton' was requested and cannot run"),
    ):
        kernels.scatter_sum(X, torch.tensor([0, 0]), 1)


def test_obstacles_are_named_in_turn(operator, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: None)
    assert "'triton' is not installed" in kernels.implementations()[operator]["triton"]
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    assert "TRITON_INTERPRET=1" in kernels.implementations()[operator]["triton"]
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert "TRITON_INTERPRET=1" in kernels.implementations()[operator]["triton"]
    assert "does not run" in kernels.implementations("mps")[operator]["triton"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert kernels.implementations()[operator]["triton"] is None
    doubles = kernels.implementations("cuda", torch.float64)
    assert doubles[operator]["triton"] == "torch.float64 is not supported"
    assert doubles[operator]["reference"] is None


FLOATS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


@pytest.mark.parametrize(
    ("obstacle", "device", "taken"),
    [
        (support.up_to_float32, "cuda", FLOATS - {torch.float64}),
        (support.float32_or_float64, "cuda", {torch.float32, torch.float64}),
        (support.no_float64_on_gpu, "cuda", FLOATS - {torch.float64}),
        (support.no_float64_on_gpu, "cpu", FLOATS),
    ],
)
def test_a_kernel_takes_these_types_and_no_others(obstacle, device, taken):
    assert {dtype for dtype in FLOATS if obstacle(torch.device(device), dtype) is None} == taken


def test_what_only_some_devices_have_is_named(operator, monkeypatch):
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    registry.register(
        *(operator, "triton", "absent:fast", None),
        lambda device, dtype: "with TMA" if device.type == "cuda" else None,
    )
    assert kernels.explain(operator, "cuda") == "test_op: triton (auto; with TMA)"
    with kernels.use("triton"):
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert kernels.explain(operator, "cpu") == "test_op: triton (requested)"


def test_integers_are_refused(operator):
    with pytest.raises(KernelError, match="test_op: the tensors are int64, expected floating"):
        registry.dispatch(operator, torch.ones(2, dtype=int))


def test_a_decision_is_made_anew_for_other_tensors_and_circumstances(operator, monkeypatch):
    def in_float32(device, dtype):
        return None if dtype == torch.float32 else "not in float32"

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    with kernels.use("triton"):
        registry.register(operator, "triton", f"{__name__}:fast", in_float32)
        assert registry.dispatch(operator, X)() == "fast"
        with planned_for_gpu():
            assert registry.dispatch(operator, X)() == "fast"
        for other in (X.double(), X.to("meta")):
            with pytest.raises(KernelError, match="cannot run"):
                registry.dispatch(operator, other)
        registry.register(operator, "triton", f"{__name__}:plain", in_float32)
        assert registry.dispatch(operator, X)() == "plain"
        monkeypatch.delenv("TRITON_INTERPRET")
        with pytest.raises(KernelError, match="cannot run"):
            registry.dispatch(operator, X)


def test_auto_takes_triton_on_a_gpu_and_the_reference_elsewhere(operator, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    assert kernels.explain(operator, "cuda") == "test_op: triton (auto)"
    assert "reference (auto; not triton: interpreted" in kernels.explain(operator, "cpu")
    in_float64 = kernels.explain(operator, "cuda", torch.float64)
    assert in_float64 == "test_op: reference (auto; not triton: torch.float64 is not supported)"
    with kernels.use("triton"):
        assert kernels.explain(operator, "cpu") == "test_op: triton (requested)"
        assert "cannot run" in kernels.explain(operator, "cuda", torch.float64)


def test_an_implementation_is_imported_only_when_it_runs(operator, monkeypatch):
    assert registry.dispatch(operator, X)() == "plain"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(registry.importlib.util, "find_spec", lambda name: object())
    with kernels.use("triton"), pytest.raises(ModuleNotFoundError, match="a_module_that"):
        registry.dispatch(operator, X)


COMPILED = """
import torch
from bevatron import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
csr = kernels.Csr.from_coo(*torch.tensor([[0, 0, 2], [0, 1, 1]], device=DEVICE), (3, 3))
x, score = torch.randn(3, 2, 8, device=DEVICE), torch.randn(3, 2, device=DEVICE)
pair = torch.randn(1, 2, 1, 16, 8, device=DEVICE)


def run():
    near = kernels.graph_attention(csr, x, score, score) + kernels.spmm(csr, x)
    return near, kernels.pair_attention(pair, pair, pair)


compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
for found, expected in zip(compiled(), run(), strict=True):
    assert torch.equal(found, expected)
"""


@pytest.mark.parametrize("choice", ["reference", "triton"])
def test_operators_that_never_ran_are_compiled_whole(choice):
    if choice == "triton":
        pytest.importorskip("triton")
    run = subprocess.run(
        [sys.executable, "-c", COMPILED],
        env={**os.environ, "BEVATRON_KERNELS": choice},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr


def test_calls_are_counted_by_operator_and_implementation():
    kernels.reset_launches()
    for _ in range(3):
        kernels.scatter_sum(X, torch.tensor([0, 0]), 1)
    assert kernels.launches() == {("scatter_sum", "reference"): 3}
    kernels.reset_launches()
    assert kernels.launches() == {}


def test_auto_logs_its_choice_once(operator, caplog):
    with caplog.at_level(logging.INFO, "bevatron.kernels"):
        registry.dispatch(operator, X)
        registry.dispatch(operator, X)
    assert [record.message for record in caplog.records if "test_op" in record.message] == [
        kernels.explain(operator, "cpu")
    ]


def test_the_environment_variable_is_read_at_the_start():
    code = (
        "from bevatron import kernels; c = kernels.current();"
        "print(c.default, c.choice('scatter_sum'), c.choice('symmetric_contraction'))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={
            "BEVATRON_KERNELS": "triton, scatter_sum=reference",
            "PATH": "",
            "PYTHONPATH": os.environ["PYTHONPATH"],
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == ["triton", "reference", "triton"]


@pytest.mark.parametrize("text", ["fast", "auto,nothing=reference", "scatter_sum="])
def test_a_wrong_environment_variable_is_named(text):
    with pytest.raises(ConfigError, match="environment variable BEVATRON_KERNELS="):
        registry._parse(text)


class OutOfResources(Exception):
    """Named as Triton's."""

    required, limit, name = 131072, 101376, "shared memory"


def test_a_kernel_too_large_for_a_gpu_is_reported_in_one_sentence():
    error = RuntimeError("in a captured step")
    error.__cause__ = OutOfResources()
    said = registry.too_large_for_this_gpu(error)
    assert said.startswith("a kernel needs more shared memory than this GPU has (131072, it has 1")
    assert registry.ENVIRONMENT_VARIABLE in said
    assert registry.too_large_for_this_gpu(RuntimeError("other")) is None
