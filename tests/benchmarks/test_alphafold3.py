"""The benchmarks of AlphaFold3, on a CPU at a size where every arm takes a second."""

import argparse
import itertools
import json
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from benchmarks.alphafold3 import (
    arms,
    kernel_time,
    learning,
    memory,
    operators,
    parts,
    traffic,
    train_step,
)
from benchmarks.common.arguments import read_all
from benchmarks.kernels.cases import Setup, cases_of
from benchmarks.parallel import memory as shared_memory

from bevatron import kernels
from bevatron.models.alphafold3 import config, task
from bevatron.parallel import axial
from bevatron.recipes.alphafold3.stores import prepare_complexes
from bevatron.train.memory_plan import MemoryPlan
from bevatron.train.profiling.autograd_memory import SavedBytes
from tiny_sizes import ALPHAFOLD3

N = 32
"""Tokens of the padded crop."""

pytestmark = pytest.mark.shared


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(config.PRESETS, "tiny", ALPHAFOLD3)


@pytest.fixture(scope="module")
def store(shared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("complexes") / "store"
    components = str(shared / "data/complexes/ccd_subset.cif.gz")
    file = shared / "data/complexes/mmcif/1bna.cif.gz"
    prepare_complexes([file], folder, components=components, workers=0, progress=False)
    return folder


def options(store, out, **changes):
    values = {"rows": 4, "copies": 2, "preset": "tiny", "device": "cpu", "workers": 0}
    values |= {"cycles": 1, "steps": 1, "seconds": 0.0, "after": None, "lengths": [N], "traced": []}
    values |= {"planned": None, "granule": 32, "kept": False}
    return argparse.Namespace(store=store, out=out, **(values | changes))


def test_all_arms_take_the_same_steps_and_their_rows_are_joined(store, tmp_path):
    ours = ["bevatron, captured, all", "bevatron, captured, all, transitions of PyTorch"]
    names = [ours[0], "eager, all", "eager, all, samples made in the step", ours[1]]
    train_step.measure_all(options(store, tmp_path / "rows", arms=names))
    train_step.collect(tmp_path / "rows", tmp_path)
    written = json.loads((tmp_path / "alphafold3" / "train_step.json").read_text())
    rows = written["rows"]
    assert [row["arm"] for row in rows] == names
    of_ours = [row for row in rows if row["arm"] in ours]
    assert all(row["loss off by"] < 1e-5 and row["gradient off by"] < 1e-3 for row in of_ours)
    assert min(row["x our best"] for row in of_ours) == 1
    assert all(row["N"] == N and row["s/step"] > 0 for row in rows)
    assert len(read_all(tmp_path / "rows", "step-*.json")) == 4
    assert rows[2]["loss off by"] == 0


def test_every_fused_operator_of_a_step_is_in_one_group_of_the_ladder(store, tmp_path):
    kernels.reset_launches()
    train_step.measure_all(options(store, tmp_path, arms=["eager, all"]))
    ran = {operator for operator, _ in kernels.launches()}
    grouped = [*itertools.chain(*train_step.GROUPS.values()), "linear"]  # cuBLAS in either case
    assert set(grouped) ^ (ran - {"fused_adam_ema"}) == set()
    assert len(grouped) == len(set(grouped))


def test_an_arm_that_runs_out_of_memory_is_told_as_such(store, tmp_path, monkeypatch):
    def refuse(*_):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(train_step.Training, "steps", refuse)
    train_step.measure_all(options(store, tmp_path, arms=["eager, all"]))
    (found,) = read_all(tmp_path)
    assert found["row"]["s/step"] == "out of memory"
    (row,) = train_step.compared([found["row"]])
    assert "x our best" not in row


def test_a_loss_that_differs_is_seen():
    rows = [
        {"N": 8, "arm": "eager, all", "loss": 2.0, "gradient norm": 1.0, "s/step": 9.0, "steps": 1},
        {"N": 8, "arm": "bevatron, captured, all", "loss": 3.0, "gradient norm": 1.0},
    ]
    ours, eager = train_step.compared(rows)
    assert ours["loss off by"] == 0.5
    assert "loss off by" not in eager
    assert "x faster than eager" not in ours


def test_a_step_stands_beside_the_eager_one_whose_samples_are_made_likewise():
    seconds = {"bevatron, captured, all": (3.0, 4.0), "eager, all": (9.0, 10.0)}
    rows = [
        {"N": 8, "arm": arm + kind, "s/step": each, "steps": 1}
        for arm, both in seconds.items()
        for kind, each in zip(("", train_step.IN_THE_STEP), both, strict=True)
    ]
    found = {row["arm"]: row["x faster than eager"] for row in train_step.compared(rows)}
    assert list(found.values()) == [3.0, 1.0, 2.5, 1.0]


def test_layers_that_start_from_zero_take_part(store):
    model = arms.built("tiny", torch.device("cpu"))
    assert all(weight.any() for weight in model.parameters() if weight.ndim > 1)


@pytest.mark.parametrize(("name", "least"), [("captured", 2), ("launched", 1)])
def test_no_step_begins_after_so_many_seconds(store, name, least):
    arm, crops = train_step.ARMS[f"bevatron, {name}, all"], arms.Crops(store, N, rows=4)
    model = arms.built("tiny", torch.device("cpu"))
    training = arms.training_of(replace(arm, workers=0), model, crops, train_step.StepOptions(2))
    assert len(training.steps(range(4), seconds=0.0).results) == least


def test_compiled_steps_see_one_shape(store):
    crops = arms.Crops(store, N, rows=4)
    model = arms.built("tiny", torch.device("cpu"))
    atoms = {}
    for name in ("torch.compile, all", "eager, all"):
        task = arms.training_of(
            train_step.ARMS[name], model, crops, train_step.StepOptions(2)
        ).run.task
        atoms[name] = {
            len(task.collate([crops.data.sample(0, seed)], np.zeros(1, np.int64), [1.0]).atom_mask)
            for seed in crops.seeds
        }
    assert atoms["torch.compile, all"] == {crops.shape["atoms"]} != atoms["eager, all"]


def test_too_long_a_crop_is_refused(store):
    with pytest.raises(SystemExit, match="no complex has 64 tokens"):
        arms.Crops(store, 64)


@pytest.mark.parametrize("make", [parts.block_of, parts.stack_of])
def test_parts_run(make):
    work = make(config.AlphaFold3Config.preset("tiny"), 8, torch.device("cpu"))
    exact = work.exact() if work.exact else work.call()
    row = parts.Prepared("bevatron", work, exact).timed()
    assert row["error"] < 1e-5


def test_the_diffusion_runs(store):
    crops = arms.Crops(store, N, rows=4)
    preset = config.AlphaFold3Config.preset("tiny")
    work = parts.diffusion_of(preset, crops, 2, torch.device("cpu"))
    assert work.call()[0].isfinite().all()


def test_an_error_of_a_part_is_relative_and_zeros_are_left_out():
    exact = [torch.tensor([4.0, 2.0]), torch.tensor([1e-9])]
    assert parts.worst([torch.tensor([4.0, 3.0]), torch.tensor([1.0])], exact) == 0.25


def test_the_longest_that_fits_is_found_by_halving(monkeypatch):
    tried = []

    def fits(self, name, policy, tokens):
        tried.append(tokens)
        return tokens <= 600

    monkeypatch.setattr(memory.Memory, "fits", fits)
    found = memory.Memory(None, argparse.Namespace(longest=True, granule=32))
    assert found.longest("bevatron", "all", [256, 512, 768]) == 576
    assert tried == [256, 512, 768, 640, 576, 608]
    assert found.longest("bevatron", "all", [256, 512]) is None


def test_memory_is_measured_by_a_step(store, tmp_path):
    given = options(store, tmp_path, policies=["all"], arms=["bevatron"], longest=False)
    memory.measure(given)
    written = json.loads((tmp_path / "alphafold3" / "memory.json").read_text())
    assert [row["N"] for row in written["rows"]] == [N]
    assert written["extra"]["longest"] == {"bevatron, all": None}


def test_steps_are_planned_at_lengths_that_no_complex_has(store, tmp_path, monkeypatch):
    def plan(run, batch, *, shape, captured):
        assert run.task.activations == torch.bfloat16
        assert not captured
        return MemoryPlan(0, 0, 0, 0, shape["tokens"])

    monkeypatch.setattr(memory, "plan_memory", plan)
    monkeypatch.setattr(memory, "SMALL", N)
    given = options(
        store, tmp_path, policies=["all"], arms=["bevatron"], longest=True, lengths=[512, 1024],
        planned=700 / 2**30,
    )  # fmt: skip
    memory.measure(given)
    written = json.loads((tmp_path / "alphafold3" / "memory.json").read_text())
    assert written["extra"]["longest"] == {"bevatron, all": 640}
    assert "not run" in written["notes"]


def test_what_is_kept_is_told_by_kind_of_module(store, tmp_path, monkeypatch):
    def kept(run, _batch, shape):
        assert shape["tokens"] == 64
        blocks = [f"trunk.pairformer.blocks.{block}" for block in (0, 1)]
        paths = [*blocks, "diffusion.encoder", "(outside of modules)"]
        assert set(paths[:-1]) <= {path for path, _ in run.model.named_modules()}
        return {path: SavedBytes(2**30) for path in paths} | {"trunk": SavedBytes(2**10)}

    monkeypatch.setattr(memory, "kept_by_module", kept)
    monkeypatch.setattr(memory, "SMALL", N)
    memory.measure(options(store, tmp_path, kept=True, lengths=[64]))
    written = json.loads((tmp_path / "alphafold3" / "kept.json").read_text())
    found = {row["module"]: round(row["bevatron GiB"], 3) for row in written["rows"]}
    blocks = "pairformer: PairformerBlock"
    assert found == {
        blocks: 2.0, "diffusion: AtomEncoder": 1.0, "(outside of modules)": 1.0, "others": 0.0,
        "all": 4.0,
    }  # fmt: skip
    assert [round(row["eager %"]) for row in written["rows"]] == [50, 25, 25, 0, 100]


def test_measured_memory_stands_beside_what_was_planned(tmp_path):
    key = {"arm": "bevatron", "policy": "all", "N": 64}
    for hardware, gib in (
        ("cpu", {"peak GiB": 1.5, "in all GiB": 8.0}),
        ("gpu", {"peak GiB": 2.0}),
    ):
        found = {"hardware": hardware, "versions": {}, "rows": [key | gib]}
        found["extra"] = {"longest": {"bevatron, all": 640} if hardware == "cpu" else {}}
        (tmp_path / f"memory-{hardware}.json").write_text(json.dumps(found))
    for arm in ("bevatron, launched, segments", "bevatron, captured, all"):
        found = {"measured on": {"hardware": "gpu", "versions": {}}}
        found["row"] = {"arm": arm, "N": 96, "peak GiB": 3.0}
        (tmp_path / f"step-{arm}.json").write_text(json.dumps(found))
    memory.collect(tmp_path, tmp_path)
    written = json.loads((tmp_path / "alphafold3" / "memory.json").read_text())
    assert written["rows"] == [
        {**key, "planned GiB": 1.5, "planned in all GiB": 8.0, "peak GiB": 2.0},
        {**key, "policy": "segments", "N": 96, "peak GiB": 3.0},
    ]
    assert "bevatron, all 640." in written["notes"]


def test_longer_crops_are_planned_for_several_gpus(store, tmp_path, monkeypatch):
    def plan(run, batch, *, shape, captured):
        del run, batch, captured
        return MemoryPlan(0, 0, 0, 0, shape["tokens"] ** 2 // axial.sample_group().size)

    monkeypatch.setattr(memory, "plan_memory", plan)
    monkeypatch.setattr(memory, "SMALL", N)
    words = ["memory", str(store), "--sizes", "1", "2", "--lengths", "512", "1024"]
    words += ["--planned", str(750**2 / 2**30), "--preset", "tiny", "--rows", "4", "--copies", "2"]
    monkeypatch.setattr("sys.argv", [*words, "--out", str(tmp_path)])
    shared_memory.main()
    written = json.loads((tmp_path / "parallel" / "memory.json").read_text())
    longest = {
        size: max(r["N"] for r in written["rows"] if r["GPUs a sample"] == size and r["fits"])
        for size in (1, 2)
    }
    assert longest == {1: 640, 2: 1024}


def test_kernels_are_told_apart_by_name():
    names = {
        "forward_kernel": "fused kernels",
        "_adam": "optimiser",
        "nvjet_sm90_tst_64x48": "matrix products of libraries",
        "void at::native::elementwise_kernel<at::native::direct_copy_kernel_cuda>": (
            "copies, casts, concatenation"
        ),
        "void at::native::vectorized_elementwise_kernel<4, CUDAFunctor_add>": "elementwise",
        "triton_poi_fused__to_copy_add_0": "compiled by inductor",
        "something": "other",
    }
    assert {name: kernel_time.class_of(name) for name in names} == names
    assert all(re.compile(pattern) for pattern in kernel_time.CLASSES.values())


def test_operators_of_a_step_are_counted_timed_and_added_up(store, tmp_path, monkeypatch):
    calls, times = tmp_path / "calls.json", {"ms": 2.0, "ms, in a row": 1.0}
    monkeypatch.setattr(task, "ROLLOUT_STEPS", 2)
    given = options(store, tmp_path / "rows", tokens=N, time=calls)
    # Heads as narrow as the tiny model's are no kernel's; Adam's reference takes long to plan.
    with kernels.use("reference", fused_adam_ema="auto"):
        calls.write_text(json.dumps(operators.calls_of(given)))
    read = json.loads(calls.read_text())
    counts = {(call["operator"], call["grad"]): 0 for call in read}
    for call in read:
        counts[call["operator"], call["grad"]] += call["calls"]
    # two blocks of the alignment, one of templates, two of the trunk, one of the confidences
    assert counts["triangle_multiply", True] == 2 * (2 + 1 + 2 + 1)
    assert counts["pair_weighted_averaging", True] == 1  # not in the last of the alignment
    # two blocks of the diffusion, alone in each step of the rollout, and both times
    assert counts["pair_attention", False] == 2 * 2
    assert counts["qkvg", False] == 2 * 2  # whose weights have gradients
    assert counts["window_attention", False] == 2 * 2
    for call in read:
        gradients = operators.ready(call, "cpu")()
        assert all(x is None or x.isfinite().all() for x in gradients)
        sizes = [x.shape for x in gradients if x is not None]
        of = [x["shape"] for x in call["arguments"] if isinstance(x, dict) and x["grad"]]
        assert not call["grad"] or sizes == [torch.Size(shape) for shape in of]
    monkeypatch.setattr(
        operators, "timed", lambda call, _: times if call["grad"] else {**times, "ms": 0.0}
    )
    operators.measure(given)
    page = {"rows": [{"N": N, "arm": operators.ARM, "kernels": "all", "ms": 2048.0}]}
    (tmp_path / "alphafold3").mkdir()
    (tmp_path / "alphafold3/kernel_time.json").write_text(json.dumps(page))
    monkeypatch.setattr(operators, "RESULTS", tmp_path)
    operators.collect(tmp_path / "rows", tmp_path, "")
    written = json.loads((tmp_path / "alphafold3/operators.json").read_text())
    whole, *rows = written["rows"]
    assert whole["calls"] == sum(counts.values()) == whole["ms, in a row"]
    with_gradient = sum(n for (_, grad), n in counts.items() if grad)
    assert whole["ms"] == 2 * with_gradient == sum(row["ms"] for row in rows)
    assert whole["GPU time of a step / ms"] == 2048 / whole["ms"]


def test_bytes_of_a_pass_are_those_between_its_marks_and_what_it_left_in_the_cache():
    table = f"""\
"ID","Kernel Name","Grid Size","{traffic.READ}","{traffic.WRITTEN}"
"","","","byte","byte"
"0","mark","(1, 1, 1)","32","0"
"1","a_kernel","(9, 1, 1)","1,048,576","0"
"2","b_kernel","(9, 1, 1)","2097152","1048576"
"3","mark","(2, 1, 1)","32","0"
"4","reduce_kernel","(7, 1, 1)","268435456","3145728"
"5","mark","(3, 1, 1)","32","0"
"6","c_kernel","(9, 1, 1)","6291456","0"
"7","mark","(4, 1, 1)","32","0"
"8","reduce_kernel","(7, 1, 1)","268435456","8388608"
"""
    kept = [{"operator": "swiglu", "implementation": who} for who in ("fused", "plain PyTorch")]
    fused, plain = traffic.compared(traffic.read(table.splitlines(), kept))
    assert (fused["read MiB"], fused["written MiB"], fused["kernels"]) == (3, 4, 2)
    assert (plain["moved MiB"], plain["kernels"], plain["x fused"]) == (14, 1, 2)


def test_passes_whose_bytes_are_counted_run(tmp_path):
    traffic.run_all(Setup(torch.float32, "cpu", tiny=True), tmp_path / "kept.json")
    rows = json.loads((tmp_path / "kept.json").read_text())
    assert {row["operator"] for row in rows} == {*traffic.TRAFFIC}
    cases = {
        op: [case.name for case in cases_of(op, Setup(torch.float32, "meta"), (name,))]
        for op, name in traffic.TRAFFIC.items()
    }
    assert cases == {op: [name] for op, name in traffic.TRAFFIC.items()}


@pytest.fixture
def learns(store, tmp_path, monkeypatch):
    def tiny_model():
        return config.AlphaFold3Config.preset("tiny", cycles=1)

    monkeypatch.setitem(learning.SIZES, "reduced", tiny_model)
    monkeypatch.setattr(learning, "CHUNK", 2)

    def learn(*words):
        fixed = ["--tokens", "24", "--copies", "2", "--device", "cpu", "--sampling", "2"]
        fixed += ["--precision", "float32", "--samples", "1", "--out", str(tmp_path / "rows")]
        monkeypatch.setattr("sys.argv", ["learning", *fixed, *map(str, words)])
        learning.main()
        return read_all(tmp_path / "rows", "learning-*.json")

    return learn


def test_a_complex_is_learnt_by_heart_at_the_rate_given(store, learns):
    by_heart = (store, "--by-heart", "--crop", 0, "--steps", 4, "--warmup", 2)
    learns(*by_heart, "--name", "a", "--lr", 1e-9)
    still, learnt = learns(*by_heart, "--name", "b", "--lr", 0.1)
    assert still["curve"][0]["loss"] == learnt["curve"][0]["loss"]
    assert [len(run["curve"]) for run in (still, learnt)] == [4, 4]
    assert abs(still["curve"][3]["loss"] / learnt["curve"][3]["loss"] - 1) > 0.01
    assert learnt["found"]["by heart"]["rmsd"] > 0


def test_held_out_complexes_are_predicted_with_and_without_alignments(store, learns):
    (run,) = learns(store, "--held", store, "--steps", 0)
    assert set(run["found"]) == {"with alignments", "without alignments"}
    assert run["found"]["with alignments"]["distogram"] > 0


def test_curves_of_kernels_are_set_beside_each_other():
    def run(kernels, precision, seed, loss):
        options = {"kernels": kernels, "precision": precision, "seed": seed}
        return {"options": options, "curve": [{"loss": loss}] * learning.CHUNK}

    runs = [
        run("auto", kind, seed, 4 + seed) for kind in ("bfloat16", "float32") for seed in (0, 2)
    ]
    (row,) = learning.curve_rows([*runs, run("reference", "bfloat16", 0, 5.0)])
    assert row["fused float32 off plain bfloat16 by"] == pytest.approx(0.2)
    assert row["fused bfloat16, mean of 2"] == row["fused float32, mean of 2"] == 5
    assert row["fused float32, deviation of seeds"] == pytest.approx(2**0.5)
    assert row["plain bfloat16, mean of 1"] == 5
    assert "plain bfloat16, deviation of seeds" not in row


def test_runs_that_differ_in_their_seed_are_averaged():
    def run(seed, lddt):
        found = {"with alignments": {"lddt": lddt, "plddt": 50.0}}
        options = {"seed": seed}
        return {"name": f"a-{seed}", "options": options, "found": found, "steps": 4, "hardware": ""}

    (row,) = learning.found_rows([run(0, 0.1), run(1, 0.3)])
    assert (row["trained"], row["seeds"], row["steps"]) == ("a", 2, 4)
    assert row["lddt"] == pytest.approx(0.2)
    assert row["lddt, deviation"] == pytest.approx(0.2 / 2**0.5)
