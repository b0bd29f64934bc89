"""The optimiser, its state by parameter name, clipping, and averaged weights."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import unwrap
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from bevatron.errors import CheckpointError, ConfigError
from bevatron.kernels.shared.launch import on_gpu
from bevatron.train.fused_optim import FusedAdamEMA, NotCompiled
from bevatron.train.settings import OptimConfig

__all__ = [
    "AveragedWeights",
    "FusedAdamEMA",
    "averaged",
    "clip_gradients",
    "fused_optimizer",
    "load_optimizer_tensors",
    "make_optimizer",
    "optimizer_tensors",
    "set_lr",
    "trained_parameters",
]


class Adam(NotCompiled, torch.optim.Adam):
    """Torch's."""

    step = torch.no_grad()(unwrap(torch.optim.Adam.step))


class AdamW(NotCompiled, torch.optim.AdamW):
    """Torch's."""

    step = Adam.step


@runtime_checkable
class HasParameterGroups(Protocol):
    """A model that defines which of its parameters decay."""

    def parameter_groups(self, weight_decay: float) -> list[dict[str, Any]]:
        """Return torch's parameter groups: ``params``, ``weight_decay``, perhaps ``lr_scale``."""


def make_optimizer(
    model: nn.Module, config: OptimConfig, ema: "AveragedWeights | None" = None
) -> torch.optim.Optimizer:
    """Build Adam, AMSGrad or AdamW over the parameters that are trained.

    On a GPU it is `FusedAdamEMA`, which also clips and updates the averages; elsewhere torch's.
    Weight decay acts on all parameters unless the model has a method ``parameter_groups``. Raises
    ConfigError if nothing is left to train.
    """
    if isinstance(model, HasParameterGroups):
        groups = model.parameter_groups(config.weight_decay)
    else:
        groups = [{"params": list(model.parameters()), "weight_decay": config.weight_decay}]
    trained = []
    for group in groups:
        parameters = [parameter for parameter in group["params"] if parameter.requires_grad]
        if parameters:
            trained.append({**group, "params": parameters})
    if not trained:
        raise ConfigError("all parameters are frozen: nothing is left to train")
    grouped = {id(parameter) for group in trained for parameter in group["params"]}
    missing = [name for name, p in trained_parameters(model).items() if id(p) not in grouped]
    if missing:
        raise ValueError(f"parameter_groups leaves out {', '.join(missing)}")
    arguments: dict[str, Any] = {
        "lr": config.lr,
        "betas": config.betas,
        "eps": config.eps,
        "foreach": None if parameters_on_gpu(model) else False,
    }
    optimizer: torch.optim.Optimizer
    if config.algorithm == "adamw":
        optimizer = AdamW(trained, **arguments)
    else:
        optimizer = Adam(trained, amsgrad=config.algorithm == "amsgrad", **arguments)
    fused = config.fused if config.fused is not None else parameters_on_gpu(model)
    return fused_optimizer(model, optimizer, config, ema) if fused else optimizer


def parameters_on_gpu(model: nn.Module) -> bool:
    """Whether one launch on a GPU can update all trained parameters."""
    trained = list(trained_parameters(model).values())
    alike = len({(p.dtype, p.device) for p in trained}) == 1
    return alike and all(on_gpu(p) and p.is_contiguous() for p in trained)


def fused_optimizer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: OptimConfig,
    ema: "AveragedWeights | None" = None,
) -> FusedAdamEMA:
    """Return a `FusedAdamEMA` that takes the place of torch's Adam or AdamW, with its state."""
    names = {id(p): name for name, p in model.named_parameters()}
    groups = [
        {
            "params": [(names[id(p)], p) for p in group["params"]],
            **{key: group[key] for key in ("lr", "weight_decay", "lr_scale") if key in group},
        }
        for group in optimizer.param_groups
    ]
    first = optimizer.param_groups[0]
    made = FusedAdamEMA(
        groups,
        betas=first["betas"],
        eps=first["eps"],
        amsgrad=first["amsgrad"],
        decoupled=isinstance(optimizer, torch.optim.AdamW),
        clip=config.clip,
        clip_per_tensor=config.clip_norm == "tensor",
        average=ema,
        every=True,
    )
    if optimizer.state:
        given = optimizer.state_dict()["state"]
        made.load_state_dict({**made.state_dict(), "state": given})
    return made


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name, in the order of the model."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of all groups, each times its own ``lr_scale`` if it has one."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)


def clip_gradients(
    parameters: Iterable[nn.Parameter], largest: float | None, per_tensor: bool = False
) -> Float[Tensor, ""]:
    """Scale the gradients to a norm of at most ``largest``; return the global norm before.

    Parameters
    ----------
    parameters : with their gradients
    largest : none = no limit
    per_tensor : limit the norm of each parameter separately, not the global norm
    """
    parameters = list(parameters)
    if largest is not None and not per_tensor:
        return nn.utils.clip_grad_norm_(parameters, largest)
    if largest is not None:
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = list(torch._foreach_norm(gradients))  # noqa: SLF001  no public name
        scales = [(largest / (norm + 1e-6)).clamp(max=1.0) for norm in norms]
        torch._foreach_mul_(gradients, scales)
        whole: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return whole
    return nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])


def optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimiser's state as ``parameter/moment`` -> tensor."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        f"{names[id(parameter)]}/{key}": torch.as_tensor(value)
        for parameter, moments in optimizer.state.items()
        for key, value in moments.items()
    }


def load_optimizer_tensors(
    model: nn.Module, optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]
) -> None:
    """Restore the state that `optimizer_tensors` returned.

    Raises CheckpointError if the state is of other parameters.
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    moments: dict[str, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        name, moment = key.rsplit("/", 1)
        moments.setdefault(name, {})[moment] = value
    unknown = sorted(set(moments) - set(order))
    if unknown:
        raise CheckpointError(
            f"the checkpoint holds the optimiser's state of '{unknown[0]}', which this run does "
            f"not train; resume with the settings of the run"
        )
    state = optimizer.state_dict()
    state["state"] = {i: moments[name] for i, name in enumerate(order) if name in moments}
    optimizer.load_state_dict(state)


class AveragedWeights:
    """Exponential moving averages of the trained parameters, one for each decay.

    After update n the decay is min(decay, (1 + n) / (10 + n)), so that the first, poor weights are
    soon forgotten (as mace's ExponentialMovingAverage does).

    Attributes
    ----------
    decays, sets
        Decay of each average, and its tensors by parameter; the first is the one to validate.
    updates : so far
    """

    def __init__(self, model: nn.Module, *decays: float) -> None:
        self.decays, self.updates = decays, 0
        self.sets = [
            {name: value.detach().clone() for name, value in trained_parameters(model).items()}
            for _ in decays
        ]

    @property
    def averages(self) -> dict[str, Tensor]:
        """The average that is validated, by parameter."""
        return self.sets[0]

    def further(self) -> dict[str, dict[str, Tensor]]:
        """Return the other averages by their decay."""
        others = zip(self.decays[1:], self.sets[1:], strict=True)
        return {str(decay): averages for decay, averages in others}

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Move the averages towards the current weights."""
        present = [parameter.detach() for parameter in trained_parameters(model).values()]
        for averages, decay in zip(self.sets, self.next_decays(), strict=True):
            torch._foreach_lerp_(list(averages.values()), present, 1 - decay)

    def next_decays(self) -> list[float]:
        """Count an update and return its decays."""
        self.updates += 1
        return [min(decay, (1 + self.updates) / (10 + self.updates)) for decay in self.decays]

    def tensors(self) -> dict[str, Tensor]:
        """Return all averages: the first by parameter, others as ``decay/parameter``."""
        others = {
            f"{decay}/{name}": value
            for decay, averages in self.further().items()
            for name, value in averages.items()
        }
        return {**self.averages, **others}

    def load(self, tensors: Mapping[str, Tensor], updates: int) -> None:
        """Replace the averages by what `tensors` returned.

        Raises CheckpointError if they are of other parameters.
        """
        own = self.tensors()
        if set(tensors) != set(own):
            odd = min(set(tensors) ^ set(own))
            raise CheckpointError(f"averaged weights: '{odd}' is in only one of run and checkpoint")
        for name, value in tensors.items():
            own[name].copy_(value)
        self.updates = updates


@contextmanager
def averaged(model: nn.Module, ema: AveragedWeights | None) -> Iterator[None]:
    """Load the averaged weights into the model for the length of a ``with`` block."""
    if ema is None:
        yield
        return
    parameters = trained_parameters(model)
    kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    try:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(ema.averages[name])
        yield
    finally:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])
