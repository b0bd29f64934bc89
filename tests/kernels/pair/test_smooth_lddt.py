"""Smooth lDDT: tiles equal the formula on all pairs, the kernel equals the tiles."""

import inspect

import numpy as np
import pytest
import torch

from bevatron.kernels import launches, smooth_lddt, use
from bevatron.kernels.pair.smooth_lddt import reference
from bevatron.testing import assert_close, poisoned
from dispatched import LargestTensor
from smooth_lddt_formula import all_pairs

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"


def draw(atoms, copies=2, structures=1, seed=0, dtype=torch.float64):
    random = np.random.default_rng(seed)
    truth = torch.from_numpy(random.normal(size=(structures, atoms, 3))) * 12
    shape = (structures, copies, atoms, 3)
    predicted = truth[:, None] + torch.from_numpy(random.normal(size=shape)) * 2
    radius = torch.from_numpy(random.choice([0.0, 15.0, 30.0], size=(structures, atoms)))
    return predicted.to(dtype).requires_grad_(), truth.to(dtype), radius.to(dtype)


@pytest.mark.parametrize("atoms", [1, 2, 17, 40])
@pytest.mark.parametrize("pairs", [1, 170, 1 << 20])
def test_tiles_of_any_size_give_the_formula_and_its_gradient(atoms, pairs):
    case = draw(atoms)
    tiled, dense = reference.smooth_lddt(*case, pairs), all_pairs(*case)
    assert_close(tiled.detach(), dense.detach(), 1e-12)
    cotangent = torch.tensor([[1.0, -2.5]], dtype=torch.float64)
    (found,) = torch.autograd.grad(tiled, case[0], cotangent)
    (expected,) = torch.autograd.grad(dense, case[0], cotangent)
    assert_close(found, expected, 1e-11)


def test_no_tensor_holds_more_than_a_tile_of_pairs():
    case = draw(300, copies=8)
    with LargestTensor() as largest:
        reference.smooth_lddt(*case, 1 << 14).sum().backward()
    assert largest.nbytes <= 8 << 14
    with LargestTensor() as largest:
        all_pairs(*case).sum().backward()
    assert largest.nbytes >= 8 * 8 * 300**2


def run(case, **chosen):
    predicted, truth, radius = case
    with use(**chosen):
        score = smooth_lddt(predicted, truth, radius)
    cotangent = torch.linspace(-1, 2, score.numel()).reshape(score.shape).to(score)
    return score.detach(), torch.autograd.grad(score, predicted, cotangent)[0]


@pytest.mark.parametrize(
    ("atoms", "copies", "structures"), [(1, 1, 1), (31, 2, 1), (64, 1, 2), (65, 3, 1), (150, 1, 1)]
)
def test_the_kernel_equals_the_reference(atoms, copies, structures):
    pytest.importorskip("triton", reason="the kernels need the package triton")
    exact = draw(atoms, copies, structures)
    expected = run(exact, smooth_lddt="reference")
    narrow = tuple(poisoned(each.detach().float().to(DEVICE)) for each in exact)
    narrow[0].requires_grad_()
    before = launches().get(("smooth_lddt", "triton"), 0)
    score, gradient = run(narrow, smooth_lddt="triton")
    assert launches()["smooth_lddt", "triton"] > before
    assert_close(score.double().cpu(), expected[0], 2e-5, "score")
    assert_close(gradient.double().cpu(), expected[1], 1e-4, "gradient")
    again = run(narrow, smooth_lddt="triton")
    assert torch.equal(score, again[0])
    assert torch.equal(gradient, again[1])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_atoms_in_one_place_and_far_away_have_finite_gradients(implementation):
    if implementation == "triton":
        pytest.importorskip("triton", reason="the kernels need the package triton")
    truth = torch.zeros(1, 4, 3, device=DEVICE)
    truth[0, 1:, 0] = torch.arange(3)
    predicted = torch.zeros(1, 2, 4, 3, device=DEVICE)
    predicted[0, 1, 0] = 1e6
    radius = torch.full((1, 4), 15.0, device=DEVICE)
    score, gradient = run((predicted.requires_grad_(), truth, radius), smooth_lddt=implementation)
    assert score.isfinite().all()
    assert gradient.isfinite().all()


def test_custom_operators_pass_opcheck():
    pytest.importorskip("triton", reason="the kernels need the package triton")
    from bevatron.kernels.pair.smooth_lddt.triton import scores

    predicted, truth, radius = (each.detach().float().to(DEVICE) for each in draw(9))
    torch.library.opcheck(scores.op, (predicted.requires_grad_(), truth, radius, True))


@pytest.mark.parametrize("choice", ["reference", "triton"])
def test_a_truth_that_requires_a_gradient_gets_none(choice):
    if choice == "triton":
        pytest.importorskip("triton")
    predicted, truth, radius = (each.detach().float().to(DEVICE) for each in draw(5))
    for copies in (predicted, predicted.clone().requires_grad_()):
        truth.requires_grad_()
        with use(smooth_lddt=choice):
            score = smooth_lddt(copies, truth, radius)
        if copies.requires_grad or score.requires_grad:
            score.sum().backward()
        assert truth.grad is None
        assert (copies.grad is not None) == copies.requires_grad


def test_mixed_types_are_refused():
    predicted, truth, radius = draw(3)
    with pytest.raises(ValueError, match="make them one type"):
        smooth_lddt(predicted, truth.float(), radius)


def test_shapes_that_do_not_fit_are_refused():
    predicted, truth, radius = draw(3)
    unchecked = inspect.unwrap(smooth_lddt)  # tests check annotations, users do not
    with pytest.raises(ValueError, match="smooth_lddt: truth has shape"):
        unchecked(predicted, truth[:, :2], radius)
    with pytest.raises(ValueError, match="smooth_lddt: radius has shape"):
        unchecked(predicted, truth, radius[:, :2])
    with pytest.raises(ValueError, match="smooth_lddt: predicted has shape"):
        unchecked(predicted[0, 0], truth, radius)


@pytest.mark.skipif(GPU, reason="a GPU's square root of 9 may be below 3")
def test_atoms_at_the_radius_do_not_count_and_a_perfect_copy_has_no_gradient():
    truth = torch.zeros(1, 40, 3)
    truth[..., 0] = torch.arange(40.0)
    radius = torch.full((1, 40), 3.0)
    perfect, longer = (c * truth[:, None].clone().requires_grad_() for c in (1.0, 1.5))
    for choice in ("reference", "triton"):
        score, _ = run((longer, truth, radius), smooth_lddt=choice)
        assert_close(score, all_pairs(longer, truth, radius - 0.5).detach(), 1e-6)
        assert not run((perfect, truth, radius), smooth_lddt=choice)[1].any()


def test_strides_do_not_change_the_kernels_result():
    drawn = draw(40, structures=2, dtype=torch.float32)
    predicted, truth, radius = (each.detach().to(DEVICE) for each in drawn)
    predicted.requires_grad_()
    gaps = (
        predicted.detach().mT.contiguous().mT.requires_grad_(),
        truth.mT.contiguous().mT,
        radius.t().contiguous().t(),
    )
    for got, want in zip(
        run(gaps, smooth_lddt="triton"),
        run((predicted, truth, radius), smooth_lddt="triton"),
        strict=True,
    ):
        assert torch.equal(got, want)


@pytest.mark.parametrize("choice", ["reference", "triton"])
def test_scores_of_sixteen_bits_are_float32(choice):
    predicted, truth, radius = (each.detach().to(DEVICE) for each in draw(17, dtype=torch.float16))
    with use(smooth_lddt=choice):
        score = smooth_lddt(predicted, truth, radius)
        assert score.equal(smooth_lddt(predicted.float(), truth.float(), radius.float()))


def test_a_score_alone_makes_no_gradient():
    case = [each.to(DEVICE) for each in draw(40, dtype=torch.float32)]
    with use(smooth_lddt="triton"), torch.no_grad(), LargestTensor() as largest:
        smooth_lddt(*case)
    assert largest.nbytes < case[0].nbytes
