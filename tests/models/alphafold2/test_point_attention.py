"""Invariant point attention against algorithm 22 as it is written, in float64."""

import math

import pytest
import torch

from bevatron.maths import rigid
from bevatron.models.alphafold2.config import StructureConfig
from bevatron.models.alphafold2.structure_module import MASKED, InvariantPointAttention

CONFIG = StructureConfig(num_heads=3, head_width=5, num_query_points=3, num_value_points=4)
WIDTHS = (18, 20)


def as_written(module, s, z, quaternion, origin, mask):
    H, D, P, V = module.sizes
    frames = rigid.rigid_of_quaternion(torch.cat([quaternion, origin], dim=-1))

    def points(projected):
        local = projected.unflatten(-1, (3, H, -1)).movedim(-3, -1)
        return rigid.apply(rigid.select(frames, (..., None, None)), local)

    q = module.q(s).unflatten(-1, (H, D))
    k, v = module.kv(s).unflatten(-1, (H, 2 * D)).split(D, -1)
    q_points = points(module.q_points(s))
    k_points, v_points = points(module.kv_points(s)).split([P, V], -2)
    gaps = q_points[..., :, None, :, :, :] - k_points[..., None, :, :, :, :]
    gamma = torch.nn.functional.softplus(module.head_weights)
    logits = torch.einsum("...ihd,...jhd->...ijh", q, k) / math.sqrt(3 * D)
    logits = logits + module.bias(z) / math.sqrt(3)
    logits = logits - gamma / 2 * math.sqrt(2 / (27 * P)) * gaps.square().sum((-1, -2))
    both = mask[..., :, None, None] & mask[..., None, :, None]
    weights = (logits - MASKED * ~both).softmax(-2)
    scalars = torch.einsum("...ijh,...jhd->...ihd", weights, v)
    found = torch.einsum("...ijh,...jhpx->...ihpx", weights, v_points)
    found = rigid.apply_inverse(rigid.select(frames, (..., None, None)), found)
    pairs = torch.einsum("...ijh,...ijc->...ihc", weights, z)
    norms = torch.sqrt(found.square().sum(-1) + 1e-8)
    by_axis = found.flatten(-3, -2).mT.flatten(-2)
    parts = [scalars.flatten(-2), by_axis, norms.flatten(-2), pairs.flatten(-2)]
    return module.out(torch.cat(parts, dim=-1))


def fused(module, s, z, quaternion, origin, mask):
    frames = rigid.rigid_of_quaternion(torch.cat([quaternion, origin], dim=-1))
    return module(s, z, module.prepare(z, mask), frames)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize(
    ("batch", "residues", "spread", "away", "masked"),
    [((), 7, 1, 0, 0), ((2,), 6, 3, 100, 2), ((1,), 1, 1, 100, 0), ((2, 1), 5, 1, 0, 5)],
    ids=["plain", "masked, 1000 A away", "one residue", "all masked"],
)
def test_points_in_the_product_equal_their_distances(
    dtype, batch, residues, spread, away, masked
):  # Lengths are in units of 10 Å.
    torch.manual_seed(residues)
    module = InvariantPointAttention(*WIDTHS, CONFIG).double()
    with torch.no_grad():
        for weight in module.parameters():
            weight.copy_(torch.randn_like(weight) / 4)
    shape = (*batch, residues)
    inputs = [
        torch.randn(*shape, WIDTHS[0]).double(),
        torch.randn(*shape, residues, WIDTHS[1]).double(),
        torch.nn.functional.normalize(torch.randn(*shape, 4).double(), dim=-1),
        (spread * torch.randn(*shape, 3) + away).double(),
    ]
    mask = torch.arange(residues).expand(shape) >= masked
    # What masked residues receive depends on how their logits are rounded, and is seen by none.
    read = mask if mask.any() or dtype == torch.float64 else torch.zeros_like(mask)
    cotangent = torch.randn(*shape, WIDTHS[0]).double() * read[..., None]
    results = []
    for compute, kind in ((as_written, torch.float64), (fused, dtype), (as_written, dtype)):
        module.to(kind)
        given = [x.to(kind).requires_grad_() for x in inputs]
        found = compute(module, *given, mask)
        wanted = [*given, *(p for n, p in module.named_parameters() if n != "bias.bias")]
        gradients = torch.autograd.grad(found, wanted, cotangent.to(kind))
        results.append([(found * read[..., None]).detach(), *gradients])
        module.double()
    # Coordinates of 1000 Å lose digits in any formula, and terms that cancel leave the rounding of
    # their own size: what the algorithm loses in the same type is allowed twice.
    largest = max(float(x.abs().max()) for x in results[0])
    rounding = {torch.float64: 1e-10, torch.float32: 16 * torch.finfo(torch.float32).eps}[dtype]
    for exact, found, written in zip(*results, strict=True):
        lost = float((written - exact).abs().max())
        torch.testing.assert_close(
            found.double(), exact, rtol=0, atol=2 * lost + rounding * largest
        )
