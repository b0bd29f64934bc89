"""Pickled ``.model`` files of mace-torch, which must be installed, to models and back."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile, ZipFile

import torch

from bevatron.errors import CheckpointError, ConfigError, MissingPackageError, TrustError, require
from bevatron.files import atomic_write
from bevatron.models.mace.convert import from_mace_torch, to_mace_torch
from bevatron.models.mace.model import MACE


def load_mace_torch_file(path: Path | str, *, trust: bool = False) -> MACE:
    """Read a ``.model`` file of mace-torch, which must be installed.

    Raises TrustError without ``trust``; MissingPackageError if mace-torch, or another package that
    the model was pickled with, is not installed; CheckpointError if the file is damaged or holds
    something else; ConfigError if the model has an option that is not supported.

    Parameters
    ----------
    path : the file
    trust : agree to unpickle it: a pickle can run any code that is in it
    """
    if Path(path).is_file():
        refuse_other_content(Path(path))
    if not trust:
        raise TrustError(
            f"{path}: is a pickle, which can run any code that is in it; "
            "if you trust where it comes from, say so (`trust=True`)"
        )
    require("mace", "", distribution="mace-torch")
    module = _unpickled(path)
    kind = type(module).__name__
    if kind not in {"MACE", "ScaleShiftMACE"}:
        hint = "; convert a state dict with --config" if isinstance(module, dict) else ""
        raise CheckpointError(f"{path}: holds a {kind}, expected a MACE or ScaleShiftMACE{hint}")
    try:
        config, state = {**_settings(module), "class": kind}, module.state_dict()
    except (AttributeError, TypeError, IndexError, KeyError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: its settings cannot be read ({error}); was it made with another version of "
            "mace-torch?"
        ) from None
    try:
        return from_mace_torch(state, config)
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{path}: {error}") from None


def refuse_other_content(path: Path) -> None:
    """Refuse a file that is not a checkpoint, by its first bytes.

    Raises CheckpointError for an empty, compressed or truncated file, a web page or a pointer of
    Git LFS.
    """
    try:
        with path.open("rb") as file:
            start = file.read(64).lstrip()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    if not start:
        raise CheckpointError(f"{path}: is empty; copy it again")
    for magic, what in _OTHER_CONTENT.items():
        if start.startswith(magic):
            raise CheckpointError(f"{path}: {what}")
    if start.startswith(b"PK"):
        try:
            with ZipFile(path) as archive:
                bad = archive.testzip()  # torch itself ignores the checksums
        except (BadZipFile, zlib.error, EOFError, OSError, ValueError, NotImplementedError):
            raise CheckpointError(f"{path}: is truncated or damaged; copy it again") from None
        if bad is not None:
            raise CheckpointError(
                f"{path}: is damaged ('{bad}' in it does not match its checksum); copy it again"
            )


_OTHER_CONTENT = {
    b"<": "is a web page, not a checkpoint; download the file itself",
    b"version https://git-lfs": "is a pointer of Git LFS; fetch the file itself (git lfs pull)",
    b"\x1f\x8b": "is compressed; unpack it first (gunzip)",
}
"""First bytes of files that are mistaken for checkpoints."""


def _unpickled(path: Path | str) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=False)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{path}: was pickled with the package '{error.name}', which is not installed"
        ) from None
    except Exception as error:
        # A pickle may raise anything.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path}: is damaged or no model of mace-torch ({reason}); copy it again"
        ) from error


def _settings(module: Any) -> dict[str, Any]:
    """Read the settings of a mace-torch model, with the keys of its own function.

    That function supports only one class, and fails for some radial functions.
    """
    heads = getattr(module, "heads", None) or ["default"]
    radial, readout = module.radial_embedding, module.readouts[-1]
    transform = getattr(radial, "distance_transform", None)
    nonlinear = hasattr(readout, "hidden_irreps")
    width = readout.hidden_irreps.num_irreps if nonlinear else len(heads)
    plain = {name: getattr(module, name, None) for name in _ATTRIBUTES}
    radial_type = type(radial.bessel_fn).__name__
    return {
        **plain,
        "use_embedding_readout": hasattr(module, "embedding_readout"),
        "readout_cls": type(readout),
        "gate": getattr(readout.non_linearity.acts[0], "f", None) if nonlinear else None,
        "radial_type": "bessel" if radial_type == "BesselBasis" else radial_type,
        "r_max": module.r_max.item(),
        "num_bessel": len(getattr(radial.bessel_fn, "bessel_weights", ())),
        "num_polynomial_cutoff": radial.cutoff_fn.p.item(),
        "max_ell": round(module.spherical_harmonics.irreps_out.dim**0.5) - 1,
        "interaction_cls": type(module.interactions[-1]),
        "interaction_cls_first": type(module.interactions[0]),
        "num_interactions": module.num_interactions.item(),
        "hidden_irreps": str(module.products[0].linear.irreps_out),
        "MLP_irreps": f"{width // len(heads)}x0e",
        "avg_num_neighbors": module.interactions[0].avg_num_neighbors,
        "atomic_numbers": module.atomic_numbers,
        "correlation": len(module.products[0].symmetric_contractions.contractions[0].weights) + 1,
        "apply_cutoff": getattr(module, "apply_cutoff", True),
        "radial_MLP": list(module.interactions[0].conv_tp_weights.hs[1:-1]),
        "pair_repulsion": hasattr(module, "pair_repulsion_fn"),
        "distance_transform": None if transform is None else type(transform).__name__,
        "heads": heads,
    }


_ATTRIBUTES = (
    "edge_irreps",
    "embedding_specs",
    "use_so3",
    "use_edge_irreps_first",
    "use_agnostic_product",
    "use_last_readout_only",
)
"""Attributes of a model of mace-torch that are keys of its configuration; older ones lack some."""


def save_mace_torch_file(model: MACE, path: Path | str) -> None:
    """Write a ``.model`` file that mace-torch, which must be installed, and its tools read.

    Raises MissingPackageError if mace-torch is not installed.
    """
    state, config = to_mace_torch(model)
    module = build_mace_torch(config, model.embedding.weight.dtype)
    module.load_state_dict(state)
    with atomic_write(Path(path), CheckpointError) as file:
        torch.save(module, file)


def build_mace_torch(config: Mapping[str, Any], dtype: torch.dtype) -> torch.nn.Module:
    """Build mace-torch's own module from a configuration of `to_mace_torch`."""
    require("mace", "", distribution="mace-torch")
    from e3nn.o3 import Irreps
    from mace import modules

    values = dict(config)
    kind = getattr(modules, values.pop("class"))
    for name in ("interaction_cls", "interaction_cls_first"):
        values[name] = modules.interaction_classes[values[name]]
    values["gate"] = torch.nn.functional.silu
    for name in ("hidden_irreps", "MLP_irreps"):
        values[name] = Irreps(values[name])
    values["atomic_energies"] = torch.tensor(values["atomic_energies"], dtype=torch.float64).numpy()
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        module: torch.nn.Module = kind(**values)
    finally:
        torch.set_default_dtype(before)
    return module
