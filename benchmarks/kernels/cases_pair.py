"""Sizes at which the pair operators are timed, with their minimum bytes and operations.

The group "other" has shapes that are not timed by default; "rows" has the rows of a pair of N
tokens, all of them or those of one of 2, 4 or 8 devices (axial sharding), and rows of several
widths.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from benchmarks.kernels import peers_pair as peers
from benchmarks.kernels.cases import Case, Family, Inputs, Operator, Setup, Work, cases
from benchmarks.kernels.checks import DRAWS, no_worse_than_plain
from torch import Tensor

from bevatron import kernels

Shape = tuple[int, ...]
Shapes = Mapping[str, Shape]
PAIR = Family(
    "pair",
    "kernels/pair",
    "{dtype}, forward and backward with all gradients; checked against float64 at these shapes "
    "(float32 where memory does not do), two runs with equal bits. ms: CUDA-graph replays, L2 "
    "flushed; MiB: peak beyond the inputs; kept: between the passes, without the result; worst "
    "error: ours over that of plain PyTorch in this type (of a weight or bias where one draw gives "
    f"more than 1.05: over {DRAWS} draws). In this run a copy moved {{copy:.2f}} TB/s and an "
    "8192^3 bf16 matmul ran at {matmul:.0f} TFLOP/s.",
    dtype="bfloat16",
    matmul_dtype=torch.bfloat16,
    flush=True,
)
PAIRS = {
    **{f"N {N}": N * N for N in (64, 128, 256, 384)},
    **{f"N 384, 1 of {parts}": 384 * 384 // parts for parts in (2, 4, 8)},
    **{f"N {N}": N * N for N in (1024, 2048)},
}
"""Rows of a pair of 128 channels."""
WIDE_ROWS = 32768
JOINED = "compile, joined weights"
CHECKED_ROWS = 2**16
"""Rows of the group "rows" whose float64 tensors fit into memory."""
TINY = {"rows": 6, "width": 8}


def drawn(setup: Setup, shapes: Shapes, mask: Shape | None, seed: int) -> Inputs:
    """Draw inputs; weights are scaled so that results are of order one."""
    generator = torch.Generator(device=setup.device).manual_seed(seed)
    found: Inputs = {}
    for name, shape in shapes.items():
        tensor = torch.randn(shape, device=setup.device, generator=generator)
        if name.endswith("weight"):
            tensor = 1.0 + 0.1 * tensor if len(shape) == 1 else tensor / shape[1] ** 0.5
        found[name] = tensor.to(setup.dtype)
    if mask is not None:
        found["mask"] = torch.rand(mask, device=setup.device, generator=generator) > 0.05
    return found


def case_of(
    setup: Setup,
    op: str,
    name: str,
    shapes: Shapes,
    functions: tuple[Operator, Operator],
    least: Work,
    mask: Shape | None = None,
    **options: Any,
) -> Case:
    """Make a case; bytes are given for 16-bit numbers."""
    moved = least.bytes * setup.dtype.itemsize / 2
    return Case(
        op,
        name,
        partial(drawn, setup, shapes, mask),
        ours=functions[0],
        plain=functions[1],
        least={"forward+backward": Work(moved, *least[1:])},
        check=no_worse_than_plain,
        **options,
    )


def norm_shapes(rows: int, width: int) -> tuple[Shapes, Work]:
    return {"x": (rows, width), "weight": (width,), "bias": (width,)}, Work(10 * rows * width)


def gated_shapes(rows: int, width: int) -> tuple[Shapes, Work]:
    return {"gate": (rows, width), "value": (rows, width)}, Work(16 * rows * width)


def norm_linear_shapes(rows: int, width: int) -> tuple[Shapes, Work]:
    shapes = {"x": (rows, width), "norm_weight": (width,), "norm_bias": (width,)}
    work = Work(22 * rows * width, 24 * rows * width * width)
    return shapes | {"weight": (4 * width, width)}, work


def transition_shapes(rows: int, width: int) -> tuple[Shapes, Work]:
    hidden = 4 * width
    shapes = {
        "x": (rows, width),
        "norm_weight": (width,),
        "norm_bias": (width,),
        "up_weight": (hidden, width),
        "down_weight": (width, hidden),
        "gate_weight": (hidden, width),
    }
    return shapes, Work(10 * rows * width, 18 * rows * width * hidden)


def conditioned_shapes(rows: int, width: int) -> tuple[Shapes, Work]:
    C, D, H = width, width // 2, 2 * width
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
    return shapes, Work(2 * rows * (5 * C + 3 * D), 6 * rows * (3 * C * D + 3 * C * H))


def on_rows(
    setup: Setup,
    op: str,
    functions: tuple[Operator, Operator],
    shapes_of: Callable[[int, int], tuple[Shapes, Work]],
    usual: Mapping[str, tuple[int, int, float]],
    others: Mapping[str, tuple[int, int]],
    joined: Operator | None = None,
) -> list[Case]:
    """Return the cases of an operator on rows: name -> rows, width and ms to reach.

    ``joined`` is plain PyTorch with weights that are joined before a matmul, another peer.
    """
    if setup.tiny:
        usual, others = {"tiny": (TINY["rows"], TINY["width"], 0.0)}, {}
    more = {JOINED: torch.compile(joined, dynamic=False)} if joined else {}
    found = [
        case_of(setup, op, name, shapes, functions, work, to_reach=to_reach or "", peers=more)
        for name, (rows, width, to_reach) in usual.items()
        for shapes, work in [shapes_of(rows, width)]
    ]
    for name, (rows, width) in others.items():
        shapes, work = shapes_of(rows, width)
        options = {"usual": False, "groups": ("rows",), "few": (0, CHECKED_ROWS)}
        found.append(case_of(setup, op, name, shapes, functions, work, **options))
    return found


def rows_of_pairs(width: int, widths: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Return rows of pairs in a width, and many rows in other widths."""
    found = {f"{name}, {width} wide": (rows, width) for name, rows in PAIRS.items()}
    return found | {f"{WIDE_ROWS} rows, {other} wide": (WIDE_ROWS, other) for other in widths}


@cases("layer_norm", PAIR)
def norm_cases(setup: Setup) -> list[Case]:
    sizes = ((147456, 128, 0.09), (589824, 128, 0.35), (32768, 256, 0.04))
    usual = {f"{rows} x {width}": (rows, width, to_reach) for rows, width, to_reach in sizes}
    others = rows_of_pairs(128, (8, 64, 384, 1024, 2048))
    functions = (kernels.layer_norm, peers.layer_norm)
    return on_rows(setup, "layer_norm", functions, norm_shapes, usual, others)


@cases("swiglu", PAIR)
def gated_cases(setup: Setup) -> list[Case]:
    functions = (kernels.swiglu, peers.swiglu)
    others = rows_of_pairs(512, (1024, 2048))
    return on_rows(setup, "swiglu", functions, gated_shapes, {}, others)


def add_dropped(x: Tensor, update: Tensor, mask: Tensor) -> Tensor:
    return kernels.add_dropped(x, update, mask.to(x.dtype))


def add_layer(x: Tensor, update: Tensor, mask: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Add the last layer of an attention."""
    return kernels.add_dropped(x, update, mask.to(x.dtype), "rows", weight, bias)


def add_turned(x: Tensor, update: Tensor, mask: Tensor) -> Tensor:
    """Add a transposed update, such as that of attention around the ending node."""
    return kernels.add_dropped(x, update.transpose(0, 1), mask.to(x.dtype), "columns")


@cases("add_dropped", PAIR)
def dropped_cases(setup: Setup) -> list[Case]:
    """Return updates of a pair, in its layout, transposed or in front of their last layer.

    Those of N 64 are soaked.
    """
    ways = {
        "": (add_dropped, peers.add_dropped),
        ", transposed": (add_turned, peers.add_turned),
        ", with its layer": (add_layer, peers.add_layer),
    }
    found = []
    for N, C in [(5, 8)] if setup.tiny else [(64, 128), (384, 128), (768, 128)]:
        for way, functions in ways.items():
            shapes: dict[str, Shape] = dict.fromkeys(("x", "update"), (N, N, C))
            name, work = f"N {N}{way}", Work(10 * N * N * C)
            if functions[0] is add_layer:
                shapes |= {"weight": (C, C), "bias": (C,)}
                work = Work(12 * N * N * C, 6 * N * N * C * C)
            case = case_of(setup, "add_dropped", name, shapes, functions, work, (N, C))
            draw = partial(with_typed_mask, case.draw)
            found.append(replace(case, draw=draw, usual=N != 64))
    return found


def with_typed_mask(draw: Callable[[int], Inputs], seed: int) -> Inputs:
    """Draw a mask in the type of what it drops, as models do: nothing casts it."""
    inputs = draw(seed)
    return inputs | {"mask": inputs["mask"].to(inputs["x"].dtype)}


@cases("transition", PAIR)
def transition_cases(setup: Setup) -> list[Case]:
    pairs = ((256, 0.28), (384, 0.58), (512, 1.05), (768, 2.3))
    sizes = *((N * N, 128, ms) for N, ms in pairs), (128 * 256, 256, 0.42), (384, 384, 0.0)
    usual = {f"{rows} x {width}, x4": (rows, width, to_reach) for rows, width, to_reach in sizes}
    others = rows_of_pairs(128, (64, 256, 384))
    functions = (kernels.transition, peers.transition)
    given = (functions, transition_shapes, usual, others)
    return on_rows(setup, "transition", *given, joined=peers.joined_transition)


@cases("layer_norm_linear", PAIR)
def norm_linear_cases(setup: Setup) -> list[Case]:
    usual = {f"{384**2} x 128 to 512": (384**2, 128, 0.0)}
    others = rows_of_pairs(128, (64, 256, 384))
    functions = (kernels.layer_norm_linear, peers.layer_norm_linear)
    found = on_rows(setup, "layer_norm_linear", functions, norm_linear_shapes, usual, others)
    rows, width = (TINY["rows"], TINY["width"]) if setup.tiny else (384**2, 128)
    for heads in (4, 16):
        shapes = norm_linear_shapes(rows, width)[0] | {"weight": (heads, width)}
        name, work = f"{rows} x {width} to {heads}", Work(6 * rows * width)
        found.append(case_of(setup, "layer_norm_linear", name, shapes, functions, work))
    return found


@cases("conditioned_transition", PAIR)
def conditioned_cases(setup: Setup) -> list[Case]:
    rows = 48 * 384
    usual = {f"{rows} x 768, condition 384": (rows, 768, 0.95)}
    others = {f"48 x {N}": (48 * N, 768) for N in (64, 256, 384, 768)}
    others |= {f"48 x 384, 1 of {parts}": (rows // parts, 768) for parts in (2, 4, 8)}
    functions = (kernels.conditioned_transition, peers.conditioned_transition)
    given = (functions, conditioned_shapes, usual, others)
    joined = peers.joined_conditioned_transition
    return on_rows(setup, "conditioned_transition", *given, joined=joined)


def other(is_usual: bool) -> dict[str, Any]:
    """Return the options that select a case by default, or in the group "other"."""
    return {"usual": is_usual, "groups": () if is_usual else ("other",)}


@cases("triangle_multiply", PAIR)
def triangle_cases(setup: Setup) -> list[Case]:
    found = []
    sizes = [(256, 128, 0.26), (384, 128, 0.5), (512, 128, 0.9), (768, 128, 1.9)]
    sizes += [(N, 128, 0.0) for N in (1024, 64, 128, 2048, 1536)]
    sizes += [(N, 64, 0.0) for N in (250, 256, 512, 1024, 64, 128, 2048)]
    for N, C, to_reach in [(5, 8, 1.0)] if setup.tiny else sizes:
        shapes: dict[str, Shape] = {"z": (N, N, C)}
        shapes |= {"norm_in_weight": (C,), "norm_in_bias": (C,)}
        shapes |= {f"{k}{g}_weight": (C, C) for k in "ab" for g in ("", "_gate")}
        shapes |= {"norm_out_weight": (C,), "norm_out_bias": (C,)}
        shapes |= {"out_weight": (C, C), "out_gate_weight": (C, C)}
        # Six projections and the contraction, each once forward and twice backward.
        work = Work(10 * N * N * C, 36 * N * N * C * C + 6 * N**3 * C)
        found.append(
            case_of(
                *(setup, "triangle_multiply", f"N {N}, C {C}", shapes),
                (kernels.triangle_multiply, peers.triangle_multiply),
                *(work, (N, N)),
                to_reach=to_reach or "",
                peers={"cuEquivariance": peers.cuequivariance_triangle_multiply},
                **other(setup.tiny or C == 128),
            )
        )
    return found


ATTENTION = {
    "triangle 256": (256, 4, 256, 32, 0.18),
    "triangle 384": (384, 4, 384, 32, 0.5),
    "triangle 512": (512, 4, 512, 32, 1.1),
    "triangle 768": (768, 4, 768, 32, 3.7),
    "MSA row 128 x 256": (128, 8, 256, 32, 0.19),
    "diffusion 48 x 384": (48, 16, 384, 48, 0.75),
    "diffusion 48 x 768": (48, 16, 768, 48, 1.6),
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
"""Rows, heads, length, width of a head, ms to reach."""


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None = None) -> Tensor:
    return kernels.pair_attention(q, k, v, bias, mask, layout="BSNHD")


def heads_first(case: Case) -> Case:
    """Return a case whose heads are contiguous, as attention libraries take them."""

    def turned(inputs: Inputs) -> Inputs:
        return inputs | {name: inputs[name].transpose(2, 3) for name in "qkv"}

    def draw(seed: int) -> Inputs:
        return {name: value.contiguous() for name, value in turned(case.draw(seed)).items()}

    def of(operator: Operator) -> Operator:
        return lambda **inputs: operator(**turned(inputs)).transpose(2, 3)

    assert case.plain is not None
    return replace(
        case,
        name=f"{case.name}, heads first",
        draw=draw,
        ours=partial(kernels.pair_attention, layout="BSHND"),
        plain=of(case.plain),
        peers={name: of(peer) for name, peer in case.peers.items()}
        | {"flex_attention": peers.flex_of_heads},
        usual=False,
        groups=("heads first",),
    )


@cases("pair_attention", PAIR)
def attention_cases(setup: Setup) -> list[Case]:
    """Return attention in the layout of projections, the usual ones with contiguous heads too."""
    found = []
    sizes = {"triangle 6": (6, 2, 6, 8, 1.0), "diffusion 3 x 5": (3, 2, 5, 8, 1.0)}
    for name, (rows, heads, length, head, to_reach) in (sizes if setup.tiny else ATTENTION).items():
        shape, logits = (1, rows, length, heads, head), rows * heads * length**2
        shapes: dict[str, Shape] = dict.fromkeys("qkv", shape)
        square = {"trifast": peers.trifast_attention} if rows == length else {}
        found.append(
            case_of(
                *(setup, "pair_attention", name),
                shapes | {"bias": (1, 1, heads, length, length)},
                (attend, peers.attention),
                Work(0.0, 14 * logits * head, 2 * logits),
                None if name.startswith(("diffusion", "single")) else (1, rows, length),
                to_reach=to_reach or "",
                peers={
                    "flex_attention": peers.flex,
                    "SDPA": peers.sdpa,
                    "cuEquivariance": peers.cuequivariance_attention,
                    **square,
                },
                few=(1, max(1, min(rows, 2**27 // (heads * length**2)))),
                **other(bool(to_reach)),
            )
        )
    return found + [heads_first(case) for case in found if case.usual]


@cases("outer_product_mean", PAIR)
def outer_cases(setup: Setup) -> list[Case]:
    found = []
    Z, H = (4, 4) if setup.tiny else (128, 32)
    sizes = ((128, 256, 256), (1024, 256, 64), (512, 384, 64), (128, 768, 256))
    sharded = ((64, 256, 256), (32, 256, 256), (16, 256, 256))
    for S, N, C in ((3, 5, 8),) if setup.tiny else (*sizes, *sharded):
        shapes = {
            "m": (S, N, C),
            "norm_weight": (C,),
            "norm_bias": (C,),
            "a_weight": (H, C),
            "b_weight": (H, C),
            "out_weight": (Z, H * H),
            "out_bias": (Z,),
        }
        work = Work(6 * S * N * C + 4 * N * N * Z, 6 * N * N * H * H * (S + Z))
        functions = (kernels.outer_product_mean, peers.outer_product_mean)
        name = f"{S} x {N} x {C}"
        found.append(case_of(setup, "outer_product_mean", name, shapes, functions, work, (S, N)))
    return found


@cases("global_attention", PAIR)
def global_cases(setup: Setup) -> list[Case]:
    C, H, D = (8, 2, 4) if setup.tiny else (64, 8, 8)
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
    for S, N in ((6, 3),) if setup.tiny else ((1024, 256), *sharded, (5120, 384)):
        work = Work(10 * S * N * C, 12 * S * N * C * H * D)
        name, inputs = f"{S} x {N} x {C}", {"m": (S, N, C)} | shapes
        found.append(case_of(setup, "global_attention", name, inputs, functions, work, (S, N)))
    return found


def joined_qkvg(norm_weight: Tensor, norm_bias: Tensor, **tensors: Tensor) -> Tensor:
    """Return the one tensor of which four results are views, with the bias and rows beside it."""
    found = kernels.qkvg(**tensors, norm=(norm_weight, norm_bias))
    joint = found[0]._base  # noqa: SLF001
    joint = torch.cat(found[:4], -1) if joint is None else joint
    return peers.beside(joint, *found[4:]) if found[4:] else joint


@cases("qkvg", PAIR)
def qkvg_cases(setup: Setup) -> list[Case]:
    C, found = 8 if setup.tiny else 128, []
    sizes = (384**2, 384**2 // 2, 384**2 // 4, 384**2 // 8, 768**2)
    for rows in (TINY["rows"],) if setup.tiny else sizes:
        shapes: dict[str, Shape] = {"x": (rows, C)}
        shapes |= {f"{name}_weight": (C, C) for name in ("q", "k", "v", "gate")}
        shapes |= {"norm_weight": (C,), "norm_bias": (C,)}
        work = Work(22 * rows * C, 24 * rows * C * C)
        functions = (joined_qkvg, peers.qkvg)
        found.append(case_of(setup, "qkvg", f"{rows} x {C}", shapes, functions, work))
    heads = 2 if setup.tiny else 4
    for N in (3,) if setup.tiny else (384, 768):
        rows, bias = N * N, {"x": (N, N, C), "bias_weight": (heads, C)}
        work = Work(22 * rows * C, 24 * rows * C * C + 6 * rows * C * heads)
        name = f"{N} x {N} x {C}, with a bias"
        found.append(case_of(setup, "qkvg", name, shapes | bias, functions, work))
    return found
