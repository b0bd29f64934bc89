"""The specification of the fused optimiser step, parameter by parameter."""

from math import inf

import torch
from torch import Tensor

from bevatron.kernels.fused_adam_ema import AdamSettings, AdamTensors, starts_of


def fused_adam_ema(tensors: AdamTensors, settings: AdamSettings) -> None:
    """Judge the step, then update every parameter if all is sound."""
    lr, largest_loss, new_share = tensors.controls.unbind()
    norm = torch.linalg.vector_norm(tensors.gradient).double()
    loss, before = tensors.loss, tensors.verdict[0] == 0
    fine = torch.isfinite(norm) & torch.isfinite(loss) & (loss <= largest_loss) & before
    tensors.verdict.copy_(torch.stack([(~fine).double(), norm, fine.double()]))
    tensors.steps.add_(fine)
    clip = inf if settings.clip is None else settings.clip
    scale = (clip / (norm + 1e-6)).clamp(max=1.0)
    beta1, beta2 = settings.betas
    starts = starts_of(tensors.parameters)
    for i, (weight, start) in enumerate(zip(tensors.parameters, starts, strict=False)):

        def part(flat: Tensor, start: int = start, weight: Tensor = weight) -> Tensor:
            return flat[start : start + weight.numel()].view(weight.shape)

        step, rate = tensors.steps[i].double(), lr * tensors.lr_scale[i]
        decay = tensors.weight_decay[i].to(weight)
        gradient = part(tensors.gradient)
        if settings.per_tensor:
            scale = (clip / (torch.linalg.vector_norm(gradient).double() + 1e-6)).clamp(max=1.0)
        gradient = gradient * scale.to(weight)
        if not settings.decoupled:
            gradient = gradient + decay * weight
        first = torch.lerp(part(tensors.first), gradient, 1 - beta1)
        second = beta2 * part(tensors.second) + (1 - beta2) * gradient.square()
        news = [(part(tensors.first), first), (part(tensors.second), second)]
        if tensors.largest is not None:
            second = torch.maximum(part(tensors.largest), second)
            news.append((part(tensors.largest), second))
        size = (rate / (1 - beta1**step)).to(weight)
        root = (1 - beta2**step).sqrt().to(weight)
        kept = weight * (1 - rate.to(weight) * decay) if settings.decoupled else weight
        moved = kept - size * first / (second.sqrt() / root + settings.eps)
        if tensors.average is not None:
            average = part(tensors.average)
            news.append((average, torch.lerp(average, moved, new_share.to(weight))))
        for old, new in [*news, (weight, moved)]:
            old.copy_(torch.where(fine, new, old))
    tensors.gradient.zero_()
