"""Benchmarks of several GPUs a sample: what they add up, and blocks at the shapes of shards."""

import argparse
import json
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from benchmarks.common.arms import Arm
from benchmarks.parallel import axial_step, links, memory, shards, simulation, traffic
from benchmarks.parallel.traffic import Collective

from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.parallel.groups import Group
from bevatron.parallel.mesh import Mesh

ROW = {"system": "alphafold2", "N": 256, "passes": 1, "policy": "none"}
ONE = {**ROW, "GPUs": 1, "GPUs a sample": 1, "loss": 2.0, "gradient norm": 4.0, "s/step": 8.0}
TWO = {**ROW, "GPUs": 2, "GPUs a sample": 2, "loss": 2.5, "gradient norm": 5.0, "s/step": 5.0}


def test_rows_are_set_beside_one_gpu_by_samples_a_second():
    apart = {**ONE, "GPUs": 2, "s/step": 10.0}
    found = axial_step.compared([TWO, apart, ONE])
    assert [row.get("x one GPU") for row in found] == [1.0, 1.6, 1.6]
    assert (found[1]["loss off by"], found[1]["gradient off by"]) == (0.25, 0.25)
    assert "loss off by" not in found[2]


def test_several_gpus_are_set_beside_the_fastest_policy_of_one():
    slower = {**ONE, "policy": "all", "s/step": 10.0}
    failed = {**ONE, "policy": "pair", "s/step": axial_step.OUT_OF_MEMORY}
    again = {**TWO, "policy": "all", "s/step": 4.0}
    found = axial_step.compared([again, slower, ONE, failed])
    assert [row.get("x one GPU") for row in found] == [0.8, 2.0, 1.0, None]


def test_rows_are_set_beside_one_gpu_of_their_own_arm():
    eager = [{**row, "arm": "eager", "s/step": 10 * row["s/step"]} for row in (ONE, TWO)]
    ours = [{**row, "arm": "bevatron"} for row in (ONE, TWO)]
    found = axial_step.compared([*eager, *ours])
    assert sorted(row["x one GPU"] for row in found) == [1.0, 1.0, 1.6, 1.6]


def test_plain_pytorch_is_measured_launched_by_the_reference_operators():
    given = argparse.Namespace(
        system="alphafold2", crop=256, policies=["all"], sharing=["apart"], passes=[1], steps=3,
        launched=2, workers=1, arm="bevatron",
    )  # fmt: skip
    ours = [(arm.kernels, arm.captured) for _, arm in axial_step.Measurement(given, Mesh()).cases()]
    assert ours == [("auto", True), ("auto", False)]
    given.arm = "eager"
    ((case, eager),) = axial_step.Measurement(given, Mesh()).cases()
    assert (case["arm"], eager.kernels, eager.captured) == ("eager", "reference", False)


def test_rows_are_set_beside_one_gpu_of_their_own_call(tmp_path):
    for call, of_one in (("first", 10.0), ("second", 8.0)):
        for row in (TWO, {**ONE, "s/step": of_one}):
            path = tmp_path / call / f"step-{row['GPUs']}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps({"row": row}))
    rows = [one["row"] for one in axial_step.read_calls(tmp_path)]
    found = [(row["call"], row["x one GPU"]) for row in axial_step.compared(rows)]
    assert sorted(found) == [("first", 1.0), ("first", 2.0), ("second", 1.0), ("second", 1.6)]


def test_launched_steps_are_timed_without_the_start_of_their_loader(monkeypatch):
    first = SimpleNamespace(loss=2.0, grad_norm=4.0)
    training = SimpleNamespace(
        steps=lambda numbers: SimpleNamespace(
            results=[first],
            seconds=[9.0 if number < axial_step.LEAD else 1.0 for number in numbers],
        ),
        release=lambda: None,
    )
    monkeypatch.setattr(axial_step.Measurement, "training", lambda *_: training)
    measurement = axial_step.Measurement(argparse.Namespace(steps=3, launched=2), Mesh())
    row, _ = measurement.row({**ROW, "passes": 1.0}, Arm("bevatron", captured=False))
    assert (row["s/step"], row["steps"], row["graphs"]) == (1.0, 2, "off")
    assert (row["exchanges"], row["NCCL"]) == ("", "")


@pytest.mark.parametrize(("device", "name"), [("cpu", "gloo"), ("cuda", "NCCL")])
def test_rows_name_what_carried_the_exchanges(device, name):
    assert links.carrier(Group([0, 1], 1), torch.device(device)) == name


def test_what_was_planned_stands_beside_what_was_sent():
    plan = {**ROW, "GPUs a sample": 2, "planned MiB": 3.0}
    assert axial_step.planned(TWO, [plan])["planned MiB"] == 3.0
    assert "planned MiB" not in axial_step.planned(ONE, [plan])


def test_rows_name_what_nccl_is_told(monkeypatch):
    for name in [name for name in os.environ if name.startswith("NCCL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    assert links.nccl_settings() == "default"
    monkeypatch.setenv("NCCL_MIN_P2P_NCHANNELS", "32")
    assert links.nccl_settings() == "MIN_P2P_NCHANNELS=32"


def test_a_simulated_sample_takes_what_is_divided_and_what_is_not():
    """A message takes 1, 0.5 in a trace and half of that hidden; k is 1, 0.5, 0.25: s is 1, p 7."""
    blocks = {"a": 2, "b": 1}
    ring = [Collective("ring", 4, 4, 1)]
    system = simulation.System(ROW, blocks, ring, 0, passes=1.0, samples=16)
    two = {**TWO, "s/step": 5.0, "sending ms": 1000.0, "hidden %": 50.0, "call": "second"}
    slower, other = {**two, "s/step": 6.0}, {**two, "N": ROW["N"] + 1, "s/step": 1.0}
    failed = {**two, "s/step": axial_step.OUT_OF_MEMORY}
    one, recomputed = {**ONE, "call": "second"}, {**ONE, "call": "second", "s/step": 9.0}
    others = {**ONE, "call": "first", "s/step": 7.0}
    steps = [other, others, one, recomputed, slower, two, failed]
    measured = simulation.fastest(system, steps)
    times = {"a, N 4": (3.0, 1.0, 0.5, 0.25), "b": (2.0, 2.0, 1.0, 0.5), "c": (9.0, 9.0, 9.0, 9.0)}
    shards = [
        {"block": name, "GPUs": size, "ms": ms}
        for name, each in times.items()
        for size, ms in zip((1, 2, 4, 8), each, strict=True)
    ]
    share = simulation.share_of_kernels(system, shards)
    assert share == {1: 1.0, 2: 0.5, 4: 0.25, 8: 0.125}
    rows = simulation.simulated(system, measured, share, lambda *_: 1.0, 1.0)
    found = {row["GPUs"]: row for row in rows}
    assert found[2]["s a sample"] == 5.0
    assert found[4]["s a sample"] == 1 + 7 / 4 + (1 + 1) * 0.25
    assert [found[size]["limit s"] for size in (1, 2, 4)] == [8.0, 1 + 7 / 2, 1 + 7 / 4]
    assert [found[size]["measured s"] for size in (1, 2, 4)] == [8.0, 5.0, ""]
    again = simulation.simulated(replace(system, passes=3.0), measured, share, lambda *_: 1.0, 1.0)
    assert again[1]["exchanges ms"] == 2 * rows[1]["exchanges ms"] == 2000.0
    assert found[64]["GPUs a sample"] == 4
    assert found[64]["s/step"] == found[4]["s/step"]


def test_a_link_takes_its_least_time_and_its_bytes_at_the_rate_of_large_ones():
    row = {"exchange": "pass_on"}
    points = ((0.25, 10.0), (16, 100.0), (64, 292.0))
    sends = simulation.links([{**row, "sent MiB": m, "replayed us": t} for m, t in points])
    assert sends("ring", 0.0) == pytest.approx(10e-6)
    assert sends("ring", 2**20) == pytest.approx(14e-6)


def test_lengths_of_equal_memory_follow_from_the_bytes_a_pair(tmp_path):
    rows = [{"GPUs a sample": size, "N": 64, "B a pair": need} for size, need in ((1, 9), (2, 4))]
    given = argparse.Namespace(
        planned=1.0, preset="small", rows=2, copies=3, policy="all", sizes=[1, 2], out=tmp_path
    )
    memory.publish(rows, {1: 64, 2: 96}, given)
    result = json.loads((tmp_path / "parallel" / "memory.json").read_text())
    assert "64 tokens on 1, 96 tokens on 2. By" in result["notes"]
    assert "lengths of 1.00, 1.50 times" in result["notes"]


def shard_rows(folder, only, *, operators=False):
    given = argparse.Namespace(
        tokens=16, residues=16, rows=8, sizes=[1, 2], only=only, operators=operators,
        two="small", three="small", device="cuda" if torch.cuda.is_available() else "cpu",
        out=folder, complexes=None,
    )  # fmt: skip
    return json.loads(shards.measure(given).read_text())["rows"]


def test_the_operators_of_a_silent_group_send_what_is_planned(tmp_path):
    rows = shard_rows(tmp_path, ["triangle"], operators=True)
    pair = AlphaFold3Config.preset("small").pairformer.pair
    width = AlphaFold3Config.preset("small").widths.pair
    planned = traffic.triangles(16, width, pair.hidden, pair.num_heads)
    sent = sum(row["sent MiB"] for row in rows if row["GPUs"] == 2) * 2**20
    assert len(rows) == 8
    bytes_each = 2 if torch.cuda.is_available() else 4
    assert sent == traffic.step_bytes(planned, 0, 2, bytes_each)


def test_a_block_of_a_silent_group_sends_what_is_planned(tmp_path):
    on_gpu = torch.cuda.is_available()
    one, two = shard_rows(tmp_path, ["AlphaFold2 Evoformer"])
    config = AlphaFold2Config.preset("small")
    block, triangles = config.evoformer, config.evoformer.triangles
    planned = [
        *traffic.pair_bias(16, block.num_heads),
        *traffic.columns(128, 16, config.c_m, block.outer_width),
        *traffic.triangles(16, config.c_z, triangles.hidden, triangles.num_heads),
    ]
    assert one["sent MiB"] == 0
    # Rows are bfloat16 on a GPU.
    assert two["sent MiB"] * 2**20 == traffic.step_bytes(planned, 0, 2, 2 if on_gpu else 4)
    assert ("ms" in two) == on_gpu
