"""Attention within molecules: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from molecule_inputs import DEVICE, GPU, HALF

from bevatron.kernels import molecule_attention, use
from bevatron.kernels.molecule.molecule_attention import molecule_attention_with_bias
from bevatron.kernels.molecule.molecule_attention.reference import dropout_mask
from bevatron.testing import Tolerance, assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")

EXACT = Tolerance(2e-6, 1e-5)


def make(sizes, heads=2, size=8, dtype=torch.float32, bias=True, spare=0, skipped=0, seed=3):
    """Molecules of these sizes; ``spare`` atoms and pairs are of none, ``skipped`` lack pairs."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.tensor([*sizes, *([skipped] if skipped else [])], dtype=torch.int64)
    pairs = counts**2
    if skipped:
        pairs[-1] = 0
    graph_ptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    pair_ptr = torch.cat([torch.zeros(1, dtype=torch.int64), pairs.cumsum(0)])
    shape = (int(graph_ptr[-1]) + spare, heads, size)
    inputs = {
        name: torch.randn(shape, generator=generator).to(DEVICE, dtype) for name in ("q", "k", "v")
    }
    drawn = torch.randn((int(pair_ptr[-1]) + spare, heads), generator=generator)
    inputs["bias"] = drawn.to(DEVICE, dtype) if bias else None
    return inputs | {"graph_ptr": graph_ptr.to(DEVICE), "pair_ptr": pair_ptr.to(DEVICE)}


def check(inputs, function=molecule_attention, tolerance=None, **options):
    dtype = inputs["q"].dtype
    check_op(
        *(function, function, inputs),
        order=1,
        tolerance=tolerance or (EXACT if dtype == torch.float32 else None),
        ran=("molecule_attention", "triton"),
        **options,
    )


def of_each(q, k, v, bias, graph_ptr, pair_ptr):
    """Attend molecule by molecule, by dense products."""
    out = torch.zeros_like(q)
    for g in range(len(graph_ptr) - 1):
        atoms = slice(int(graph_ptr[g]), int(graph_ptr[g + 1]))
        n = atoms.stop - atoms.start
        own = bias[int(pair_ptr[g]) : int(pair_ptr[g + 1])].view(n, n, q.shape[1])
        logits = torch.einsum("ihd,jhd->ijh", q[atoms], k[atoms]) * q.shape[-1] ** -0.5 + own
        out[atoms] = torch.einsum("ijh,jhd->ihd", logits.softmax(1), v[atoms])
    return out


def test_the_reference_is_dense_attention_of_each_molecule():
    inputs = make([1, 20, 0, 33, 3], dtype=torch.float64)
    with use("reference"):
        assert_close(molecule_attention(**inputs), of_each(**inputs), 1e-13)


@pytest.mark.parametrize("sizes", [[1], [16, 17], [20, 1, 0, 3], [33], [32, 2]])
def test_molecules_of_any_size_are_right(sizes):
    check(make(sizes))


@pytest.mark.skipif(GPU, reason="float64 runs by the reference on a GPU")
def test_float64_is_exact():
    check(make([1, 17, 33], heads=1, dtype=torch.float64))


def test_a_large_molecule_is_right():
    check(make([51], heads=1))


@pytest.mark.parametrize(("heads", "size"), [(1, 24), (3, 4), (9, 8)])
def test_any_number_and_size_of_heads_is_right(heads, size):
    check(make([5, 18], heads=heads, size=size))


@pytest.mark.parametrize(("heads", "size"), [(3, 64), (2, 200)])
def test_long_rows_go_to_programs_of_fewer_heads(heads, size):
    """What a program keeps in shared memory grows with its heads and their rows alike."""
    from bevatron.kernels.molecule.molecule_attention import triton

    check(make([3, 33], heads, size))
    padded = 4 * (1 << (size - 1).bit_length())
    for launch, usual in zip(triton._launches(64, padded), triton.LAUNCHES, strict=True):
        assert launch["HEADS"] * padded <= usual["HEADS"] * triton.WIDEST or launch["HEADS"] == 1
    assert [launch["HEADS"] for launch in triton._launches(64, 16)] == [8, 4]


def test_there_may_be_no_bias():
    check(make([3, 20], heads=1, bias=False))


def test_there_may_be_no_molecule_and_no_atom():
    check(make([]))
    check(make([0, 0]))


def test_sixteen_bits_are_close():
    check(make([9, 20], heads=1, dtype=HALF), tolerance=Tolerance(1e-2, 3e-2))


@pytest.mark.parametrize("size", [20, 40])
def test_what_all_keys_share_gets_no_gradient(size):
    inputs = make([size], heads=1, dtype=HALF)
    for name, shared_part in (("q", 1.0), ("k", 60.0), ("v", 30.0)):
        inputs[name] += shared_part

    def gradients(implementation, dtype):
        leaves = {name: inputs[name].to(dtype).requires_grad_() for name in ("q", "k", "bias")}
        with use(molecule_attention=implementation):
            out = molecule_attention(**inputs | {"v": inputs["v"].to(dtype)} | leaves)
        along = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
        return torch.autograd.grad(out, [*leaves.values()], along.to(HALF).to(DEVICE, dtype))

    found, exact = gradients("triton", HALF), gradients("reference", torch.float64)
    rounding = torch.finfo(HALF).eps
    for got, want, most in zip(found, exact, (40, 1, 1), strict=True):
        assert (got.double() - want).norm() <= most * rounding * want.norm()


def test_atoms_of_no_molecule_and_molecules_without_pairs_get_zero():
    inputs = make([4, 2], spare=37, skipped=40)
    check(inputs)
    with use(molecule_attention="triton"):
        assert not molecule_attention(**inputs)[6:].any()


def test_a_bias_with_contiguous_pairs_gets_such_a_gradient():
    inputs = make([7, 20], heads=3)
    lying = inputs["bias"].t().contiguous().t().requires_grad_()
    with use(molecule_attention="triton"):
        out = molecule_attention(**inputs | {"bias": lying})
        (found,) = torch.autograd.grad(out.square().sum(), lying)
    exact = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    exact["bias"].requires_grad_()
    with use("reference"):
        expected = molecule_attention(**exact)
    assert_close(out, expected, 2e-6)
    assert_close(found, torch.autograd.grad(expected.square().sum(), exact["bias"])[0], 1e-5)
    assert found.stride(0) == 1


@pytest.mark.parametrize("lying", [False, True])
def test_gradients_of_a_returned_bias_are_added(lying):
    def both(bias, **inputs):
        given = bias.t().contiguous().t() if lying else bias
        out, given = molecule_attention_with_bias(bias=given, **inputs)
        return torch.cat([out.flatten(), given.square().flatten()])

    check(make([3, 18], spare=3, skipped=2), both)


def test_one_projection_may_hold_queries_keys_and_values():
    inputs = make([7, 20])
    packed = torch.stack([inputs.pop(name) for name in ("q", "k", "v")], 1)
    check(inputs | {"q": packed, "k": None, "v": None})


def test_strided_inputs_are_right():
    check(make([7, 20]), strided=True)


@pytest.mark.parametrize("sizes", [[16, 20, 3], [33]])
def test_dropout_is_the_same_in_both_and_in_the_backward_pass(sizes):
    def dropped(**tensors):
        return molecule_attention(
            **tensors, dropout=0.3, seed=torch.tensor(2**40 + 77, device=DEVICE)
        )

    check(make(sizes, heads=2), dropped)


def test_dropout_drops_the_requested_fraction_and_draws_differ():
    atoms, heads = torch.arange(60), torch.arange(8)
    grid = (atoms[:, None, None], atoms[None, :, None], heads[None, None, :])
    masks = [dropout_mask(torch.tensor(seed), *grid, 0.3) for seed in (1, 2, 2**33 + 1)]
    for mask in masks:
        kept = mask.double()
        assert abs(kept.mean() - 0.7) < 0.01
        for axis in range(3):
            others = [other for other in range(3) if other != axis]
            spread = kept.mean(others).std()
            wanted = (0.21 / (mask.numel() / mask.shape[axis])) ** 0.5
            assert 0.5 * wanted < spread < 1.6 * wanted
    for a, b in ((0, 1), (0, 2), (1, 2)):
        agree = (masks[a] == masks[b]).double().mean()
        assert abs(agree - 0.58) < 0.01


def test_dropout_keeps_the_mean():
    inputs = make([12], heads=4)
    inputs["v"] = torch.ones_like(inputs["v"])
    seeds = torch.arange(200, device=DEVICE)
    with use("reference"):
        outs = [molecule_attention(**inputs, dropout=0.3, seed=seed) for seed in seeds]
    assert abs(torch.stack(outs).mean() - 1.0) < 0.01


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.molecule.molecule_attention.triton import attend

    inputs = make([3, 5])
    tensors = [inputs[name] for name in ("q", "k", "v", "bias")]
    torch.library.opcheck(
        attend.op, (*tensors, inputs["graph_ptr"], inputs["pair_ptr"], None, 0.35, 0.0)
    )


def test_mismatched_arguments_are_named():
    inputs = make([3])
    with pytest.raises((ValueError, TypeError), match="bias"):
        molecule_attention(**inputs | {"bias": torch.zeros(9, 5)})
    with pytest.raises(ValueError, match="seed"):
        molecule_attention(**inputs, dropout=0.1)
    with pytest.raises(ValueError, match="scale"):
        molecule_attention(**inputs, scale=0.0)
    with pytest.raises(ValueError, match="without"):
        molecule_attention(**inputs | {"k": None})


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="needs a CUDA device")
def test_it_is_captured_in_a_graph():
    inputs = make([14, 20, 16, 51, 3] * 40, heads=32, dtype=torch.bfloat16)
    seed = torch.tensor(5, device=DEVICE)
    with use(molecule_attention="triton"):
        expected = molecule_attention(**inputs, dropout=0.3, seed=seed)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = molecule_attention(**inputs, dropout=0.3, seed=seed)
        graph.replay()
    assert torch.equal(captured, expected)
