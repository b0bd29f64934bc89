"""Clipping, optimiser and averaged weights in a few launches that never wait for the device.

Gradients, and averages, each lie in one flat buffer of which a parameter's is a part: norm,
clipping, the sum over ranks and the average are one launch each however many parameters there are.
Whether loss and gradient are sound is decided on the device, by a number that torch's fused
optimisers read: if it is set, they change nothing.
"""

import torch
from torch import Tensor

from bevatron.train.optim import FlatTensors, set_lr, trained_parameters
from bevatron.train.state import TrainState


class DeviceUpdate:
    """The second half of a step: from summed gradients to new weights.

    It takes over the gradients, the learning rates and the averaged weights of ``state``; they lie
    in memory of its own from now on.

    Parameters
    ----------
    state
        Its optimiser must be one of torch's fused ones.
    clip
        Largest global norm of the gradient; None = no clipping.

    Attributes
    ----------
    parameters
        Those that are trained.
    gradients
        All gradients, to be added to; zero after every update.
    """

    def __init__(self, state: TrainState, clip: float | None) -> None:
        parameters = trained_parameters(state.model)
        self.parameters = list(parameters.values())
        self.gradients = FlatTensors.zeros(parameters)
        for name, parameter in parameters.items():
            parameter.grad = self.gradients.parts[name]
        self._optimizer, self._ema, self._clip = state.optimizer, state.ema, clip
        self._averages: Tensor | None = None
        if state.ema is not None:
            averages = FlatTensors.copy(state.ema.averages)
            state.ema.averages, self._averages = averages.parts, averages.flat
        flat = self.gradients.flat
        device = flat.device
        self._limit = torch.zeros((), dtype=torch.float64, device=device)
        self._ema_weight = torch.zeros((), dtype=flat.dtype, device=device)
        self._stopped = torch.zeros((), dtype=torch.bool, device=device)
        self._skip = torch.zeros((), dtype=torch.float32, device=device)
        for group in self._optimizer.param_groups:
            group["lr"] = torch.zeros((), dtype=torch.float32, device=device)
            group["capturable"] = device.type == "cuda"
        self._optimizer.found_inf = self._skip  # type: ignore[attr-defined]

    def set(self, lr: float, largest_loss: float) -> None:
        """Tell the device what changes from step to step."""
        set_lr(self._optimizer, lr)
        self._limit.fill_(largest_loss)
        if self._ema is not None:
            self._ema_weight.fill_(1.0 - self._ema.next_decay())

    @torch.no_grad()
    def __call__(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Clip, step, average, and forget the gradients; change no weight if anything is unsound.

        Once it was, no later call changes any weight either.

        Parameters
        ----------
        loss
            Of the whole step, on the device.

        Returns
        -------
        norm, fine
            Global norm of the gradient before clipping, and whether the weights were changed.
        """
        flat = self.gradients.flat
        norm = torch.linalg.vector_norm(flat)
        fine = torch.isfinite(norm) & torch.isfinite(loss) & (loss <= self._limit) & ~self._stopped
        self._stopped.copy_(~fine)
        self._skip.copy_(self._stopped)
        if self._clip is not None:
            flat.mul_((self._clip / (norm + 1e-6)).clamp(max=1.0))
        self._optimizer.step()
        if self._averages is not None:
            present = torch.cat([parameter.reshape(-1) for parameter in self.parameters])
            self._averages.lerp_(present, self._ema_weight * fine)
        flat.zero_()
        return norm, fine

    def rehearse(self, loss: Tensor) -> None:
        """Do everything once without changing weights, moments or averages."""
        before = self._stopped.clone()
        self._stopped.fill_(value=True)
        self(loss)
        self._stopped.copy_(before)

    def release(self) -> None:
        """Give the optimiser back as it was, for steps of another kind."""
        for group in self._optimizer.param_groups:
            group["lr"] = float(group["lr"])
        del self._optimizer.found_inf  # type: ignore[attr-defined]
        self._optimizer.zero_grad()
