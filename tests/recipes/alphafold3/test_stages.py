"""Stages of a configuration: those that are given, over those of the preset of the same name."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from bevatron.data.packing.costs import CostModel
from bevatron.errors import ConfigError
from bevatron.models.alphafold3 import AlphaFold3Config, load_model
from bevatron.models.alphafold3.losses import LossWeights
from bevatron.models.alphafold3.task import ROLLOUT_STEPS, StepOptions
from bevatron.models.common.folding import Checkpointing
from bevatron.models.common.folding.checkpointing import Recomputation, automatic
from bevatron.recipes.alphafold3.run import AlphaFold3Run, ComplexStage, build
from bevatron.recipes.proteins.staged_run import LARGEST_BATCH, token_sizes
from bevatron.train.capture import step as captured_step
from bevatron.train.checkpoint import list_checkpoints, read_checkpoint, read_tensors
from bevatron.train.loop import fit
from bevatron.train.run import BesideGraphs
from bevatron.train.settings import OptimConfig, ScheduleConfig

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def names_and_crops(**values):
    stages = AlphaFold3Run.from_values(values).stages
    return {name: (stage.crop, stage.step.copies) for name, stage in stages.items()}


def published(steps, crop, copies, **weights):
    """Of table 6 of the supplement; lengths and rows as Protenix has them."""
    loss = LossWeights(confidence=1e-4, **{"diffusion": 4.0, "distogram": 0.03} | weights)
    step = StepOptions(copies=copies, confidence_every=1, loss=loss)
    return ComplexStage(steps, 256, crop=crop, atoms=24 * crop, rows=1024, step=step)


STAGES = {
    "initial": published(75_000, 384, 48, pae=0.0, bond=0.0, smooth_lddt=1.0),
    "fine_tuning_1": published(15_000, 640, 32, pae=0.0, bond=1.0, smooth_lddt=0.0),
    "fine_tuning_2": published(5_000, 768, 32, pae=0.0, bond=1.0, smooth_lddt=0.0),
    "fine_tuning_3": published(
        4_000, 768, 32, pae=1.0, bond=0.0, smooth_lddt=0.0, diffusion=0.0, distogram=0.0
    ),
}


PUBLISHED = OptimConfig(
    algorithm="adam", lr=1.8e-3, weight_decay=0.0, betas=(0.9, 0.95), eps=1e-8, clip=10.0,
    clip_norm="global", ema=0.999,
)  # fmt: skip


def test_the_default_has_the_published_settings():
    config = AlphaFold3Run.from_values({})
    assert config == AlphaFold3Run()
    assert config.optim == PUBLISHED
    assert config.schedule == ScheduleConfig(
        kind="exponential", gamma=0.95, gamma_steps=50_000, warmup_steps=1000
    )
    assert config.stages == STAGES
    assert list(config.stages) == list(STAGES)
    assert config.model == AlphaFold3Config()
    assert (config.model.cycles, ROLLOUT_STEPS, LARGEST_BATCH) == (4, 20, 256)


def test_megafold_has_the_crops_and_the_rate_of_its_configuration():
    config = AlphaFold3Run.from_values({"preset": "megafold"})
    assert config.optim == replace(PUBLISHED, lr=1e-4)
    loss = LossWeights(confidence=1e-4, diffusion=4.0, distogram=0.03, pae=1.0, smooth_lddt=1.0)
    step = StepOptions(copies=48, confidence_every=10, loss=loss)
    initial = ComplexStage(20_000, 1, 1000, crop=384, atoms=7000, rows=16_384, step=step)
    assert config.stages == {"initial": initial}
    assert config.model == AlphaFold3Config.preset("megafold") != AlphaFold3Config()


def test_the_small_preset_is_the_one_whose_time_the_guide_states():
    (stage,) = AlphaFold3Run.from_values({"preset": "small"}).stages.values()
    assert (stage.steps, stage.samples_per_step, stage.crop) == (1_000, 1, 64)
    assert (stage.atoms, stage.rows, stage.step.copies) == (1024, 32, 8)


def test_a_stage_of_the_presets_name_changes_only_what_it_gives():
    assert names_and_crops(preset="small", stages={"initial": {"crop": 48}}) == {"initial": (48, 8)}


def test_stages_of_other_names_take_the_place_of_the_presets():
    given = {"short": {"steps": 3, "samples_per_step": 1, "crop": 32}}
    assert names_and_crops(preset="small", stages=given) == {"short": (32, 48)}
    assert names_and_crops(stages=given) == {"short": (32, 48)}


def test_a_stage_without_its_length_is_refused():
    with pytest.raises(ConfigError, match=r"stages\.short"):
        AlphaFold3Run.from_values({"stages": {"short": {"crop": 32}}})
    with pytest.raises(ConfigError, match="stages: expected at least one"):
        AlphaFold3Run.from_values({"stages": {}})


def test_batches_of_several_complexes_are_refused():
    with pytest.raises(ConfigError, match="a batch of proteins is one sample"):
        AlphaFold3Run.from_values({"batch": {"size": 2}})


def test_the_small_model_computes_nothing_again():
    model = AlphaFold3Config.preset("small")
    assert model.checkpointing == model.diffusion.checkpointing == Checkpointing()


def test_costs_of_samples_are_as_steps_were_measured():
    page = Path(__file__).parents[3] / "benchmarks/results/alphafold3/train_step.json"
    rows = json.loads(page.read_text())["rows"]
    rows = [row for row in rows if row["arm"] == "bevatron, captured, all" and row.get("s/step")]
    tokens = np.array([row["N"] for row in rows])
    cost = CostModel(weights=AlphaFold3Run().batch.cost)(token_sizes(tokens))
    seconds = np.array([row["s/step"] for row in rows])
    np.testing.assert_allclose(cost / cost.mean(), seconds / seconds.mean(), rtol=0.15)


def test_a_run_starts_from_the_weights_that_it_is_given(
    complexes, components, tiny_model, tmp_path
):
    stage = {"steps": 1, "samples_per_step": 1, "crop": 13, "atoms": 300, "rows": 3}
    values = {
        "output": str(tmp_path / "run"),
        "preset": "small",
        "model": json.loads((tiny_model / "model.json").read_text())["config"],
        "start_from": str(tiny_model),
        "data": {"train": [str(complexes)], "components": components},
        "stages": {"initial": stage},
        "train": {"device": "cpu"},
    }
    config, given = AlphaFold3Run.from_values(values), load_model(tiny_model).state_dict()
    run = build(config)
    assert run.monitor == "-lddt"  # the largest is the best
    started = run.model.state_dict()
    assert all(torch.equal(started[name], value) for name, value in given.items())
    resumed = build(config, resume=True).model.state_dict()  # its weights are the checkpoint's
    assert not all(torch.equal(resumed[name], value) for name, value in given.items())


def test_a_resumed_run_is_the_whole_run_to_the_last_bit(
    complexes, components, tiny_model, tmp_path
):
    """Killed within the first of two stages, between steps with and without confidences."""

    def run(name, steps, resume=False):
        step = {"copies": 2, "confidence_every": 2}
        sizes = {"samples_per_step": 1, "crop": 13, "atoms": 300, "rows": 3, "step": step}
        stages = {"initial": {"steps": steps, **sizes}, "longer": {"steps": 1, **sizes, "crop": 17}}
        values = {
            "output": str(tmp_path / name),
            "preset": "small",
            "model": json.loads((tiny_model / "model.json").read_text())["config"],
            "data": {"train": [str(complexes)], "components": components},
            "stages": stages if steps == 3 else {"initial": stages["initial"]},
            "validation_steps": 2,
            "loader": {"workers": 0},
            "checkpoint": {"every_steps": 1, "keep": 9},
            "train": {"device": "cpu", "threads": 1},
            "report": False,
        }
        return fit(build(AlphaFold3Run.from_values(values), resume=resume))

    whole = run("whole", 3)
    run("cut", 2)
    resumed = run("cut", 3, resume=True)
    assert (whole.steps, resumed.steps) == (4, 4)
    assert resumed.metrics == whole.metrics
    last, again = (
        read_checkpoint(list_checkpoints(tmp_path / name / "checkpoints")[-1])
        for name in ("whole", "cut")
    )
    for file in ("model.safetensors", "optimizer.safetensors"):
        found = read_tensors(again, file)
        for name, value in read_tensors(last, file).items():
            assert torch.equal(found[name], value), name


def test_blocks_that_are_computed_again_beside_graphs_change_no_bit_of_a_run(
    complexes, components, tiny_model, tmp_path, monkeypatch
):
    """Complexes of several shapes, each launched once and then captured on a GPU; confidences in
    every other step, whose loss has more terms."""
    monkeypatch.setattr(captured_step, "obstacle", lambda *_: None)
    given = json.loads((tiny_model / "model.json").read_text())["config"]
    for part in (given, given["diffusion"]):
        part["checkpointing"] = {"kind": "auto"}
    step = {"copies": 2, "confidence_every": 2}
    stage = {"steps": 6, "samples_per_step": 1, "crop": 13, "atoms": 300, "rows": 3, "step": step}
    values = {
        "preset": "small",
        "model": given,
        "start_from": str(tiny_model),
        "data": {"train": [str(complexes)], "components": components},
        "stages": {"initial": stage},
        "train": {"device": DEVICE},
        "report": False,
    }
    weights, kinds = {}, []
    for spare in (None, "all"):
        run = build(AlphaFold3Run.from_values(values | {"output": str(tmp_path / str(spare))}))
        modules = automatic(run.model)
        assert len(modules) > 5
        inner = run.task.loss

        def loss(model, *rest, inner=inner):
            kinds.append(model.trunk.pairformer.checkpointing.kind)
            return inner(model, *rest)

        monkeypatch.setattr(run.task, "loss", loss)
        beside = None if spare is None else BesideGraphs(Recomputation(modules, spare), 2**34)
        (only,) = run.stages
        run.stages = [replace(only, set_up=Recomputation(modules, "none"), beside=beside)]
        fit(run)
        weights[spare] = [weight.detach().clone() for weight in run.model.parameters()]
    for one, other in zip(weights[None], weights["all"], strict=True):
        assert torch.equal(one, other)
    assert {"none", "all"} == set(kinds[len(kinds) // 2 :])
