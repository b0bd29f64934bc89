"""mace-torch's configuration in ours and back: keys, class names, unsupported options."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from bevatron.errors import ConfigError
from bevatron.maths.irreps import Irreps
from bevatron.models.mace.config import InteractionKind, MaceConfig

KINDS: dict[str, InteractionKind] = {
    "RealAgnosticInteractionBlock": "agnostic",
    "RealAgnosticResidualInteractionBlock": "residual",
    "RealAgnosticDensityInteractionBlock": "density",
    "RealAgnosticDensityResidualInteractionBlock": "density_residual",
}
"""mace-torch's interaction blocks and ours."""

_PLAIN = {
    "edge_irreps": (None,),
    "use_so3": (False, None),
    "use_edge_irreps_first": (False, None),
    "use_agnostic_product": (False, None),
    "use_last_readout_only": (False, None),
    "use_embedding_readout": (False, None),
    "embedding_specs": (None,),
    "radial_type": ("bessel", None),
    "keep_last_layer_irreps": (False, None),
    "lammps_mliap": (False, None),
}
"""Options with the only values that are supported."""


def parse_config(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> MaceConfig:
    """Read mace-torch's configuration.

    Parameters
    ----------
    config
        Values as mace-torch's ``extract_config_mace_model`` gives them, or the same as plain JSON.
    state
        The state dict, which alone shows whether there are a scale and a shift.

    Raises
    ------
    ConfigError
        For a missing key or an option that this model has not.
    """
    _refuse_unsupported(config)
    hidden = Irreps.parse(str(_get(config, "hidden_irreps"))).simplify()
    channels = hidden[0].mul
    degrees = [(block.l, block.parity) for block in hidden]
    if degrees != [(degree, (-1) ** degree) for degree in range(len(hidden))] or any(
        block.mul != channels for block in hidden
    ):
        raise ConfigError(f"hidden_irreps: expected equal numbers of 0e, 1o, 2e, ..., got {hidden}")
    num_interactions = int(_get(config, "num_interactions"))
    heads = config.get("heads") or ["default"]
    radial_mlp = config.get("radial_MLP") or (64, 64, 64)
    return MaceConfig(
        atomic_numbers=tuple(int(z) for z in _numbers(_get(config, "atomic_numbers"))),
        heads=tuple(str(head) for head in heads),
        avg_num_neighbors=float(_get(config, "avg_num_neighbors")),
        scale_shift="scale_shift.scale" in state,
        r_max=float(_get(config, "r_max")),
        num_bessel=int(_get(config, "num_bessel")),
        polynomial_cutoff=int(_get(config, "num_polynomial_cutoff")),
        apply_cutoff=bool(config.get("apply_cutoff", True)),
        distance_transform=_transform(config.get("distance_transform")),
        pair_repulsion=bool(config.get("pair_repulsion", False)),
        radial_mlp=tuple(int(width) for width in radial_mlp),
        l_max=int(_get(config, "max_ell")),
        num_channels=channels,
        max_L=hidden.l_max,
        correlation=_correlation(_get(config, "correlation")),
        num_interactions=num_interactions,
        readout_width=_readout_width(config),
        interaction_first=_kind(config, "interaction_cls_first"),
        interaction=_kind(config, "interaction_cls"),
    )


def write_config(config: MaceConfig) -> dict[str, Any]:
    """Write mace-torch's configuration as plain values: its class's arguments, and ``class``."""
    names = {kind: name for name, kind in KINDS.items()}
    single = config.num_heads == 1
    values: dict[str, Any] = {
        "class": "ScaleShiftMACE" if config.scale_shift else "MACE",
        "r_max": config.r_max,
        "num_bessel": config.num_bessel,
        "num_polynomial_cutoff": config.polynomial_cutoff,
        "max_ell": config.l_max,
        "interaction_cls": names[config.interaction],
        "interaction_cls_first": names[config.interaction_first],
        "num_interactions": config.num_interactions,
        "num_elements": config.num_elements,
        "hidden_irreps": config.hidden_irreps,
        "MLP_irreps": f"{config.readout_width}x0e",
        "gate": "silu",
        "atomic_energies": [list(row) for row in config.atomic_energies],
        "avg_num_neighbors": config.avg_num_neighbors,
        "atomic_numbers": list(config.atomic_numbers),
        "correlation": config.correlation,
        "radial_type": "bessel",
        "radial_MLP": list(config.radial_mlp),
        "pair_repulsion": config.pair_repulsion,
        "distance_transform": "Agnesi" if config.distance_transform == "agnesi" else "None",
        "apply_cutoff": config.apply_cutoff,
        "use_reduced_cg": False,
        "heads": list(config.heads),
    }
    if single:
        values["atomic_energies"] = values["atomic_energies"][0]
    if config.scale_shift:
        for name, theirs in (("scale", "atomic_inter_scale"), ("shift", "atomic_inter_shift")):
            per_head = getattr(config, name)
            per_head = per_head if len(per_head) > 1 else per_head * config.num_heads
            values[theirs] = per_head[0] if single else list(per_head)
    return values


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    for key, allowed in _PLAIN.items():
        value = config.get(key)
        if value not in allowed and str(value) not in {str(choice) for choice in allowed}:
            raise ConfigError(f"{key}: {value!r} is not supported, only {allowed[0]!r}")
    readout = config.get("readout_cls")
    # A model of one layer has the linear read-out only.
    known = {"NonLinearReadoutBlock"}
    known |= {"LinearReadoutBlock"} if config.get("num_interactions") == 1 else set()
    if readout is not None and _class_name(readout) not in known:
        raise ConfigError(
            f"readout_cls: {_class_name(readout)} is not supported, only NonLinearReadoutBlock"
        )
    gate = config.get("gate")
    if gate is not None and "silu" not in str(getattr(gate, "__name__", gate)).lower():
        raise ConfigError(f"gate: {gate!r} is not supported, only silu")
    kind = config.get("class", "ScaleShiftMACE")
    if kind not in {"MACE", "ScaleShiftMACE"}:
        raise ConfigError(f"class: {kind} is not supported, only MACE and ScaleShiftMACE")


def _get(config: Mapping[str, Any], key: str) -> Any:
    if config.get(key) is None:
        raise ConfigError(f"{key}: missing in the configuration of the mace-torch model")
    return config[key]


def _numbers(values: Any) -> list[Any]:
    """Numbers from a list, an array or mace-torch's table of elements."""
    values = getattr(values, "zs", values)
    return list(values.tolist() if hasattr(values, "tolist") else values)


def _class_name(value: Any) -> str:
    """Name of a class given as such, as its name or as its repr."""
    text = value.__name__ if isinstance(value, type) else str(value)
    names = re.findall(r"[A-Za-z_]\w*", text)
    return names[-1] if names else text


def _kind(config: Mapping[str, Any], key: str) -> InteractionKind:
    name = _class_name(_get(config, key))
    if name not in KINDS:
        raise ConfigError(f"{key}: {name} is not supported (supported: {', '.join(KINDS)})")
    return KINDS[name]


def _transform(value: Any) -> Any:
    if value is None or str(value).lower() == "none":
        return "none"
    if str(value).lower() in {"agnesi", "agnesitransform"}:
        return "agnesi"
    raise ConfigError(f"distance_transform: {value} is not supported, only None and Agnesi")


def _correlation(value: Any) -> int:
    values = {int(v) for v in value} if isinstance(value, Sequence) else {int(value)}
    if len(values) != 1:
        raise ConfigError(f"correlation: expected the same for all layers, got {value}")
    return values.pop()


def _readout_width(config: Mapping[str, Any]) -> int:
    irreps = Irreps.parse(str(_get(config, "MLP_irreps"))).simplify()
    if len(irreps) != 1 or irreps[0].l != 0:
        raise ConfigError(f"MLP_irreps: expected scalars such as 16x0e, got {irreps}")
    return irreps[0].mul
