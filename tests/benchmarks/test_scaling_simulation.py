"""What the simulation of many GPUs adds up."""

import argparse

import numpy as np
import pytest
from benchmarks.mace import scaling_simulation as simulation


def simulated(atoms, batching="fixed_count", **link):
    arguments = argparse.Namespace(
        **{"gradient_bytes": 0, "bandwidth": 1.0, "latency": 0.0, **link}
    )
    atoms = np.array(atoms)
    mix = simulation.Mix(atoms, 2 * atoms, np.zeros_like(atoms))
    time = simulation.StepTime(atoms=0.25, edges=0.375, graphs=0.0, constant=0.0)
    return simulation.simulate(mix, batching, 2, time, arguments)


def test_every_step_waits_for_the_slowest_rank():
    """A batch of seven small graphs beside one of seven large ones, a second an atom."""
    even = simulated([100] * 14)
    assert (even["steps"], even["seconds"]) == (1, 700.0)
    assert even["waiting for the slowest %"] == 0.0
    uneven = simulated([100] * 13 + [400])
    assert uneven["seconds"] == 1000.0
    assert uneven["waiting for the slowest %"] == 15.0


def test_gradients_are_summed_after_every_step():
    row = simulated([100] * 28, gradient_bytes=300, bandwidth=3.0, latency=25.0)
    assert row["seconds"] == 2 * (700.0 + 100.0 + 2 * 25.0)
    assert row["communication %"] == pytest.approx(100 * 150 / 850, abs=0.01)


def test_efficiency_is_relative_to_the_fewest_gpus():
    plain = {"batching": "balanced", "kernels": "fast"}
    rows = [
        {**plain, "GPUs": 2, "graphs": 10, "seconds": 8.0},
        {**plain, "GPUs": 4, "graphs": 20, "seconds": 10.0},
    ]
    simulation.with_efficiency(rows, weak=True)
    assert [row["efficiency %"] for row in rows] == [100.0, 80.0]
    simulation.with_efficiency(rows, weak=False)
    assert [row["efficiency %"] for row in rows] == [100.0, 40.0]
