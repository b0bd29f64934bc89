"""Coefficients of the symmetric product against what mace-torch stored in checkpoints."""

import gzip
import io
import pickle
import subprocess
import sys

import pytest
import torch

from bevatron.errors import ConfigError
from bevatron.maths.so3 import wigner_d
from bevatron.maths.symmetric_product import (
    CouplingTensor,
    count_paths,
    known_coupling,
    symmetric_coefficients,
)
from bevatron.testing import assert_close, random_rotation

CHECKPOINTS = [
    "real_imagdau_mace01_f64.state_dict.pt",
    "real_mace_tutorial_solvent_f32.state_dict.pt",
    "synth_mp0like_32x0e1o_l3_c3.state_dict.pt.gz",
    "synth_paper_128x0e1o_l3_c2.state_dict.pt.gz",
]


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_coefficients_equal_those_stored_in_checkpoints(shared, name):
    raw = (shared / "data/mace/models" / name).read_bytes()
    state = torch.load(
        io.BytesIO(gzip.decompress(raw) if name.endswith(".gz") else raw), weights_only=True
    )
    stored = {key: value for key, value in state.items() if "U_matrix_" in key}
    assert stored
    for key, expected in stored.items():
        degree = int(key.split("contractions.")[-1].split(".")[0])
        nu = int(key.rsplit("_", 1)[1])
        l_max = round(expected.shape[-2] ** 0.5) - 1
        built = symmetric_coefficients(l_max, degree, nu).dense()
        assert built.shape == expected.shape, key
        limit = 1e-12 if expected.dtype == torch.float64 else 1e-6
        assert (built - expected).abs().max() < limit, key


@pytest.mark.parametrize(
    ("degree", "numbers"),
    [(0, [1, 4, 23, 158]), (1, [1, 6, 51, 284]), (2, [1, 7, 65]), (3, [1, 6, 65])],
)
def test_number_of_paths(degree, numbers):
    found = [symmetric_coefficients(3, degree, nu).num_paths for nu in range(1, len(numbers) + 1)]
    assert found == numbers
    assert [count_paths(3, degree, nu) for nu in range(1, len(numbers) + 1)] == numbers


@pytest.mark.parametrize(("l_max", "degree", "nu"), [(3, 0, 2), (2, 1, 3), (2, 2, 3), (1, 1, 4)])
def test_coefficients_turn_their_factors_into_the_result(l_max, degree, nu):
    rotation = -random_rotation(5)
    blocks = [wigner_d(part, rotation) for part in range(l_max + 1)]
    factor = torch.block_diag(*blocks)
    u = symmetric_coefficients(l_max, degree, nu).dense()
    u = u if degree else u[None]
    turned = torch.einsum("ma,m...->a...", wigner_d(degree, rotation), u)
    for axis in range(1, nu + 1):
        turned = torch.einsum("...i,ia->...a", turned.movedim(axis, -1), factor).movedim(-1, axis)
    assert_close(turned, u, 1e-12)


def test_adding_up_equal_products_changes_no_result():
    coupling = symmetric_coefficients(2, 1, 3)
    a = torch.randn(9, dtype=torch.float64)
    full = torch.einsum("mijkp,i,j,k->mp", coupling.dense(), a, a, a)
    indices, paths, values = (torch.from_numpy(part) for part in coupling.symmetrised())
    assert len(values) < len(coupling.values)
    assert (indices[:, 1:].diff(dim=1) >= 0).all()
    terms = values * a[indices[:, 1:]].prod(1)
    few = torch.zeros_like(full).index_put((indices[:, 0], paths), terms, accumulate=True)
    assert_close(few, full, 1e-13)


@pytest.mark.parametrize("degree", [0, 1])
def test_coefficients_taken_from_a_dense_tensor_are_the_same(degree):
    built = symmetric_coefficients(2, degree, 2)
    taken = CouplingTensor.from_dense(built.dense(), degree)
    assert (taken.l_max, taken.num_paths, taken.correlation) == (2, built.num_paths, 2)
    assert torch.equal(taken.dense(), built.dense())


def test_a_degree_that_cannot_be_reached_has_one_path_of_zeros():
    coupling = symmetric_coefficients(1, 2, 1)
    assert coupling.dense().shape == (5, 4, 1)
    assert not coupling.dense().any()


def test_correlation_four_is_built_where_promised_and_refused_with_its_size_beyond():
    assert symmetric_coefficients(3, 1, 4).num_paths == 284
    with pytest.raises(ConfigError, match=r"l_max 4 and hidden degree 2 has \d+ .* GiB"):
        symmetric_coefficients(4, 2, 4)


def test_coefficients_are_found_by_their_key_also_in_another_process():
    coupling = symmetric_coefficients(2, 1, 2)
    assert known_coupling(coupling.key) is coupling
    assert symmetric_coefficients(2, 0, 2).key != coupling.key
    code = "import pickle, sys; c = pickle.load(sys.stdin.buffer); from bevatron.maths import "
    code += "symmetric_product as s; print(s.known_coupling(c.key) is c, c.key)"
    run = subprocess.run(
        [sys.executable, "-c", code], input=pickle.dumps(coupling), capture_output=True, check=True
    )
    assert run.stdout.decode().split() == ["True", coupling.key]
