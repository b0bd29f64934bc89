"""Accuracy, area under the ROC curve and average precision over batches and ranks.

Ranks exchange one vector of sums. Ranking measures are exact on one process; on several they are
computed from bins of the score (off by less than 1e-4 for smooth scores).
"""

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from bevatron.data.samples import GraphBatch
from bevatron.models.common.ranking import RankedSums, RankingSums
from bevatron.models.graph_attention.config import LabelKind

NUM_BINS = 2**14
"""Bins of a label's logits; scores in one bin count as equal."""


class NodeMetrics(RankedSums):
    """Metrics of node classification over the labels that count.

    ``classes``: ``accuracy`` and ``loss``. ``yes_no``: ``roc_auc`` and ``average_precision``,
    means over the labels that have both kinds, ``accuracy`` at one half, ``loss``.

    Parameters
    ----------
    labels : kind of labels
    outputs : number of logits per node
    """

    def __init__(self, labels: LabelKind, outputs: int) -> None:
        self.labels, self.outputs = labels, outputs
        # Right answers, answers, sum of the loss.
        self._sums = torch.zeros(3, dtype=torch.float64)
        ranked = outputs if labels == "yes_no" else 0
        self._ranking = RankingSums(ranked, NUM_BINS)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all metrics."""
        ranked = ("roc_auc", "average_precision") if self.labels == "yes_no" else ()
        return "accuracy", "loss", *ranked

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
        for label in range(self.outputs):
            self._ranking.add(label, logits[:, label], target[:, label] > 0.5, counts[:, label])

    def compute(self) -> dict[str, float]:
        """Compute the metrics by name; one without any label is left out."""
        right, count, loss = self._sums.tolist()
        if count == 0:
            return {}
        found = {"accuracy": right / count, "loss": loss / count}
        labels = range(self.outputs if self.labels == "yes_no" else 0)
        ranked = [r for label in labels if (r := self._ranking.compute(label)) is not None]
        if ranked:
            found["roc_auc"] = float(np.mean([area for area, _ in ranked]))
            found["average_precision"] = float(np.mean([precision for _, precision in ranked]))
        return found


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
