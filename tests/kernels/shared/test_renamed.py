"""Old names of public functions."""

import importlib

import pytest

OLD = {
    "linear": {"linear_beside": "linear_with_input"},
    "molecule_attention": {"molecule_attention_beside": "molecule_attention_with_bias"},
    "neighbour_sums": {"neighbour_sums_beside": "neighbour_sums_with_inputs"},
    "segment_sum": {"segment_sum_beside": "segment_sum_with_input"},
}


@pytest.mark.parametrize("operator", OLD)
def test_old_names_are_accepted_with_a_warning(operator):
    module = importlib.import_module(f"bevatron.kernels.molecule.{operator}")
    for old, new in OLD[operator].items():
        with pytest.warns(DeprecationWarning, match=f"{old} has been renamed to {new}"):
            assert getattr(module, old) is getattr(module, new)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = module.nothing
