"""Compares compiled with eager operators on pairs and rows; run by a test, without shape checks."""

import torch

from bevatron import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
C = 16
SQUARE, VECTOR = (C, C), (C,)
NORM = [VECTOR, VECTOR]
SHAPES = {
    "triangle_multiply": [(8, 8, C), (8, 8), *NORM, *[SQUARE] * 4, *NORM, SQUARE, SQUARE],
    "outer_product_mean": [(4, 8, C), (4, 8), *NORM, (4, C), (4, C), (C, 16)],
    "global_attention": [
        *((4, 8, C), (4, 8), *NORM, SQUARE, (8, C), (8, C), SQUARE, VECTOR, SQUARE, VECTOR),
    ],
    "qkvg": [(8, C), *[SQUARE] * 4],
    "pair_attention": [*[(1, 2, 1, 16, 8)] * 3, (1, 1, 1, 16, 16)],
    "window_attention": [*[(1, 2, 20, 1, 16)] * 4, (1, 2, 1, 16, 32), (1, 20)],
    "pair_weighted_averaging": [(3, 8, C), (3, 8, C), (2, 8, 8)],
    "layer_norm": [(8, C), *NORM],
    "add_norm": [(8, C)] * 5,
    "layer_norm_linear": [(8, C), *NORM, (24, C)],
    "swiglu": [(8, C), (8, C)],
    "add_dropped": [(4, 8, C), (4, 8, C)],
    "invariant_point_attention": [
        *[(8, 2, 4)] * 3,
        *[(8, 3, 2, 4)] * 3,
        (2, 8, 8),
        (8, 8, C),
        (2,),
    ],
    "transition": [(8, C), *NORM, (64, C), (C, 64), (64, C)],
    "conditioned_transition": [
        *((8, C), (8, 8), (8,), (C, 8), VECTOR, (C, 8), (32, C), (32, C), (C, 32), (C, 8), VECTOR),
    ],
}
MASKED = {"triangle_multiply", "outer_product_mean", "global_attention"}


def compare(name, dtype):
    """Result and gradients of both, bit for bit."""

    def loss(*tensors):
        result = getattr(kernels, name)(*tensors)
        parts = result if isinstance(result, tuple) else (result,)
        return sum(part.float().square().sum() for part in parts)

    # Small ones: float16 ends at 65504.
    tensors = [(torch.randn(s, device=DEVICE) / 4).to(dtype) for s in SHAPES[name]]
    if name in MASKED:
        tensors[1] = (tensors[1] > 0).to(dtype)
    if name == "window_attention":
        tensors[-1] = tensors[-1] > 0
    given = [t for i, t in enumerate(tensors) if i != 1 or name not in MASKED]
    leaves = [t.requires_grad_() for t in given if t.is_floating_point()]
    torch.compiler.reset()  # of one function only a few types and sizes are compiled
    eager = torch.autograd.grad(loss(*tensors), leaves)
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    compiled = torch.autograd.grad(traced(*tensors), leaves)
    assert all(map(torch.equal, compiled, eager)), (name, dtype)


if __name__ == "__main__":
    with kernels.use("triton"):
        for chosen in SHAPES:
            # 16 bits take other kernels where there are fused ones for narrow rows.
            for dtype in (torch.float32, torch.float16):
                compare(chosen, dtype)
