"""Pairs for the tests of the triangle multiplication, and how they are compared."""

import torch
from pair_operators import DEVICE, GPU

from bevatron.kernels import triangle_multiply
from bevatron.testing import Tolerance, check_op

EXACT = Tolerance(4e-6, 2e-5)
ROUNDED = Tolerance(2e-2, 4e-2) if GPU else Tolerance(4e-3, 8e-3)
BIASES = ("a_bias", "a_gate_bias", "b_bias", "b_gate_bias", "out_bias", "out_gate_bias")


def make(length, width, hidden, biases=(), batch=(), masked=True, dtype=torch.float32):
    """Random inputs whose intermediate numbers are of order one."""
    generator = torch.Generator().manual_seed(7)
    sizes = {"a": (hidden, width), "b": (hidden, width), "out": (width, hidden)}
    shapes = {
        "z": (*batch, length, length, width),
        "norm_in_weight": (width,),
        "norm_in_bias": (width,),
        **{f"{k}{gate}_weight": sizes[k] for k in "ab" for gate in ("", "_gate")},
        "norm_out_weight": (hidden,),
        "norm_out_bias": (hidden,),
        "out_weight": sizes["out"],
        "out_gate_weight": (width, width),
        **{name: (sizes[name.split("_")[0]][0],) for name in biases},
    }
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    for name, shape in shapes.items():
        if name != "z" and len(shape) == 2:
            drawn[name] /= shape[1] ** 0.5
    inputs = {name: value.to(DEVICE, dtype) for name, value in drawn.items()}
    mask = torch.rand(shapes["z"][:-1], generator=generator) > 0.2
    return inputs | {"mask": mask.to(DEVICE) if masked else None}


def check(inputs, run=triangle_multiply, **options):
    check_op(
        *(run, run, inputs),
        order=1,
        tolerance=EXACT if inputs["z"].dtype == torch.float32 else ROUNDED,
        ran=("triangle_multiply", "triton"),
        **options,
    )


def dropped(z):
    """A dropout mask for the channels of every column."""
    generator = torch.Generator().manual_seed(5)
    shape = (*z.shape[:-3], *z.shape[-2:])
    return ((torch.rand(shape, generator=generator) > 0.25) / 0.75).to(z)


class OthersRows:
    """A contraction of own rows with rows of another place, here of constant numbers."""

    def __init__(self, rows, first):
        self.rows, self.first = rows, first

    def other(self, a):
        """Rows of the other place, [N - R, N], alike for all channels."""
        number = torch.arange(self.rows * a.shape[-1], device=a.device, dtype=a.dtype)
        return (0.37 * number).sin().view(self.rows, -1).expand(*a.shape[:-2], -1, -1)

    def contract(self, a, b, x, outgoing):
        others = self.other(a)
        if outgoing:
            x.copy_(a @ torch.cat([b, others], -2).mT)
            return [others.contiguous()]
        x.copy_(a[..., self.first : self.first + a.shape[-2]].mT @ b)
        x += others.sum(-2, keepdim=True)
        return []

    def contract_backward(self, dx, a, b, kept, da, db, outgoing, meanwhile):
        R = a.shape[-2]
        # As if it had been received before anything else was launched.
        db.copy_(dx[..., :R].mT @ a if outgoing else a[..., self.first : self.first + R] @ dx)
        meanwhile()
        if outgoing:
            da.copy_(dx @ torch.cat([b, *kept], -2))
        else:
            da.zero_()
            da[..., self.first : self.first + R] = b @ dx.mT
