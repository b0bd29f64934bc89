"""From and to mace-torch: state dict and configuration.

Weights and buffers are taken as stored, even if they are rounded to float32. Coupling coefficients
that differ from those built here (a reduced basis, float32 rounding) are converted too and saved
with the model. Every entry of a state dict is used, checked or refused by name. Coupling
coefficients of messages are exact here; mace-torch uses the rounded ones of a float32 checkpoint
even in float64, where forces then differ by some 1e-9 of their size.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bevatron.errors import CheckpointError
from bevatron.kernels.shared.checks import described
from bevatron.maths.symmetric_product import CouplingTensor, symmetric_coefficients
from bevatron.models.common.model_folder import misfit, not_finite
from bevatron.models.mace.config import MaceConfig
from bevatron.models.mace.layers import coupling_state
from bevatron.models.mace.mace_torch_config import parse_config, write_config
from bevatron.models.mace.mace_torch_layout import (
    CoefficientName,
    Piece,
    coefficient_names,
    constants,
    contraction_name,
    pieces,
    weight_name,
    wigner_names,
)
from bevatron.models.mace.model import MACE


def from_mace_torch(state_dict: Mapping[str, Tensor], config: Mapping[str, Any]) -> MACE:
    """Build the model of a mace-torch state dict.

    Raises ConfigError if the configuration lacks a key or requires something unsupported;
    CheckpointError if it is no state dict, or an entry is missing, unknown or of the wrong shape.

    Parameters
    ----------
    state_dict
        State dict of a ``MACE`` or ``ScaleShiftMACE``, or of one in a ``DistributedDataParallel``.
    config
        The settings that the state dict lacks, with the keys of mace-torch's
        ``extract_config_mace_model``; classes may be given by name or by their repr.

    Returns
    -------
    MACE
        In the floating-point type of the state dict.
    """
    reader = _Reader(state_dict)
    dtype = reader.dtype
    settings = parse_config(config, reader.tensors)
    state = {piece.ours: reader.take(piece) for piece in pieces(settings)}
    couplings = _stored_couplings(settings, reader)
    for ours, coupling in couplings.items():
        state.update({f"{ours}.{key}": value for key, value in coupling_state(coupling).items()})
    _check_constants(settings, reader)
    reader.refuse_rest()
    settings = _with_stored(settings, state, stored=bool(couplings))
    model = MACE(settings, dtype)
    for name, value in model.state_dict().items():
        if name in {"atomic_energies", "scale", "shift"} and name in state:
            state[name] = state[name].reshape(-1, *value.shape[1:]).expand(value.shape)
    state["atomic_numbers"] = model.atomic_numbers
    if not settings.scale_shift:
        state.update(scale=model.scale, shift=model.shift)
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise CheckpointError(
            f"the state dict does not fit its configuration ({misfit(error)})"
        ) from None
    return model


def to_mace_torch(model: MACE) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Write the state dict and configuration from which mace-torch builds the same model.

    Returns
    -------
    tuple
        A state dict complete enough for ``load_state_dict(strict=True)`` in mace-torch 0.3.16, and
        plain values with the keys that `from_mace_torch` reads.
    """
    config, own = model.config, model.state_dict()
    dtype = model.embedding.weight.dtype
    state: dict[str, Tensor] = {}
    flat: dict[str, list[Tensor]] = {}
    for piece in pieces(config):
        value = own[piece.ours].detach().cpu()
        if -1 in piece.shape:
            state[piece.theirs] = value.clone()
        elif piece.flat:
            flat.setdefault(piece.theirs, []).append(piece.to_theirs(value))
        else:
            state[piece.theirs] = piece.to_theirs(value).clone()
    state.update({name: torch.cat(parts) for name, parts in flat.items()})
    state.update(constants(config, dtype))
    r_max = own["radial_basis.r_max"].detach().cpu().clone()
    state.update({"r_max": r_max, "radial_embedding.bessel_fn.r_max": r_max.clone()})
    for name in coefficient_names(config):
        coupling = model.couplings(name.layer, name.degree)[name.nu - 1]
        state[name.theirs] = coupling.dense(dtype)
        state[name.flag] = torch.tensor(not len(coupling.values))
    return state, write_config(config)


class _Reader:
    """A state dict whose entries are each taken exactly once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if not isinstance(tensors, Mapping):
            raise CheckpointError(
                f"state_dict is {described(tensors)}, expected the state dict of a mace-torch model"
            )
        for name, value in tensors.items():
            if not isinstance(value, Tensor):
                raise CheckpointError(
                    f"state_dict: '{name}' is {described(value)}, expected a tensor; give the "
                    "state dict itself"
                )
        # DistributedDataParallel puts it before every name.
        prefix = "module." if all(name.startswith("module.") for name in tensors) else ""
        self.tensors = {
            name.removeprefix(prefix): value.detach().cpu() for name, value in tensors.items()
        }
        self._used: dict[str, int] = {}
        bad = not_finite(self.tensors)
        if bad is not None:
            raise CheckpointError(f"the state dict's '{bad}' holds NaN or infinity")
        if "products.0.symmetric_contractions.weight" in self.tensors:
            raise CheckpointError(
                "the state dict is in cuEquivariance's layout; convert it to e3nn's first "
                "(python -m mace.cli.convert_cueq_e3nn)"
            )

    @property
    def dtype(self) -> torch.dtype:
        """Floating-point type of the weights."""
        if "node_embedding.linear.weight" not in self.tensors:
            raise CheckpointError("the state dict has no 'node_embedding.linear.weight'")
        return self.tensors["node_embedding.linear.weight"].dtype

    def get(self, name: str) -> Tensor:
        """Take a whole tensor."""
        if name not in self.tensors:
            raise CheckpointError(f"the state dict has no '{name}'")
        self._used[name] = self.tensors[name].numel()
        return self.tensors[name]

    def take(self, piece: Piece) -> Tensor:
        """Take the next stretch of a flat tensor, or a whole one."""
        if not piece.flat:
            return self._shaped(piece, self.get(piece.theirs))
        start = self._used.get(piece.theirs, 0)
        whole = self.get(piece.theirs)
        self._used[piece.theirs] = start + piece.size
        return self._shaped(piece, whole.reshape(-1)[start : start + piece.size])

    def _shaped(self, piece: Piece, values: Tensor) -> Tensor:
        if not values.is_floating_point():
            raise CheckpointError(f"the state dict's '{piece.theirs}' holds {values.dtype}")
        if -1 in piece.shape:
            axes = len(values.shape) == len(piece.shape)
            if axes and all(a in {-1, b} for a, b in zip(piece.shape, values.shape, strict=True)):
                return values.clone()
        if values.numel() != piece.size:
            raise CheckpointError(
                f"the state dict's '{piece.theirs}' has {self.tensors[piece.theirs].numel()} "
                f"numbers, which does not fit the configuration"
            )
        return piece.to_ours(values).clone()

    def optional(self, name: str) -> Tensor | None:
        """Take a tensor that may be absent."""
        return self.get(name) if name in self.tensors else None

    def refuse_rest(self) -> None:
        """Raise if an entry was not used completely."""
        for name, value in self.tensors.items():
            if name not in self._used:
                raise CheckpointError(
                    f"the state dict has an entry that is not understood: '{name}'"
                )
            if self._used[name] != value.numel():
                raise CheckpointError(
                    f"the state dict's '{name}' has {value.numel()} numbers, "
                    f"the configuration wants {self._used[name]}"
                )


def _stored_couplings(config: MaceConfig, reader: _Reader) -> dict[str, CouplingTensor]:
    """Return the checkpoint's coefficients by our names, empty if all equal those built here."""
    found: dict[str, CouplingTensor] = {}
    equal = True
    for name in coefficient_names(config):
        stored = reader.get(name.theirs)
        reader.optional(name.flag)
        _check_coupling(config, name, stored, reader)
        found[name.ours] = CouplingTensor.from_dense(stored, name.degree)
        exact = symmetric_coefficients(config.l_max, name.degree, name.nu).dense()
        equal &= stored.shape == exact.shape and bool((stored - exact).abs().max() < 1e-13)
    return {} if equal else found


def _check_coupling(
    config: MaceConfig, name: CoefficientName, stored: Tensor, reader: _Reader
) -> None:
    """Check that coefficients have the axes M (but for degree 0), lm_1, ..., lm_nu, path."""
    components = [2 * name.degree + 1] if name.degree else []
    weights = f"{contraction_name(name.layer, name.degree)}.{weight_name(config, name.nu)}"
    paths = reader.get(weights).shape[1]
    expected = [*components, *[(config.l_max + 1) ** 2] * name.nu, paths]
    if list(stored.shape) != expected or not stored.is_floating_point():
        raise CheckpointError(
            f"the state dict's '{name.theirs}' is {list(stored.shape)}, which does not fit the "
            f"configuration and '{weights}', expected {expected}"
        )


def _check_constants(config: MaceConfig, reader: _Reader) -> None:
    """Check redundant entries: masks, empty biases, numbers that the configuration repeats."""
    expected = constants(config, torch.float64)
    wigner = dict(wigner_names(config))
    for name, value in expected.items():
        stored = reader.optional(name)
        if stored is None:
            if name in {"atomic_numbers", "num_interactions"}:
                raise CheckpointError(f"the state dict has no '{name}'")
            continue
        if (
            stored.shape != value.shape
            or stored.is_complex()
            or not torch.allclose(stored.double(), value.double(), atol=1e-6)
        ):
            reason = "other signs or order of components" if name in wigner else "another value"
            raise CheckpointError(f"the state dict's '{name}' is not as expected: {reason}")
    for name in ("r_max", "radial_embedding.bessel_fn.r_max"):
        stored = reader.optional(name)
        if stored is not None and (
            stored.numel() != 1 or not abs(stored.real.item() - config.r_max) <= 1e-5
        ):
            raise CheckpointError(
                f"the state dict's '{name}' is {stored.tolist()}, not {config.r_max}"
            )


def _with_stored(config: MaceConfig, state: dict[str, Tensor], *, stored: bool) -> MaceConfig:
    """Add the settings that the state dict holds to the configuration."""

    def values(name: str) -> tuple[float, ...]:
        return tuple(float(value) for value in state[name].reshape(-1))

    energies = state["atomic_energies"].reshape(-1, config.num_elements).double().tolist()
    return replace(
        config,
        atomic_energies=tuple(tuple(row) for row in energies),
        scale=values("scale") if config.scale_shift else (1.0,),
        shift=values("shift") if config.scale_shift else (0.0,),
        coefficients="stored" if stored else "exact",
    )
