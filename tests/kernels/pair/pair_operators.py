"""Devices, types and checks that tests of operators on pairs share."""

import torch
from torch.autograd.graph import saved_tensors_hooks

from bevatron.kernels import use
from bevatron.testing import check_op

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HALF = torch.bfloat16 if GPU else torch.float16
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if GPU else [])
"""Interpreted, bfloat16 is covered by the conversions that float16 shares."""


def check_kernels(operator, inputs, tolerance=None, **options):
    """Compare with the reference: result and every first gradient."""
    ran = (operator.__name__, "triton")
    check_op(operator, operator, inputs, order=1, tolerance=tolerance, ran=ran, **options)


def saved(operator, inputs):
    """Return the result of the kernels, and what they save for its gradients beside the inputs."""
    inputs = {name: value.requires_grad_() for name, value in inputs.items()}
    given = {value.data_ptr() for value in inputs.values()}
    kept = []
    hooks = saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t)
    with hooks, use(**{operator.__name__: "triton"}):
        result = operator(**inputs)
    return result, [t for t in kept if t.data_ptr() not in given]
