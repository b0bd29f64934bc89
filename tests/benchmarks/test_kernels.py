"""The cases of the kernels' benchmark, small and interpreted: checked as there before timing."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

ATOMS, EDGES, STRUCTURES = 24, 130, 3


@pytest.fixture
def timing(monkeypatch):
    from benchmarks.kernels import run as kernels

    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name, value in {"ATOMS": ATOMS, "EDGES": EDGES, "CELL": 8, "DEVICE": device}.items():
        monkeypatch.setattr(kernels, name, value)
    return kernels


@pytest.mark.parametrize("op", ["radial_network", "edge_vectors", "scatter_sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_cases_pass_their_check_and_every_pass_runs(timing, op, dtype):
    for case in timing.CASES[op](dtype):
        timing.check(case)
        with timing.kernels.use("triton"):
            result, first, second = (timing.work(case, which)() for which in timing.PASSES)
        assert result.dtype == dtype
        assert [g.shape for g in first] == [value.shape for value in case.inputs.values()]
        assert len(second) == 1 + len(case.inputs)
        assert second[0].shape == result.shape
        moved = [case.bytes[which] for which in timing.PASSES]
        assert moved == sorted(set(moved))


def test_a_kernel_that_is_wrong_is_not_timed(timing):
    (case,) = timing.CASES["edge_vectors"](torch.float32)

    def wrong(positions):
        return case.call(positions) * (1.0 if positions.dtype == torch.float64 else 1.0001)

    with pytest.raises(AssertionError, match="result: error"):
        timing.check(replace(case, call=wrong))


def test_training_takes_first_derivatives_as_forces_are_taken(timing, monkeypatch):
    """Else the derivatives of the weights' gradients were timed, which no step needs."""
    from bevatron.kernels.equivariant.radial_network import triton as module

    (case,) = timing.CASES["radial_network"](torch.float32)
    monkeypatch.setattr(module, "plain", lambda *_: pytest.fail("differentiated once more"))
    with timing.kernels.use("triton"):
        timing.work(case, "training")()


def test_bytes_are_those_of_the_operators_pages(timing):
    (vectors,) = timing.CASES["edge_vectors"](torch.float32)
    forward = 40 * EDGES + 20 * ATOMS + 36 * STRUCTURES
    sums, again = 20 * EDGES + 28 * ATOMS, 28 * EDGES + 12 * ATOMS
    assert [vectors.bytes[which] for which in timing.PASSES] == [
        forward,
        forward + sums,
        forward + sums + again,
    ]
    energies = timing.CASES["scatter_sum"](torch.float64)[0]
    assert energies.bytes["forward"] == 8 * ATOMS + 8 * STRUCTURES + 8 * (STRUCTURES + 1)
