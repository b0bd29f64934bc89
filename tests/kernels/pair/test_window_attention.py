"""Attention in windows of atoms: the windows, all gradients, atoms and windows without keys."""

import inspect

import pytest
import torch

from bevatron import kernels
from bevatron.errors import KernelError
from bevatron.kernels import pair_attention, window_attention
from bevatron.kernels.shared.parts import parts_of_one
from bevatron.testing import assert_close, poisoned

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TYPES = [torch.float32, *([torch.bfloat16, torch.float16] if DEVICE == "cuda" else [])]


def draw(samples, copies, atoms, heads, width, queries, keys, kept=0.8):
    generator = torch.Generator().manual_seed(atoms + width)
    shape = samples, copies, atoms, heads, width
    windows = -(-atoms // queries)
    tensors = [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(4)]
    bias = samples, windows, heads, queries, keys
    tensors.append(torch.randn(bias, generator=generator, dtype=torch.float64))
    return tensors, torch.rand((samples, atoms), generator=generator) < kept


def outcome(tensors, mask, which):
    """Result and all gradients, of a cotangent that does not depend on the type."""
    generator = torch.Generator().manual_seed(0)
    cotangent = torch.randn(tensors[0].shape, generator=generator, dtype=torch.float64)
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    with kernels.use(window_attention=which):
        result = window_attention(*leaves, mask)
    return [result.detach(), *torch.autograd.grad(result, leaves, cotangent.to(result))]


def test_windows_are_attention_among_atoms_that_are_near_in_the_list():
    """Of 32 atoms to the 48 before and after them: by attention among all with a band of bias."""
    (q, k, v, gate, bias), mask = draw(1, 2, 150, 2, 8, 32, 128)
    whole = torch.full((1, 1, 2, 150, 150), float("-inf"), dtype=torch.float64)
    for i in range(150):
        w = i // 32
        for j in range(max(0, 32 * w - 48), min(150, 32 * w + 80)):
            whole[0, 0, :, i, j] = bias[0, w, :, i % 32, j - (32 * w - 48)]
    keep = mask[:, None].expand(-1, 2, -1)
    with kernels.use("reference"):
        expected = pair_attention(q, k, v, whole, keep, gate=gate, layout="BSNHD")
        assert_close(window_attention(q, k, v, gate, bias, mask), expected, 1e-13)


SHAPES = [
    (1, 2, 33, 2, 8, 32, 128),
    (2, 3, 70, 1, 16, 16, 32),
    (1, 1, 1, 1, 24, 16, 64),
    (1, 2, 64, 2, 32, 32, 32),
    (1, 17, 5, 1, 16, 16, 32),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", TYPES)
def test_the_kernel_equals_the_reference(shape, dtype):
    pytest.importorskip("triton", reason="the kernels need the package triton")
    exact, mask = draw(*shape)
    narrow = [poisoned(tensor.to(DEVICE, dtype)) for tensor in exact]
    mask = poisoned(mask.to(DEVICE, torch.int32)) > 0
    expected = outcome([each.double() for each in narrow], mask, "reference")
    before = kernels.launches().get(("window_attention", "triton"), 0)
    found = outcome(narrow, mask, "triton")
    assert kernels.launches()["window_attention", "triton"] > before
    tolerance = 2e-6 if dtype == torch.float32 else 0.02
    for name, one, other in zip(("o", "q", "k", "v", "gate", "bias"), found, expected, strict=True):
        assert one.dtype == dtype
        assert_close(one, other, tolerance, name)
    again = outcome(narrow, mask, "triton")
    assert all(map(torch.equal, found, again))


def test_gaps_between_heads_biases_and_masks_do_not_change_the_result():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    exact, mask = draw(2, 2, 20, 2, 16, 16, 32)
    tensors, mask = [tensor.to(DEVICE, torch.float32) for tensor in exact], mask.to(DEVICE)
    gaps = [each.transpose(-1, -2).contiguous().transpose(-1, -2) for each in tensors]
    heads = [each.transpose(2, 3).contiguous().transpose(2, 3) for each in tensors[:4]]
    wanted = outcome(tensors, mask, "triton")
    for given in (gaps, [*heads, tensors[4]]):
        found = outcome(given, mask.t().contiguous().t(), "triton")
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("which", ["reference", "triton"])
def test_windows_without_keys_give_zeros_and_no_gradient(which):
    if which == "triton":
        pytest.importorskip("triton", reason="the kernels need the package triton")
    exact, mask = draw(1, 2, 40, 1, 16, 16, 32)
    mask[:] = False
    mask[0, 2] = True  # a key of the first window and, 8 atoms before it, of no other
    tensors = [tensor.to(DEVICE, torch.float32) for tensor in exact]
    found = outcome(tensors, mask.to(DEVICE), which)
    assert found[0][:, :, :16].abs().min() > 0
    for tensor in found:
        assert tensor.isfinite().all()
    for tensor in (found[0], found[1], found[4]):
        assert tensor[:, :, 16:].eq(0).all()
    assert found[3][:, :, 2].abs().min() > 0
    assert found[5][:, 1:].eq(0).all()


@pytest.mark.parametrize("which", ["reference", "triton"])
def test_a_query_whose_keys_have_a_bias_of_minus_infinity_gives_zero_and_no_gradient(which):
    if which == "triton":
        pytest.importorskip("triton", reason="the kernels need the package triton")
    exact, mask = draw(1, 2, 40, 1, 16, 16, 32)
    mask[:, 30:] = False
    exact[4][0, 1, 0, 3, :22] = float("-inf")  # all kept keys of atom 19
    tensors = [tensor.to(DEVICE, torch.float32) for tensor in exact]
    found = outcome(tensors, mask.to(DEVICE), which)
    for tensor in found:
        assert tensor.isfinite().all()
    for tensor in (found[0], found[1], found[4]):
        assert tensor[:, :, 19].eq(0).all()
        assert tensor[:, :, 20].ne(0).any()
    assert found[5][0, 1, 0, 3].eq(0).all()


@pytest.mark.parametrize("which", ["reference", "triton"])
@pytest.mark.parametrize(("copies", "atoms"), [(2, 0), (0, 20)])
def test_no_atoms_and_no_copies_have_empty_results(which, copies, atoms):
    if which == "triton":
        pytest.importorskip("triton", reason="the kernels need the package triton")
    exact, mask = draw(1, copies, atoms, 1, 16, 16, 32)
    tensors = [tensor.to(DEVICE, torch.float32) for tensor in exact]
    for one, other in zip(
        outcome(tensors, mask.to(DEVICE), which), tensors[:1] + tensors, strict=True
    ):
        assert one.shape == other.shape
        assert one.eq(0).all()


def test_logits_far_from_zero_and_a_bias_of_minus_infinity_are_exact():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    (q, *others, bias), mask = draw(1, 2, 40, 1, 16, 16, 64, kept=1.0)
    bias[..., 7] = float("-inf")
    bias[..., 8:, :] += 1000  # also of queries behind the last atom
    tensors = [tensor.to(DEVICE, torch.float32) for tensor in (30 * q, *others, bias - 500)]
    expected = outcome([each.double() for each in tensors], mask.to(DEVICE), "reference")
    found = outcome(tensors, mask.to(DEVICE), "triton")
    for one, other in zip(found, expected, strict=True):
        assert_close(one, other, 2e-4)  # float32 rounds logits of 500


def test_gradients_of_parts_of_a_projection_are_parts_of_one_tensor():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    joint = torch.randn(2, 1, 2, 20, 2, 1, 16, device=DEVICE)
    (q, gate), (k, v) = (each.unbind(3) for each in joint.requires_grad_())
    bias = torch.randn(1, 2, 1, 16, 32, device=DEVICE)
    mask = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    with kernels.use("triton"):
        result = window_attention(q, k, v, gate, bias, mask)
    dq, dk, dv, dgate = torch.autograd.grad(result.square().sum(), (q, k, v, gate))
    assert parts_of_one([dq, dgate]) is not None
    assert parts_of_one([dk, dv]) is not None


def test_custom_operators_pass_opcheck():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    from bevatron.kernels.pair.window_attention.triton import attention

    tensors, mask = draw(1, 2, 20, 1, 16, 16, 32)
    leaves = [tensor.to(DEVICE, torch.float32).requires_grad_() for tensor in tensors]
    torch.library.opcheck(attention.op, (*leaves, mask.to(DEVICE)))


def test_what_does_not_fit_is_refused():
    (q, k, v, gate, bias), mask = draw(1, 1, 20, 1, 16, 16, 32)
    unchecked = inspect.unwrap(window_attention)  # tests check annotations, users do not
    with pytest.raises(ValueError, match=r"k has shape \(1, 1, 19, 1, 16\), expected"):
        unchecked(q, k[:, :, :19], v, gate, bias, mask)
    with pytest.raises(ValueError, match="bias has shape"):
        unchecked(q, k, v, gate, bias[:, :1], mask)
    with pytest.raises(ValueError, match=r"bias has shape .*, expected \[B, W, H, Q, K\]"):
        unchecked(q, k, v, gate, bias[0], mask)
    with pytest.raises(ValueError, match="mask has shape"):
        unchecked(q, k, v, gate, bias, mask[:, :19])
    with pytest.raises(ValueError, match="16 queries and 31 keys"):
        unchecked(q, k, v, gate, bias[..., :31], mask)
    with pytest.raises(ValueError, match="16 queries and 14 keys"):
        unchecked(q, k, v, gate, bias[..., :14], mask)
    with pytest.raises(ValueError, match="0 queries and 32 keys"):
        unchecked(q, k, v, gate, bias[..., :0, :], mask)
    with pytest.raises(ValueError, match="make them one type"):
        unchecked(q, k, v.float(), gate, bias, mask)


@pytest.mark.parametrize(
    ("width", "queries", "keys"), [(16, 20, 40), (16, 24, 64), (16, 16, 16), (136, 16, 32)]
)
def test_windows_that_the_kernel_does_not_take_are_refused(width, queries, keys):
    pytest.importorskip("triton", reason="the kernels need the package triton")
    tensors, mask = draw(1, 1, 20, 1, width, queries, keys)
    given = [tensor.to(DEVICE, torch.float32) for tensor in tensors]
    found = f"heads of {width} and windows of {queries} queries and {keys} keys"
    with kernels.use("triton"), pytest.raises(KernelError, match=found):
        window_attention(*given, mask.to(DEVICE))


def test_atoms_too_far_apart_for_32_bits_are_copied():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    from bevatron.kernels.pair.window_attention.triton import _readable

    shape = 1, 2, 5, 1, 16
    near = torch.empty_strided(shape, (2**32, 2**31, 2**28, 16, 1), device="meta")
    far = torch.empty_strided(shape, (2**32, 2**32, 2**29, 16, 1), device="meta")
    assert _readable(near) is near
    assert _readable(far).is_contiguous()
