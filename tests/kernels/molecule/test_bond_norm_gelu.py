"""A split layer over bonds: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from molecule_inputs import DEVICE, HALF, TOLERANCES, draw, molecule, pointers

from bevatron.kernels import bond_norm_gelu, index_bonds, norm_gelu, use
from bevatron.testing import assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")


def make(num_atoms, num_bonds, width, *names, dtype=torch.float32, graphs=None):
    inputs = {
        "edges": molecule(num_atoms, num_bonds),
        "edge_rows": draw(2 * num_bonds, width, dtype=dtype),
        "atom_rows": draw(num_atoms, 2 * width, dtype=dtype, seed=8),
    }
    for seed, name in enumerate(("weight", "bias", *names)):
        inputs[name] = draw(width, dtype=dtype, seed=20 + seed)
    if graphs is not None:
        inputs["graph_rows"] = draw(len(graphs), width, dtype=dtype, seed=4)
        index = torch.repeat_interleave(torch.arange(len(graphs)), torch.tensor(graphs))
        inputs |= {"graph": index.to(DEVICE), "ptr": pointers(*graphs)}
    return inputs


def run(edges, atom_rows, **tensors):
    bonds = index_bonds(edges, len(atom_rows))
    return bond_norm_gelu(atom_rows=atom_rows, bonds=bonds, **tensors)


def check(inputs, **options):
    check_op(
        *(run, run, inputs),
        order=1,
        tolerance=TOLERANCES.get(inputs["edge_rows"].dtype),
        ran=("bond_norm_gelu", "triton"),
        **options,
    )


@pytest.mark.parametrize("graph", [(1, 0), (2, 1), (20, 22), (3, 60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_molecule_is_right(graph, dtype):
    check(make(*graph, 24, "linear_bias", dtype=dtype))


@pytest.mark.parametrize("width", [7, 64, 512])
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_any_width_is_right(width, dtype):
    check(make(5, 6, width, "linear_bias", dtype=dtype, graphs=[2, 3]))


def test_rows_of_molecules_without_atoms_have_no_effect():
    check(make(6, 5, 16, graphs=[0, 4, 0, 2]))


def test_strided_inputs_are_right():
    check(make(6, 5, 16, "linear_bias", graphs=[4, 2]), strided=True)


def test_it_equals_the_layer_on_concatenated_inputs():
    inputs = make(6, 5, 16, dtype=torch.float64, graphs=[4, 2])
    senders, receivers = inputs["edges"]
    atoms, index = inputs["atom_rows"], inputs["graph"]
    z = inputs["edge_rows"] + atoms[receivers, :16] + atoms[senders, 16:]
    z = z + inputs["graph_rows"][index[receivers]]
    with use("reference"):
        assert_close(run(**inputs), norm_gelu(z, inputs["weight"], inputs["bias"]), 1e-13)


def test_mismatched_arguments_are_reported():
    inputs = make(6, 5, 16)
    with pytest.raises(ValueError, match="atom_rows"):
        run(**inputs | {"atom_rows": inputs["atom_rows"][:, :16].contiguous()})
