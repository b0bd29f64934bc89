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


RENAMED = {
    "linear": {"linear_beside": "linear_with_input"},
    "molecule_attention": {"molecule_attention_beside": "molecule_attention_with_bias"},
    "neighbour_sums": {"neighbour_sums_beside": "neighbour_sums_with_inputs"},
    "segment_sum": {"segment_sum_beside": "segment_sum_with_input"},
}


@pytest.mark.parametrize("operator", RENAMED)
def test_old_names_are_accepted_with_a_warning(operator):
    module = importlib.import_module(f"bevatron.kernels.molecule.{operator}")
    for old, new in RENAMED[operator].items():
        with pytest.warns(DeprecationWarning, match=f"{old} is deprecated; use {new}"):
            assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("prepare_structures", "stores.prepare_structures"),
        ("prepare_files", "stores.prepare_files"),
        ("isolated_atoms", "splits.isolated_atoms"),
        ("check_elements", "splits.check_elements"),
    ],
)
def test_what_left_the_data_of_mace_is_found_there(old, new):
    from bevatron.recipes.mace import data

    with pytest.warns(DeprecationWarning, match=rf"data\.{old} is deprecated; use .*mace\.{new}"):
        assert getattr(data, old).__name__ == old


def test_a_name_that_moved_to_another_module_is_found_there():
    from bevatron.data import dataset, loader

    with pytest.warns(
        DeprecationWarning, match=r"loader\.Dataset is deprecated; use .*SampleSource"
    ):
        assert loader.Dataset is dataset.SampleSource
