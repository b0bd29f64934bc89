"""The part of a step after the gradients: clipping, optimiser and averaged weights.

`FusedAdamEMA`, called as users call it and as runs do, is compared with torch's fused AdamW with
`clip_grad_norm_` and `_foreach_lerp_`, after a check against AdamW in float64. The floor counts
every tensor once: weights, gradient, moments and averages read, all but the gradient
written, and the gradient read once more for its norm.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from benchmarks.common.timing import Replay, captured
from benchmarks.kernels.cases import Case, Family, Inputs, Row, Setup, Step, Work, cases
from torch import nn

from bevatron.train.capture.cuda_graphs import GraphPool
from bevatron.train.fused_optim import FusedAdamEMA
from bevatron.train.optim import AveragedWeights, clip_gradients, make_optimizer
from bevatron.train.settings import OptimConfig


def table(rows: list[Row]) -> list[Row]:
    """Put ours and torch's times of a model into one row."""
    found: dict[str, Row] = {}
    for row in rows:
        labels = {"model": row["case"], "tensors": row["tensors"], "numbers": row["numbers"]}
        one = found.setdefault(row["case"], labels)
        who = "" if row["who"] == "bevatron" else f"{row['who']} "
        columns = {"eager ms": "launched ms", "host ms": "host ms", "ms": "captured ms"}
        one |= {f"{who}{name}": row[key] for key, name in columns.items() if key in row}
        if not who:
            one["floor ms"] = row["floor ms"]
    for one in found.values():
        for how in ("captured", "launched"):
            if f"{how} ms" in one:
                one[f"{how}/floor"] = one[f"{how} ms"] / one["floor ms"]
    return list(found.values())


OPTIMIZER = Family(
    "optim",
    "kernels/optimizer",
    "{dtype}; clipping by the global norm, averages. launched: from the first launch of a step to "
    "the end of the device's work, the device idle before; host: until the call returns; captured: "
    "replay of a CUDA graph. Copy rate {copy:.2f} TB/s; medians.",
    by_operator=False,
    host=True,
    table=table,
)
OPTIM = OptimConfig(algorithm="amsgrad", clip=10.0, ema=0.99, fused=True)
CLIP, DECAY = 0.1, 0.999
BLOCK = (
    *[(128,)] * 20,
    *[(256,)] * 20,
    *[(128, 128)] * 21,
    *[(256, 256)] * 8,
    *[(512, 128)] * 8,
    *[(256, 1024)] * 2,
    *[(4, 128)] * 2,
    *[(8, 256)] * 4,
)
"""Shapes of one block of an Evoformer-like network; 48 of these have 4,080 tensors."""


class Many(nn.Module):
    """Parameters of a network with thousands of small layers."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(shape)) for shape in shapes)

    def backward(self) -> None:
        """Give every parameter a gradient, as a backward pass does."""
        weights = list(self.weights)
        torch.autograd.backward(weights, torch._foreach_mul([w.detach() for w in weights], 2.0))  # noqa: SLF001


def mace(preset: str, num_elements: int) -> nn.Module:
    """Make a model for the first elements of the periodic table."""
    from bevatron.models.mace import MACE, MaceConfig

    config = MaceConfig.preset(preset).with_data(
        atomic_numbers=tuple(range(1, num_elements + 1)),
        atomic_energies=((-1.0,) * num_elements,),
        avg_num_neighbors=20.0,
    )
    return MACE(config)


def fused_step(model: Many, copies: torch.dtype | None) -> Step:
    """Make a step of `FusedAdamEMA`; each follows a backward pass."""
    optimizer = FusedAdamEMA(
        model.parameters(), weight_decay=0.01, clip=CLIP, decay=DECAY, copies=copies
    )

    def capture() -> Replay:
        model.backward()
        optimizer.advance()
        return captured(optimizer.step, rehearsals=0)

    return Step(optimizer.step, model.backward, capture)


def torch_step(model: Many, copies: torch.dtype | None) -> Step:
    """Make an equivalent step of torch functions; its gradients are not zeroed."""
    parameters = list(model.parameters())
    model.backward()
    optimizer = torch.optim.AdamW(
        parameters, weight_decay=0.01, fused=True, capturable=parameters[0].is_cuda
    )
    averages = [parameter.detach().clone() for parameter in parameters]
    weights = [parameter.detach() for parameter in parameters]
    low = [] if copies is None else [weight.to(copies) for weight in weights]

    def run() -> None:
        nn.utils.clip_grad_norm_(parameters, CLIP)
        optimizer.step()
        torch._foreach_lerp_(averages, weights, 1 - DECAY)
        if low:
            torch._foreach_copy_(low, weights)

    return Step(run)


def step_of_a_run(model: nn.Module) -> Step:
    """Make the part of a run's step after the gradients."""
    optimizer: Any = make_optimizer(model, OPTIM, AveragedWeights(model, 0.99))
    device = next(model.parameters()).device

    def capture() -> Replay:
        optimizer.advance()
        replay = GraphPool(device).capture(optimizer.run, optimizer.warm_up)
        return Replay(replay, (optimizer, model))

    return Step(optimizer.step, capture=capture)


def torch_step_of_a_run(model: nn.Module) -> Step:
    """Make the same from torch functions."""
    ema = AveragedWeights(model, 0.99)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True, fused=True)
    parameters = list(model.parameters())
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)

    def run() -> None:
        clip_gradients(parameters, OPTIM.clip)
        optimizer.step()
        ema.update(model)

    return Step(run, launch_only=True)


@functools.cache
def check(setup: Setup) -> None:
    """Compare three launched and three captured steps with AdamW in float64; exit if off."""
    torch.manual_seed(0)
    model = Many(list(BLOCK)).to(setup.device)
    exact = [nn.Parameter(weight.detach().double()) for weight in model.parameters()]
    averages = [weight.detach().clone() for weight in exact]
    ours = FusedAdamEMA(model.parameters(), lr=1e-2, weight_decay=0.01, clip=CLIP, decay=DECAY)
    theirs = torch.optim.AdamW(exact, lr=1e-2, weight_decay=0.01)
    replay = None
    for step in range(1, 7):
        model.backward()
        for parameter, weight in zip(model.parameters(), exact, strict=True):
            weight.grad = parameter.grad.double()
        if step == 4 and setup.device == "cuda":
            replay = captured(ours.step, rehearsals=0)
        if replay is None:
            ours.step()
        else:
            ours.advance()
            replay()
        nn.utils.clip_grad_norm_(exact, CLIP)
        theirs.step()
        share = 1 - min(DECAY, (1 + step) / (10 + step))
        torch._foreach_lerp_(averages, exact, share)
    for got, want in ((list(model.parameters()), exact), (ours.averages, averages)):
        for a, b in zip(got, want, strict=True):
            error = (a.detach().double() - b.detach()).abs().max() / b.detach().abs().max()
            if not float(error) < 1e-5:
                raise SystemExit(f"FusedAdamEMA is off by {float(error):.1e}")


def draw(setup: Setup, make: Callable[[], nn.Module], seed: int) -> Inputs:
    """Make a model."""
    torch.manual_seed(seed)
    return {"model": make().to(setup.device, setup.dtype)}


def checked(setup: Setup, _case: Case) -> dict[str, float]:
    check(setup)
    return {}


def case_of(
    setup: Setup,
    op: str,
    name: str,
    make: Callable[[], nn.Module],
    bytes_each: int,
    ours: Callable[..., Step],
    peer: Callable[..., Step],
) -> Case:
    """Make the case of a model; ``bytes_each`` are moved for each number."""
    sizes = [p.numel() for p in make().parameters()]
    return Case(
        op,
        name,
        functools.partial(draw, setup, make),
        ours,
        {"step": Work(float(bytes_each * sum(sizes)))},
        functools.partial(checked, setup),
        peers={"torch": peer},
        labels={"tensors": len(sizes), "numbers": sum(sizes)},
    )


@cases("fused_adam_ema", OPTIMIZER)
def fused_cases(setup: Setup) -> list[Case]:
    """Return 93 million parameters in 4,080 tensors, also with copies in bfloat16."""
    make = functools.partial(Many, list(BLOCK) * (1 if setup.tiny else 48))
    found = []
    for copies in (None, torch.bfloat16):
        name = f"FusedAdamEMA, AdamW{', bfloat16 copies' if copies is not None else ''}"
        ours, peer = (functools.partial(f, copies=copies) for f in (fused_step, torch_step))
        size = 40 + (copies is not None) * 2
        found.append(case_of(setup, "fused_adam_ema", name, make, size, ours, peer))
    return found


@cases("run_update", OPTIMIZER)
def update_cases(setup: Setup) -> list[Case]:
    """Return models of few and of thousands of tensors."""
    made: dict[str, Callable[[], nn.Module]] = {
        "MACE paper, 10 elements": functools.partial(mace, "paper", 10),
        "MACE MP-0 medium, 89 elements": functools.partial(mace, "mp-0-medium", 89),
        "4000 tensors of 4096": functools.partial(Many, [(4096,)] * 4000),
        "4000 tensors of 64": functools.partial(Many, [(64,)] * 4000),
    }
    if setup.tiny:
        made = {"20 tensors of 64": functools.partial(Many, [(64,)] * 20)}
    functions = (step_of_a_run, torch_step_of_a_run)
    return [
        case_of(setup, "run_update", f"FusedAdamEMA, AMSGrad: {name}", make, 48, *functions)
        for name, make in made.items()
    ]
