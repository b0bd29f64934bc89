"""Errors of predictions in the user's units, as sums over batches and ranks."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from bevatron.data.samples import MoleculeBatch
from bevatron.models.common.ranking import RankedSums, RankingSums
from bevatron.models.gpspp.config import Target, TargetKind
from bevatron.models.gpspp.losses import LossConfig, target_losses

NUM_BINS = 4096
"""Bins of logits; scores in one bin count as equal."""

NAMES: Mapping[TargetKind, tuple[str, ...]] = {
    "regression": ("mae", "rmse", "r2"),
    "binary": ("accuracy", "auroc", "ap"),
    "multiclass": ("accuracy",),
}
"""Metrics of a target, by its kind."""

MOMENTS = 6
"""Sums per target: weight, loss, absolute and squared error (or hits), label, its square."""


class PropertyMetrics(RankedSums):
    """Errors per target.

    Names, with ``gap`` for the target's: ``gap_mae``, ``gap_rmse`` (in the target's unit) and
    ``gap_r2``; ``gap_auroc``, ``gap_ap`` and ``gap_accuracy`` of a binary target;
    ``gap_accuracy`` of one with several classes; ``loss``, the mean of all targets' losses in
    normalised units. Metrics without any label are left out.

    Parameters
    ----------
    targets : what is predicted
    config : the loss
    modes
        Modes of `bevatron.models.gpspp.corruption.Mode`: the names of all but the first begin with
        ``MODE/``.
    """

    def __init__(
        self, targets: Sequence[Target], config: LossConfig, modes: Sequence[str] = ("2d",)
    ) -> None:
        self.targets, self.config, self.modes = tuple(targets), config, tuple(modes)
        shape = len(self.modes), len(self.targets)
        self._sums = torch.zeros(*shape, MOMENTS, dtype=torch.float64)
        self._binary = [t for t, target in enumerate(targets) if target.kind == "binary"]
        self._ranking = RankingSums(shape[0] * len(self._binary), NUM_BINS)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all metrics."""
        of_targets = [f"{each.name}_{what}" for each in self.targets for what in NAMES[each.kind]]
        prefixes = ["", *(f"{mode}/" for mode in self.modes[1:])]
        return tuple(f"{prefix}{name}" for prefix in prefixes for name in ("loss", *of_targets))

    def update(self, batch: MoleculeBatch, outputs: Mapping[str, Tensor]) -> None:
        """Add a batch; outputs of all but the first mode are named ``MODE/raw`` and so on."""
        self._sums = self._sums.to(batch.target_weight.device)
        for m, mode in enumerate(self.modes):
            prefix = "" if m == 0 else f"{mode}/"
            self._add(m, batch, outputs[f"{prefix}raw"], outputs[f"{prefix}prediction"])

    def compute(self) -> dict[str, float]:
        """Compute all metrics by name."""
        found: dict[str, float] = {}
        for m, mode in enumerate(self.modes):
            prefix = "" if m == 0 else f"{mode}/"
            losses = []
            for t, target in enumerate(self.targets):
                weight, loss, *_ = row = self._sums[m, t].tolist()
                if weight > 0:
                    losses.append(loss / weight)
                    found |= self._target(f"{prefix}{target.name}", m, t, target, row)
            if losses:
                found[f"{prefix}loss"] = sum(losses) / len(losses)
        return found

    def _add(self, mode: int, batch: MoleculeBatch, raw: Tensor, prediction: Tensor) -> None:
        weight = batch.target_weight.double()
        labels, raw = batch.targets.double(), raw.detach().double()
        losses = target_losses(raw, labels, self.targets, self.config)
        error = prediction.detach().double() - labels
        # Labels are centred: the variance of large numbers would cancel.
        centred = labels - torch.stack([labels.new_full((), t.mean) for t in self.targets])
        size, square = error.abs(), error.square()
        for t, target in enumerate(self.targets):
            if target.kind != "regression":
                hit = size[:, t] < 0.5
                size[:, t] = square[:, t] = hit.double()
        rows = torch.stack(
            [torch.ones_like(error), losses, size, square, centred, centred.square()], 2
        )
        rows = torch.where(weight[..., None] > 0, rows * weight[..., None], 0.0)
        self._sums[mode] += rows.sum(0)
        for place, t in enumerate(self._binary):
            start = sum(target.width for target in self.targets[:t])
            self._ranking.add(
                mode * len(self._binary) + place, raw[:, start], labels[:, t] > 0.5, weight[:, t]
            )

    def _target(
        self, name: str, mode: int, t: int, target: Target, row: list[float]
    ) -> dict[str, float]:
        weight, _, absolute, squared, label, label_squared = row
        if target.kind != "regression":
            found = {f"{name}_accuracy": absolute / weight}
            if target.kind == "binary":
                ranked = self._ranking.compute(mode * len(self._binary) + self._binary.index(t))
                if ranked is not None:
                    found[f"{name}_auroc"], found[f"{name}_ap"] = ranked
            return found
        found = {f"{name}_mae": absolute / weight, f"{name}_rmse": (squared / weight) ** 0.5}
        spread = label_squared - label**2 / weight
        if spread > 1e-12 * label_squared:
            found[f"{name}_r2"] = 1.0 - squared / spread
        return found
