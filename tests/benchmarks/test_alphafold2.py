"""The benchmarks of AlphaFold2 at tiny sizes: they run, and what they compare is the same."""

import gc
import json
import shutil
from dataclasses import replace

import pytest
import torch
from benchmarks.alphafold2 import (
    evoformer_block,
    half_precision,
    learning,
    sample_times,
    train_step,
)
from benchmarks.common.arms import set_policy, uncollected
from benchmarks.common.report import RESULTS
from benchmarks.train import slow_samples

from bevatron.models.alphafold2.config import PRESETS, AlphaFold2Config
from bevatron.models.alphafold2.evoformer import EvoformerBlock
from bevatron.models.alphafold2.msa_attention import MSAColumnAttention
from bevatron.models.common.folding import Checkpointing
from bevatron.recipes.alphafold2.stores import prepare_chains

pytest.importorskip("gemmi")


@pytest.fixture(scope="module")
def store(shared, tmp_path_factory):
    """A store of one small chain."""
    root = tmp_path_factory.mktemp("benchmark")
    source = shared / "data/proteins"
    (root / "files").mkdir()
    shutil.copy(source / "mmcif/1crn.cif.gz", root / "files")
    for file in (source / "msa/1crn_A").iterdir():
        shutil.copy(file, root / "files")
    prepare_chains([root / "files"], root / "chains", workers=0, progress=False)
    return root / "chains"


def test_steps_are_timed_and_compared(store, tmp_path, monkeypatch):
    small = AlphaFold2Config.preset("small")
    stacks = ("evoformer", "structure")
    shallow = {name: replace(getattr(small, name), num_blocks=1) for name in stacks}
    monkeypatch.setitem(PRESETS, "small", {**PRESETS["small"], **shallow})
    monkeypatch.setattr(train_step, "CYCLES", 2)
    plan, plans = train_step.planned_gib, []  # the same of both rungs, which are launched
    planned = lambda *given: plans[0] if plans else plans.append(plan(*given)) or plans[0]  # noqa: E731
    monkeypatch.setattr(train_step, "planned_gib", planned)
    sizes = "--crop 12 --msa-rows 3 --extra-rows 4 --templates 1 --preset small --device cpu"
    names = ["no CUDA graphs", "no CUDA graphs, no garbage collection"]
    arms = ["--arms", "eager PyTorch", "--ladder", *names]
    given = [*sizes.split(), *arms, "--turns", "1", "--compared", "1", "--out", str(tmp_path)]
    given += ["--planned"]
    train_step.main([str(store), *given])
    assert torch.backends.cuda.matmul.fp32_precision != "tf32"
    rows = json.loads((tmp_path / "alphafold2/train_step.json").read_text())["rows"]
    assert [row["arm"] for row in rows] == ["eager PyTorch"]
    for row in rows:
        assert all(row[f"s, {count} recyclings"] > 0 for count in range(2))
        assert 0 < row["loss off by"] < 0.05
    ladder = json.loads((tmp_path / "alphafold2/ladder.json").read_text())["rows"]
    assert [row["without"] for row in ladder] == names
    assert 0.06 < ladder[0]["planned GiB"] < 0.1  # most of it is for cuBLAS
    assert "planned GiB" not in rows[0]


def test_the_ladder_is_measured_and_named_after_the_operators_that_are_left_out():
    page = json.loads((RESULTS / "alphafold2/ladder.json").read_text())["rows"]
    assert {row["without"] for row in page} <= set(train_step.LADDER)
    kinds = {"pair", "global", "invariant_point"}
    for arm in train_step.LADDER.values():
        left = {kind for kind in kinds if f"{kind}_attention" in arm.plain}
        named = {kind for kind in kinds if f"{kind.replace('_', ' ')} attention" in arm.name}
        assert left == (named or (kinds if "attention" in arm.name else set())), arm.name


def test_one_block_is_compared_with_the_reference(tmp_path):
    sizes = "--rows 4 --residues 8 --preset small --device cpu --peers"
    evoformer_block.main([*sizes.split(), "eager PyTorch", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "alphafold2/evoformer_block.json").read_text())["rows"]
    assert [row["who"] for row in rows] == ["bevatron", "eager PyTorch"]
    for row in rows:
        assert 0 < row["results off by"] < 0.02
        assert 0 < row["gradients off by"] < 0.03


def test_a_model_is_trained_and_tested_with_alignments_and_without(store, tmp_path):
    sizes = "--crop 12 --rows 3 --extra-rows 4 --preset small --device cpu --longest 64 --seen 1"
    steps = "--steps 2 --samples 1 --evaluate-every 1"
    stores = [str(store), "--valid", str(store), "--test", str(store)]
    rows = ["--out", str(tmp_path / "rows")]
    learning.main([*stores, *sizes.split(), *steps.split(), *rows])
    late = [*steps.split(), "--name", "held out, late", "--slow", "1", "--longest-delay", "0.01"]
    learning.main([str(store), *sizes.split(), *late, *rows])
    learning.main(["--collect", str(tmp_path / "rows"), "--results", str(tmp_path)])
    result = json.loads((tmp_path / "alphafold2/learning.json").read_text())
    judged = [row["judged on"] for row in result["rows"]]
    shown = ("alignment", "sequence alone")
    tested = [f"{of}, {each}" for of in ("test", "training") for each in shown]
    assert judged == ["validation, step 2", *tested]
    (spent,) = json.loads((tmp_path / "alphafold2/time_to_train.json").read_text())["rows"]
    assert spent["steps, s"] > 0 < spent["validating, s"]
    (pair,) = json.loads((tmp_path / "alphafold2/learning_pairs.json").read_text())["rows"]
    assert pair["beside"] == "held out, late"
    assert pair["overtaken"] == pair["loss apart %"] == 0  # late samples are the same samples
    run, _ = result["extra"]["runs"]
    assert [step for step, *_ in run["curve"]["steps"]] == [2]
    with_rows, alone = run["tested"][:2]
    assert with_rows["rows"] > alone["rows"] == 1
    assert with_rows["lddt_ca"] != alone["lddt_ca"]


def test_a_row_counts_the_seeds_that_it_judges():
    curve = {"steps": [[2]], "valid": [dict.fromkeys(learning.JUDGED, 0.5) | {"step": 2}]}
    run = {"parameters": 1, "crop": 8, "hardware": "cpu", "tested": []}
    stopped = {**run, "curve": {**curve, "valid": []}}
    (row,) = learning.rows_of("two", [{**run, "curve": curve}, stopped])
    assert (row["seeds"], row["judged on"]) == (1, "validation, step 2")


def test_times_of_samples_are_sorted_and_drawn(store, tmp_path):
    sample_times.main([str(store), "--draws", "5", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "alphafold2/sample_times.json").read_text())
    assert result["extra"]["ms"] == sorted(result["extra"]["ms"])
    assert [row["ms"] for row in result["rows"]][-1] == pytest.approx(
        result["extra"]["ms"][-1], 1e-2
    )
    assert (tmp_path / "alphafold2/sample_times.png").stat().st_size


def test_the_collector_works_again_after_steps_that_fail():
    def steps():
        assert not gc.isenabled()
        raise ValueError("a step")

    with pytest.raises(ValueError, match="a step"), uncollected():
        steps()
    assert gc.isenabled()


def test_the_policy_of_an_arm_reaches_the_blocks():
    config = AlphaFold2Config.preset("small")
    block = EvoformerBlock(
        config.c_m, config.c_z, config.evoformer, MSAColumnAttention, Checkpointing()
    )
    m, z = torch.randn(3, 5, config.c_m), torch.randn(5, 5, config.c_z)
    masks = torch.ones(3, 5, dtype=torch.bool), torch.ones(5, 5, dtype=torch.bool)

    def kept(kind):
        sizes = []
        set_policy(block, kind)
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()), id):
            block((m.requires_grad_(), z.requires_grad_()), *masks)
        return sum(sizes)

    assert kept("paper") < kept("pair") < kept("none")


def test_precisions_of_a_step_are_compared_block_by_block(store, tmp_path):
    sizes = "--crop 12 --msa-rows 3 --extra-rows 4 --templates 1 --preset small --device cpu"
    half_precision.main([str(store), *sizes.split(), "--passes", "2", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "alphafold2/half_precision.json").read_text())
    exact, *others = result["rows"]
    assert [row["activations"] for row in others] == ["bfloat16", *["float16"] * 3]
    assert 10 < exact["triangle multiplication"] < half_precision.LARGEST
    for row in others[:2]:
        assert row["loss"] == pytest.approx(exact["loss"], rel=0.01)
        assert 0 < row["gradient off by"] < 0.1
    blocks = result["extra"]["profiles"]["bevatron, float16, 1024"]["gradients"]
    unscaled = result["extra"]["profiles"]["bevatron, float16, 1"]["gradients"]
    for name, (largest, *_) in unscaled.items():
        assert blocks[name][0] == pytest.approx(1024 * largest, rel=0.05)


class Blocks(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def test_the_first_block_that_is_not_finite_is_named():
    model, x = Blocks(), torch.randn(5, 4)

    def looked_at(scale=1):
        row, *_ = half_precision.looked_at(model, lambda: model(x).sum(), scale, {})
        return row["not finite first"]

    assert looked_at() == ""
    with torch.no_grad():
        model.blocks[2].weight.fill_(1e20)
    assert looked_at(scale=10**19) == "gradient of blocks.1 m"
    with torch.no_grad():
        model.blocks[1].weight.fill_(torch.inf)
    assert looked_at() == "blocks.1 m"


def test_real_samples_pass_through_both_loaders(store, tmp_path, monkeypatch):
    monkeypatch.setattr(slow_samples, "WORKERS", 1)
    slow_samples.main([str(store), "--batches", "6", "--step", "1", "--out", str(tmp_path)])
    rows = json.loads((tmp_path / "alphafold2/slow_samples.json").read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        assert (row["batches"], row["samples lost"], row["doubled"]) == (6, 0, 0)
        assert row["ended by"] == "its end"
