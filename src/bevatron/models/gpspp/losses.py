"""Losses of GPS++: targets, reconstructed features (noisy nodes and edges), directions of noise.

Every function sums over a batch what `label_counts` counts, so that a step's loss is one mean over
all its batches. With n the normalised label and y the network's number:

==============  ================================================================
targets         ``l1`` |y - n|, ``mse`` (y - n)^2, ``huber``; cross-entropy of a
                binary target or one of several classes; mean over molecules with
                a label, then over targets
nodes, edges    cross-entropy of each feature; mean over features, then atoms or
                directed edges
directions      1 - cos(u, noise); over atoms of molecules seen in 3D only
==============  ================================================================
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from bevatron.data.samples import MoleculeBatch
from bevatron.errors import ConfigError
from bevatron.models.gpspp.config import Target
from bevatron.models.gpspp.vocabulary import membership_on, starts_on


@dataclass(frozen=True)
class LossConfig:
    """The loss and its weights.

    Attributes
    ----------
    regression : loss of numeric targets, see the table of this module
    huber_delta : error at which ``huber`` turns from squared to absolute, in normalised units
    target_weight : weight of the targets
    node_weight : weight of noisy nodes, if the model has that head
    edge_weight : weight of noisy edges, likewise
    denoising_weight : weight of the direction of the noise on positions, likewise
    """

    regression: Literal["l1", "mse", "huber"] = "l1"
    huber_delta: float = 1.0
    target_weight: float = 1.0
    node_weight: float = 1.2
    edge_weight: float = 1.2
    denoising_weight: float = 1.0

    def __post_init__(self) -> None:
        for name in ("target_weight", "node_weight", "edge_weight", "denoising_weight"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}: expected 0 or more, got {getattr(self, name)}")
        if self.huber_delta <= 0:
            raise ConfigError(f"huber_delta: expected above 0, got {self.huber_delta}")


def label_counts(
    batch: MoleculeBatch, targets: Sequence[Target], share_only_3d: float
) -> dict[str, Tensor]:
    """Count what each term averages over.

    The molecules seen in 3D only are drawn later, so ``directions`` counts their expected number of
    atoms.
    """
    weight = batch.graph_weight.double()
    atoms = batch.graph_ptr.diff() * weight
    labels = batch.target_weight.sum(0, dtype=torch.float64).unbind()
    return {f"target {t.name}": count for t, count in zip(targets, labels, strict=True)} | {
        "nodes": atoms.sum(),
        "edges": weight[batch.edge_graph].sum(),
        "directions": share_only_3d * (atoms * batch.has_positions).sum(),
    }


def target_losses(
    raw: Float[Tensor, "G W"],
    labels: Float[Tensor, "G T"],
    targets: Sequence[Target],
    config: LossConfig,
) -> Float[Tensor, "G T"]:
    """Compute every molecule's loss of every target, whether it has a label or not."""
    columns, start = [], 0
    for t, target in enumerate(targets):
        own, label = raw[:, start : start + target.width], labels[:, t].to(raw.dtype)
        start += target.width
        if target.kind == "multiclass":
            columns.append(F.cross_entropy(own, label.long(), reduction="none"))
        elif target.kind == "binary":
            columns.append(F.binary_cross_entropy_with_logits(own[:, 0], label, reduction="none"))
        else:
            error = own[:, 0] - (label - target.mean) / target.std
            columns.append(_regression(error, config))
    return torch.stack(columns, 1)


def _regression(error: Tensor, config: LossConfig) -> Tensor:
    if config.regression == "l1":
        return error.abs()
    if config.regression == "mse":
        return error.square()
    zero = torch.zeros_like(error)
    return F.huber_loss(error, zero, reduction="none", delta=config.huber_delta)


def feature_loss_sum(
    logits: Float[Tensor, "M V"],
    features: Int[Tensor, "M F"],
    sizes: tuple[int, ...],
    weight: Float[Tensor, " M"],
) -> Float[Tensor, ""]:
    """Sum the mean cross-entropy of each row's features over rows, in at least float32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    found = logits.gather(1, features + starts_on(sizes, logits.device))
    losses = (feature_log_sums(logits, sizes) - found).sum(1)
    return (losses * weight.to(losses)).sum() / len(sizes)


def feature_log_sums(logits: Float[Tensor, "M V"], sizes: tuple[int, ...]) -> Float[Tensor, "M F"]:
    """Compute the log of the sum of exponentials of every feature's logits.

    The sums of all features are one matmul: a few kernel launches in total, not per feature.
    """
    member = membership_on(sizes, logits.device).to(logits.dtype)
    with torch.autocast(logits.device.type, enabled=False):
        parts = logits.detach().split(list(sizes), 1)
        top = torch.stack([part.amax(1) for part in parts], 1)
        owner = member.argmax(1)
        return top + torch.log(torch.exp(logits - top[:, owner]) @ member)


def direction_loss_sum(
    directions: Float[Tensor, "N 3"],
    noise: Float[Tensor, "N 3"],
    counts: Bool[Tensor, " N"],
    weight: Float[Tensor, " N"],
) -> Float[Tensor, ""]:
    """Sum 1 - cos over the atoms that count."""
    cosine = F.cosine_similarity(directions, noise.to(directions), dim=1, eps=1e-6)
    return ((1.0 - cosine) * (weight * counts).to(directions)).sum()


def term_weights(config: LossConfig, heads: Mapping[str, bool]) -> dict[str, float]:
    """Return the factors of the terms that a model with these heads has."""
    weights = {
        "targets": config.target_weight,
        "nodes": config.node_weight,
        "edges": config.edge_weight,
        "directions": config.denoising_weight,
    }
    return {name: weight for name, weight in weights.items() if weight and heads.get(name, True)}
