"""The specification of the fused optimiser step, parameter by parameter."""

from math import inf

import torch
from torch import Tensor

from bevatron.kernels.optim.fused_adam_ema import AdamSettings, AdamTensors, starts_of


def fused_adam_ema(tensors: AdamTensors, settings: AdamSettings) -> None:
    """Judge the step, then update every parameter if the step is sound."""
    lr, largest_loss, *shares = tensors.controls.unbind()
    if tensors.squares is None:
        norm = torch.linalg.vector_norm(tensors.gradient).double()
    else:
        norm = tensors.squares.double().sum().sqrt()
    loss, before = tensors.loss, tensors.verdict[0] == 0
    fine = torch.isfinite(norm) & torch.isfinite(loss) & (loss <= largest_loss) & before
    tensors.verdict.copy_(torch.stack([(~fine).double(), norm, fine.double()]))
    active = torch.ones_like(tensors.lr_scale) if tensors.active is None else tensors.active
    tensors.steps.add_(fine * active)
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
        moves = fine & (active[i] > 0)
        news = [(part(tensors.first), first, moves), (part(tensors.second), second, moves)]
        if tensors.largest is not None:
            second = torch.maximum(part(tensors.largest), second)
            news.append((part(tensors.largest), second, moves))
        size = (rate / (1 - beta1**step)).to(weight)
        root = (1 - beta2**step).sqrt().to(weight)
        kept = weight * (1 - rate.to(weight) * decay) if settings.decoupled else weight
        moved = kept - size * first / (second.sqrt() / root + settings.eps)
        present = torch.where(moves, moved, weight)
        averages = () if tensors.averages is None else tensors.averages
        for flat, share in zip(averages, shares, strict=True):
            average = part(flat)
            news.append((average, torch.lerp(average, present, share.to(weight)), fine))
        for old, new, changes in [*news, (weight, moved, moves)]:
            old.copy_(torch.where(changes, new, old))
        if tensors.copy is not None:
            part(tensors.copy).copy_(weight)
    tensors.gradient.zero_()
