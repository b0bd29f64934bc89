"""The task of classifying nodes: batches, loss and metrics (`bevatron.task.Task`)."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bevatron.data.samples import GraphBatch, collate_graphs
from bevatron.models.graph_attention.config import LabelKind
from bevatron.models.graph_attention.metrics import NodeMetrics, counted_answers, counted_classes
from bevatron.task import Loss
from bevatron.typing import Arrays, IntArray


class NodeTask:
    """Cross entropy over the nodes of a batch whose labels count.

    Parameters
    ----------
    labels
        ``classes`` (softmax; a label of -1 or NaN is none) or ``yes_no`` (a sigmoid per label;
        binary labels are a single one).
    outputs : number of logits per node
    """

    allows_autocast: Literal[True] = True
    """Features and matmuls may be in 16 bits: scores, softmax and the loss stay in float32."""

    def __init__(self, labels: LabelKind, outputs: int) -> None:
        self.labels, self.outputs = labels, outputs

    def collate(
        self, samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]
    ) -> GraphBatch:
        """Collate graphs into a batch; a whole graph is not copied."""
        return collate_graphs(samples, indices, weights)

    def begin_epoch(self, epoch: int) -> None:
        """Do nothing: the loss stays the same."""

    def constants(self) -> tuple[()]:
        """Return nothing: the loss depends on tensors alone, so steps may be captured."""
        return ()

    def normalisers(self, batch: GraphBatch) -> dict[str, Tensor]:
        """Count the labels that the loss averages over."""
        if self.labels == "classes":
            count = (counted_classes(batch) >= 0).sum()
        else:
            count = counted_answers(batch)[1].sum()
        return {"cross_entropy": count.double()}

    def loss(
        self, model: torch.nn.Module, batch: GraphBatch, normalisers: Mapping[str, Tensor]
    ) -> Loss:
        """Compute the mean cross entropy; zero if no label of the whole step counts."""
        logits = model(batch)["logits"]
        if self.labels == "classes":
            total = F.cross_entropy(
                logits, counted_classes(batch), ignore_index=-1, reduction="sum"
            )
        else:
            answers, counts = counted_answers(batch)
            losses = F.binary_cross_entropy_with_logits(
                logits, answers.to(logits.dtype), reduction="none"
            )
            total = torch.where(counts, losses, 0.0).sum()
        count = normalisers["cross_entropy"].to(total).clamp(min=1.0)
        return Loss(total / count, {"cross_entropy": (total / count).detach()})

    def predict(self, model: torch.nn.Module, batch: GraphBatch) -> dict[str, Tensor]:
        """Compute logits and probabilities, [N, outputs]."""
        with torch.no_grad():
            logits = model(batch)["logits"].detach()
        probabilities = logits.softmax(1) if self.labels == "classes" else logits.sigmoid()
        return {"logits": logits, "probabilities": probabilities}

    def metrics(self) -> NodeMetrics:
        """Begin new running sums."""
        return NodeMetrics(self.labels, self.outputs)
