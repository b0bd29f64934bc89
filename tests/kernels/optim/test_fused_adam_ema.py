"""The fused optimiser step: the reference against torch, Triton against the reference."""

import copy

import pytest
import torch

pytest.importorskip("triton")

from bevatron import kernels
from bevatron.kernels.optim.fused_adam_ema import (
    AdamSettings,
    AdamTensors,
    FlatTensors,
    fused_adam_ema,
    starts_of,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHARES = (0.1, 0.01, 1.0)
SHAPES = [(3, 5), (), (1025,), (64, 33), (1,), (2, 2, 2)]


def poisoned(shape, dtype):
    """A random tensor inside a larger one full of NaN, at an odd place."""
    numel = torch.Size(shape).numel()
    outer = torch.full((numel + 13,), float("nan"), dtype=dtype, device=DEVICE)
    inner = outer[7 : 7 + numel].view(shape)
    inner.copy_(torch.randn(shape, dtype=dtype))
    return outer, inner


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64, device=DEVICE)


def make(dtype=torch.float64, amsgrad=True, ema=True, shapes=SHAPES):
    """Everything the operator takes, and the memory around the parameters."""
    torch.manual_seed(3)
    outer, weights = zip(*(poisoned(shape, dtype) for shape in shapes), strict=True)
    named = {str(i): weight for i, weight in enumerate(weights)}
    flat = [FlatTensors.zeros(named).flat for _ in range(4)]
    averages = torch.stack([FlatTensors.copy(named).flat] * 3)
    shares = SHARES if ema else ()
    p = len(shapes)
    tensors = AdamTensors(
        parameters=list(weights),
        gradient=flat[0],
        first=flat[1],
        second=flat[2],
        largest=flat[3] if amsgrad else None,
        averages=averages if ema else None,
        steps=torch.zeros(p, device=DEVICE),
        lr_scale=torch.linspace(1.0, 0.5, p, dtype=torch.float64, device=DEVICE),
        weight_decay=torch.linspace(0.0, 0.1, p, dtype=torch.float64, device=DEVICE),
        controls=numbers(0.01, float("inf"), *shares),
        loss=numbers(1.0)[0],
        verdict=numbers(0.0, 0.0, 0.0),
    )
    return tensors, outer


def set_gradient(tensors, seed):
    """Write the same random gradient for the same seed."""
    torch.manual_seed(seed)
    for weight, start in zip(tensors.parameters, starts_of(tensors.parameters), strict=False):
        values = torch.randn(weight.numel(), dtype=torch.float64)
        tensors.gradient[start : start + weight.numel()] = values.to(weight)


def everything(tensors):
    """Copies of all that may change."""
    flat = (tensors.first, tensors.second, tensors.largest, tensors.averages, tensors.steps)
    return [one.clone() for one in (*tensors.parameters, *flat) if one is not None]


@pytest.mark.parametrize("algorithm", ["adam", "amsgrad", "adamw"])
@pytest.mark.parametrize(("clip", "per_tensor"), [(None, False), (0.5, False), (2.5, True)])
def test_it_equals_torch(algorithm, clip, per_tensor):
    tensors, _ = make(amsgrad=algorithm == "amsgrad")
    settings = AdamSettings(
        (0.9, 0.99), 1e-7, decoupled=algorithm == "adamw", clip=clip, per_tensor=per_tensor
    )
    weights = [torch.nn.Parameter(weight.clone()) for weight in tensors.parameters]
    averages = [[weight.detach().clone() for weight in weights] for _ in SHARES]
    groups = [
        {"params": [weight], "lr": 0.01 * float(scale), "weight_decay": float(decay)}
        for weight, scale, decay in zip(
            weights, tensors.lr_scale, tensors.weight_decay, strict=True
        )
    ]
    kind = torch.optim.AdamW if algorithm == "adamw" else torch.optim.Adam
    optimizer = kind(groups, betas=(0.9, 0.99), eps=1e-7, amsgrad=algorithm == "amsgrad")
    for seed in range(4):
        set_gradient(tensors, seed)
        starts = starts_of(tensors.parameters)
        for weight, start in zip(weights, starts, strict=False):
            part = tensors.gradient[start : start + weight.numel()]
            weight.grad = part.view(weight.shape).clone()
        norm = torch.nn.utils.clip_grad_norm_(weights, 1e9 if per_tensor else clip or 1e9)
        for weight in weights if per_tensor else []:
            torch.nn.utils.clip_grad_norm_([weight], clip)
        optimizer.step()
        with torch.no_grad():
            for own, share in zip(averages, SHARES, strict=True):
                torch._foreach_lerp_(own, weights, share)
        with kernels.use("reference"):
            fused_adam_ema(tensors, settings)
        assert float(tensors.verdict[1]) == pytest.approx(float(norm), rel=1e-12)
    for found, weight in zip(tensors.parameters, weights, strict=True):
        assert torch.allclose(found, weight, rtol=1e-12, atol=1e-14)
    for flat, own in zip(tensors.averages, averages, strict=True):
        for start, average in zip(starts_of(tensors.parameters), own, strict=False):
            part = flat[start : start + average.numel()]
            assert torch.allclose(part, average.flatten(), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    ("amsgrad", "ema", "decoupled", "clip", "per_tensor"),
    [
        (True, True, False, 1.0, False),
        (False, False, True, None, True),
        (False, True, True, 100.0, False),
        (False, True, False, 2.5, True),
    ],
)
def test_triton_equals_the_reference(dtype, tolerance, amsgrad, ema, decoupled, clip, per_tensor):
    settings = AdamSettings(
        (0.9, 0.999), 1e-8, decoupled=decoupled, clip=clip, per_tensor=per_tensor
    )
    found, outer = make(dtype, amsgrad, ema)
    expected, _ = make(torch.float64, amsgrad, ema)
    for one, other in zip(expected.parameters, found.parameters, strict=True):
        one.copy_(other)
    if ema:
        expected.averages.copy_(found.averages)
    kernels.reset_launches()
    for seed in range(3):
        for tensors, choice in ((expected, "reference"), (found, "triton")):
            set_gradient(tensors, seed)
            with kernels.use(choice):
                fused_adam_ema(tensors, settings)
        assert not found.gradient.any()
    assert kernels.launches()["fused_adam_ema", "triton"] == 3
    for one, other in zip(everything(found), everything(expected), strict=True):
        assert torch.isfinite(one).all()
        assert torch.allclose(one.double(), other.double(), rtol=tolerance, atol=tolerance)
    assert torch.allclose(found.verdict, expected.verdict, rtol=1e-6)
    for memory in outer:
        assert torch.isnan(memory[:7]).all()
        assert torch.isnan(memory[-6:]).all()


@pytest.mark.parametrize("choice", ["reference", "triton"])
@pytest.mark.parametrize("wrong", ["gradient", "overflow", "loss", "limit", "before"])
def test_an_unsound_step_changes_nothing(choice, wrong):
    tensors, _ = make(torch.float32)
    set_gradient(tensors, 0)
    with kernels.use(choice):
        fused_adam_ema(tensors, AdamSettings())
        before = everything(tensors)
        set_gradient(tensors, 1)
        if wrong == "gradient":
            tensors.gradient[3] = float("nan")
        elif wrong == "overflow":
            tensors.gradient[3] = float("-inf")
        elif wrong == "loss":
            tensors.loss.fill_(float("nan"))
        elif wrong == "limit":
            tensors.controls[1] = 0.5
        else:
            tensors.verdict[0] = 1.0
        fused_adam_ema(tensors, AdamSettings())
        assert tensors.verdict[[0, 2]].tolist() == [1.0, 0.0]
        # Nor does a sound one after it.
        tensors.loss.fill_(1.0)
        tensors.controls[1] = float("inf")
        set_gradient(tensors, 2)
        fused_adam_ema(tensors, AdamSettings())
    for one, other in zip(everything(tensors), before, strict=True):
        assert torch.equal(one, other)
    assert not tensors.gradient.any()


@pytest.mark.parametrize("choice", ["reference", "triton"])
def test_parameters_without_gradient_stay_copies_follow_and_known_norms_are_used(choice):
    tensors, _ = make(torch.float32)
    plain, _ = make(torch.float32)
    for one, other in zip(tensors.parameters, plain.parameters, strict=True):
        one.copy_(other)
    idle = 3
    active = torch.ones(len(SHAPES), dtype=torch.float64, device=DEVICE)
    active[idle] = 0.0
    twin = torch.full_like(tensors.gradient, float("nan"), dtype=torch.float16)
    squares = torch.zeros(3, device=DEVICE)
    values = {**vars(tensors), "active": active, "copy": twin, "squares": squares, "kept": {}}
    tensors = AdamTensors(**values)
    tensors.averages.zero_()
    starts = starts_of(tensors.parameters)
    before = [weight.clone() for weight in tensors.parameters]
    for seed in range(2):
        for one in (tensors, plain):
            set_gradient(one, seed)
        shares = torch.tensor([0.0, 0.25, 0.75], device=DEVICE)
        squares.copy_(shares * tensors.gradient.square().sum())
        with kernels.use(choice):
            fused_adam_ema(tensors, AdamSettings(clip=0.1))
        with kernels.use("reference"):
            fused_adam_ema(plain, AdamSettings(clip=0.1))
    assert tensors.steps.tolist() == [2.0, 2.0, 2.0, 0.0, 2.0, 2.0]
    for i, (weight, start) in enumerate(zip(tensors.parameters, starts, strict=False)):
        span = slice(start, start + weight.numel())
        expected = before[i] if i == idle else plain.parameters[i]
        assert torch.allclose(weight, expected, rtol=1e-5, atol=1e-6)
        assert tensors.first[span].any() == (i != idle)
        assert torch.equal(twin[span].view(weight.shape), weight.half())
    span = slice(starts[idle], starts[idle] + before[idle].numel())
    assert torch.allclose(tensors.averages[0, span], 0.19 * before[idle].flatten(), rtol=1e-5)


def test_two_runs_give_equal_bits():
    found = []
    for _ in range(2):
        tensors, _ = make(torch.float32)
        set_gradient(tensors, 0)
        with kernels.use("triton"):
            fused_adam_ema(tensors, AdamSettings(clip=0.1))
        found.append(everything(tensors))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_wrong_shapes_are_refused():
    tensors, _ = make()
    values = {**vars(copy.copy(tensors)), "parameters": tensors.parameters[:-1]}
    with pytest.raises(ValueError, match="flat tensor has shape"):
        AdamTensors(**values)
