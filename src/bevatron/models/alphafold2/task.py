"""The task of AlphaFold2: its loss after a drawn number of cycles, its metrics after all."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from bevatron.data.proteins.chain_batch import ChainBatch, collate_chain
from bevatron.models.alphafold2.inputs import model_inputs, reference_inputs
from bevatron.models.alphafold2.losses import LossWeights, loss_terms
from bevatron.models.alphafold2.metrics import ChainMetrics
from bevatron.parallel.axial import all_rows
from bevatron.task import Loss, StepNumbers

CYCLES = 4
"""Passes of a step at most: 0 to 3 recyclings."""


class AlphaFold2Task:
    """Loss and metrics of AlphaFold2.

    Parameters
    ----------
    cycles : a step has 1 to this many passes, the same number on all ranks; validation has all
    stages : weights of the loss by the number of the stage
    activations
        Type of alignment and pair; structure module, heads and losses stay in float32. None = the
        type of the weights.
    """

    def __init__(
        self,
        cycles: int = CYCLES,
        stages: Sequence[LossWeights] = (LossWeights(),),
        activations: torch.dtype | None = None,
    ) -> None:
        self.most_cycles, self.stages, self.activations = cycles, tuple(stages), activations
        self.cycles, self.weights = cycles, self.stages[0]
        self._step_seed = 0
        self._seeds: dict[torch.device, Tensor] = {}

    collate = staticmethod(collate_chain)

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: what changes follows from the step."""

    def begin_step(self, numbers: StepNumbers) -> Mapping[str, int]:
        """Draw the passes of the step and the seed of its dropout, a tensor that stays in place."""
        self.weights = self.stages[min(numbers.stage, len(self.stages) - 1)]
        self.cycles = 1 + numbers.draw("cycles", below=self.most_cycles)
        self._step_seed = numbers.draw("dropout")
        for seed in self._seeds.values():
            seed.fill_(self._step_seed)
        return {"cycles": self.cycles}

    def constants(self) -> LossWeights:
        """Return the weights of the stage, which the loss depends on: steps may be captured."""
        return self.weights

    def normalisers(self, batch: ChainBatch) -> dict[str, Tensor]:
        """Count the chains."""
        return {"chains": batch.weight.double()}

    def loss(self, model: Any, batch: ChainBatch, normalisers: Mapping[str, Tensor]) -> Loss:
        """Compute the mean loss of chains."""
        given = batch.tensors()
        cycles = [model_inputs(given, number) for number in range(self.cycles)]
        seed = given["seed"] ^ self._seed_on(batch.seed.device) if model.training else None
        with self._precision(given["aatype"]):
            outputs = model(cycles, seed)
        reference = reference_inputs(given, self.cycles - 1)
        terms = loss_terms(outputs, reference, self.weights)
        share = batch.weight / normalisers["chains"].clamp(min=1.0)
        parts = {name: term * share.to(term.dtype) for name, term in terms.items()}
        return Loss(torch.stack([*parts.values()]).sum(), {n: p.detach() for n, p in parts.items()})

    def predict(self, model: Any, batch: ChainBatch) -> dict[str, Tensor]:
        """Predict a structure after all cycles; the terms of the loss are there as well."""
        given = batch.tensors()
        cycles = [model_inputs(given, number) for number in range(self.most_cycles)]
        with torch.no_grad(), self._precision(given["aatype"]):
            outputs = model(cycles)
        with torch.no_grad():
            reference = reference_inputs(given, self.most_cycles - 1)
            terms = loss_terms(outputs, reference, self.weights)
        found = {name: outputs[name] for name in ("final_atom_positions", "lddt_logits")}
        for name in ("distogram_logits", "tm_logits"):
            if name in outputs:
                found[name] = all_rows(outputs[name])
        return found | {f"loss_{name}": term for name, term in terms.items()}

    def metrics(self) -> ChainMetrics:
        """Begin new running sums."""
        return ChainMetrics()

    def _seed_on(self, device: torch.device) -> Tensor:
        if device not in self._seeds:
            self._seeds[device] = torch.full((), self._step_seed, device=device)
        return self._seeds[device]

    def _precision(self, like: Tensor) -> AbstractContextManager[None]:
        chosen = self.activations
        # No cache: a weight that a cycle without gradient has rounded would have none in the last.
        return torch.autocast(
            like.device.type, chosen, enabled=chosen is not None, cache_enabled=False
        )
