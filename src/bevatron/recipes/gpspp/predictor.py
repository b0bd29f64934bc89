"""Trained GPS++ models in use: properties and embeddings of molecules, one model or several."""

import copy
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bevatron.data.dataset import Dataset, InMemory, Subset
from bevatron.data.ragged import pointer
from bevatron.data.readers.molecules import MoleculeReader, molecules_in_memory
from bevatron.data.store.store import Store
from bevatron.errors import ConfigError, DataError, OutOfMemoryError
from bevatron.models.gpspp import (
    GPSPlusPlus,
    GPSPlusPlusConfig,
    GPSPlusPlusTask,
    Mode,
    Target,
    observe,
)
from bevatron.models.gpspp.features import Featurizer
from bevatron.recipes.devices import announce, device_to_use
from bevatron.recipes.finite import check_finite
from bevatron.recipes.gpspp.data import molecule_sizes
from bevatron.recipes.gpspp.domain import differences
from bevatron.recipes.gpspp.finetune import trained_model
from bevatron.recipes.gpspp.stores import check_molecules, prepare_molecules
from bevatron.recipes.kinds import check_distinct
from bevatron.train.evaluate import in_eval_mode, ordered_batches, predict
from bevatron.train.settings import BatchConfig
from bevatron.typing import Array, FloatArray, IntArray

Precision = Literal["float32", "float64", "bfloat16"]

IN_PROCESS = 2000
"""Maximum number of molecules whose features are computed in this process."""

PAIRS_PER_ATOM = 32
"""Capacity of a batch; a larger molecule is a batch of its own."""

Molecules = Sequence[Any] | MoleculeReader | Store
"""SMILES and RDKit molecules (None or NaN for what is none), a reader, or a prepared store."""


@dataclass(frozen=True)
class MoleculePredictions:
    """Predictions of one or several models for molecules, in their order.

    Attributes
    ----------
    targets : the predicted properties
    values : [n, T]
        Numbers in the target's unit, the probability of a binary target, the most probable class
        of one with several; of several models their mean. NaN for rows that are not usable
        molecules.
    spread : [n, T] or None
        Standard deviation over several models (of a multiclass target: of that class's
        probability).
    probabilities : probabilities of multiclass targets by name, [n, classes]
    smiles : as given, or written by RDKit
    reason
        Why there is no prediction, what was left out of a molecule, and in what it is outside the
        data that a model was trained on; else empty.
    seen_3d : [n] bool
        Whether positions were seen.
    outside : [n] bool
        Whether a molecule is outside the data that a model was trained on: an element that is not
        in them, more or fewer heavy atoms.
    """

    targets: tuple[Target, ...]
    values: FloatArray
    spread: FloatArray | None
    probabilities: dict[str, FloatArray]
    smiles: list[str]
    reason: list[str]
    seen_3d: Any
    outside: Any

    def of(self, name: str) -> FloatArray:
        """Return the predictions of one target, [n]."""
        names = [target.name for target in self.targets]
        if name not in names:
            raise ConfigError(f"there is no target '{name}' (known: {', '.join(names)})")
        return self.values[:, names.index(name)]

    def __len__(self) -> int:
        return len(self.values)


@dataclass(frozen=True)
class Embeddings:
    """Embeddings of molecules, from which a model reads out properties.

    Attributes
    ----------
    graph : [n, C]
        Sum over the last nodes; NaN for rows that are not usable molecules.
    nodes : [N, C] or None
        One row per heavy atom, molecule after molecule, in the order of the SMILES.
    atom_ptr : [n + 1]
        Offsets of the molecules' atoms; an unusable molecule has none.
    smiles, reason : as in `MoleculePredictions`
    """

    graph: FloatArray
    nodes: FloatArray | None
    atom_ptr: IntArray
    smiles: list[str]
    reason: list[str]


class MoleculePredictor:
    """One model or an ensemble, ready for predictions.

    Raises CheckpointError if a folder holds no GPS++; ConfigError if the models have different
    targets, or the device cannot be used.

    Parameters
    ----------
    models : runs, model folders or models; of several, with the same targets, the mean is predicted
    device : ``auto`` (a GPU if there is one), ``cpu``, ``cuda``, ``cuda:1``
    precision : ``float32``, ``float64``, or ``bfloat16`` (matmuls only)
    mode
        Inputs: ``2d`` (SMILES are enough), ``3d`` or ``both``; a molecule without positions
        is always treated as 2D.
    capacity : maximum number of atoms per batch; a larger molecule is a batch of its own
    workers : processes that compute features; all usable cores by default

    Examples
    --------
    >>> from bevatron.models.gpspp import build
    >>> predictor = MoleculePredictor(build("gpspp-4", num_layers=1))
    >>> found = predictor.predict(["CCO", "no molecule", "C"])
    >>> found.values.shape, [bool(reason) for reason in found.reason]
    ((3, 1), [False, True, False])
    """

    def __init__(
        self,
        models: Path | str | GPSPlusPlus | Sequence[Path | str | GPSPlusPlus],
        *,
        device: str = "auto",
        precision: Precision = "float32",
        mode: Mode = "2d",
        capacity: int = 4096,
        workers: int | None = None,
    ) -> None:
        single = isinstance(models, Path | str | GPSPlusPlus)
        given: Sequence[Any] = [models] if single else list(models)  # type: ignore[arg-type]
        if not given:
            raise ConfigError("models: expected at least one run or model folder")
        check_distinct(given)
        dtype = torch.float64 if precision == "float64" else torch.float32
        self.device, self.precision, self.dtype = device_to_use(device), precision, dtype
        announce(self.device, precision)
        self.mode, self.capacity, self.workers = mode, capacity, workers
        names = [str(m) if not isinstance(m, GPSPlusPlus) else "the model" for m in given]
        # A given model is copied: moving it would change it for the caller.
        loaded = [
            # In this precision the mean and spread of the labels are exact.
            copy.deepcopy(m) if isinstance(m, GPSPlusPlus) else trained_model(m, dtype)
            for m in given
        ]
        self.models = [model.to(self.device, dtype).eval() for model in loaded]
        self.targets = self.models[0].config.targets
        for name, model in zip(names, self.models, strict=True):
            if _kinds(model.config.targets) != _kinds(self.targets):
                raise ConfigError(
                    f"{name}: predicts {_listed(model.config.targets)}, {names[0]} "
                    f"{_listed(self.targets)}; models of one ensemble need the same targets"
                )
            if mode != "2d" and not model.config.uses_positions:
                raise ConfigError(f"{name}: uses no positions, so mode '{mode}' is not possible")
            known = model.config.trained_on
            if mode != "2d" and known is not None and not known.positions:
                raise ConfigError(
                    f"{name}: was trained without 3D structures, its layers for positions are as "
                    f"they began; predict with mode '2d' instead of '{mode}'"
                )

    def predict(self, molecules: Molecules) -> MoleculePredictions:
        """Predict properties.

        Parameters
        ----------
        molecules
            SMILES and RDKit molecules (with their conformers), a reader or a prepared store. Rows
            that cannot be used keep their place and get a reason.
        """
        sums: list[list[FloatArray]] = []
        smiles: list[str] = []
        unusable: list[str] = []
        reasons: list[list[str]] = []
        seen: Any = np.zeros(0, dtype=bool)
        for members in self._by_features():
            with self._prepared(molecules, members[0].config) as dataset:
                sums += [self._values(model, dataset) for model in members]
                smiles, unusable = _texts(dataset, "smiles"), _texts(dataset, "reason")
                reasons += [differences(dataset, model.config) for model in members]
                seen = dataset.lengths("positions") > 0
        values, spread, probabilities = _joined(sums, self.targets)
        outside = np.array([any(each) for each in zip(*reasons, strict=True)], dtype=bool)
        return MoleculePredictions(
            self.targets,
            values,
            spread,
            probabilities,
            smiles,
            _listed_reasons([unusable, *reasons]),
            seen & (self.mode != "2d"),
            outside,
        )

    def embed(self, molecules: Molecules, *, atoms: bool = False) -> Embeddings:
        """Compute the embeddings of molecules by the first model.

        Parameters
        ----------
        molecules : as for `predict`
        atoms : also return those of atoms
        """
        model = self.models[0]
        width = model.config.node_width
        compute = ["graph_embedding", *(["node_embedding"] if atoms else [])]
        with self._prepared(molecules, model.config) as dataset:
            sizes = molecule_sizes(dataset)
            usable = np.flatnonzero(sizes["atoms"] > 0)
            graph = np.full((len(dataset), width), np.nan)
            nodes = []
            task = GPSPlusPlusTask(model.config)
            chosen = Subset(dataset, usable)
            with in_eval_mode(model), torch.no_grad(), self._arithmetic():
                for indices, weights in ordered_batches(molecule_sizes(chosen), self._limits()):
                    samples = [chosen[int(i)] for i in indices]
                    batch = task.collate(samples, indices, list(weights)).to(
                        self.device, self.dtype
                    )
                    found = model(batch, inputs=observe(batch, self.mode), compute=compute)
                    graph[usable[indices]] = found["graph_embedding"].double().cpu().numpy()
                    if atoms:
                        nodes.append(found["node_embedding"].double().cpu().numpy())
            _check_finite(dataset, usable, graph, ["embedding"] * width)
            offsets = pointer(sizes["atoms"])
            every = np.concatenate(nodes) if nodes else np.zeros((0, width))
            reasons = [_texts(dataset, "reason"), differences(dataset, model.config)]
            return Embeddings(
                graph,
                every if atoms else None,
                offsets,
                _texts(dataset, "smiles"),
                _listed_reasons(reasons),
            )

    def _by_features(self) -> list[list[GPSPlusPlus]]:
        groups: dict[tuple[str, int], list[GPSPlusPlus]] = {}
        for model in self.models:
            config = model.config
            groups.setdefault((config.feature_set, config.features_version), []).append(model)
        return list(groups.values())

    def _limits(self) -> dict[str, int]:
        return {"atoms": self.capacity, "pairs": PAIRS_PER_ATOM * self.capacity}

    def _arithmetic(self) -> Any:
        narrow = self.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16) if narrow else nullcontext()

    @contextmanager
    def _prepared(self, molecules: Molecules, model: GPSPlusPlusConfig) -> Iterator[Dataset]:
        """Compute features: of a few molecules in memory, of many by workers in a store."""
        feature_set, version = model.feature_set, model.features_version
        if isinstance(molecules, Store):
            yield check_molecules(molecules, feature_set, version)
            return
        if isinstance(molecules, str):
            raise DataError("molecules: expected a list of SMILES, got a single string")
        reader = (
            molecules if isinstance(molecules, MoleculeReader) else molecules_in_memory(molecules)
        )
        if reader.num_samples <= IN_PROCESS:
            raw = list(reader.read(0, reader.num_samples))
            yield _Molecules(Featurizer(feature_set, version).many(raw), reader.describe)
            return
        with tempfile.TemporaryDirectory(prefix="bevatron-") as scratch:
            out = Path(scratch) / "store"
            yield prepare_molecules(
                reader, out, feature_set, workers=self.workers, features_version=version
            )

    def _values(self, model: GPSPlusPlus, dataset: Dataset) -> list[FloatArray]:
        """By target: numbers or probabilities of one model, [n] or [n, classes]."""
        usable = np.flatnonzero(dataset.lengths("atom_features") > 0)
        widths = [target.width for target in self.targets]
        every = np.full((len(dataset), sum(widths)), np.nan)
        if len(usable):
            chosen = Subset(dataset, usable)
            task = GPSPlusPlusTask(model.config, modes=(self.mode,))
            parts = []
            try:
                with self._arithmetic():
                    for _, outputs in predict(
                        task,
                        model,
                        chosen,
                        molecule_sizes(chosen),
                        batch=BatchConfig(capacity=self._limits()),
                        device=self.device,
                        dtype=self.dtype,
                    ):
                        parts.append(_numbers(outputs, model.config.targets))
            except torch.OutOfMemoryError as error:
                raise OutOfMemoryError(
                    f"{self.device} ran out of memory; lower the capacity (now {self.capacity} "
                    "atoms)"
                ) from error
            every[usable] = np.concatenate(parts)
            names = [target.name for target in self.targets for _ in range(target.width)]
            _check_finite(dataset, usable, every, names)
        columns = np.split(every, np.cumsum(widths)[:-1], axis=1)
        return [c if c.shape[1] > 1 else c[:, 0] for c in columns]


class _Molecules(InMemory):
    """Prepared molecules in memory."""

    def flat(self, field: str) -> Iterator[tuple[Array, IntArray]]:
        """Yield all rows of a ragged field and the samples' offsets, as a store does."""
        if self.samples:
            rows = np.concatenate([sample[field] for sample in self.samples])
            yield rows, pointer(self.lengths(field))


def _check_finite(
    dataset: Dataset, usable: IntArray, values: FloatArray, names: Sequence[str]
) -> None:
    """Refuse predictions [n, W] that are not finite, naming row and target."""
    bad = np.argwhere(~np.isfinite(values[usable]))
    if len(bad):
        row, column = int(usable[bad[0, 0]]), int(bad[0, 1])
        check_finite(
            {names[column]: values[row, column : column + 1]}, lambda: dataset.describe(row)
        )


def _texts(dataset: Dataset, field: str) -> list[str]:
    found = []
    for flat, offsets in dataset.flat(field):  # type: ignore[attr-defined]
        data = flat.tobytes()
        found += [data[a:b].decode() for a, b in pairwise(offsets)]
    return found


def _listed_reasons(reasons: Sequence[Sequence[str]]) -> list[str]:
    """Join several lists of reasons molecule by molecule, each reason once."""
    return ["; ".join(dict.fromkeys(filter(None, own))) for own in zip(*reasons, strict=True)]


def _numbers(outputs: dict[str, torch.Tensor], targets: Sequence[Target]) -> FloatArray:
    """Concatenate numbers and probabilities of all targets, [G, W]."""
    columns, start = [], 0
    for t, target in enumerate(targets):
        if target.kind == "multiclass":
            own = outputs["raw"][:, start : start + target.width]
            columns.append(own.double().softmax(1))
        else:
            columns.append(outputs["prediction"][:, t : t + 1].double())
        start += target.width
    return torch.cat(columns, 1).cpu().numpy()


def _joined(
    found: Sequence[Sequence[FloatArray]], targets: Sequence[Target]
) -> tuple[FloatArray, FloatArray | None, dict[str, FloatArray]]:
    """Mean and spread over models."""
    values, spreads, probabilities = [], [], {}
    for t, target in enumerate(targets):
        every = np.stack([one[t] for one in found])
        mean, std = every.mean(axis=0), every.std(axis=0)
        if target.kind == "multiclass":
            probabilities[target.name] = mean
            best = mean.argmax(axis=1)
            std = std[np.arange(len(best)), best]
            mean = np.where(np.isnan(mean).any(axis=1), np.nan, best)
        values.append(mean)
        spreads.append(std)
    spread = np.stack(spreads, axis=1) if len(found) > 1 else None
    return np.stack(values, axis=1), spread, probabilities


def _kinds(targets: Sequence[Target]) -> list[tuple[str, str, int]]:
    return [(target.name, target.kind, target.num_classes) for target in targets]


def _listed(targets: Sequence[Target]) -> str:
    return ", ".join(target.name for target in targets)
