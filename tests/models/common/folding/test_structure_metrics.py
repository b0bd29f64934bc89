"""lDDT, RMSD, TM-score, DockQ, pockets and contacts: definitions, invariance, real complexes."""

import importlib
import math
import sys

import numpy as np
import pytest
import torch

from bevatron.models.common.folding import metrics
from bevatron.testing import assert_close

docked = importlib.import_module("docked")


def random_points(number, seed=0, spread=8.0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(number, 3))) * spread


def perturbed(x, size, seed=1):
    return x + torch.from_numpy(np.random.default_rng(seed).normal(size=x.shape)) * size


def moved(x, seed=3):
    rotation, shift = docked.random_motion(seed)
    return x @ rotation.T + shift


def kabsch_rmsd(x, y, fit, measure):
    """Superpose x on y by the points of ``fit`` and measure those of ``measure``, in numpy."""
    xc, yc = x[fit].mean(0), y[fit].mean(0)
    u, _, vt = np.linalg.svd((x[fit] - xc).T @ (y[fit] - yc))
    r = vt.T @ np.diag([1, 1, np.sign(np.linalg.det(vt.T @ u.T))]) @ u.T
    error = (x - xc) @ r.T + yc - y
    return math.sqrt((error[measure] ** 2).sum(-1).mean())


def loop_lddt(x, y, resolved, residue, radius):
    """Sum of scores and number of pairs of each atom, pair by pair."""
    preserved, considered = np.zeros(len(x)), np.zeros(len(x))
    for i in range(len(x)):
        for j in range(len(x)):
            distance = math.dist(y[i], y[j])
            if residue[i] == residue[j] or distance >= radius or not (resolved[i] and resolved[j]):
                continue
            error = abs(math.dist(x[i], x[j]) - distance)
            preserved[i] += sum(error < t for t in (0.5, 1, 2, 4)) / 4
            considered[i] += 1
    return preserved, considered


def test_lddt_is_its_definition_pair_by_pair():
    y = random_points(40)
    x = perturbed(y, 0.8)
    resolved = torch.arange(40) % 7 != 0
    residue = torch.arange(40) // 3
    for radius in (15.0, 30.0):
        preserved, considered = metrics.lddt(x, y, resolved, residue, radius)
        expected = loop_lddt(x.numpy(), y.numpy(), resolved, residue, radius)
        assert_close(preserved, torch.from_numpy(expected[0]), 1e-12)
        assert_close(considered, torch.from_numpy(expected[1]), 1e-12)


def test_lddt_of_c_alphas():
    y = random_points(30)
    yes = torch.ones(30, dtype=torch.bool)
    assert metrics.ca_lddt(moved(y), y, yes) == 1
    assert metrics.ca_lddt(y * 3, y, yes) < 0.4
    assert metrics.ca_lddt(y[:1], y[:1], yes[:1]) == 1
    x = perturbed(y, 1.0)
    preserved, considered = loop_lddt(x.numpy(), y.numpy(), yes, range(30), 15.0)
    expected = torch.tensor(preserved.sum() / considered.sum(), dtype=torch.float64)
    assert_close(metrics.ca_lddt(x, y, yes), expected, 1e-12)
    assert_close(metrics.ca_lddt(moved(x), y, yes), expected, 1e-12)


def test_lddt_by_kind_is_its_definition_pair_by_pair():
    y = random_points(48, spread=12.0)
    x = perturbed(y, 0.9)
    kind = torch.arange(48) // 12
    chain = torch.arange(48) // 6
    residue = torch.arange(48) // 2
    resolved = torch.arange(48) % 11 != 0
    found = metrics.lddt_by_kind(x, y, resolved, residue, chain, kind)
    names = ("protein", "rna", "dna", "ligand")
    expected = {name: np.zeros(2) for name in found}
    for i in range(48):
        for j in range(48):
            a, b = sorted((int(kind[i]), int(kind[j])))
            radius = 30 if {1, 2} & {a, b} else 15
            distance = math.dist(y[i], y[j])
            apart = i != j if a == b == 3 else residue[i] != residue[j]
            if not (apart and resolved[i] and resolved[j] and distance < radius):
                continue
            error = abs(math.dist(x[i], x[j]) - distance)
            score = sum(error < t for t in (0.5, 1, 2, 4)) / 4
            if chain[i] == chain[j]:
                expected[names[a]] += (score, 1)
            else:
                expected[f"{names[a]}_{names[b]}"] += (score, 1)
    assert len(found) == 14
    for name, sums in found.items():
        assert [float(value) for value in sums] == expected[name].tolist(), name
        assert sums[1] > 0, name


def test_rmsd_forgets_motion_and_what_is_not_resolved():
    y = random_points(20)
    resolved = torch.ones(20, dtype=torch.bool)
    assert metrics.rmsd(moved(y), y, resolved) < 1e-12
    x = perturbed(y, 1.5)
    expected = kabsch_rmsd(x.numpy(), y.numpy(), slice(None), slice(None))
    assert float(metrics.rmsd(moved(x), y, resolved)) == pytest.approx(expected, rel=1e-10)
    resolved[15:] = False
    x[15:] += 100
    expected = kabsch_rmsd(x.numpy(), y.numpy(), slice(15), slice(15))
    assert float(metrics.rmsd(x, y, resolved)) == pytest.approx(expected, rel=1e-10)


def test_a_mirror_image_is_not_the_same_structure():
    y = random_points(20)
    mirrored = y * torch.tensor([1.0, 1, -1], dtype=torch.float64)
    assert metrics.rmsd(mirrored, y, torch.ones(20, dtype=torch.bool)) > 4


def helix(length):
    t = torch.arange(length, dtype=torch.float64)
    angle = t * math.radians(100)
    wave = 8 * torch.sin(t / 9)
    return torch.stack([2.3 * angle.cos() + wave, 2.3 * angle.sin(), 1.5 * t], -1)


def test_tm_score_of_a_moved_copy_is_one():
    y = helix(60)
    yes = torch.ones(60, dtype=torch.bool)
    assert float(metrics.tm_score(moved(y), y, yes)) == pytest.approx(1, abs=1e-12)
    assert metrics.tm_score(y[:0], y[:0], yes[:0]) == 0
    assert float(metrics.tm_score(y[:2], moved(y[:2]), yes[:2])) == pytest.approx(1, abs=1e-9)


def best_tm(x, y, starts=15):
    """Maximum over rotations and translations by a general optimiser from many starts."""
    optimize = pytest.importorskip("scipy.optimize")
    spatial = pytest.importorskip("scipy.spatial.transform")
    length = len(x)
    d0 = 1.24 * (length - 15) ** (1 / 3) - 1.8
    random = np.random.default_rng(0)

    def negative(p):
        r = spatial.Rotation.from_rotvec(p[:3]).as_matrix()
        d = ((x @ r.T + p[3:] - y) ** 2).sum(-1)
        return -np.mean(1 / (1 + d / d0**2))

    best = 0.0
    for _ in range(starts):
        low = random.integers(0, length - 12)
        piece = slice(low, low + random.integers(8, 30))
        xc, yc = x[piece].mean(0), y[piece].mean(0)
        u, _, vt = np.linalg.svd((x[piece] - xc).T @ (y[piece] - yc))
        r = vt.T @ np.diag([1, 1, np.sign(np.linalg.det(vt.T @ u.T))]) @ u.T
        p = np.concatenate([spatial.Rotation.from_matrix(r).as_rotvec(), yc - r @ xc])
        best = max(best, -optimize.minimize(negative, p, method="BFGS").fun)
    return best


@pytest.mark.parametrize("bend", [0.3, 1.2])
def test_tm_score_finds_the_best_superposition(bend):
    """A hinge at two thirds: the best superposition is that of the larger part."""
    y = helix(75)
    turn = torch.tensor(
        [[math.cos(bend), 0, math.sin(bend)], [0, 1, 0], [-math.sin(bend), 0, math.cos(bend)]],
        dtype=torch.float64,
    )
    x = y.clone()
    x[50:] = (x[50:] - x[50]) @ turn.T + x[50]
    x = moved(perturbed(x, 0.4))
    found = float(metrics.tm_score(x, y, torch.ones(75, dtype=torch.bool)))
    expected = best_tm(x.numpy(), y.numpy())
    assert expected - 0.01 < found < expected + 1e-6


@pytest.fixture(scope="module", params=["1AVX", "1AY7", "1ACB"])
def complex_name(request):
    return request.param


@pytest.fixture(scope="module")
def pair(shared, complex_name):
    return docked.load(shared, complex_name)


def dockq_of(predicted, pair, resolved=None):
    resolved = torch.ones(len(pair.names), dtype=torch.bool) if resolved is None else resolved
    return metrics.dockq(predicted, pair.bound, resolved, pair.residue, pair.partner, pair.backbone)


@pytest.mark.shared
def test_dockq_of_a_complex_with_itself_is_one_wherever_it_lies(pair):
    result = dockq_of(moved(pair.bound), pair)
    assert result.fnat == 1
    assert result.score == pytest.approx(1, abs=1e-9)


@pytest.mark.shared
def test_dockq_of_unbound_structures_is_its_definition(pair, shared, complex_name):
    """The unbound partners lie where the bound ones do: as close as rigid docking can come."""
    result = dockq_of(moved(pair.unbound), pair)
    x, y = pair.unbound.numpy(), pair.bound.numpy()
    residue, partner = pair.residue.numpy(), pair.partner.numpy()
    backbone = pair.backbone.numpy()
    atoms = [np.flatnonzero(residue == r) for r in range(residue.max() + 1)]
    sides = [[r for r, own in enumerate(atoms) if partner[own[0]] == side] for side in (0, 1)]
    centres = np.array([y[own].mean(0) for own in atoms])

    def closest(points, a, b):
        return min(math.dist(points[i], points[j]) for i in atoms[a] for j in atoms[b])

    native, kept, interface = 0, 0, set()
    for a in sides[0]:
        for b in sides[1]:
            if math.dist(centres[a], centres[b]) > 30:
                continue
            distance = closest(y, a, b)
            if distance < 10:
                interface |= {a, b}
            if distance < 5:
                native += 1
                kept += closest(x, a, b) < 5
    assert result.fnat == pytest.approx(kept / native, abs=1e-12)
    fit = backbone & np.isin(residue, list(interface))
    assert result.interface_rmsd == pytest.approx(kabsch_rmsd(x, y, fit, fit), rel=1e-9)
    larger = 0 if len(sides[0]) >= len(sides[1]) else 1
    expected = kabsch_rmsd(x, y, backbone & (partner == larger), backbone & (partner != larger))
    assert result.ligand_rmsd == pytest.approx(expected, rel=1e-9)
    parts = (result.fnat, 1 / (1 + (result.interface_rmsd / 1.5) ** 2))
    score = (sum(parts) + 1 / (1 + (result.ligand_rmsd / 8.5) ** 2)) / 3
    assert result.score == pytest.approx(score)
    # The benchmark's table, which takes C-alpha atoms alone.
    assert result.interface_rmsd == pytest.approx(
        docked.interface_rmsd(shared, complex_name), abs=0.4
    )


@pytest.mark.shared
def test_dockq_of_a_partner_far_away_is_incorrect(pair):
    away = pair.bound + 60.0 * (pair.partner == 1)[:, None]
    result = dockq_of(away, pair)
    assert result.fnat == 0
    assert result.score < 0.23
    apart = torch.ones(len(pair.names), dtype=torch.bool) & (pair.partner == 0)
    assert dockq_of(away, pair, apart) is None


@pytest.mark.shared
def test_lddt_across_the_interface_sees_only_the_interface(pair):
    """A partner turned as a whole keeps its own distances."""
    rotation, _ = docked.random_motion(5)
    side = pair.partner == 1
    turned = pair.bound.clone()
    centre = turned[side].mean(0)
    turned[side] = (turned[side] - centre) @ rotation.T + centre
    yes = torch.ones(len(side), dtype=torch.bool)
    kind = torch.zeros(len(side), dtype=torch.int64)
    found = metrics.lddt_by_kind(turned, pair.bound, yes, pair.residue, pair.partner, kind)
    within, across = found["protein"], found["protein_protein"]
    assert float(within[0] / within[1]) == 1
    assert float(across[0] / across[1]) < 0.5
    assert float(found["rna"][1]) == 0


def ligand_case():
    """A pocket of twelve residues around a ligand of four atoms, two of which may be exchanged."""
    random = np.random.default_rng(0)
    polymer, ligand = random.normal(size=(36, 3)) * 6, random.normal(size=(4, 3)) * 1.5
    truth = torch.from_numpy(np.concatenate([polymer, ligand]))
    residue = torch.cat([torch.arange(12).repeat_interleave(3), torch.full((4,), 12)])
    backbone = (torch.arange(40) < 36) & (torch.arange(40) % 3 != 2)
    orders = torch.tensor([[36, 37, 38, 39], [36, 38, 37, 39]])
    return truth, torch.ones(40, dtype=torch.bool), residue, backbone, orders


def test_pocket_rmsd_takes_the_best_order_of_the_ligand():
    truth, resolved, residue, backbone, orders = ligand_case()
    x = truth.clone()
    x[[37, 38]] = truth[[38, 37]]
    assert metrics.pocket_rmsd(moved(x), truth, resolved, residue, backbone, orders) < 1e-12
    alone = metrics.pocket_rmsd(moved(x), truth, resolved, residue, backbone, orders[:1])
    swap = float((truth[37] - truth[38]).square().sum() * 2 / 4) ** 0.5
    assert float(alone) == pytest.approx(swap, rel=1e-9)


def test_pocket_rmsd_is_its_definition():
    truth, resolved, residue, backbone, orders = ligand_case()
    truth[:3] += 40
    truth[2] = truth[36]  # unresolved: it brings its residue into no pocket
    just_outside = torch.tensor([[11.0, 0, 0], [12, 0, 0], [11, 1, 0]])
    truth[3:6] = truth[36:39].amax(0) + just_outside
    resolved[[2, 5, 39]] = False
    x = perturbed(truth, 0.7)
    y, known = truth.numpy(), resolved.numpy()
    near = set()
    for i in range(36):
        for j in range(36, 39):
            if known[i] and math.dist(y[i], y[j]) < 10:
                near.add(int(residue[i]))
    assert near == set(range(2, 12))
    pocket = backbone.numpy() & known & np.isin(residue.numpy(), list(near))
    ligand = np.array([36, 37, 38])
    swapped = y.copy()
    swapped[[37, 38]] = y[[38, 37]]
    expected = min(kabsch_rmsd(x.numpy(), z, pocket, ligand) for z in (y, swapped))
    found = metrics.pocket_rmsd(x, truth, resolved, residue, backbone, orders)
    assert float(found) == pytest.approx(expected, rel=1e-9)
    resolved[36:] = False
    assert metrics.pocket_rmsd(x, truth, resolved, residue, backbone, orders).isnan()


def test_contact_precision_counts_the_surest_pairs():
    y = helix(40)
    y[20:] = y[:20].flip(0) + torch.tensor([5.0, 0, 0])
    resolved = torch.ones(40, dtype=torch.bool)
    resolved[3] = False
    number = torch.arange(40)
    probability = torch.rand(40, 40, generator=torch.Generator().manual_seed(0))
    probability = (probability + probability.mT) / 2
    for separation, share in ((6, 1.0), (24, 0.2)):
        pairs = [
            (float(probability[i, j]), math.dist(y[i], y[j]) < 8)
            for i in range(40)
            for j in range(i + separation, 40)
            if resolved[i] and resolved[j]
        ]
        surest = sorted(pairs, reverse=True)[: int(share * 39)]
        expected = sum(contact for _, contact in surest) / len(surest)
        found = metrics.contact_precision(
            probability, y, resolved, number, separation=separation, pairs_per_residue=share
        )
        assert float(found) == pytest.approx(expected)
        distance = torch.cdist(y, y)
        assert (
            metrics.contact_precision(
                -distance, y, resolved, number, separation=separation, pairs_per_residue=0.05
            )
            == 1
        )
    short = metrics.contact_precision(probability[:5, :5], y[:5], resolved[:5], number[:5])
    assert short.isnan()


def test_contact_probability_sums_the_bins_below_eight_angstrom():
    logits = torch.log(torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    assert_close(metrics.contact_probability(logits, (4.0, 12.0, 3)), torch.tensor([0.3]), 1e-6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"resolved": torch.ones(1) > 0}, r"resolved is bool \(1,\), expected bool \(4,\)"),
        ({"resolved": torch.ones(4)}, "resolved is float32"),
        ({"resolved": np.ones(4) > 0}, "resolved is a numpy.ndarray, expected a tensor"),
        ({"predicted": torch.ones(4, 3).bfloat16()}, "predicted is bfloat16, expected float32"),
        ({"truth": torch.ones(4, 3).half()}, "truth is float16, expected float32"),
        ({"predicted": np.ones((4, 3))}, "predicted is a numpy.ndarray"),
        ({"predicted": torch.ones(1, 4, 3)}, r"predicted has shape \(1, 4, 3\)"),
        ({"truth": [[1.0, 1.0, 1.0]]}, "truth is a list"),
        ({"truth": torch.ones(1, 3)}, r"truth has shape \(1, 3\), expected \(4, 3\)"),
        ({"residue": torch.zeros(1, dtype=torch.int64)}, r"residue has shape \(1,\)"),
        ({"residue": torch.zeros(4)}, "residue is float32, expected int64"),
        ({"kind": torch.zeros(3, dtype=torch.int64)}, r"kind has shape \(3,\)"),
    ],
)
def test_lddt_names_the_argument_that_does_not_fit(change, said, monkeypatch):
    if "shape_checks" in sys.modules:
        monkeypatch.setattr(sys.modules["shape_checks"], "checking", False)
    index = torch.zeros(4, dtype=torch.int64)
    points = {"predicted": torch.ones(4, 3), "truth": torch.ones(4, 3)}
    given = {**points, "resolved": torch.ones(4) > 0, "residue": index, **change}
    atoms = {"chain": index, "kind": index, **given}
    calls = {metrics.lddt_by_kind: atoms}
    if "kind" not in change:
        calls[metrics.lddt] = given
        if "residue" not in change:
            calls[metrics.ca_lddt] = {k: v for k, v in given.items() if k != "residue"}
    for metric, arguments in calls.items():
        with pytest.raises(ValueError, match=f"^{metric.__name__}: {said}"):
            metric(**arguments)
