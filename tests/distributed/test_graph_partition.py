"""Attention on a graph cut over processes equals that of one process."""

import pytest
from graph_ranks import STEPS, cut_losses, run_ranks, whole_losses

from bevatron.parallel.graph_partition import Grid

DOT = ["va", "va softmax", "agnn", "agnn softmax"]


def cases(world):
    """Return (kind, graph, scheme, options) to try on so many ranks: everything on four.

    There every scheme takes all the steps once; on other numbers of ranks, and in further variants,
    a few steps show the same.
    """
    grids = [Grid(px, world // px) for px in range(1, world + 1) if world % px == 0]
    few = {"steps": 6}
    whole = {} if world == 4 else few
    middle = {"grid": grids[len(grids) // 2], **whole}
    found = [
        ("gat", "tiny", "two_dimensional", middle),
        (
            "gat dropout",
            "weighted",
            "two_dimensional",
            {**middle, "chunks": 2, "regather": world == 6},
        ),
        ("gat", "plain", "rows", whole),
        ("gat", "plain", "feature_parallel", whole),
        ("agnn softmax", "weighted", "two_dimensional", middle),
    ]
    if world == 6:
        found += [("gat", "plain", "two_dimensional", {"grid": Grid(1, 6), **few})]
    if world == 4:
        found += [("gat dropout", "plain", "one_and_half_d", {})]
        found += [(kind, "plain", "two_dimensional", {**middle, **few}) for kind in DOT]
        found += [("gat dropout", "plain", "two_dimensional", {**middle, **few, "regather": True})]
        found += [(kind, "plain", "one_and_half_d", few) for kind in DOT[1::2]]
        found += [("va", "weighted", "one_and_half_d", few)]
        found += [("agnn softmax", "weighted", "rows", few)]
        found += [("gat dropout", "tiny", "feature_parallel", few)]
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6])
def test_losses_are_those_of_one_process(world, tmp_path):
    """In float64, to 1e-9; vertices not divisible, fewer vertices than ranks, hubs, weights."""

    def work(mesh):
        return [
            cut_losses(mesh, kind, graph, scheme, **o) for kind, graph, scheme, o in cases(world)
        ]

    found = run_ranks(world, work, tmp_path)
    for number, (kind, graph, scheme, options) in enumerate(cases(world)):
        expected = whole(kind, graph)
        assert expected[-1] < 0.95 * expected[0], "the stack learns"
        for losses in found:
            case = f"{kind} on {graph}, {scheme} {options}"
            steps = options.get("steps", STEPS)
            assert losses[number] == pytest.approx(expected[:steps], rel=0, abs=1e-9), case


KNOWN = {}


def whole(kind, graph):
    """Losses of one process, computed once."""
    if (kind, graph) not in KNOWN:
        KNOWN[kind, graph] = whole_losses(kind, graph)
    return KNOWN[kind, graph]
