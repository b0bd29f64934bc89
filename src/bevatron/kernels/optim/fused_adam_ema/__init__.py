"""Clipping, Adam and averaged weights over all parameters of a model at once, on the device."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support

__all__ = ["AdamSettings", "AdamTensors", "FlatTensors", "fused_adam_ema"]

_operator = registry.operator("fused_adam_ema", __name__, takes=support.float32_or_float64)

ALIGNMENT = 32
"""Elements; each part of a flat tensor begins at a multiple of it."""


@dataclass(frozen=True)
class FlatTensors:
    """Tensors packed into one flat buffer, so that one launch updates all of them.

    Attributes
    ----------
    flat : the buffer, with zeros between the tensors
    parts : views into it, by name
    """

    flat: Float[Tensor, " n"]
    parts: dict[str, Tensor]

    @classmethod
    def zeros(cls, like: Mapping[str, Tensor]) -> "FlatTensors":
        """Allocate zeros of the given shapes.

        Examples
        --------
        >>> tensors = FlatTensors.zeros({"a": torch.ones(2), "b": torch.ones(1, 3)})
        >>> tensors.parts["b"].fill_(1.0)
        tensor([[1., 1., 1.]])
        >>> tensors.flat.sum()
        tensor(3.)
        """
        first = next(iter(like.values()))
        starts = starts_of(list(like.values()))
        flat = torch.zeros(starts[-1], dtype=first.dtype, device=first.device)
        parts = {
            name: flat.as_strided(tensor.shape, _strides(tensor.shape), start)
            for (name, tensor), start in zip(like.items(), starts[:-1], strict=True)
        }
        return cls(flat, parts)

    @classmethod
    def copy(cls, tensors: Mapping[str, Tensor]) -> "FlatTensors":
        """Copy tensors into one buffer."""
        made = cls.zeros(tensors)
        for name, tensor in tensors.items():
            made.parts[name].copy_(tensor)
        return made


def _strides(shape: Sequence[int]) -> list[int]:
    """Return contiguous strides: `as_strided` is one view per tensor, slice and reshape are two."""
    return [*accumulate(reversed(shape[1:]), mul, initial=1)][::-1] if shape else []


def starts_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return the offset of each tensor in a flat one, and the end of the last."""
    sizes = [-(-tensor.numel() // ALIGNMENT) * ALIGNMENT for tensor in tensors]
    return [0, *accumulate(sizes)]


@dataclass(frozen=True)
class AdamSettings:
    """Settings that do not change during a run.

    Attributes
    ----------
    betas, eps : decays of the moments, and the term added to the denominator
    decoupled : whether weight decay acts on the weights (AdamW) and not on the gradient
    clip : largest norm of the gradient, None = any
    per_tensor : whether ``clip`` limits each parameter's norm instead of the global one
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    decoupled: bool = False
    clip: float | None = None
    per_tensor: bool = False


@dataclass(frozen=True)
class AdamTensors:
    """Everything that the update reads and writes, at fixed addresses. P parameters, n elements.

    Attributes
    ----------
    parameters : anywhere in memory, each contiguous, of one type and device
    gradient, first, second : [n]
        Gradient and Adam's moments of all parameters, as `FlatTensors` lays them out.
    largest : [n]
        Largest second moment so far (AMSGrad); None = plain Adam.
    averages : [K, n]
        Averaged weights; None = none.
    steps : [P] float32
        Updates so far.
    lr_scale, weight_decay : [P] float64
        One for each parameter.
    controls : [2 + K] float64
        Learning rate, largest sound loss, and the share of the new weights in each average.
    loss : [] float64
        Loss of this step.
    verdict : [3] float64
        Whether something was unsound, now or before (then nothing but the gradient changes); global
        norm of the gradient before clipping; whether the weights were changed.
    active : [P] float64
        1 for parameters that have a gradient; 0 leaves weights, moments and step count
        unchanged; None = all have one.
    copy : [n]
        A copy of the weights in another type, written with them; None = none.
    squares : [b]
        Terms of the squared gradient norm if they are already known, as from the buckets of an
        all-reduce; None = the norm is computed.
    kept : cache for what an implementation derives from the addresses
    """

    parameters: list[Tensor]
    gradient: Float[Tensor, " n"]
    first: Float[Tensor, " n"]
    second: Float[Tensor, " n"]
    largest: Float[Tensor, " n"] | None
    averages: Float[Tensor, "K n"] | None
    steps: Float[Tensor, " P"]
    lr_scale: Float[Tensor, " P"]
    weight_decay: Float[Tensor, " P"]
    controls: Float[Tensor, " c"]
    loss: Float[Tensor, ""]
    verdict: Float[Tensor, "3"]
    active: Float[Tensor, " P"] | None = None
    copy: Float[Tensor, " n"] | None = None
    squares: Float[Tensor, " b"] | None = None
    kept: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not all(parameter.is_contiguous() for parameter in self.parameters):
            raise ValueError("fused_adam_ema: parameters must be contiguous")
        end = starts_of(self.parameters)[-1]
        flat = (self.gradient, self.first, self.second, self.largest, self.copy)
        for tensor in (*flat, *(() if self.averages is None else self.averages)):
            if tensor is not None and tensor.shape != (end,):
                raise ValueError(
                    f"fused_adam_ema: a flat tensor has shape {tuple(tensor.shape)}, expected "
                    f"({end},)"
                )
        if len(self.controls) != 2 + (0 if self.averages is None else len(self.averages)):
            raise ValueError("fused_adam_ema: each average needs a share")


@torch.no_grad()
def fused_adam_ema(tensors: AdamTensors, settings: AdamSettings) -> None:
    r"""Clip the gradient, take an Adam step and update the averages in place; zero the gradient.

    With the gradient, or each parameter's, scaled to a norm of at most ``clip``, and
    :math:`\lambda w` added to it unless decay is decoupled, for step t

    .. math::

        m \leftarrow \beta_1 m + (1-\beta_1) g, \quad v \leftarrow \beta_2 v + (1-\beta_2) g^2,
        \quad w \leftarrow w - \frac{\eta}{1-\beta_1^t}
        \frac{m}{\sqrt{\hat v / (1-\beta_2^t)} + \epsilon}, \quad
        a_k \leftarrow a_k + \alpha_k (w - a_k)

    where :math:`\hat v` is v, or the largest v so far (Kingma and Ba 2015; Reddi et al. 2018;
    Loshchilov and Hutter 2019). It never synchronises with the device. If norm or loss is not
    finite, or the loss above its largest sound value, now or in an earlier call, nothing but the
    gradient changes.

    Examples
    --------
    >>> weight = torch.ones(2)
    >>> flat = [FlatTensors.zeros({"w": weight}).flat for _ in range(3)]
    >>> flat[0][:2] = 3.0
    >>> def numbers(*values): return torch.tensor(values, dtype=torch.float64)
    >>> tensors = AdamTensors(
    ...     [weight], *flat, None, None, torch.zeros(1), numbers(1.0), numbers(0.0),
    ...     numbers(0.1, float("inf")), numbers(2.0)[0], numbers(0.0, 0.0, 0.0),
    ... )
    >>> fused_adam_ema(tensors, AdamSettings())
    >>> weight, tensors.steps
    (tensor([0.9000, 0.9000]), tensor([1.]))
    """
    run = _operator.dispatch(tensors.gradient)
    run(tensors, settings)
