"""A trained interatomic potential, ready to be evaluated on structures.

Shared by the ASE calculator, relaxation and prediction: weights of a folder, device and precision,
the head, errors for unknown elements, batching, and splitting the results by structure.
"""

import copy
import logging
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch

from bevatron.data.readers.labels import LabelOptions
from bevatron.data.samples import StructureBatch, collate_structures
from bevatron.errors import ConfigError, DataError, OutOfMemoryError
from bevatron.models.mace import MACE, MaceConfig, hessian, load_model
from bevatron.parallel.threads import few_threads
from bevatron.recipes.devices import device_to_use
from bevatron.recipes.kinds import check_distinct, newest_model
from bevatron.train.capture.cuda_graphs import NotCapturableError
from bevatron.train.capture.inference import CapturedInference, Outputs, obstacle
from bevatron.typing import Arrays, FloatArray

log = logging.getLogger("bevatron.inference")

DTYPES = {"float64": torch.float64, "float32": torch.float32}

PER_ATOM = ("forces", "node_energy", "descriptors", "features")
ROWS = dict.fromkeys(PER_ATOM, "atoms")
"""Outputs whose rows run along the atoms of a batch."""
PER_STRUCTURE = ("energy", "stress", "virials")

Results = dict[str, FloatArray]

_said: set[str] = set()


class Potential:
    """A model on a device, in a precision, with frozen weights.

    Raises BevatronError if there is no such model, dtype, head or device; with ``capture=True``
    also, here or on evaluation, if nothing can be captured.

    Parameters
    ----------
    model
        A model object (copied, so that later training or conversion does not touch it), a model
        folder or a run folder (of an unfinished run, its best model so far).
    device
        Where torch computes: ``"auto"`` (a GPU if there is one), ``"cpu"``, ``"cuda"``,
        ``"cuda:1"``.
    dtype : ``"float64"`` or ``"float32"``
    head : which readout of a multi-head model; its default head if not given
    capture
        Whether evaluations are captured as CUDA graphs over padded shapes, which saves launching
        some hundreds of kernels: None = on a GPU, shapes that recur; the log says why if it is
        not possible; True = at once, and an error if it is not possible. The
        numbers are the same. Weights must then stay where they are.
    """

    def __init__(
        self,
        model: torch.nn.Module | Path | str,
        device: torch.device | str = "auto",
        dtype: str = "float64",
        head: str | None = None,
        *,
        capture: bool | None = None,
    ) -> None:
        if dtype not in DTYPES:
            raise ConfigError(f"dtype: expected 'float64' or 'float32', got {dtype!r}")
        self.device, self.dtype = device_to_use(device), DTYPES[dtype]
        module = (
            copy.deepcopy(model) if isinstance(model, torch.nn.Module) else trained_model(model)
        )
        self.model = module.to(device=self.device, dtype=self.dtype).eval().requires_grad_(False)
        config: Any = self.model.config
        self.cutoff = float(config.r_max)
        self.atomic_numbers = tuple(int(z) for z in config.atomic_numbers)
        self.heads: tuple[str, ...] = tuple(config.heads)
        self.head: int = config.head_index(head)
        self.chosen_head = head
        self._unused: Counter[str] = Counter()
        self._insists = bool(capture)
        self._captured = None if capture is False else self._capturing()

    @property
    def captured(self) -> bool:
        """Whether evaluations are captured and replayed, as far as known yet."""
        return self._captured is not None

    def head_of(self, info: Mapping[str, Any], where: str) -> int:
        """Return the head for a structure: the one chosen for all, the one it names, the default.

        Raises DataError if the model has several heads and none of that name.

        Parameters
        ----------
        info : ``info`` of the structure, as ASE has it; it may name a ``head``
        where : what the structure is called in messages
        """
        name = info.get(LabelOptions.head_key)
        if self.chosen_head is not None or name is None or str(name) == self.heads[self.head]:
            return self.head
        if len(self.heads) == 1:
            self._unused[str(name)] += 1
            return self.head
        if str(name) not in self.heads:
            raise DataError(
                f"{where} names the head '{name}', the model has {', '.join(self.heads)}; correct "
                'it or choose one for all with `head="NAME"`'
            )
        return self.heads.index(str(name))

    def warn_of_unused_heads(self, source: Path | str) -> None:
        """Warn of structures that named heads of a model that has one only."""
        if self._unused:
            names = ", ".join(f"'{name}' in {count:,}" for name, count in self._unused.items())
            log.warning(
                "%s: structures name heads (%s) but the model has the one head '%s', which is used",
                source,
                names,
                self.heads[0],
            )
            self._unused.clear()

    def check_elements(self, atomic_numbers: npt.ArrayLike, name: str = "the structure") -> None:
        """Reject a structure without atoms, or an element that the model was not trained on.

        Raises DataError naming the elements and those that are known.
        """
        if not np.size(atomic_numbers):
            raise DataError(f"{name} holds no atoms")
        unknown = sorted(
            set(np.unique(np.asarray(atomic_numbers)).tolist()) - set(self.atomic_numbers)
        )
        if unknown:
            known = ", ".join(_symbols(self.atomic_numbers))
            raise DataError(
                f"{name} holds {', '.join(_symbols(unknown))}, which the model does not know "
                f"(it knows {known})"
            )

    def evaluate(
        self,
        samples: Sequence[Arrays],
        compute: Collection[str] = ("energy", "forces"),
        max_atoms: int = 2048,
    ) -> Iterator[Results]:
        """Evaluate structures in batches and yield the results of each, in order.

        Parameters
        ----------
        samples
            With `bevatron.data.samples.STRUCTURE_FIELDS`, edges of this model's cutoff included.
        compute : any of `bevatron.models.mace.model.OUTPUTS`
        max_atoms : maximum number of atoms per batch; a larger structure is a batch of its own

        Yields
        ------
        energy [], forces [N, 3], stress [3, 3] and so on, float64.
        """
        # One batch is launched ahead: the host collates it while the GPU works on another.
        launched: deque[tuple[StructureBatch, Callable[[], Outputs]]] = deque()
        for some in _in_batches(samples, max_atoms):
            batch = collate_structures(some, np.arange(len(some)), [1.0] * len(some))
            launched.append((batch, self._launch(batch, tuple(compute))))
            if len(launched) > 1:
                yield from _results(*launched.popleft())
        for last in launched:
            yield from _results(*last)

    def hessian(self, sample: Arrays) -> FloatArray:
        """Compute the second derivatives of a structure's energy by its positions.

        Exact, by automatic differentiation; one backward pass for each of the 3N forces.

        Returns
        -------
        [N, 3, N, 3], eV/Å^2.
        """
        batch = collate_structures([sample], np.arange(1), [1.0])
        try:
            with few_threads(batch.num_atoms, self.device):
                second = hessian(cast("MACE", self.model), batch.to(self.device, self.dtype))
        except torch.OutOfMemoryError as error:
            raise OutOfMemoryError(
                f"the device ran out of memory at the Hessian of {batch.num_atoms} atoms with "
                f"{batch.num_edges} edges; take float32, a larger GPU or the CPU"
            ) from error
        return second.to("cpu", torch.float64).numpy()

    def _launch(self, batch: StructureBatch, compute: tuple[str, ...]) -> Callable[[], Outputs]:
        """Return a function that gives the outputs: of a replayed graph or of the model itself."""
        if self._captured is not None and batch.num_atoms:
            try:
                return self._captured.launch(batch, compute=tuple(sorted({*compute})))
            except NotCapturableError as error:
                why = str(error)
            except torch.OutOfMemoryError:
                why = f"{batch.num_atoms} atoms with {batch.num_edges} edges take too much memory"
            self._captured = None
            self._refuse(why)

        def outputs() -> Outputs:
            with few_threads(batch.num_atoms, self.device):
                found: Outputs = self.model(batch.to(self.device, self.dtype), compute=compute)
                return found

        return outputs

    def _capturing(self) -> CapturedInference | None:
        why = obstacle(self.device)
        if why is not None:
            self._refuse(why)
            return None
        patience = {"patience": 0} if self._insists else {}
        return CapturedInference(self.model, self.device, self.dtype, ROWS, **patience)

    def _refuse(self, why: str) -> None:
        """Log, once per process, why nothing is captured; an error if capture was asked for."""
        if self._insists:
            raise ConfigError(f"capture: inference cannot be captured, {why}; leave it out")
        if self.device.type == "cuda" and why not in _said:
            _said.add(why)
            log.warning("inference is not captured as CUDA graphs: %s", why)


def committee(
    models: Sequence[torch.nn.Module | Path | str], *given: Any, **options: Any
) -> list[Potential]:
    """Open one or several different models; ``given`` and ``options`` as in `Potential`.

    Raises ConfigError if one is given twice.
    """
    check_distinct(models)
    return [Potential(model, *given, **options) for model in models]


def _results(batch: StructureBatch, read: Callable[[], Outputs]) -> Iterator[Results]:
    """Split the results of a batch by structure."""
    try:
        outputs = read()
    except torch.OutOfMemoryError as error:
        raise OutOfMemoryError(
            f"the device ran out of memory at a batch of {batch.num_atoms} atoms with "
            f"{batch.num_edges} edges in {batch.num_graphs} structures; allow a batch fewer atoms "
            "(--capacity, max_atoms in Python) or choose float32"
        ) from error
    arrays = {
        name: outputs[name].detach().to("cpu", torch.float64).numpy()
        for name in (*PER_ATOM, *PER_STRUCTURE)
        if name in outputs
    }
    first = batch.graph_ptr.tolist()
    for g in range(batch.num_graphs):
        own = slice(first[g], first[g + 1])
        yield {
            name: value[own] if name in PER_ATOM else np.asarray(value[g])
            for name, value in arrays.items()
        }


def trained_model(path: Path | str) -> MACE:
    """Read a model folder or a run folder; of an unfinished run, the best model so far.

    Raises CheckpointError if there is none, or a file is given, which has to be converted first.
    """
    convert = f"bevatron convert mace-torch {path} FOLDER --trust"
    hint = f"; `{convert}` makes one of a mace-torch model"
    return load_model(newest_model(Path(path), hint))


def _in_batches(samples: Sequence[Arrays], max_atoms: int) -> Iterator[list[Arrays]]:
    batch: list[Arrays] = []
    atoms = 0
    for sample in samples:
        size = len(sample["atomic_numbers"])
        if batch and atoms + size > max_atoms:
            yield batch
            batch, atoms = [], 0
        batch.append(sample)
        atoms += size
    if batch:
        yield batch


def head_of_unnamed(config: MaceConfig, choose: str) -> str:
    """Return the head for structures that name none: the default or, logged once, the first.

    Parameters
    ----------
    config : the model's configuration; folders of bevatron 0.1 with several heads have no default
    choose : the option that chooses another
    """
    names = ", ".join(config.heads)
    if config.default_head is None and config.num_heads > 1 and names not in _said:
        _said.add(names)
        log.warning(
            "the model has several heads (%s) and none is its default: the first is used, %s "
            "chooses another",
            names,
            choose,
        )
    return config.default_head or config.heads[0]


def _symbols(atomic_numbers: Collection[int]) -> list[str]:
    from ase.data import chemical_symbols

    return [
        chemical_symbols[z] if 0 <= z < len(chemical_symbols) else str(z) for z in atomic_numbers
    ]
