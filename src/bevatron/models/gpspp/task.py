"""The task of learning molecular properties: batches, corruption, loss and errors of GPS++."""

from collections.abc import Hashable, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from bevatron.data.samples import MoleculeBatch, collate_molecules
from bevatron.errors import ConfigError
from bevatron.models.gpspp.config import GPSPlusPlusConfig
from bevatron.models.gpspp.corruption import CorruptionConfig, Inputs, Mode, corrupt, observe
from bevatron.models.gpspp.losses import (
    LossConfig,
    direction_loss_sum,
    feature_loss_sum,
    label_counts,
    target_losses,
    term_weights,
)
from bevatron.models.gpspp.metrics import PropertyMetrics
from bevatron.task import Loss
from bevatron.typing import Arrays, IntArray


class GPSPlusPlusTask:
    """Loss and metrics of a GPS++ (the protocol `bevatron.task.Task`).

    Raises ConfigError if there is no mode, or one twice.

    Parameters
    ----------
    model : hyper-parameters of the model: its targets, heads and vocabularies
    loss : the loss and its weights
    corruption : how inputs are masked and corrupted in training
    modes
        Visible part of molecules in validation and predictions: ``2d``, ``3d``, ``both``. With
        several, the outputs and metrics of all but the first are named ``MODE/...``.
    """

    allows_autocast: Literal[True] = True

    def __init__(
        self,
        model: GPSPlusPlusConfig,
        loss: LossConfig | None = None,
        corruption: CorruptionConfig | None = None,
        modes: Sequence[Mode] = ("2d",),
    ) -> None:
        self.model_config = model
        self.config = loss if loss is not None else LossConfig()
        self.corruption = corruption if corruption is not None else CorruptionConfig()
        self.modes = tuple(modes)
        known = {"2d", "3d", "both"}
        if not modes or not set(modes) <= known or len(set(modes)) != len(modes):
            raise ConfigError(f"modes: expected some of {sorted(known)}, got {list(modes)}")
        heads = {
            "nodes": model.noisy_nodes,
            "edges": model.noisy_edges,
            "directions": model.denoising,
        }
        self.weights = term_weights(self.config, heads)

    def collate(
        self, samples: Sequence[Arrays], indices: IntArray, weights: Sequence[float]
    ) -> MoleculeBatch:
        """Collate molecules into a batch."""
        return collate_molecules(samples, indices, weights)

    def begin_epoch(self, epoch: int) -> None:
        """Nothing changes from epoch to epoch."""

    def constants(self) -> Hashable:
        """Return the settings that a captured step holds as constants."""
        return self.config, self.corruption

    def normalisers(self, batch: MoleculeBatch) -> dict[str, Tensor]:
        """Count what each term averages over."""
        return label_counts(batch, self.model_config.targets, self.corruption.shares[1])

    def loss(
        self, model: torch.nn.Module, batch: MoleculeBatch, normalisers: Mapping[str, Tensor]
    ) -> Loss:
        """Corrupt a batch and compute the loss; each term is divided by the step's count.

        A term with nothing to average over in the whole step is zero.
        """
        config = self.model_config
        inputs = corrupt(
            batch,
            self.corruption,
            config.features,
            uses_positions=config.uses_positions,
            denoising="directions" in self.weights,
        )
        names = {"nodes": "node_logits", "edges": "edge_logits", "directions": "directions"}
        compute = ["raw", *(names[term] for term in self.weights if term in names)]
        outputs = model(batch, inputs=inputs, compute=compute)
        sums = self._sums(batch, inputs, outputs, normalisers)
        total = torch.zeros((), dtype=outputs["raw"].dtype, device=outputs["raw"].device)
        terms = {}
        for term, weight in self.weights.items():
            value = weight * sums[term]
            terms[term] = value.detach()
            total = total + value
        return Loss(total=total, terms=terms)

    def predict(self, model: torch.nn.Module, batch: MoleculeBatch) -> dict[str, Tensor]:
        """Compute predictions in every mode; see `GPSPlusPlus.forward` for what they are."""
        found: dict[str, Tensor] = {}
        for m, mode in enumerate(self.modes):
            inputs = observe(batch, mode)
            with torch.no_grad():
                outputs = model(batch, inputs=inputs, compute=("prediction", "raw"))
            prefix = "" if m == 0 else f"{mode}/"
            found |= {f"{prefix}{name}": value.detach() for name, value in outputs.items()}
        return found

    def metrics(self) -> PropertyMetrics:
        """Begin new running sums."""
        return PropertyMetrics(self.model_config.targets, self.config, self.modes)

    def _sums(
        self,
        batch: MoleculeBatch,
        inputs: Inputs,
        outputs: Mapping[str, Tensor],
        normalisers: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Compute every term before its weight."""
        config, raw = self.model_config, outputs["raw"]

        def mean(total: Tensor, name: str) -> Tensor:
            count = normalisers[name].to(raw.device)
            return total / torch.where(count > 0, count, 1.0).to(total.dtype)

        weight = batch.target_weight.to(raw.dtype)
        losses = target_losses(raw, batch.targets, config.targets, self.config)
        # Without a label there must be no gradient either, even of an infinite loss.
        totals = torch.where(weight > 0, losses * weight, 0.0).sum(0)
        means = [
            mean(total, f"target {t.name}") for total, t in zip(totals, config.targets, strict=True)
        ]
        sums = {"targets": torch.stack(means).mean()}
        features = config.features
        if "nodes" in self.weights:
            total = feature_loss_sum(
                outputs["node_logits"],
                batch.atom_features,
                features.atom_sizes,
                batch.graph_weight[batch.graph],
            )
            sums["nodes"] = mean(total, "nodes")
        if "edges" in self.weights:
            total = feature_loss_sum(
                outputs["edge_logits"],
                batch.bond_features,
                features.bond_sizes,
                batch.graph_weight[batch.edge_graph],
            )
            sums["edges"] = mean(total, "edges")
        if "directions" in self.weights and inputs.position_noise is not None:
            only_3d = inputs.only_3d
            assert only_3d is not None
            total = direction_loss_sum(
                outputs["directions"],
                inputs.position_noise,
                only_3d[batch.graph],
                batch.graph_weight[batch.graph],
            )
            sums["directions"] = mean(total, "directions")
        return sums
