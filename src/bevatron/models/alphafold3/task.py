"""The task of AlphaFold3: its loss on noisy copies, its metrics on sampled structures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bevatron.data.proteins.complex_batch import ComplexBatch, collate_complex
from bevatron.errors import ConfigError
from bevatron.models.alphafold3.confidence import ConfidenceHead, ConfidenceLogits
from bevatron.models.alphafold3.losses import LossWeights, Term, total_loss
from bevatron.models.alphafold3.metrics import ComplexMetrics
from bevatron.models.alphafold3.model import AlphaFold3, Representation
from bevatron.models.alphafold3.noising import draw_copies, noisy_copies
from bevatron.models.alphafold3.permutation import permute_truth
from bevatron.models.common.folding import recomputed
from bevatron.models.common.folding.normal import SeededNormal
from bevatron.models.common.hyper_parameters import check_ranges
from bevatron.parallel.axial import own, own_rows
from bevatron.task import Loss, StepNumbers

ROLLOUT_STEPS = 20
"""Of the sampling of a training step, whose structure the confidence head judges."""

VALIDATION_SEED = 1

STREAM = 2**20
"""Calls between the random numbers of the copies and those of the rollout."""


@dataclass(frozen=True)
class StepOptions:
    """Losses of the steps of a stage.

    Attributes
    ----------
    copies : noisy copies of each structure (the diffusion batch size)
    confidence_every : steps between rollouts that train the confidence head; 0 = never
    loss : weights of the terms
    """

    copies: int = 48
    confidence_every: int = 1
    loss: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        check_ranges(self, [("copies", 1, math.inf), ("confidence_every", 0, math.inf)])
        if not self.loss.of_trunk and self.confidence_every != 1:
            raise ConfigError(
                "confidence_every: expected 1 in a stage that trains the confidence head alone, "
                f"got {self.confidence_every}"
            )


class AlphaFold3Task:
    """Loss and metrics of AlphaFold3.

    Parameters
    ----------
    cycles : a step has 1 to this many passes through the trunk, the same number on all ranks
    stages : by the number of the stage
    activations
        Type of the activations of trunk and diffusion; weights, coordinates, losses and the
        confidences stay in float32. None = the type of the weights.
    validation_steps : steps of the sampling in validation
    """

    def __init__(
        self,
        cycles: int,
        stages: Sequence[StepOptions] = (StepOptions(),),
        activations: torch.dtype | None = None,
        validation_steps: int = 20,
    ) -> None:
        self.most_cycles, self.stages = cycles, tuple(stages)
        self.activations, self.validation_steps = activations, validation_steps
        self.cycles, self.stage, self.with_confidence = cycles, 0, True
        self._step_seed = 0
        self._seeds: dict[torch.device, Tensor] = {}

    collate = staticmethod(collate_complex)

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: all changes follow from the step."""

    def begin_step(self, numbers: StepNumbers) -> Mapping[str, int]:
        """Draw the passes of the step and the seed of its noise.

        The seed is a tensor at a fixed address, which a captured step reads again.
        """
        self.stage = min(numbers.stage, len(self.stages) - 1)
        every = self.options.confidence_every
        self.with_confidence = bool(every) and numbers.step % every == 0
        self.cycles = 1 + numbers.draw("cycles", below=self.most_cycles)
        self._step_seed = numbers.draw("noise and dropout")
        for seed in self._seeds.values():
            seed.fill_(self._step_seed)
        return {"cycles": self.cycles, "confidence": int(self.with_confidence)}

    @property
    def options(self) -> StepOptions:
        """The losses of the stage's steps."""
        return self.stages[self.stage]

    def constants(self) -> int:
        """Return the stage, on which the loss depends besides tensors: steps may be captured."""
        return self.stage

    def normalisers(self, batch: ComplexBatch) -> dict[str, Tensor]:
        """Count the structures."""
        return {"structures": batch.weight.double()}

    def loss(self, model: Any, batch: ComplexBatch, normalisers: Mapping[str, Tensor]) -> Loss:
        """Compute the mean loss of structures."""
        given = batch.tensors()
        seed = given["seed"] ^ self._seed_on(batch.seed.device)
        weights = self.options.loss
        with torch.set_grad_enabled(torch.is_grad_enabled() and weights.of_trunk):
            trunk = model(given, self.cycles, seed if model.training else None, self.activations)
            shared = model.condition(given, trunk)
        truth: Mapping[str, Tensor] = given
        confidences: dict[str, Term] = {}
        if self.with_confidence:
            normal = SeededNormal(seed, calls=STREAM)
            structure = model.sample(given, shared, 1, ROLLOUT_STEPS, normal)[0]
            position, resolved = permute_truth(structure, given)
            truth = {**given, "position": position, "resolved": resolved}
        # In front of the confidences: the backward pass comes to it last, and holds no gradient of
        # the trunk's pairs while it goes through the pair blocks of the confidence head.
        distogram = self._distogram_terms(model, truth, trunk.z) if weights.distogram else {}
        if self.with_confidence:
            confidences = self._confidence_terms(model, truth, trunk, structure)
        terms: dict[str, Term] = {}
        if weights.diffusion:
            draw = draw_copies((self.options.copies, len(given["atom_mask"])), SeededNormal(seed))
            noisy = noisy_copies(truth["position"], truth["resolved"], draw)
            denoised = model.diffusion(own_rows(noisy.x), own(noisy.sigma, -1), shared)
            terms = total_loss({"denoised": denoised, "sigma": noisy.sigma}, truth, weights)
        terms = terms | distogram | confidences
        count = normalisers["structures"].clamp(min=1.0)
        parts = {name: term.sum / count.to(term.sum.dtype) for name, term in terms.items()}
        return Loss(torch.stack([*parts.values()]).sum(), {n: p.detach() for n, p in parts.items()})

    def _distogram_terms(
        self, model: Any, truth: Mapping[str, Tensor], z: Tensor
    ) -> dict[str, Term]:
        def terms(z: Tensor) -> dict[str, Term]:
            return total_loss({"distogram": _wide(model.distogram(z))}, truth, self.options.loss)

        return recomputed(model.trunk.pairformer.checkpointing, terms)(z)

    def _confidence_terms(
        self, model: Any, truth: Mapping[str, Tensor], trunk: Representation, structure: Tensor
    ) -> dict[str, Term]:
        head: ConfidenceHead = model.confidence

        def terms(s: Tensor, z: Tensor) -> dict[str, Term]:
            outputs = _of_structure(structure, head.logits(truth, s, z))
            return total_loss(outputs, truth, self.options.loss)

        represented = head.represent(truth, *trunk, structure)
        return recomputed(head.pairformer.checkpointing, terms)(*represented)

    def predict(self, model: Any, batch: ComplexBatch) -> dict[str, Tensor]:
        """Sample one structure and judge it; seeds are those of the samples."""
        given = batch.tensors()
        with torch.no_grad():
            trunk = model(given, self.most_cycles, None, self.activations)
            shared = model.condition(given, trunk)
            normal = SeededNormal(given["seed"] ^ VALIDATION_SEED)
            rollout = model.sample(given, shared, 1, self.validation_steps, normal)
            position, resolved = permute_truth(rollout[0], given)
            return {
                "distogram": _wide(model.distogram(trunk.z)),
                "position": position,
                "truth_resolved": resolved,
                **judged(model, given, trunk, rollout[0]),
            }

    def _seed_on(self, device: torch.device) -> Tensor:
        if device not in self._seeds:
            self._seeds[device] = torch.full((), self._step_seed, device=device)
        return self._seeds[device]

    def metrics(self) -> ComplexMetrics:
        """Begin new running sums."""
        return ComplexMetrics()


def judged(
    model: AlphaFold3, given: Mapping[str, Tensor], trunk: Representation, structure: Tensor
) -> dict[str, Tensor]:
    """Return a structure and the confidence head's logits in the form that the loss takes."""
    return _of_structure(structure, model.judge(given, trunk, structure))


def _of_structure(structure: Tensor, logits: ConfidenceLogits) -> dict[str, Tensor]:
    of_one = {name: x[None] for name, x in logits._asdict().items()}
    return {"rollout": structure[None], **of_one}


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
