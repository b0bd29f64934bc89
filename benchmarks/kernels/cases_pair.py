"""Sizes at which the pair operators are timed, with what they must at least move and compute."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from benchmarks.kernels import peers_pair as peers
from torch import Tensor

from bevatron import kernels

EXPONENTIALS = 16 * 132 * 1.75e9
"""A second, on an H200."""
Operator = Callable[..., Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Case:
    """One operator at one size.

    Attributes
    ----------
    op, name
        Operator and size.
    shapes
        Of the inputs, by name; weights are scaled so that results are of order one.
    ours, plain
        The operator and plain PyTorch; take the tensors, and the mask, by name.
    moved, operations, exponentials
        Bytes (of 16-bit numbers), operations of matrix products and exponentials of forward and
        backward, at least.
    mask
        Its shape, if there is one.
    to_reach
        Milliseconds of forward and backward.
    peers
        More peers than plain and compiled PyTorch.
    few_rows
        How many entries of axis 1 of inputs with five axes the check in float64 takes; 0 for all.
    """

    op: str
    name: str
    shapes: Mapping[str, Shape]
    ours: Operator
    plain: Operator
    moved: float = 0.0
    operations: float = 0.0
    exponentials: float = 0.0
    mask: Shape | None = None
    to_reach: float = 0.0
    peers: Mapping[str, Operator] = field(default_factory=dict)
    few_rows: int = 0

    def draw(self, dtype: torch.dtype, seed: int = 0) -> dict[str, Tensor | None]:
        """Draw the inputs."""
        generator = torch.Generator(device="cuda").manual_seed(seed)
        found: dict[str, Tensor | None] = {}
        for name, shape in self.shapes.items():
            tensor = torch.randn(shape, device="cuda", generator=generator)
            if name.endswith("weight"):
                tensor = 1.0 + 0.1 * tensor if len(shape) == 1 else tensor / shape[1] ** 0.5
            found[name] = tensor.to(dtype).requires_grad_()
        if self.mask is not None:
            drawn = torch.rand(self.mask, device="cuda", generator=generator)
            found["mask"] = drawn > 0.05
        elif self.op == "pair_attention":
            found["mask"] = None
        return found


def norm_cases() -> list[Case]:
    found = []
    for rows, width, to_reach in ((147456, 128, 0.09), (589824, 128, 0.35), (32768, 256, 0.04)):
        shapes = {"x": (rows, width), "weight": (width,), "bias": (width,)}
        name, functions = f"{rows} x {width}", (kernels.layer_norm, peers.layer_norm)
        moved = 10 * rows * width
        found.append(Case("layer_norm", name, shapes, *functions, moved, to_reach=to_reach))
    return found


def transition_cases() -> list[Case]:
    found = []
    sizes = ((384**2, 128, 0.65), (768**2, 128, 2.5), (128 * 256, 256, 0.0), (384, 384, 0.0))
    for rows, width, to_reach in sizes:
        hidden = 4 * width
        shapes = {
            "x": (rows, width),
            "norm_weight": (width,),
            "norm_bias": (width,),
            "up_weight": (hidden, width),
            "down_weight": (width, hidden),
            "gate_weight": (hidden, width),
        }
        name, functions = f"{rows} x {width}, x4", (kernels.transition, peers.transition)
        work = (10 * rows * width, 18 * rows * width * hidden)
        found.append(Case("transition", name, shapes, *functions, *work, to_reach=to_reach))
    return found


def norm_linear_cases() -> list[Case]:
    rows, width, out = 384**2, 128, 512
    shapes = {"x": (rows, width), "norm_weight": (width,), "norm_bias": (width,)}
    functions = (kernels.layer_norm_linear, peers.layer_norm_linear)
    work = (2 * rows * (3 * width + 2 * out), 6 * rows * width * out)
    name = f"{rows} x {width} to {out}"
    return [Case("layer_norm_linear", name, shapes | {"weight": (out, width)}, *functions, *work)]


def conditioned_cases() -> list[Case]:
    rows, C, D, H = 48 * 384, 768, 384, 1536
    shapes = {
        "x": (rows, C),
        "s": (rows, D),
        "norm_weight": (D,),
        "scale_weight": (C, D),
        "scale_bias": (C,),
        "shift_weight": (C, D),
        "gate_weight": (H, C),
        "up_weight": (H, C),
        "down_weight": (C, H),
        "out_weight": (C, D),
        "out_bias": (C,),
    }
    work = (2 * rows * (5 * C + 3 * D), 6 * rows * (3 * C * D + 3 * C * H))
    functions = (kernels.conditioned_transition, peers.conditioned_transition)
    name = f"{rows} x {C}, condition {D}"
    return [Case("conditioned_transition", name, shapes, *functions, *work)]


def triangle_cases() -> list[Case]:
    found = []
    sizes = [(384, 128, 0.9), (768, 128, 2.6)]
    sizes += [(N, 128, 0.0) for N in (256, 512, 1024, 64, 128, 2048, 1536)]
    sizes += [(N, 64, 0.0) for N in (250, 256, 512, 1024, 64, 128, 2048)]
    for N, C, to_reach in sizes:
        shapes: dict[str, Shape] = {"z": (N, N, C)}
        shapes |= {"norm_in_weight": (C,), "norm_in_bias": (C,)}
        shapes |= {f"{k}{g}_weight": (C, C) for k in "ab" for g in ("", "_gate")}
        shapes |= {"norm_out_weight": (C,), "norm_out_bias": (C,)}
        shapes |= {"out_weight": (C, C), "out_gate_weight": (C, C)}
        # Six projections and the contraction, each once forward and twice backward.
        found.append(
            Case(
                *("triangle_multiply", f"N {N}, C {C}", shapes),
                *(kernels.triangle_multiply, peers.triangle_multiply),
                *(10 * N * N * C, 36 * N * N * C * C + 6 * N**3 * C),
                mask=(N, N),
                to_reach=to_reach,
                peers={"cuEquivariance": peers.cuequivariance_triangle_multiply},
            )
        )
    return found


ATTENTION = {
    "triangle 256": (256, 4, 256, 32, 0.30),
    "triangle 384": (384, 4, 384, 32, 0.60),
    "triangle 512": (512, 4, 512, 32, 1.35),
    "triangle 768": (768, 4, 768, 32, 4.4),
    "MSA row 128 x 256": (128, 8, 256, 32, 0.35),
    "diffusion 48 x 384": (48, 16, 384, 48, 0.75),
    "diffusion 48 x 768": (48, 16, 768, 48, 2.3),
    "single 384": (1, 16, 384, 24, 0.0),
    "triangle 256, sharded by 8": (32, 4, 256, 32, 0.0),
    "triangle 768, sharded by 2": (384, 4, 768, 32, 0.0),
    "triangle 768, sharded by 4": (192, 4, 768, 32, 0.0),
    "triangle 768, sharded by 8": (96, 4, 768, 32, 0.0),
    "MSA row, sharded by 8": (16, 8, 256, 32, 0.0),
    "heads of 8": (256, 8, 256, 8, 0.0),
    "heads of 16": (256, 4, 256, 16, 0.0),
    "heads of 64": (256, 4, 256, 64, 0.0),
    "heads of 128": (256, 4, 256, 128, 0.0),
    "heads of 24": (256, 4, 256, 24, 0.0),
    "triangle 64": (64, 4, 64, 32, 0.0),
    "triangle 128": (128, 4, 128, 32, 0.0),
    "triangle 200": (200, 4, 200, 32, 0.0),
    "triangle 1024": (1024, 4, 1024, 32, 0.0),
    "triangle 2048": (2048, 4, 2048, 32, 0.0),
}
"""Rows, heads, length, head, milliseconds to reach."""


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
    return kernels.pair_attention(q, k, v, bias, mask, layout="BSNHD")


def attention_cases() -> list[Case]:
    found = []
    for name, (rows, heads, length, head, to_reach) in ATTENTION.items():
        shape, logits = (1, rows, length, heads, head), rows * heads * length**2
        shapes: dict[str, Shape] = dict.fromkeys("qkv", shape)
        square = {"trifast": peers.trifast_attention} if rows == length else {}
        found.append(
            Case(
                *("pair_attention", name, shapes | {"bias": (1, 1, heads, length, length)}),
                *(attend, peers.attention, 0.0, 14 * logits * head, 2 * logits),
                mask=None if name.startswith(("diffusion", "single")) else (1, rows, length),
                to_reach=to_reach,
                peers={
                    "flex_attention": peers.flex,
                    "SDPA": peers.sdpa,
                    "cuEquivariance": peers.cuequivariance_attention,
                    **square,
                },
                few_rows=max(1, min(rows, 2**27 // (heads * length**2))),
            )
        )
    return found


def outer_cases() -> list[Case]:
    found = []
    Z, H = 128, 32
    sizes = ((128, 256, 256), (1024, 256, 64), (512, 384, 64), (128, 768, 256))
    sharded = ((64, 256, 256), (32, 256, 256), (16, 256, 256))
    for S, N, C in (*sizes, *sharded):
        shapes = {
            "m": (S, N, C),
            "norm_weight": (C,),
            "norm_bias": (C,),
            "a_weight": (H, C),
            "b_weight": (H, C),
            "out_weight": (Z, H * H),
            "out_bias": (Z,),
        }
        work = (6 * S * N * C + 4 * N * N * Z, 6 * N * N * H * H * (S + Z))
        functions = (kernels.outer_product_mean, peers.outer_product_mean)
        name = f"{S} x {N} x {C}"
        found.append(Case("outer_product_mean", name, shapes, *functions, *work, mask=(S, N)))
    return found


def global_cases() -> list[Case]:
    C, H, D = 64, 8, 8
    shapes: dict[str, Shape] = {
        "norm_weight": (C,),
        "norm_bias": (C,),
        "q_weight": (H * D, C),
        "k_weight": (D, C),
        "v_weight": (D, C),
        "gate_weight": (H * D, C),
        "gate_bias": (H * D,),
        "out_weight": (C, H * D),
        "out_bias": (C,),
    }
    functions = (kernels.global_attention, peers.global_attention)
    found = []
    sharded = ((1024, 128), (1024, 64), (1024, 32))
    for S, N in ((1024, 256), *sharded, (5120, 384)):
        work = (10 * S * N * C, 12 * S * N * C * H * D)
        inputs = {"m": (S, N, C)} | shapes
        name = f"{S} x {N} x {C}"
        found.append(Case("global_attention", name, inputs, *functions, *work, mask=(S, N)))
    return found


def joined_qkvg(norm_weight: Tensor, norm_bias: Tensor, **tensors: Tensor) -> Tensor:
    """Return the one tensor of which all four results are views."""
    joint = kernels.qkvg(**tensors, norm=(norm_weight, norm_bias))[0]._base  # noqa: SLF001
    assert joint is not None
    return joint


def qkvg_cases() -> list[Case]:
    C, found = 128, []
    for rows in (384**2, 384**2 // 2, 384**2 // 4, 384**2 // 8, 768**2):
        shapes: dict[str, Shape] = {"x": (rows, C)}
        shapes |= {f"{name}_weight": (C, C) for name in ("q", "k", "v", "gate")}
        shapes |= {"norm_weight": (C,), "norm_bias": (C,)}
        work = (2 * rows * 11 * C, 24 * rows * C * C)
        found.append(Case("qkvg", f"{rows} x {C}", shapes, joined_qkvg, peers.qkvg, *work))
    return found


CASES: Mapping[str, Callable[[], list[Case]]] = {
    "layer_norm": norm_cases,
    "layer_norm_linear": norm_linear_cases,
    "transition": transition_cases,
    "conditioned_transition": conditioned_cases,
    "triangle_multiply": triangle_cases,
    "pair_attention": attention_cases,
    "outer_product_mean": outer_cases,
    "global_attention": global_cases,
    "qkvg": qkvg_cases,
}
