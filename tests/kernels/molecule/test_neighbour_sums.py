"""Sums over an atom's bonds: the reference everywhere, the kernels interpreted or compiled."""

import pytest
import torch
from molecule_inputs import DEVICE, EXACT, HALF, TOLERANCES, draw, molecule

from bevatron.kernels import index_bonds, neighbour_sums, use
from bevatron.kernels.molecule.neighbour_sums import neighbour_sums_with_inputs
from bevatron.testing import assert_close, check_op

pytest.importorskip("triton", reason="the kernels need the package triton")

MESSAGES = ("messages", "nodes")


def check(inputs, **options):
    fixed = {name: inputs.pop(name) for name in ("outgoing", "own") if name in inputs}

    def sums(edges, num_atoms, **tensors):
        tensors = {"messages": None, "nodes": None} | tensors
        if "scale" in tensors:
            tensors["scale"] = tensors["scale"].detach()
        return neighbour_sums(**tensors, bonds=index_bonds(edges, num_atoms), **fixed)

    given = inputs.get("messages", inputs.get("nodes"))
    tolerance = TOLERANCES.get(given.dtype)
    ran = ("neighbour_sums", "triton")
    check_op(sums, sums, inputs, order=1, tolerance=tolerance, ran=ran, **options)


def make(num_atoms, num_bonds, channels, node_channels, dtype=torch.float32):
    return {
        "edges": molecule(num_atoms, num_bonds),
        "num_atoms": num_atoms,
        "messages": draw(2 * num_bonds, channels, dtype=dtype),
        "nodes": draw(num_atoms, node_channels, dtype=dtype, seed=8),
    }


@pytest.mark.parametrize("graph", [(1, 0), (2, 1), (20, 22), (7, 0), (3, 60)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_any_molecule_is_right(graph, dtype):
    check(make(*graph, 24, 40, dtype) | {"own": True})


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_returned_inputs_are_added(own, scaled):
    bonds = index_bonds(molecule(7, 9), 7)
    scale = draw(18, seed=4).relu() if scaled else None

    def both(messages, nodes):
        factor = None if scale is None else scale.to(messages)
        found = neighbour_sums_with_inputs(messages, nodes, bonds, scale=factor, own=own)
        sums, messages, nodes = found
        return torch.cat([part.flatten() for part in (sums, messages.square(), nodes.square())])

    inputs = {name: value for name, value in make(7, 9, 24, 20).items() if name in MESSAGES}
    check_op(both, both, inputs, order=1, tolerance=EXACT, ran=("neighbour_sums", "triton"))


@pytest.mark.parametrize("left_out", ["messages", "nodes"])
def test_parts_may_be_left_out(left_out):
    inputs = make(6, 7, 8, 5)
    del inputs[left_out]
    check(inputs)


@pytest.mark.parametrize("outgoing", [False, True])
@pytest.mark.parametrize("own", [False, True])
def test_the_parts_are_concatenated(outgoing, own):
    check(make(6, 7, 8, 5) | {"outgoing": outgoing, "own": own})


def test_a_factor_drops_messages_of_an_edge():
    inputs = make(6, 7, 8, 5) | {"scale": draw(14).sign().relu()}
    check(inputs)


def test_strided_and_sixteen_bit_inputs_are_right():
    check(make(6, 7, 8, 5) | {"own": True}, strided=True)
    check(make(6, 7, 8, 5, HALF) | {"own": True})


def test_wide_rows_are_right():
    check(make(5, 6, 512, 256))


def test_the_reverse_of_an_edge_is_the_next():
    edges = molecule(5, 4)
    bonds = index_bonds(edges, 5)
    messages = torch.eye(8, device=DEVICE)
    with use("reference"):
        sums = neighbour_sums(messages, None, bonds)
    assert_close(sums[:, :8], torch.nn.functional.one_hot(edges[1], 5).T.float())
    assert_close(sums[:, 8:], torch.nn.functional.one_hot(edges[0], 5).T.float())


def test_custom_operators_pass_opcheck():
    from bevatron.kernels.molecule.neighbour_sums.triton import gather

    bonds = index_bonds(molecule(4, 3), 4)
    lists = (bonds.senders, bonds.receivers, bonds.incoming, bonds.incoming_ptr)
    leaves = (draw(6, 4), draw(4, 3))
    torch.library.opcheck(gather.op, (*leaves, None, *lists, True, True))


def test_mismatched_arguments_are_reported():
    bonds = index_bonds(molecule(4, 3), 4)
    with pytest.raises(ValueError, match="6 edges"):
        neighbour_sums(torch.zeros(5, 2, device=DEVICE), None, bonds)
    with pytest.raises(ValueError, match="neither"):
        neighbour_sums(None, None, bonds)
    with pytest.raises(ValueError, match="pairs of directions"):
        index_bonds(torch.zeros(2, 3, dtype=torch.int64), 2)
