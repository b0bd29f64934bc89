"""What a process holds of a step grows as its share of the pairs, not as all of them."""

from dataclasses import replace
from pathlib import Path

import complex_task
import numpy as np
import pytest
import tiny_model
import torch

from bevatron.kernels import use
from bevatron.models.alphafold2.losses import FINE_TUNING_WEIGHTS
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.task import AlphaFold2Task
from bevatron.models.alphafold3.model import AlphaFold3
from bevatron.models.alphafold3.task import AlphaFold3Task, StepOptions
from bevatron.models.common.folding import Checkpointing
from bevatron.parallel.axial import one_of
from bevatron.recipes.alphafold3.run import AlphaFold3Run
from bevatron.train.fused_optim import FusedAdamEMA
from bevatron.train.memory_plan import LiveBytes, plan_memory
from bevatron.train.run import Run

TOKENS = 2048
"""So many that nothing else counts, with an atom each."""


@pytest.fixture(scope="module", autouse=True)
def _no_update():
    """The update of weights holds nothing of pairs, and to plan it takes half of the time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedAdamEMA, "step", lambda _: None)
        yield


@pytest.fixture(scope="module")
def plans(shared, tmp_path_factory):
    """Bytes for each pair of tokens that a step needs, and those of every tensor, by processes."""
    index = tmp_path_factory.mktemp("components") / "index"
    crop = complex_task.crop_of_1pfe(shared, index).to("cpu", torch.float32)
    torch.manual_seed(0)
    model = AlphaFold3(complex_task.TINY)
    for module in model.modules():
        if hasattr(module, "checkpointing"):
            module.checkpointing = Checkpointing("all")
    task = AlphaFold3Task(1, [StepOptions(copies=16)], torch.bfloat16)
    settings = AlphaFold3Run.from_values({"train": {"device": "cpu"}}).settings
    run = Run(model, task, [None], {"tokens": np.array([1])}, Path("unused"), settings)
    sizes = {**crop.sizes, "tokens": TOKENS, "atoms": TOKENS, "rows": 32}
    shape = crop.padding.rounded([sizes[axis] for axis in crop.padding.names])
    tensors, note = set(), LiveBytes._note
    found = {}

    def noted(live, tensor):
        tensors.add(tensor.untyped_storage().nbytes() / TOKENS**2)
        note(live, tensor)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("bevatron.models.alphafold3.task.ROLLOUT_STEPS", 1)
        patch.setattr(LiveBytes, "_note", noted)
        for size in (1, 16):
            tensors.clear()
            with one_of(size):
                needed = plan_memory(run, crop, shape=shape, captured=False).activations
            found[size] = needed / TOKENS**2, max(tensors)
    return found


def test_a_step_needs_its_share_of_the_memory_for_pairs(plans):
    """And what is whole: 150 bytes for a pair, of 3,600 that one process needs."""
    assert plans[16][0] < plans[1][0] / 16 + 150


def test_no_tensor_of_alphafold2_is_of_all_pairs(chain, monkeypatch):
    """Of 16 processes; structure module and all losses of fine-tuning included."""
    tiny = tiny_model.TINY
    sizes = {
        name: replace(getattr(tiny, name), num_blocks=1)
        for name in ("evoformer", "extra_msa", "structure")
    }
    model = AlphaFold2(replace(tiny, **sizes))
    task = AlphaFold2Task(1, [replace(FINE_TUNING_WEIGHTS, tm=0.1)])
    settings = AlphaFold3Run.from_values({"train": {"device": "cpu"}}).settings
    run = Run(model, task, [None], {"tokens": np.array([1])}, Path("unused"), settings)
    tokens, largest, note = 256, [], LiveBytes._note
    axes = {**chain.sizes, "tokens": tokens}
    shape = chain.padding.rounded([axes[axis] for axis in chain.padding.names])

    def noted(live, tensor):
        largest.append(tensor.untyped_storage().nbytes() / tokens**2)
        note(live, tensor)

    monkeypatch.setattr(LiveBytes, "_note", noted)
    with one_of(16), use("reference"):
        plan_memory(run, chain, shape=shape, captured=False)
    assert max(largest) < 200, "bytes for each pair: distances of all atoms would take 784"


def test_no_tensor_holds_channels_of_all_pairs(plans):
    """Whole are masks, a block's bias of 4 heads and factor of 16 channels (32 bytes), atoms' 8."""
    assert plans[16][1] <= 32
