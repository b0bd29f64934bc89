"""A whole model with weights of Protenix predicts what Protenix 2.0.0 does, from the same noise."""

import ast
from dataclasses import replace

import numpy as np
import protenix_whole as whole
import pytest
import torch

from bevatron.errors import CheckpointError
from bevatron.models.alphafold3 import edm, sampler
from bevatron.models.alphafold3.augmentation import Move
from bevatron.models.alphafold3.config import AlphaFold3Config
from bevatron.models.alphafold3.config_diffusion import (
    AtomConfig,
    ConfidenceConfig,
    DiffusionConfig,
    TokenTransformerConfig,
    TrunkWidths,
)
from bevatron.models.alphafold3.config_trunk import MsaConfig, PairformerConfig, TemplateConfig
from bevatron.models.alphafold3.convert import from_protenix, to_protenix
from bevatron.models.alphafold3.predict import _scores as scores
from bevatron.models.common.folding.metrics.confidence import expected_lddt
from bevatron.testing import assert_close

ONE = AtomConfig(whole.ATOM, whole.ATOM_PAIR, num_heads=4, num_blocks=1)
HEAD = whole.SINGLE // 16
CONFIG = AlphaFold3Config(
    widths=TrunkWidths(whole.TOKEN + 65, whole.SINGLE, whole.PAIR),
    atoms=AtomConfig(whole.ATOM, whole.ATOM_PAIR, num_heads=4, num_blocks=3),
    templates=TemplateConfig(num_blocks=1),
    msa=MsaConfig(num_blocks=whole.BLOCKS),
    pairformer=PairformerConfig(num_blocks=whole.BLOCKS, head_width=HEAD),
    diffusion=DiffusionConfig(
        encoder=ONE,
        transformer=TokenTransformerConfig(whole.DIFFUSION, num_blocks=whole.BLOCKS),
        decoder=ONE,
    ),
    confidence=ConfidenceConfig(PairformerConfig(num_blocks=1, head_width=HEAD)),
    cycles=whole.CYCLES,
)
BINS = ("confidence_head.lower_bins", "confidence_head.upper_bins")


@pytest.fixture(scope="module")
def golden():
    with np.load(whole.GOLDEN) as file:
        return {name: file[name] for name in file.files}


@pytest.fixture(scope="module")
def theirs(golden):
    """Protenix's state dict: the bins are its own, all else is drawn."""
    shapes = dict(line.split(" ", 1) for line in golden["names"].tolist())
    found = {name: whole.weight(name, ast.literal_eval(shape)) for name, shape in shapes.items()}
    lower = torch.arange(3.25, 52.0, 1.25)
    return found | dict(
        zip(BINS, (lower, torch.cat([lower[1:], torch.tensor([1e6])])), strict=True)
    )


def test_its_predictions_are_those_of_protenix(golden, theirs, monkeypatch):
    monkeypatch.setattr(torch, "atan", whole.rounded_atan)  # of deletions, the one float32
    model, batch = from_protenix(theirs, CONFIG, torch.float64), whole.batch()
    want = {name: torch.from_numpy(x) for name, x in golden.items() if name != "names"}
    moves = zip(want["rotation"], want["translation"], want["noise"], strict=True)
    draws = [sampler.StepDraw(Move(turn, shift), noise) for turn, shift, noise in moves]
    with torch.no_grad():
        trunk = model(batch)
        prepared = model.diffusion.prepare(model.condition(batch, trunk))
        levels = edm.schedule(whole.STEPS, torch.device("cpu"), torch.float64)
        conditions = model.diffusion.levels(sampler.raised(levels), prepared)
        structures = sampler.sample(
            lambda x, sigma: model.diffusion(x, sigma, prepared, next(conditions)),
            levels, want["start"], draws, batch["atom_mask"],
        )  # fmt: skip
        found = {**trunk._asdict(), "distogram": model.distogram(trunk.z)}
        judged = [model.judge(batch, trunk, x)._asdict() for x in structures]
    found |= {name: torch.stack([each[name] for each in judged]) for name in judged[0]}
    for name, value in {**found, "coordinate": structures}.items():
        assert_close(value, want[name], 1e-11, name)


def test_scores_of_its_logits_are_those_of_protenix(golden):
    names = ("plddt", "ptm", "iptm", "ranking_score")
    of = {name: torch.from_numpy(golden[name]) for name in ("plddt", "pae", "coordinate")}
    for number, (plddt, pae, structure) in enumerate(zip(*of.values(), strict=True)):
        found = scores(whole.batch(), pae, expected_lddt(plddt), structure)
        want = {name: golden[f"score_{name}"][number] for name in whole.SCORES}
        # Protenix adds 1e-8 to the number of which it takes a mean.
        assert [found[name] for name in names] == pytest.approx([want[n] for n in names], rel=1e-8)
        alone = [row[place] for place, row in enumerate(found["chain_pair_iptm"])]
        assert alone == pytest.approx(want["chain_ptm"].tolist(), rel=1e-8)
        assert found["clash"] == bool(want["has_clash"])


def test_only_polymers_clash(golden):
    batch, pae = whole.batch(), torch.from_numpy(golden["pae"][0])
    in_one_place = torch.zeros(len(batch["atom_to_token"]), 3)
    for kind, clash in ((0, True), (3, False)):
        batch["molecule_type"] = torch.full_like(batch["molecule_type"], kind)
        assert scores(batch, pae, torch.ones(1), in_one_place)["clash"] == clash


def test_protenix_would_load_what_we_give_it(golden, theirs):
    given = to_protenix(from_protenix(theirs, CONFIG, torch.float64))
    assert set(golden["names"].tolist()) == {f"{n} {tuple(x.shape)}" for n, x in given.items()}
    assert all(torch.equal(given[name], value) for name, value in theirs.items())


def test_weights_whose_template_embedder_has_no_blocks_are_taken_without_it(theirs):
    """Those of Protenix v0.5.0 are such."""
    old = {name: x for name, x in theirs.items() if "template_embedder.pairformer" not in name}
    config = replace(CONFIG, templates=replace(CONFIG.templates, num_blocks=0))
    model = from_protenix({f"module.{name}": x for name, x in old.items()}, config, torch.float64)
    given = to_protenix(model)
    assert {name: x.shape for name, x in given.items()} == {n: x.shape for n, x in old.items()}
    for name, value in old.items():
        unused = name.startswith("template_embedder.")
        assert torch.equal(given[name], torch.zeros_like(value) if unused else value), name
    with pytest.raises(CheckpointError, match="no such tensor of Protenix"):
        from_protenix(theirs, config)


def test_other_bins_of_distances_are_refused(theirs):
    other = theirs | {BINS[0]: theirs[BINS[0]] + 1}
    with pytest.raises(CheckpointError, match=r"confidence_head\.lower_bins: other bins"):
        from_protenix(other, CONFIG)
