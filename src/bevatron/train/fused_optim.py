"""`FusedAdamEMA`: clipping, Adam and averaged weights in a few launches, as torch optimises."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from inspect import unwrap
from operator import is_
from typing import Any, Literal, Protocol

import torch
from jaxtyping import Float
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from bevatron.kernels.optim.fused_adam_ema import (
    AdamSettings,
    AdamTensors,
    FlatTensors,
    fused_adam_ema,
)
from bevatron.train.capture.transfers import NumberFeed

MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


class Averages(Protocol):
    """Averaged weights by name, kept elsewhere: `bevatron.train.optim.AveragedWeights`."""

    sets: list[dict[str, Tensor]]

    def next_decays(self) -> list[float]:
        """Count an update and return its decays."""


class NotCompiled(torch.optim.Optimizer):
    """An optimiser without what torch wraps around its methods for steps that are compiled.

    That imports torch._dynamo: a second of CPU time at the start of a run.
    """

    add_param_group = unwrap(torch.optim.Optimizer.add_param_group)
    state_dict = unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = unwrap(torch.optim.Optimizer.load_state_dict)
    zero_grad = unwrap(torch.optim.Optimizer.zero_grad)


class FusedAdamEMA(NotCompiled):
    r"""Adam, AdamW or AMSGrad with clipping and averaged weights, see `fused_adam_ema`.

    All gradients, moments and averages are contiguous in one buffer each, so a step is three
    launches however many parameters there are, and never waits for the device. Gradients stay where
    they are: ``zero_grad`` is part of the step, and backward adds to them. A step is not sound if
    its gradient is not finite or its ``loss``, where that is written, is not finite or too large:
    it changes no weight, moment or average, but still counts for the share that the next ones have
    in the average.

    A parameter takes part if backward has reached it, or its ``grad`` was assigned, since the last
    step; any other keeps weight, moments and count of steps, as with torch's optimisers. Raises
    ValueError for parameters of several types or devices, and settings out of range.

    Parameters
    ----------
    params
        Parameters, named parameters or groups of them, float32 or float64 on one device. A group
        may have its own ``lr`` and ``weight_decay``.
    lr, betas, eps, weight_decay, amsgrad : as those of `torch.optim.AdamW`
    decoupled : weight decay acts on the weights (AdamW), not on the gradient (Adam)
    clip : largest norm of the gradient; None = any
    clip_per_tensor : that is each parameter's norm, not that of all together
    average
        ``ema``: :math:`a \leftarrow d a + (1 - d) w`, after step n with
        :math:`d = \min(decay, (1 + n)/(10 + n))`; ``swa``: the mean of the weights after every
        step (Izmailov et al. 2018); None. Or an object that keeps them by the names of the
        parameters, which are then moved here, and gives the decays.
    decay : decay of ``ema``
    copies : also keep the weights in this type, written in the same pass (`copies_of_weights`)
    every
        All parameters take part in every step, with a gradient of zero if backward has not reached
        them.

    Attributes
    ----------
    parameters, gradients
        Those of all groups, in order; gradients accumulate and are zero after every step.
    gradient : all gradients in one piece
    loss : [] float64
        Loss of the step, written before it by a caller who wants it checked.
    largest_loss : upper bound of a sound one
    stops : whether all steps after one that is not sound change nothing either

    Notes
    -----
    In a CUDA graph capture ``step()`` and call `advance` before every replay, which sends the
    learning rates and the average's share to the device.

    Examples
    --------
    >>> model = torch.nn.Linear(3, 1)
    >>> optimizer = FusedAdamEMA(model.parameters(), lr=0.1, clip=1.0, decay=0.9)
    >>> for _ in range(2):
    ...     model(torch.ones(4, 3)).square().mean().backward()
    ...     optimizer.step()
    >>> float(optimizer.grad_norm) > 0
    True
    >>> with optimizer.averaged():
    ...     averaged = model.weight.clone()
    >>> torch.equal(averaged, model.weight)
    False
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        amsgrad: bool = False,
        decoupled: bool = True,
        clip: float | None = None,
        clip_per_tensor: bool = False,
        average: Literal["ema", "swa"] | Averages | None = "ema",
        decay: float = 0.999,
        copies: torch.dtype | None = None,
        every: bool = False,
    ) -> None:
        for name, value in {"lr": lr, "eps": eps, "weight_decay": weight_decay}.items():
            if not value >= 0:
                raise ValueError(f"FusedAdamEMA: {name} is {value}, expected 0 or more")
        for name, value in {"betas[0]": betas[0], "betas[1]": betas[1], "decay": decay}.items():
            if not 0 <= value < 1:
                raise ValueError(f"FusedAdamEMA: {name} is {value}, expected 0 <= {name} < 1")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "updates": 0,
        }
        super().__init__(params, defaults)
        self._kind, self._decay, self._every = average, decay, every
        self.largest_loss, self.stops = float("inf"), False
        self.parameters = [p for group in self.param_groups for p in group["params"]]
        self._check_alike()
        self._settings = AdamSettings(betas, eps, decoupled, clip, clip_per_tensor)
        self._make_tensors(amsgrad, copies)
        self._sent: tuple[Any, ...] = ()
        self._sent_shared: tuple[float, ...] = ()
        # Called once per parameter in every backward pass: a set's own method costs least, and
        # keeps no optimiser alive that is not used any more.
        self._touched: set[Tensor] = set()
        for parameter in () if every else self.parameters:
            parameter.register_post_accumulate_grad_hook(self._touched.add)

    def _check_alike(self) -> None:
        """Refuse parameters that one launch cannot update."""
        kinds = {(p.dtype, p.device) for p in self.parameters}
        if len(kinds) > 1:
            found = ", ".join(sorted(f"{dtype} on {device}" for dtype, device in kinds))
            raise ValueError(f"FusedAdamEMA: parameters of one type on one device, got {found}")

    def _make_tensors(self, amsgrad: bool, copies: torch.dtype | None) -> None:
        """Lay out gradients, moments and averages."""
        named = {str(i): p.detach() for i, p in enumerate(self.parameters)}
        device, number = self.parameters[0].device, len(named)
        # First, as averages that are moved exist twice for a moment: later it would be the peak.
        self._flat: dict[str, FlatTensors] = {}
        if isinstance(self._kind, str):
            self._flat["average"] = FlatTensors.copy(named)
        elif self._kind is not None:
            self._move_averages(self._kind)
        self._gradients = FlatTensors.zeros(named)
        self.gradient = self._gradients.flat
        self._flat |= {name: FlatTensors.zeros(named) for name in MOMENTS[: 3 if amsgrad else 2]}
        self._copies: FlatTensors | None = None
        if copies is not None:
            typed = {name: weight.to(copies) for name, weight in named.items()}
            self._copies = FlatTensors.copy(typed)
        # Of each parameter: share of the rate, decay, whether it has a gradient.
        self._feed = NumberFeed(3 * number, device)
        largest, average = self._flat.get(MOMENTS[2]), self._flat.get("average")
        number_of_averages = 0 if average is None else len(average.flat) // len(self.gradient)
        self._controls = NumberFeed(2 + number_of_averages, device)
        lr_scale, weight_decay, active = self._feed.values.view(3, number)
        self._steps = torch.zeros(number, dtype=torch.float32, device=device)
        self._tensors = AdamTensors(
            parameters=self.parameters,
            gradient=self._gradients.flat,
            first=self._flat[MOMENTS[0]].flat,
            second=self._flat[MOMENTS[1]].flat,
            largest=None if largest is None else largest.flat,
            averages=None if average is None else average.flat.view(number_of_averages, -1),
            steps=self._steps,
            lr_scale=lr_scale,
            weight_decay=weight_decay,
            controls=self._controls.values,
            loss=torch.zeros((), dtype=torch.float64, device=device),
            verdict=torch.zeros(3, dtype=torch.float64, device=device),
            active=None if self._every else active,
            copy=None if self._copies is None else self._copies.flat,
        )
        self.gradients = list(self._gradients.parts.values())
        self.loss = self._tensors.loss
        for i, (parameter, own) in enumerate(zip(self.parameters, self.gradients, strict=True)):
            parameter.grad = own
            self._link_state(i)

    def _move_averages(self, kept: Averages) -> None:
        """Move averages that are kept elsewhere into one buffer; they stay known by their names."""
        names = [name for group in self.param_groups for name in group["param_names"]]
        flat = FlatTensors.copy(
            {f"{k} {name}": own[name] for k, own in enumerate(kept.sets) for name in names}
        )
        kept.sets = [
            {name: flat.parts[f"{k} {name}"] for name in own} for k, own in enumerate(kept.sets)
        ]
        self._flat["average"] = flat

    def _own(self) -> dict[str, FlatTensors]:
        """Return what is part of the optimiser's state, not kept elsewhere."""
        return {k: v for k, v in self._flat.items() if k in MOMENTS or isinstance(self._kind, str)}

    def _link_state(self, i: int) -> None:
        """Expose the moments of a parameter in the place where torch's optimisers have them."""
        state = {name: flat.parts[str(i)] for name, flat in self._own().items()}
        self.state[self.parameters[i]] = {"step": self._steps[i], **state}

    @property
    def grad_norm(self) -> Float[Tensor, ""]:
        """Global norm of the last step's gradient before clipping, on the device."""
        return self._tensors.verdict[1]

    @property
    def skipped(self) -> Float[Tensor, ""]:
        """1 if the last step's gradient was not finite and nothing was changed, else 0."""
        return self._tensors.verdict[0]

    @property
    def verdict(self) -> Float[Tensor, "2"]:
        """Norm of the last step's gradient before clipping, and whether weights were changed."""
        return self._tensors.verdict[1:]

    @property
    def copies_of_weights(self) -> list[Tensor]:
        """The weights in the type ``copies``, in the order of the parameters; empty without."""
        return [] if self._copies is None else list(self._copies.parts.values())

    @property
    def averages(self) -> list[Tensor]:
        """The (first) averaged weights, in the order of the parameters; empty without."""
        parts = list(self._flat["average"].parts.values()) if "average" in self._flat else []
        return parts[: len(self.parameters)]

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: ARG002  torch's signature
        """Forget the gradients; they stay where they are."""
        self._gradients.flat.zero_()
        self._touched.clear()
        for parameter, own in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = own

    def advance(self) -> None:
        """Send what changes from step to step; `step` does it unless it is being captured."""
        updates = self.param_groups[0]["updates"] + 1
        self.param_groups[0]["updates"] = updates
        shares: list[float] = []
        if self._kind == "ema":
            shares = [1.0 - min(self._decay, (1 + updates) / (10 + updates))]
        elif self._kind == "swa":
            shares = [1.0 / updates]
        elif self._kind is not None:
            shares = [1.0 - decay for decay in self._kind.next_decays()]
        rates = [float(group["lr"]) for group in self.param_groups]
        first = rates[0] or 1.0
        shared = (first, self.largest_loss, *shares)
        if shared != self._sent_shared:
            self._controls.send(shared)
            self._sent_shared = shared
        every = self._every or len(self._touched) == len(self.parameters)
        touched = None if every else frozenset(self._touched)
        decays = [float(group["weight_decay"]) for group in self.param_groups]
        # Schedules change all rates alike: then nothing new is sent per parameter.
        sent = ([rate / first for rate in rates], decays, touched)
        if sent != self._sent:
            self._send_numbers(*sent)
            self._sent = sent

    def _send_numbers(
        self, shares: list[float], decays: list[float], touched: frozenset[Tensor] | None
    ) -> None:
        """Send each parameter's rate factor, decay, and whether it moves."""
        # A few fills: lists of thousands of numbers take longer than the step itself.
        numbers = torch.ones(3, len(self.parameters), dtype=torch.float64)
        sizes = [len(group["params"]) for group in self.param_groups]
        for row, values in zip(numbers, (shares, decays), strict=False):
            for part, value in zip(row.split(sizes), values, strict=True):
                part.fill_(value)
        if touched is not None:
            moves = [i for i, parameter in enumerate(self.parameters) if parameter in touched]
            numbers[2].zero_()[moves] = 1.0
        self._feed.send(numbers.flatten())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have a gradient, then forget the gradients."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_gradients()
        capturing = self._steps.is_cuda and torch.cuda.is_current_stream_capturing()
        if not capturing:
            self.advance()
        self.run()
        if not capturing:
            self._touched.clear()
        return loss

    @torch.no_grad()
    def run(self) -> None:
        """Update from the gradients and from what `advance` has sent, as a replayed graph does."""
        if not self.stops:
            self._tensors.verdict[0].zero_()
        fused_adam_ema(self._tensors, self._settings)

    def warm_up(self) -> None:
        """Launch the kernels of a step that changes nothing but the gradient, which is zeroed."""
        before, stops = self._tensors.verdict.clone(), self.stops
        self._tensors.verdict.fill_(1.0)
        self.stops = True
        try:
            self.run()
        finally:  # else the verdict would stop all later steps
            self.stops = stops
            self._tensors.verdict.copy_(before)

    def _take_gradients(self) -> None:
        """Copy gradients that were assigned elsewhere into the kernel's buffer."""
        given = [parameter.grad for parameter in self.parameters]
        if all(map(is_, given, self.gradients)):
            return
        there, here = [], []
        for parameter, grad, own in zip(self.parameters, given, self.gradients, strict=True):
            if grad is own:
                continue
            if grad is None:
                own.zero_()
            elif grad.data_ptr() != own.data_ptr():
                there.append(grad)
                here.append(own)
                self._touched.add(parameter)
            parameter.grad = own
        if there:
            torch._foreach_copy_(here, there)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Load the averaged weights into the parameters for the length of a ``with`` block."""
        averages = self.averages
        kept = [parameter.detach().clone() for parameter in self.parameters] if averages else []
        with torch.no_grad():
            for parameter, average in zip(self.parameters, averages, strict=bool(averages)):
                parameter.copy_(average)
        try:
            yield
        finally:
            with torch.no_grad():
                for parameter, before in zip(self.parameters, kept, strict=bool(kept)):
                    parameter.copy_(before)

    @torch.no_grad()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from a state of this class, or of torch's Adam or AdamW.

        If it has no averages, they start from the current weights.
        """
        super().load_state_dict(dict(state_dict))
        for group in self.param_groups:
            group.setdefault("updates", 0)
        for i, parameter in enumerate(self.parameters):
            loaded = dict(self.state[parameter])
            self._steps[i] = torch.as_tensor(loaded.get("step", 0.0))
            for name, flat in self._own().items():
                part = flat.parts[str(i)]
                if name in loaded:
                    part.copy_(loaded[name])
                elif name == "average":
                    part.copy_(parameter)
                else:
                    part.zero_()
            if self._copies is not None:
                self._copies.parts[str(i)].copy_(parameter)
            self._link_state(i)
        self._sent, self._sent_shared = (), ()

    def clip_from_buckets(self, model: DistributedDataParallel) -> None:
        """Take the global norm from DDP's buckets, overlapped with their all-reduce.

        The squares of a bucket are summed as soon as it is reduced, so nothing is read again before
        the step. Raises ValueError if each parameter is clipped by its own norm, which buckets do
        not have.
        """
        if self._settings.per_tensor:
            raise ValueError("FusedAdamEMA: buckets have no norms of single parameters")
        squares = torch.zeros(
            len(self.parameters), dtype=self._steps.dtype, device=self._steps.device
        )
        self._tensors = replace(self._tensors, squares=squares)
        # Without annotations: DDP refuses all but its own.
        model.register_comm_hook(squares, lambda kept, bucket: _mean_and_square(kept, bucket))  # noqa: PLW0108


def _mean_and_square(squares: Tensor, bucket: Any) -> Any:
    """Average a bucket over the ranks, and keep the sum of its squares; return a future."""
    buffer = bucket.buffer().div_(distributed.get_world_size())
    work = distributed.all_reduce(buffer, async_op=True)

    def note(future: Any) -> Tensor:
        mean: Tensor = future.value()[0]
        squares[bucket.index()] = mean.square().sum(dtype=squares.dtype)
        return mean

    return work.get_future().then(note)
