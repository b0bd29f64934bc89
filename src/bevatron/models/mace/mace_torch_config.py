"""Conversion of mace-torch's configuration: keys, class names, unsupported options."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from torch import Tensor

from bevatron.config import from_dict
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

Block = Literal[
    "RealAgnosticInteractionBlock",
    "RealAgnosticResidualInteractionBlock",
    "RealAgnosticDensityInteractionBlock",
    "RealAgnosticDensityResidualInteractionBlock",
]


@dataclass(frozen=True)
class MaceTorchConfig:
    """Keys of a mace-torch configuration and their supported values.

    Keys without a default are required. Values that mace-torch's modules do not read
    (``cueq_config``) or that the state dict holds (E0, scale and shift) are arbitrary.
    """

    r_max: float
    num_bessel: int
    num_polynomial_cutoff: int
    max_ell: int
    interaction_cls: Block
    interaction_cls_first: Block
    num_interactions: int
    hidden_irreps: str
    MLP_irreps: str
    # With no activation (None) or another one the read-out is a different function. A model of
    # one layer has no such read-out.
    gate: Literal["silu", "SiLU"]
    avg_num_neighbors: float
    atomic_numbers: tuple[int, ...]
    correlation: int | tuple[int, ...]
    heads: tuple[str, ...] = ("default",)
    radial_MLP: tuple[int, ...] = (64, 64, 64)  # noqa: N815  mace-torch's name
    apply_cutoff: bool = True
    pair_repulsion: bool = False
    distance_transform: Literal["None", "Agnesi", "AgnesiTransform"] = "None"
    radial_type: Literal["bessel"] = "bessel"
    readout_cls: Literal["NonLinearReadoutBlock", "LinearReadoutBlock"] = "NonLinearReadoutBlock"
    # So that a message says "expected one of None".
    edge_irreps: Literal[None] = None  # noqa: PYI061
    embedding_specs: Literal[None] = None  # noqa: PYI061
    use_so3: Literal[False] = False
    use_edge_irreps_first: Literal[False] = False
    use_agnostic_product: Literal[False] = False
    use_last_readout_only: Literal[False] = False
    use_embedding_readout: Literal[False] = False
    keep_last_layer_irreps: Literal[False] = False
    lammps_mliap: Literal[False] = False
    num_elements: Any = None
    atomic_energies: Any = None
    atomic_inter_scale: Any = None
    atomic_inter_shift: Any = None
    use_reduced_cg: Any = None
    cueq_config: Any = None
    oeq_config: Any = None


def parse_config(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> MaceConfig:
    """Read mace-torch's configuration.

    Raises ConfigError for a missing key or an unsupported option, naming key, value and the
    supported ones.

    Parameters
    ----------
    config
        The result of mace-torch's ``extract_config_mace_model``, or the same as plain JSON.
    state : the state dict, which alone shows whether there are a scale and a shift
    """
    given = _read(config)
    if given.num_interactions > 1 and given.readout_cls != "NonLinearReadoutBlock":
        raise ConfigError(
            f"readout_cls: {given.readout_cls} is not supported, only NonLinearReadoutBlock"
        )
    hidden = _irreps("hidden_irreps", given.hidden_irreps)
    channels = hidden[0].mul
    degrees = [(block.l, block.parity) for block in hidden]
    if degrees != [(degree, (-1) ** degree) for degree in range(len(hidden))] or any(
        block.mul != channels for block in hidden
    ):
        raise ConfigError(f"hidden_irreps: expected equal numbers of 0e, 1o, 2e, ..., got {hidden}")
    readout = _irreps("MLP_irreps", given.MLP_irreps)
    if len(readout) != 1 or readout[0].l != 0:
        raise ConfigError(f"MLP_irreps: expected scalars such as 16x0e, got {readout}")
    found = given.correlation
    correlations = {found} if isinstance(found, int) else set(found)
    if len(correlations) != 1:
        raise ConfigError(f"correlation: expected the same for all layers, got {given.correlation}")
    return MaceConfig(
        atomic_numbers=given.atomic_numbers,
        heads=given.heads,
        avg_num_neighbors=given.avg_num_neighbors,
        scale_shift="scale_shift.scale" in state,
        r_max=given.r_max,
        num_bessel=given.num_bessel,
        polynomial_cutoff=given.num_polynomial_cutoff,
        apply_cutoff=given.apply_cutoff,
        distance_transform="none" if given.distance_transform == "None" else "agnesi",
        pair_repulsion=given.pair_repulsion,
        radial_mlp=given.radial_MLP,
        l_max=given.max_ell,
        num_channels=channels,
        max_L=hidden.l_max,
        correlation=correlations.pop(),
        num_interactions=given.num_interactions,
        readout_width=readout[0].mul,
        interaction_first=KINDS[given.interaction_cls_first],
        interaction=KINDS[given.interaction_cls],
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


def _read(config: Mapping[str, Any]) -> MaceTorchConfig:
    """Check a configuration against `MaceTorchConfig`."""
    values = {str(key): _plain(value) for key, value in config.items()}
    kind = values.pop("class", "ScaleShiftMACE")
    if kind not in ("MACE", "ScaleShiftMACE"):  # may be unhashable
        raise ConfigError(f"class: {kind!r} is not supported, only MACE and ScaleShiftMACE")
    known = {field.name for field in fields(MaceTorchConfig)}
    for key, value in values.items():
        if key not in known and value not in (None, False):
            raise ConfigError(f"{key}: {value!r} is not supported, this option is not known here")
    # mace-torch treats None as absent, except for the gate, where it is the identity.
    given = {k: v for k, v in values.items() if k in known and v is not None}
    if "gate" in values:
        given["gate"] = str(values["gate"])
    given |= {k: _class_name(given[k]) for k in _NAMED if isinstance(given.get(k), str)}
    if given.get("num_interactions") == 1:
        given["gate"] = "silu"
    try:
        return from_dict(MaceTorchConfig, given)
    except ConfigError as error:
        raise ConfigError(f"{error} in the configuration of the mace-torch model") from None


_NAMED = ("interaction_cls", "interaction_cls_first", "readout_cls", "gate")
"""Keys of classes and functions, which may be objects, names or reprs."""


def _plain(value: Any) -> Any:
    """Convert arrays, tables of elements, classes and JSON's None into plain values."""
    value = getattr(value, "zs", value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return {"None": None, "True": True, "False": False}.get(value, value)
    if value is None or isinstance(value, bool | int | float | dict):
        return value
    if callable(value) and not isinstance(value, type):
        value = getattr(value, "__name__", type(value).__name__)
    return str(value)


def _class_name(text: str) -> str:
    """Return the bare name in ``<class 'mace.modules.X'>``, ``<function x at 0x7f>`` or ``a.b.x``.

    Examples
    --------
    >>> _class_name("<function silu at 0x7f904452f380>"), _class_name("torch.nn.SiLU")
    ('silu', 'SiLU')
    """
    found = re.match(r"<(?:class|function|built-in method|built-in function) '?([\w.]+)", text)
    return (found[1] if found else text.removesuffix("()")).rpartition(".")[2]


def _irreps(key: str, text: str) -> Irreps:
    try:
        irreps = Irreps.parse(text).simplify()
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None
    if not len(irreps):
        raise ConfigError(f"{key}: expected irreps such as 16x0e, got {text!r}")
    return irreps
