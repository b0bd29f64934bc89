"""Accuracy, area under the ROC curve and average precision, added up over batches and ranks.

Ranks exchange one vector of sums. Ranking measures need all scores, so besides exact scores of this
process there are counts of positives and negatives in fine bins of the score: a process alone
computes exactly, several compute from the bins (off by less than 1e-4 for smooth scores).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bevatron.data.samples import GraphBatch
from bevatron.models.common.ranking import ranking, ranking_of_scores
from bevatron.models.graph_attention.config import LabelKind
from bevatron.typing import FloatArray

BINS = 2**14
"""Bins of a score's rank in (0, 1)."""


class NodeMetrics:
    """Metrics of node classification over the labels that count.

    ``classes``: ``accuracy`` and ``loss``. ``yes_no``: ``roc_auc`` and ``average_precision``,
    means over the labels that have both kinds, ``accuracy`` at one half, ``loss``.

    Parameters
    ----------
    labels
        Kind of labels.
    outputs
        Number of logits per node.
    """

    def __init__(self, labels: LabelKind, outputs: int) -> None:
        self.labels, self.outputs = labels, outputs
        # Right answers, answers, sum of the loss.
        self._sums = torch.zeros(3, dtype=torch.float64)
        ranked = outputs if labels == "yes_no" else 0
        self._bins = torch.zeros(ranked, 2, BINS, dtype=torch.float64)
        self._scores: list[tuple[FloatArray, FloatArray]] | None = []

    def update(self, batch: GraphBatch, outputs: Mapping[str, Tensor]) -> None:
        """Add a batch."""
        logits = outputs["logits"].detach().double()
        if self.labels == "classes":
            self._add_classes(batch, logits)
        else:
            self._add_yes_no(batch, logits)

    def _add_classes(self, batch: GraphBatch, logits: Tensor) -> None:
        target = counted_classes(batch)
        counts = target >= 0
        right = ((logits.argmax(1) == target) & counts).sum()
        loss = torch.nn.functional.cross_entropy(logits, target, ignore_index=-1, reduction="sum")
        self._sums += torch.stack([right.double(), counts.sum().double(), loss]).cpu()

    def _add_yes_no(self, batch: GraphBatch, logits: Tensor) -> None:
        target, counts = counted_answers(batch)
        target = target.double()
        losses = torch.nn.functional.binary_cross_entropy_with_logits(
            logits, target, reduction="none"
        )
        right = ((logits > 0) == (target > 0.5)) & counts
        loss = torch.where(counts, losses, 0.0).sum()
        self._sums += torch.stack([right.sum().double(), counts.sum().double(), loss]).cpu()
        place = (_rank(logits) * BINS).long().clamp(0, BINS - 1)
        for label in range(self.outputs):
            for kind in (0, 1):
                chosen = place[counts[:, label] & ((target[:, label] > 0.5) == bool(kind)), label]
                self._bins[label, kind] += torch.bincount(chosen, minlength=BINS).double().cpu()
        if self._scores is not None:
            answers = torch.where(counts, target, torch.nan)
            self._scores.append((logits.cpu().numpy(), answers.cpu().numpy()))

    def sums(self) -> Tensor:
        """Return all running sums as one float64 vector; the first counts the processes."""
        return torch.cat([self._sums.new_ones(1), self._sums, self._bins.flatten()])

    def load_sums(self, sums: Tensor) -> None:
        """Replace the running sums; scores are exact only while they are of this process alone.

        All ranks must decide alike, also the one that happens to have all labels.
        """
        sums = sums.detach().double().cpu()
        if int(sums[0]) != 1:
            self._scores = None
        self._sums, self._bins = sums[1:4].clone(), sums[4:].reshape(self._bins.shape).clone()

    def compute(self) -> dict[str, float]:
        """Compute the metrics by name; one without any label is left out."""
        right, count, loss = self._sums.tolist()
        if count == 0:
            return {}
        found = {"accuracy": right / count, "loss": loss / count}
        ranked = [r for r in self._ranked() if r is not None]
        if ranked:
            found["roc_auc"] = float(np.mean([area for area, _ in ranked]))
            found["average_precision"] = float(np.mean([precision for _, precision in ranked]))
        return found

    def _ranked(self) -> list[tuple[float, float] | None]:
        if self.labels == "classes":
            return []
        if self._scores:
            scores = np.concatenate([s for s, _ in self._scores])
            answers = np.concatenate([a for _, a in self._scores])
            return [
                ranking_of_scores(scores[known, label], answers[known, label])
                for label in range(self.outputs)
                for known in [~np.isnan(answers[:, label])]
            ]
        return [ranking(*self._bins[label].numpy()) for label in range(self.outputs)]


def counted_classes(batch: GraphBatch) -> Tensor:
    """Classes of the nodes that count, -1 elsewhere, [N]."""
    labels = batch.labels
    if labels.ndim == 2:
        labels = labels[:, 0]
    if labels.is_floating_point():
        labels = torch.where(labels.isnan(), -1.0, labels).long()
    return torch.where(batch.mask, labels, -1)


def counted_answers(batch: GraphBatch) -> tuple[Tensor, Tensor]:
    """Return (answers, which of them count), [N, T]; 0 where there is none."""
    labels = batch.labels if batch.labels.ndim == 2 else batch.labels[:, None]
    known = ~labels.isnan() if labels.is_floating_point() else labels >= 0
    counts = known & batch.mask[:, None]
    return torch.where(counts, labels, 0), counts


def _rank(logits: Tensor) -> Tensor:
    """Map logits into (0, 1), finely around 0 and without end on either side."""
    return 0.5 + torch.atan(logits) / torch.pi
