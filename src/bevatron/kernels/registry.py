"""Dispatch of operators: which implementation runs, why, and how often it ran.

Every operator has an exact ``reference`` in plain PyTorch and may have fast implementations. The
choice is made here and nowhere else, so no flag travels through a model:

- `use` sets it for all operators or for single ones, permanently or within a ``with``;
- the environment variable ``BEVATRON_KERNELS`` sets the initial choice in the same terms
  (``triton`` or ``auto,symmetric_contraction=reference``);
- ``auto``, the default, takes the fastest that can run here and logs its choice once. A fast
  implementation that is requested by name and cannot run raises an error that says why.
"""

import importlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self, get_args

import torch
from torch import Tensor

from bevatron.errors import ConfigError, KernelError
from bevatron.kernels.shared.checks import no_tensor
from bevatron.kernels.shared.launch import device_of
from bevatron.kernels.shared.support import Obstacle, without_triton

log = logging.getLogger("bevatron.kernels")

ENVIRONMENT_VARIABLE = "BEVATRON_KERNELS"
Choice = Literal["auto", "reference", "triton"]
CHOICES: tuple[Choice, ...] = get_args(Choice)
Special = Callable[[torch.device, torch.dtype], str | None]
"""Names the kernels that an implementation has only for such a device and type, if any."""
PREFERENCE = ("triton", "reference")
"""Implementations from the fastest to the plainest, in the order in which ``auto`` tries them."""


@dataclass(frozen=True)
class KernelConfig:
    """Implementations chosen for each operator.

    Attributes
    ----------
    default : implementation of every operator that ``ops`` does not name
    ops : implementation by operator
    """

    default: Choice = "auto"
    ops: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, choice in self.ops.items():
            _check_choice(name, choice)
            if name not in _operators:
                known = ", ".join(sorted(_operators))
                raise ConfigError(f"kernels: there is no operator '{name}' (known: {known})")

    def choice(self, operator: str) -> str:
        """Return the choice for one operator."""
        return self.ops.get(operator, self.default)


@dataclass
class _Implementation:
    target: str
    obstacle: Obstacle | None
    special: Special | None = None
    function: Callable[..., Any] | None = None


_operators: dict[str, dict[str, _Implementation]] = {}
_chosen: dict[tuple[Any, ...], tuple[tuple[str, str], Callable[..., Any]]] = {}
"""Decisions of `dispatch` under the current choices."""
_launches: Counter[tuple[str, str]] = Counter()
_logged: set[str] = set()
_current: KernelConfig | None = None


@dataclass(frozen=True)
class Operator:
    """An operator that `operator` has declared."""

    name: str

    def dispatch(self, tensor: Tensor) -> Callable[..., Any]:
        """Return the function that runs on tensors like this one; see `dispatch`."""
        return dispatch(self.name, tensor)


def operator(
    name: str,
    package: str,
    *,
    reference: str = "reference",
    triton: str | None = "triton",
    takes: Obstacle | None = None,
    special: Special | None = None,
) -> Operator:
    """Declare an operator: its exact reference, its Triton implementation and what that supports.

    Nothing is imported before it runs.

    Parameters
    ----------
    name : name of the operator, and of the function in both modules
    package : where the modules are, ``__name__`` for an operator's ``__init__``
    reference, triton
        ``module`` or ``module:function`` of the implementation; None if there is none.
    takes
        Returns why the Triton kernel cannot run on a device and type. Common requirements (the
        package, a device) are checked before, so this is for the kernel's own limits.
    special
        Names the kernels that the Triton implementation has only for such a device and type, for
        `explain`.

    Examples
    --------
    In ``bevatron/kernels/FAMILY/NAME/__init__.py``::

        _operator = registry.operator("NAME", __name__, takes=support.up_to_float32)


        def NAME(x: Tensor) -> Tensor:
            result: Tensor = _operator.dispatch(x)(x)
            return result
    """
    for implementation, target, obstacle, says in (
        ("reference", reference, None, None),
        ("triton", triton, takes, special),
    ):
        if target is not None:
            module, _, function = target.partition(":")
            where = f"{package}.{module}:{function or name}"
            register(name, implementation, where, obstacle, says)
    return Operator(name)


def register(
    operator: str,
    implementation: str,
    target: str,
    obstacle: Obstacle | None = None,
    special: Special | None = None,
) -> None:
    """Register a single implementation without importing it; `operator` declares a whole operator.

    Parameters
    ----------
    implementation : ``reference`` or ``triton``
    target : ``module:function``, imported when it is first chosen
    obstacle : returns why it cannot run on a device and type, or None
    special : names the kernels that it has only for such a device and type, or None
    """
    found = _Implementation(target, obstacle, special)
    _operators.setdefault(operator, {})[implementation] = found
    _chosen.clear()


def use(default: str | KernelConfig | None = None, /, **operators: str) -> "Setting":
    """Choose implementations; permanently as a statement, temporarily in a ``with``.

    Raises ConfigError if there is no such choice or operator. Whether the choice can run depends on
    the device and type of the tensors, so that is checked when an operator is called.

    Parameters
    ----------
    default
        ``auto``, ``reference`` or ``triton`` for all operators (this drops earlier choices for
        single ones), or a whole `KernelConfig`. If omitted, only what ``operators`` names changes.
    operators : the choice for single operators

    Examples
    --------
    >>> import bevatron.kernels as kernels
    >>> with kernels.use("reference", scatter_sum="auto"):
    ...     kernels.current().choice("symmetric_contraction")
    'reference'
    """
    if isinstance(default, KernelConfig):
        base = default
    elif default is None:
        base = current()
    else:
        base = KernelConfig(default=_check_choice("default", default))
    return Setting(KernelConfig(default=base.default, ops={**base.ops, **operators}))


class Setting:
    """Result of `use`: in force at once; leaving a ``with`` block restores the previous setting."""

    def __init__(self, config: KernelConfig) -> None:
        self._before = current()
        _set(config)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        _set(self._before)


def current() -> KernelConfig:
    """Return the choices in force, initially those of the environment variable."""
    if _current is None:
        _set(_parse(os.environ.get(ENVIRONMENT_VARIABLE, "auto")))
    assert _current is not None
    return _current


def dispatch(operator: str, tensor: Tensor) -> Callable[..., Any]:
    """Return the function that computes ``operator`` on tensors like this one, and count the call.

    Raises KernelError if the requested implementation cannot run; ValueError if it is no tensor.
    """
    if torch.compiler.is_compiling():
        return load(operator, _decide(operator, tensor.device, tensor.dtype)[0])
    try:
        device = device_of(tensor)
        # The variable decides whether kernels run on a CPU, and tests change it.
        interpreted = device.type == "cpu" and os.environ.get("TRITON_INTERPRET")
    except AttributeError as error:
        raise no_tensor(operator, [("the first argument", tensor)]) or error from None
    key = (operator, device, tensor.dtype, interpreted)
    found = _chosen.get(key)
    if found is None:
        found = _chosen[key] = _choose(operator, device, tensor.dtype)
    _launches[found[0]] += 1
    return found[1]


def load(operator: str, implementation: str) -> Callable[..., Any]:
    """Import an implementation without checking whether it can run."""
    _import(operator, implementation)
    found = _operators[operator][implementation].function
    assert found is not None
    return found


def _import(operator: str, implementation: str) -> None:
    found = _operators[operator][implementation]
    if found.function is None:
        module, _, function = found.target.partition(":")
        found.function = getattr(importlib.import_module(module), function)


# torch.compile cannot trace an import, so it runs this while it traces. That is what
# torch.compiler.assume_constant_result sets, which would import torch._dynamo here.
_import._dynamo_marked_constant = True  # type: ignore[attr-defined]  # noqa: SLF001


def explain(operator: str, device: torch.device | str, dtype: torch.dtype = torch.float32) -> str:
    """Name the implementation for a device and type in one line, and why no faster one runs.

    Kernels that it has only for such a device are named too.

    Examples
    --------
    >>> import bevatron.kernels as kernels
    >>> with kernels.use("reference"):
    ...     kernels.explain("scatter_sum", "cpu")
    'scatter_sum: reference (requested)'
    """
    choice = current().choice(operator)
    try:
        name, passed_over = _decide(operator, torch.device(device), dtype)
    except KernelError as error:
        return str(error)
    special = _operators[operator][name].special
    says = special and special(torch.device(device), dtype)
    why = [choice if choice == "auto" else "requested", *passed_over, *filter(None, [says])]
    return f"{operator}: {name} ({'; '.join(why)})"


def implementations(
    device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, dict[str, str | None]]:
    """List every operator's implementations, each with why it cannot run here (None: it can)."""
    return {
        operator: {
            name: _obstacle(operator, name, torch.device(device), dtype) for name in CHOICES[1:]
        }
        for operator in sorted(_operators)
    }


def launches() -> dict[tuple[str, str], int]:
    """Return how often each (operator, implementation) was called since the last reset."""
    return dict(_launches)


def reset_launches() -> None:
    """Set all counts to zero."""
    _launches.clear()


def too_large_for_this_gpu(error: BaseException | None) -> str | None:
    """Describe a kernel that exceeds a resource of the GPU; None for other errors."""
    while error is not None and type(error).__name__ != "OutOfResources":
        error = error.__cause__ or error.__context__
    if error is None:
        return None
    name, required, limit = (getattr(error, key, "?") for key in ("name", "required", "limit"))
    return (
        f"a kernel needs more {name} than this GPU has ({required}, it has {limit}); set "
        f"{ENVIRONMENT_VARIABLE}=reference (or for a single operator auto,OPERATOR=reference; "
        "--debug shows which one it was)"
    )


def _choose(
    operator: str, device: torch.device, dtype: torch.dtype
) -> tuple[tuple[str, str], Callable[..., Any]]:
    """Choose and import an implementation; log the first choice of ``auto``."""
    name, _ = _decide(operator, device, dtype)
    if current().choice(operator) == "auto" and operator not in _logged:
        _logged.add(operator)
        log.info("%s", explain(operator, device, dtype))
    return (operator, name), load(operator, name)


def _decide(operator: str, device: torch.device, dtype: torch.dtype) -> tuple[str, list[str]]:
    """Choose an implementation; also return why faster ones were rejected."""
    if not dtype.is_floating_point:
        kind = str(dtype).removeprefix("torch.")
        raise KernelError(f"{operator}: the tensors are {kind}, expected floating-point")
    choice = current().choice(operator)
    if choice != "auto":
        obstacle = _obstacle(operator, choice, device, dtype)
        if obstacle is not None:
            raise KernelError(
                f"{operator}: '{choice}' was requested and cannot run, {obstacle}; "
                f"use('auto') or {ENVIRONMENT_VARIABLE}=auto takes what can"
            )
        return choice, []
    passed_over: list[str] = []
    for name in PREFERENCE:
        obstacle = _obstacle(operator, name, device, dtype)
        # Interpreted kernels are for tests; auto never takes them.
        if obstacle is None and name == "triton" and device.type == "cpu":
            obstacle = "interpreted on a CPU it is slower than the reference"
        if obstacle is None:
            return name, passed_over
        passed_over.append(f"not {name}: {obstacle}")
    raise KernelError(f"{operator}: nothing can run, {'; '.join(passed_over)}")


def _obstacle(operator: str, name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why an implementation cannot run, or None."""
    implementation = _operators[operator].get(name)
    if implementation is None:
        return f"there is no {name} implementation of this operator yet"
    if name == "triton":
        obstacle = without_triton(device)
        if obstacle is not None:
            return obstacle
    return implementation.obstacle(device, dtype) if implementation.obstacle else None


def _check_choice(name: str, choice: str) -> Choice:
    for known in CHOICES:
        if choice == known:
            return known
    raise ConfigError(f"kernels: '{name}' is '{choice}', expected one of {', '.join(CHOICES)}")


def _set(config: KernelConfig) -> None:
    global _current  # noqa: PLW0603  the one place where the choice is kept
    _current = config
    _chosen.clear()


def _parse(text: str) -> KernelConfig:
    """Read ``auto,symmetric_contraction=reference``."""
    default, operators = "auto", {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, equals, choice = (piece.strip() for piece in part.partition("="))
        if equals:
            operators[name] = choice
        else:
            default = name
    try:
        return KernelConfig(default=_check_choice("default", default), ops=operators)
    except ConfigError as error:
        raise ConfigError(
            f"environment variable {ENVIRONMENT_VARIABLE}='{text}': {error}"
        ) from None
