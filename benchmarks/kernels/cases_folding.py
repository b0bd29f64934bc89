"""Sizes at which operators of structures, windows of atoms and rows of alignments are timed."""

import functools
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from benchmarks.kernels import peers_folding as peers
from benchmarks.kernels import peers_pair
from benchmarks.kernels.cases import Case, Inputs, Operator, Setup, Work, cases
from benchmarks.kernels.cases_pair import PAIR, Shape, case_of
from benchmarks.kernels.checks import no_worse_than_plain
from torch import Tensor

from bevatron import kernels
from bevatron.kernels.pair.invariant_point_attention import reference
from bevatron.kernels.shared.parts import split

STRUCTURE = replace(
    PAIR,
    name="structure",
    result="kernels/structure",
    notes=PAIR.notes.replace("8192^3 bf16", "8192^3 float32"),
    dtype="float32",
    matmul_dtype=torch.float32,
)
COPIES = 48
"""Noisy copies of a structure in a step."""
QUERIES, KEYS = 32, 128
SMALL = 1500
"""Atoms whose pairs plain PyTorch holds in memory, and a captured graph too."""
RADIUS = 15.001
"""Å; between two distances of points on a grid of `GRID` Å, so that all types count the same."""
GRID, OF_COPIES = 1 / 16, 1 / 64
"""Å, of points in the truth and in copies: float32 has exact squares of distances then, so that
float64 finds the same pairs, and the same signs of errors, at which the slope jumps."""
ATOMS_OF_RESIDUE, DISTANCE = 8, 5.1
"""Å between residues on a lattice, so that atoms are as dense as in proteins."""
SPECIAL = 3
"""Square root, exponential and reciprocal of a pair of atoms: four sigmoids share the last two."""


@cases("window_attention", PAIR)
def window_cases(setup: Setup) -> list[Case]:
    """Return windows of all copies; the fewest are soaked."""
    found, (H, D) = [], (2, 8) if setup.tiny else (4, 32)
    queries, keys = (16, 32) if setup.tiny else (QUERIES, KEYS)
    sizes = [(3, 35)] if setup.tiny else [(4, 1000), (COPIES, 4600), (COPIES, 9000)]
    for copies, atoms in sizes:
        windows, values = -(-atoms // queries), copies * atoms * H * D
        shapes: dict[str, Shape] = dict.fromkeys(
            ("q", "k", "v", "gate"), (1, copies, atoms, H, D)
        ) | {"bias": (1, windows, H, queries, keys)}
        of_bias = windows * H * queries * keys
        # Read four and written one; read the five and the gradient, written four gradients.
        least = Work(30 * values + 6 * of_bias, 14 * copies * of_bias * D, 2 * copies * of_bias)
        functions = (kernels.window_attention, peers.window_attention)
        found.append(
            case_of(
                *(setup, "window_attention", f"{copies} x {atoms} atoms", shapes, functions, least),
                mask=(1, atoms),
                few=(1, 8),
                usual=atoms != 1000,
                peers={
                    "pair_attention": peers.pair_attention_of_windows,
                    "flex_attention": peers.flex_of_windows,
                    "SDPA": peers.sdpa_of_windows,
                },
            )
        )
    return found


def averaged(
    m: Tensor,
    logits: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    v_weight: Tensor,
    gate_weight: Tensor,
    out_weight: Tensor,
) -> Tensor:
    """Compute the layer as the model does."""
    joint = torch.cat([v_weight, gate_weight])
    both = kernels.layer_norm_linear(m, norm_weight, norm_bias, joint)
    v, gate = split(both, [len(v_weight)] * 2)
    averages = kernels.pair_weighted_averaging(v, gate, logits.softmax(-1))
    return F.linear(averages, out_weight)


@cases("pair_weighted_averaging", PAIR)
def averaging_cases(setup: Setup) -> list[Case]:
    """Return the layer from normalisation to output, of logits that a pair gives.

    The smallest is soaked.
    """
    found, (C, H, D) = [], (8, 2, 8) if setup.tiny else (64, 8, 8)
    for S, N in ((3, 5),) if setup.tiny else ((128, 64), (1024, 384), (1024, 768)):
        shapes: dict[str, Shape] = {"m": (S, N, C), "logits": (H, N, N)}
        shapes |= {"norm_weight": (C,), "norm_bias": (C,), "out_weight": (C, H * D)}
        shapes |= dict.fromkeys(("v_weight", "gate_weight"), (H * D, C))
        operations = 18 * S * N * C * H * D + 6 * S * N * N * H * D
        work = Work(10 * S * N * C + 6 * H * N * N, operations)
        functions = (averaged, peers.pair_weighted_averaging)
        given = setup, "pair_weighted_averaging", f"{S} x {N} x {C}", shapes, functions, work
        found.append(case_of(*given, usual=N != 64))
    return found


@functools.cache
def chain(device: str, atoms: int) -> Tensor:
    """Return a chain folded into a cube, residue after residue [1, A, 3]."""
    generator = torch.Generator(device=device).manual_seed(2)
    residue = torch.arange(atoms, device=device) // ATOMS_OF_RESIDUE
    side = round((atoms / ATOMS_OF_RESIDUE) ** (1 / 3) + 0.5)
    x, y, z = residue % side, residue // side % side, residue // side**2
    x = torch.where(residue // side % 2 == 1, side - 1 - x, x)
    y = torch.where(z % 2 == 1, side - 1 - y, y)
    noise = torch.randn((1, atoms, 3), generator=generator, device=device)
    points = DISTANCE * torch.stack([x, y, z], -1)[None] + 1.5 * noise
    return GRID * torch.round(points / GRID)


def noisy(setup: Setup, atoms: int, copies: int, seed: int) -> Inputs:
    """Draw copies of the chain with more and more noise, and the atoms that are resolved."""
    generator = torch.Generator(device=setup.device).manual_seed(seed)
    shape = (1, copies, atoms, 3)
    size = torch.linspace(0.2, 8.0, copies, device=setup.device)[:, None, None]
    noise = size * torch.randn(shape, generator=generator, device=setup.device)
    predicted = chain(setup.device, atoms)[:, None] + noise
    predicted = (OF_COPIES * torch.round(predicted / OF_COPIES)).to(setup.dtype)
    resolved = torch.rand((1, atoms), generator=generator, device=setup.device) > 0.02
    return {"predicted": predicted, "mask": resolved}


def lddt_floor(setup: Setup, atoms: int, copies: int, _: str) -> float:
    """Return the time of special functions, of each pair that counts once in both passes, in ms."""
    truth, resolved = chain(setup.device, atoms)[0], noisy(setup, atoms, 1, 0)["mask"][0]
    close = (torch.cdist(truth, truth) < RADIUS) & resolved & resolved[:, None]
    pairs = int(close.sum() - resolved.sum()) // 2
    return Work(exponentials=2 * SPECIAL * copies * pairs).floor_ms(1.0, 1.0)


def with_truth(operator: Operator, predicted: Tensor, mask: Tensor) -> Tensor:
    """Score copies by an implementation; only they have gradients."""
    truth = chain(str(predicted.device), predicted.shape[2]).to(predicted.dtype)
    radius = torch.where(mask, RADIUS, 0.0).to(predicted.dtype)
    result: Tensor = operator(predicted, truth, radius)
    return result


@cases("smooth_lddt", STRUCTURE)
def lddt_cases(setup: Setup) -> list[Case]:
    """Return whole structures; the smallest is soaked, and the next one is what fits eagerly."""
    return [
        Case(
            *("smooth_lddt", f"{copies} x {atoms} atoms"),
            draw=partial(noisy, setup, atoms, copies),
            ours=partial(with_truth, kernels.smooth_lddt),
            plain=partial(with_truth, peers.smooth_lddt),
            least={"forward+backward": Work(setup.dtype.itemsize * 9 * copies * atoms)},
            floor=partial(lddt_floor, setup, atoms, copies),
            check=no_worse_than_plain,
            peers={"plain, in tiles": partial(with_truth, peers.smooth_lddt_in_tiles)},
            few=(1, 4),
            usual=setup.tiny or atoms > SMALL,
        )
        for copies, atoms in (
            [(2, 40)] if setup.tiny else [(8, 500), *((COPIES, A) for A in (SMALL, 4600, 7000))]
        )
    ]


def flat(results: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([each.flatten(1) for each in results], -1)


def joined_points(**tensors: Tensor) -> Tensor:
    """Return values, points and pairs of invariant point attention as one tensor."""
    return flat(kernels.invariant_point_attention(**tensors))


def separate_operators(**tensors: Tensor) -> Tensor:
    """Compute invariant point attention without its kernels, points as channels of a matmul."""
    return flat(reference.invariant_point_attention(**tensors))


def separate_operators_compiled(**tensors: Tensor) -> Tensor:
    return peers_pair.compiled(separate_operators)(**tensors)


@cases("invariant_point_attention", STRUCTURE)
def point_cases(setup: Setup) -> list[Case]:
    H, D, P, V, Z = (2, 4, 2, 3, 8) if setup.tiny else (12, 16, 4, 8, 128)
    found = []
    for N in (5,) if setup.tiny else (256, 384):
        shapes: dict[str, Shape] = dict.fromkeys("qkv", (N, H, D))
        shapes |= dict.fromkeys(("q_points", "k_points"), (N, 3, H, P))
        shapes |= {"v_points": (N, 3, H, V), "bias": (H, N, N), "z": (N, N, Z)}
        shapes |= {"head_weights": (H,)}
        # The pair and its bias are read, then the pair again and both gradients written.
        products = 2 * D + 3 * P + 3 * V + Z
        work = Work(2 * N * N * (3 * Z + 2 * H), 6 * N * N * H * products, 2 * N * N * H)
        found.append(
            case_of(
                *(setup, "invariant_point_attention", f"N {N}", shapes),
                (joined_points, peers_pair.invariant_point_attention),
                work,
                peers={
                    "separate operators": separate_operators,
                    "separate operators, compiled": separate_operators_compiled,
                },
            )
        )
    return found
