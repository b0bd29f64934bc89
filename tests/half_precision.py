"""Errors of an operator in 16 bits beside those of plain PyTorch in 16 bits."""

from collections.abc import Callable, Mapping

import torch

from bevatron.kernels import use


def check_no_worse(
    operator: str, call: Callable[..., torch.Tensor], inputs: Mapping[str, torch.Tensor]
):
    """Compare mean errors of result and gradients, against float64, with those of the reference."""
    dtype = next(iter(inputs.values())).dtype

    def run(choice, tensors):
        leaves = {name: value.detach().requires_grad_() for name, value in tensors.items()}
        with use(**{operator: choice}):
            y = call(**leaves)
            along = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
            along = along.to(y.device, dtype).to(y.dtype)
            found = torch.autograd.grad(y, list(leaves.values()), along)
        return dict(zip(("y", *leaves), (y, *found), strict=True))

    exact = run("reference", {name: value.double() for name, value in inputs.items()})
    plain, ours = run("reference", inputs), run("triton", inputs)
    for name, value in exact.items():
        error, theirs = ((t[name].double() - value).abs().mean() for t in (ours, plain))
        # The mean over a vector of weights is one over few numbers.
        limit = 1.1 if value.numel() > 1000 else 1.5
        assert error <= limit * theirs, f"{name}: mean error {error}, plain PyTorch {theirs}"
