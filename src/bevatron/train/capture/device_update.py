"""The second half of a captured step: `fused_adam_ema` on the state of a run.

Gradients, moments and averages are moved into flat tensors of which a parameter's are parts, so
that norm, clipping, the sum over ranks and the update are a few launches however many parameters
there are. Checkpoints see no difference: the optimiser's state has the same tensors by name.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bevatron.kernels.optim.fused_adam_ema import (
    AdamSettings,
    AdamTensors,
    FlatTensors,
    fused_adam_ema,
)
from bevatron.train.capture.transfers import NumberFeed
from bevatron.train.optim import trained_parameters
from bevatron.train.state import TrainState

MOMENTS = {"first": "exp_avg", "second": "exp_avg_sq", "largest": "max_exp_avg_sq"}
"""Names of the moments here and in torch's optimisers."""


class DeviceUpdate:
    """From summed gradients to new weights without waiting for the device.

    It takes over the gradients, moments and averages of ``state`` and moves them into its own
    buffers.

    Parameters
    ----------
    state
        Its optimiser is torch's Adam or AdamW.
    clip
        Largest norm of the gradient; None = no clipping.
    per_tensor
        Whether that is each parameter's norm, not that of all together.

    Attributes
    ----------
    parameters
        Those that are trained.
    gradients
        All gradients, to be added to; zero after every update.
    loss : [] float64, of the step, to be written before `run`
    verdict : [3] float64, see `AdamTensors`
    """

    def __init__(self, state: TrainState, clip: float | None, *, per_tensor: bool = False) -> None:
        named = trained_parameters(state.model)
        self.parameters = list(named.values())
        self.gradients = FlatTensors.zeros(named)
        for name, parameter in named.items():
            parameter.grad = self.gradients.parts[name]
        self._optimizer, self._ema = state.optimizer, state.ema
        device = self.gradients.flat.device
        groups = {id(p): group for group in state.optimizer.param_groups for p in group["params"]}
        of_each = [groups[id(parameter)] for parameter in self.parameters]

        def numbers(*values: float) -> Tensor:
            return torch.tensor(values, dtype=torch.float64, device=device)

        steps = torch.zeros(len(named), dtype=torch.float32, device=device)
        moments = _flat_moments(state.optimizer, named, steps, of_each[0]["amsgrad"])
        average = None
        if state.ema is not None:
            averages = FlatTensors.copy(state.ema.averages)
            state.ema.averages, average = averages.parts, averages.flat
        self._controls = NumberFeed(3, device)
        self._tensors = AdamTensors(
            parameters=[parameter.detach() for parameter in self.parameters],
            gradient=self.gradients.flat,
            first=moments["first"].flat,
            second=moments["second"].flat,
            largest=moments["largest"].flat if "largest" in moments else None,
            average=average,
            steps=steps,
            lr_scale=numbers(*(group.get("lr_scale", 1.0) for group in of_each)),
            weight_decay=numbers(*(group["weight_decay"] for group in of_each)),
            controls=self._controls.values,
            loss=numbers(0.0)[0],
            verdict=numbers(0.0, 0.0, 0.0),
        )
        self._settings = AdamSettings(
            betas=of_each[0]["betas"],
            eps=of_each[0]["eps"],
            decoupled=isinstance(state.optimizer, torch.optim.AdamW),
            clip=clip,
            per_tensor=per_tensor,
        )
        self.loss, self.verdict = self._tensors.loss, self._tensors.verdict

    def set(self, lr: float, largest_loss: float) -> None:
        """Send what changes from step to step to the device."""
        share = 0.0 if self._ema is None else 1.0 - self._ema.next_decay()
        self._controls.send(torch.tensor([lr, largest_loss, share], dtype=torch.float64))

    def run(self) -> None:
        """Check the step, update if it is finite, zero the gradients. See `fused_adam_ema`."""
        fused_adam_ema(self._tensors, self._settings)

    def warm_up(self) -> None:
        """Launch the same kernels without changing weights, moments or averages."""
        before = self.verdict.clone()
        self.verdict.fill_(1.0)
        self.run()
        self.verdict.copy_(before)

    def release(self) -> None:
        """Restore the gradients of the optimiser, for steps that are not captured."""
        self._optimizer.zero_grad()


def _flat_moments(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    steps: Tensor,
    amsgrad: bool,
) -> dict[str, FlatTensors]:
    """Move an optimiser's moments into flat tensors, zeros if there are none yet."""
    kinds = {here: there for here, there in MOMENTS.items() if here != "largest" or amsgrad}
    flat = {here: FlatTensors.zeros(parameters) for here in kinds}
    for i, (name, parameter) in enumerate(parameters.items()):
        old: dict[str, Any] = optimizer.state.get(parameter, {})
        steps[i] = old.get("step", 0.0)
        optimizer.state[parameter] = {"step": steps[i]}
        for here, there in kinds.items():
            part = flat[here].parts[name]
            if there in old:
                part.copy_(old[there])
            optimizer.state[parameter][there] = part
    return flat
