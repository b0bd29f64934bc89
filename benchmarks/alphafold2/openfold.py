"""OpenFold's block and whole training step, its own source with our weights, as a peer.

Its package is wherever it is installed. Its compiled softmax, which the extra alignment's rows
pass through, is replaced by PyTorch's.
"""

import sys
import time
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np
import torch
from benchmarks.common.arms import difference, free, peak_gib
from torch import Tensor

from bevatron import kernels
from bevatron.data.proteins.chain_batch import ChainBatch
from bevatron.models.alphafold2.config import AlphaFold2Config
from bevatron.models.alphafold2.inputs import model_inputs, reference_inputs
from bevatron.models.alphafold2.model import AlphaFold2
from bevatron.models.alphafold2.openfold_layout import openfold_name
from bevatron.models.alphafold2.task import AlphaFold2Task
from bevatron.train.run import Run

CLIP, EPS = 0.1, 1e-5
"""Of the gradient's norm and of Adam, as it trains."""


class _Softmax(ModuleType):
    """What its compiled module does, in place: the softmax of logits, and its gradient."""

    @staticmethod
    def forward_(logits: Tensor, rows: int, keys: int) -> None:  # noqa: ARG004
        logits.copy_(logits.softmax(-1))

    @staticmethod
    def backward_(weights: Tensor, gradient: Tensor, values: Tensor, *sizes: int) -> None:  # noqa: ARG004
        inner = gradient @ values.transpose(-1, -2)
        weights.mul_(inner - (inner * weights).sum(-1, keepdim=True))


def prepare_import() -> None:
    """Let its modules be imported without what was compiled for them."""
    sys.modules.setdefault("attn_core_inplace_cuda", _Softmax("attn_core_inplace_cuda"))


def block_with(weights: Mapping[str, Tensor], config: AlphaFold2Config) -> torch.nn.Module:
    """Make its Evoformer block with the weights of one of ours, where they are."""
    prepare_import()
    from openfold.model.evoformer import EvoformerBlock

    sizes = config.evoformer
    with torch.device(next(iter(weights.values())).device):
        block = EvoformerBlock(
            c_m=config.c_m,
            c_z=config.c_z,
            c_hidden_msa_att=sizes.head_width,
            c_hidden_opm=sizes.outer_width,
            c_hidden_mul=sizes.triangles.hidden,
            c_hidden_pair_att=sizes.triangles.head_width,
            no_heads_msa=sizes.num_heads,
            no_heads_pair=sizes.triangles.num_heads,
            transition_n=sizes.transition_factor,
            msa_dropout=sizes.dropout,
            pair_dropout=sizes.triangles.dropout,
            no_column_attention=False,
            opm_first=False,
            fuse_projection_weights=False,
            inf=1e9,
            eps=1e-8,
        )
    block.load_state_dict({openfold_name(k): v for k, v in weights.items()})
    return block


class OpenFoldStep:
    """Its model, loss, optimiser and averaged weights, under autocast, to bfloat16 as it trains.

    Parameters
    ----------
    ours
        Whose weights and device it takes; of published widths.
    """

    def __init__(self, ours: AlphaFold2) -> None:
        prepare_import()
        from openfold.config import model_config
        from openfold.model.model import AlphaFold
        from openfold.utils.exponential_moving_average import ExponentialMovingAverage
        from openfold.utils.loss import AlphaFoldLoss

        config = model_config("initial_training", train=True)
        sizes = config.model
        sizes.evoformer_stack.no_blocks = ours.config.evoformer.num_blocks
        sizes.extra_msa.extra_msa_stack.no_blocks = ours.config.extra_msa.num_blocks
        sizes.template.template_pair_stack.no_blocks = ours.config.templates.num_blocks
        self.device = next(ours.parameters()).device
        with torch.device(self.device):
            self.model = AlphaFold(config)
        self.model.load_state_dict({openfold_name(k): v for k, v in ours.state_dict().items()})
        self.loss = AlphaFoldLoss(config.loss)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.0, eps=EPS)
        self.averages = ExponentialMovingAverage(self.model, config.ema.decay)
        self.averages.to(self.device)

    def loss_of(
        self, batch: ChainBatch, passes: int, activations: torch.dtype = torch.bfloat16
    ) -> Tensor:
        """Compute the loss after so many passes; dropout is its own."""
        given = openfold_batch(batch, passes)
        with torch.autocast(self.device.type, activations):
            outputs = self.model(given)
            last = {name: value[..., -1] for name, value in given.items()}
            loss: Tensor = self.loss(outputs, last)
        return loss

    def train(self, batch: ChainBatch, passes: int) -> float:
        """Train one step and return its loss."""
        self.model.train()
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss_of(batch, passes)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.averages.update(self.model)
        return loss.item()

    def loss_without_dropout(self, batch: ChainBatch) -> float:
        """Compute the loss of one pass, nothing dropped."""
        rates = {m: m.p for m in self.model.modules() if isinstance(m, torch.nn.Dropout)}
        for module in rates:
            module.p = 0.0
        with torch.no_grad():
            found = self.loss_of(batch, 1).item()
        for module, rate in rates.items():
            module.p = rate
        return found


def openfold_batch(batch: ChainBatch, passes: int) -> dict[str, Any]:
    """Return the features of a sample as it takes them: a batch of one, cycles as the last axis."""
    given = batch.tensors()
    cycles = [model_inputs(given, number) for number in range(passes)]
    features = {name: torch.stack([each[name] for each in cycles], -1) for name in cycles[0]}
    targets = reference_inputs(given, passes - 1)
    for name in targets.keys() - features.keys():
        features[name] = targets[name][..., None].expand(*targets[name].shape, passes)
    return {name: value[None] for name, value in features.items()}


def measured_step(run: Run, turns: int, most_passes: int) -> dict[str, Any]:
    """Time whole steps, 1 pass to the most in turn; samples are made beforehand."""
    device = next(run.model.parameters()).device
    lead = 2  # the first without a pass that has no gradient, the second with one
    count = lead + most_passes * turns
    batches = [
        run.task.collate([run.train[i]], np.array([i]), [1.0]).to(device) for i in range(count)
    ]
    step = OpenFoldStep(run.model)
    losses = step.loss_without_dropout(batches[0]), exact_loss(run, batches[0])
    free()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    seconds = []
    for number, batch in enumerate(batches):
        began = time.perf_counter()
        step.train(batch, 1 + number % most_passes)
        seconds.append(time.perf_counter() - began)
    timed = np.reshape(seconds[lead:], (turns, most_passes))
    row: dict[str, Any] = {"arm": "OpenFold", "s/step": float(timed.mean())}
    for passes in range(most_passes):
        row[f"s, {passes} recyclings"] = float(np.median(timed[:, (passes - lead) % most_passes]))
    if device.type == "cuda":
        row["peak GiB"] = peak_gib()
    return row | {"loss off by": difference(losses[:1], losses[1:])}


def exact_loss(run: Run, batch: ChainBatch) -> float:
    """Compute our loss of one pass in plain PyTorch and float32, nothing dropped."""
    task = AlphaFold2Task(1, run.task.stages)  # type: ignore[attr-defined]
    run.model.eval()
    with torch.no_grad(), kernels.use("reference"):
        found = task.loss(run.model, batch, task.normalisers(batch)).total.item()
    run.model.train()
    return found
