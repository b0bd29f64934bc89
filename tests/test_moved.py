"""Old public names still work, with a warning."""

import importlib

import pytest
import torch

from bevatron import kernels
from bevatron.moved import MOVED


@pytest.mark.parametrize("old", sorted(MOVED))
def test_an_old_public_name_gives_what_the_new_one_does(old):
    new = importlib.import_module(MOVED[old])
    name = new.__all__[0] if hasattr(new, "__all__") else "load_model"
    name = name if hasattr(new, name) else next(n for n in vars(new) if n[0].isalpha())
    with pytest.warns(DeprecationWarning, match=MOVED[old]):
        assert getattr(importlib.import_module(old), name) is getattr(new, name)


def test_an_import_by_the_old_name_leaves_the_operator_in_its_place():
    with pytest.warns(DeprecationWarning, match=r"bevatron\.kernels\.equivariant\.silu"):
        from bevatron.kernels.silu import silu

    assert kernels.silu is silu
    assert torch.equal(kernels.silu(torch.zeros(2)), torch.zeros(2))


def test_what_is_not_there_is_no_attribute():
    with (
        pytest.warns(DeprecationWarning, match="has moved"),
        pytest.raises(AttributeError, match="no attribute 'nothing'"),
    ):
        _ = importlib.import_module("bevatron.kernels.silu").nothing


def test_a_module_that_was_split_still_has_all_its_names():
    from bevatron.recipes.graph.evaluate import evaluate_graphs
    from bevatron.recipes.graph.predict import predict_graph

    old = importlib.import_module("bevatron.recipes.graph_use")
    with pytest.warns(DeprecationWarning, match="graph_use has moved"):
        assert (old.evaluate_graphs, old.predict_graph) == (evaluate_graphs, predict_graph)
