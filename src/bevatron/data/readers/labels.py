"""Labels: which names of a file hold energy, forces, stress or virials.

Names are detected. For every quantity the first of these that a file has is used, in upper or lower
case:

======== =================== =================== ================== ===============
quantity explicit            explicit            plain              last
======== =================== =================== ================== ===============
energy   REF_energy          dft_energy          energy             free_energy
forces   REF_forces (_force) dft_forces (_force) forces, force
stress   REF_stress          dft_stress          stress
virials  REF_virials (_al)   dft_virials (_al)   virials, virial
======== =================== =================== ================== ===============

An explicit name takes precedence over a plain one, since calculators also write their own results
under plain names. Two explicit names whose values differ, or a file where some frames have one name
and others another, are refused: the user must choose.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from bevatron.data.readers.base import Signature, Survey
from bevatron.errors import ConfigError, DataError

Quantity: TypeAlias = Literal["energy", "forces", "stress", "virials"]

COMMON_NAMES: dict[Quantity, tuple[tuple[str, ...], ...]] = {
    "energy": (("ref_energy",), ("dft_energy",), ("energy",), ("free_energy",)),
    "forces": (("ref_forces", "ref_force"), ("dft_forces", "dft_force"), ("forces", "force")),
    "stress": (("ref_stress",), ("dft_stress",), ("stress",)),
    "virials": (
        ("ref_virials", "ref_virial"),
        ("dft_virials", "dft_virial"),
        ("virials", "virial"),
    ),
}
"""Names in lower case, tier by tier; the first two tiers are the explicit ones."""

NUM_EXPLICIT = 2

_LOOKS_LIKE: dict[Quantity, tuple[str, ...]] = {
    "energy": ("energy", "energies"),
    "forces": ("force", "grad"),
    "stress": ("stress",),
    "virials": ("virial",),
}


@dataclass(frozen=True)
class LabelOptions:
    """Options of finding labels in files of structures.

    Attributes
    ----------
    energy_key
        Name of the energy; detected by default. An empty name ignores the label.
    forces_key : name of the forces, likewise
    stress_key : name of the stress, likewise
    virials_key : name of the virials, likewise
    group_key
        Name of the text that assigns a structure to a group for metrics ('IsolatedAtom' marks
        reference energies of single atoms).
    group_weights : factor on the weight of every structure of a group, 0 or more
    weight_key : name of the weight of a structure; 1 where absent
    energy_weight_key : name of the weight of its energy
    forces_weight_key : name of the weight of its forces
    stress_weight_key : name of the weight of its stress
    head_key : name of the text that names the head of a structure
    heads : the heads in order; a structure that names none belongs to the first
    allow_unlabelled
        Accept structures without any label (for prediction); NaN labels count as absent.
    allow_zero_labels : accept files whose energies, forces or stresses are all exactly zero
    trust
        Unpickle files that are pickles. A pickle can run arbitrary code.
    """

    energy_key: str | None = None
    forces_key: str | None = None
    stress_key: str | None = None
    virials_key: str | None = None
    group_key: str = "config_type"
    group_weights: dict[str, float] = field(default_factory=dict)
    weight_key: str = "config_weight"
    energy_weight_key: str = "config_energy_weight"
    forces_weight_key: str = "config_forces_weight"
    stress_weight_key: str = "config_stress_weight"
    head_key: str = "head"
    heads: tuple[str, ...] = ()
    allow_unlabelled: bool = False
    allow_zero_labels: bool = False
    trust: bool = False

    def __post_init__(self) -> None:
        """Refuse weights that would reward errors."""
        for group, weight in self.group_weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise ConfigError(
                    f"group_weights: expected 0 or more for the group '{group}', got {weight:g}"
                )

    def given(self, quantity: Quantity) -> str | None:
        """Name the user gave for a quantity."""
        key: str | None = getattr(self, f"{quantity}_key")
        return key


@dataclass(frozen=True)
class LabelKeys:
    """The names of the labels in one file.

    Attributes
    ----------
    names : the name of each quantity that is used
    rivals : other names of it whose values must be equal where both occur
    unused : names of it with lower precedence; listed in the report
    """

    names: Mapping[Quantity, str]
    rivals: Mapping[Quantity, tuple[str, ...]]
    unused: Mapping[Quantity, tuple[str, ...]]

    @property
    def columns(self) -> frozenset[str]:
        """Arrays that must be read."""
        return frozenset({self.names.get("forces", ""), *self.rivals.get("forces", ())} - {""})


def watched_names(options: LabelOptions) -> frozenset[str]:
    """Return the names, in lower case, that a survey compares with zero."""
    quantities: tuple[Quantity, ...] = ("energy", "stress", "virials")
    common = {name for q in quantities for tier in COMMON_NAMES[q] for name in tier}
    given = {(options.given(q) or "").lower() for q in quantities}
    return frozenset(common | given)


def find_keys(file: str, survey: Survey, options: LabelOptions) -> LabelKeys:
    """Decide which names of a file hold its labels.

    With ``allow_unlabelled`` nothing is refused here. Raises DataError if there is no energy, a
    name that looks like a label is not one of the common ones, or some frames have one name and
    some only another.
    """
    names: dict[Quantity, str] = {}
    rivals: dict[Quantity, tuple[str, ...]] = {}
    unused: dict[Quantity, tuple[str, ...]] = {}
    for quantity in COMMON_NAMES:
        given = options.given(quantity)
        if given is not None:
            names |= {quantity: given} if given else {}
            continue
        found = _candidates(quantity, survey.counts)
        if not found or _other_is_given(quantity, options):
            continue
        (best, name), others = found[0], found[1:]
        names[quantity] = name
        unused[quantity] = tuple(n for t, n in others if t != best and t >= NUM_EXPLICIT)
        if not options.allow_unlabelled:
            rivals[quantity] = tuple(n for t, n in others if t == best or t < NUM_EXPLICIT)
            _refuse_mixture(file, quantity, name, [n for _, n in others], survey)
    _prefer_explicit(names, rivals, unused)
    if not options.allow_unlabelled:
        _refuse_missing_energy(file, names, survey, options)
        _refuse_lookalikes(file, names, survey, options)
    return LabelKeys(names, rivals, unused)


def _tier(quantity: Quantity, name: str) -> int | None:
    lower = name.lower()
    return next((t for t, tier in enumerate(COMMON_NAMES[quantity]) if lower in tier), None)


def _holders(quantity: Quantity, signature: Signature) -> Iterable[str]:
    """Names of a frame that may hold a quantity."""
    return signature.info + signature.arrays if quantity == "forces" else signature.info


def _candidates(quantity: Quantity, signatures: Iterable[Signature]) -> list[tuple[int, str]]:
    """List the common names that occur, best first."""
    names = {name for signature in signatures for name in _holders(quantity, signature)}
    tiers = [(_tier(quantity, name), name) for name in names]
    order = {name: i for tier in COMMON_NAMES[quantity] for i, name in enumerate(tier)}
    found = [(tier, name) for tier, name in tiers if tier is not None]
    return sorted(found, key=lambda item: (item[0], order[item[1].lower()], item[1]))


def _other_is_given(quantity: Quantity, options: LabelOptions) -> bool:
    """Whether the user named the other one of stress and virials, which exclude each other."""
    pair: dict[Quantity, Quantity] = {"stress": "virials", "virials": "stress"}
    return quantity in pair and bool(options.given(pair[quantity]))


def _prefer_explicit(
    names: dict[Quantity, str],
    rivals: dict[Quantity, tuple[str, ...]],
    unused: dict[Quantity, tuple[str, ...]],
) -> None:
    """Drop plain stress if virials are explicit, and plain virials if stress is explicit."""
    if "stress" not in names or "virials" not in names:
        return
    stress, virials = _tier("stress", names["stress"]), _tier("virials", names["virials"])
    if stress is None or virials is None or (stress < NUM_EXPLICIT) == (virials < NUM_EXPLICIT):
        return
    weaker: Quantity = "stress" if virials < NUM_EXPLICIT else "virials"
    unused[weaker] = (names.pop(weaker), *rivals.pop(weaker, ()), *unused.get(weaker, ()))


def _refuse_mixture(
    file: str, quantity: Quantity, name: str, others: list[str], survey: Survey
) -> None:
    for signature, first in survey.first.items():
        there = set(_holders(quantity, signature))
        other = next((n for n in others if n in there), None)
        if name not in there and other is not None:
            raise DataError(
                f"{file}, frame {first}: has '{other}' where other frames have '{name}'; "
                f"set {quantity}_key to the right one"
            )


def _refuse_missing_energy(
    file: str, names: Mapping[Quantity, str], survey: Survey, options: LabelOptions
) -> None:
    if options.energy_key == "":
        return
    key = names.get("energy")
    if key is not None and any(key in signature.info for signature in survey.counts):
        return
    there = sorted({name for s in survey.counts for name in s.info + s.arrays})
    if not there:
        raise DataError(f"{file}: no frame has an energy or any other label")
    found = f"the names found are {', '.join(map(repr, there))}"
    wanted = f"no frame has the energy '{key}'" if key else "no frame has an energy"
    hint = _lookalike("energy", survey)
    advice = f"; set energy_key='{hint}' if that is the energy" if hint else "; set energy_key"
    raise DataError(f"{file}: {wanted} ({found}){advice}")


def _refuse_lookalikes(
    file: str, names: Mapping[Quantity, str], survey: Survey, options: LabelOptions
) -> None:
    """Refuse to train without a label that is present under an unknown name."""
    wanted: tuple[tuple[Quantity, ...], ...] = (("forces",), ("stress", "virials"))
    for quantities in wanted:
        if any(q in names or options.given(q) == "" for q in quantities):
            continue
        for quantity in quantities:
            name = _lookalike(quantity, survey)
            if name is not None:
                raise DataError(
                    f"{file}: no {quantity} under a common name, but '{name}' looks like one; set "
                    f"{quantity}_key='{name}' to use it or {quantity}_key='' to ignore it"
                )


def _lookalike(quantity: Quantity, survey: Survey) -> str | None:
    words = _LOOKS_LIKE[quantity]
    for signature in survey.counts:
        names = signature.arrays if quantity == "forces" else signature.info
        for name in names:
            lower = name.lower()
            if any(word in lower for word in words) and "weight" not in lower:
                return name
    return None
