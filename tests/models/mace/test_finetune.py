"""Starting from another model: the same function where both know the elements and heads."""

import pytest
import torch

from bevatron.errors import CheckpointError
from bevatron.models.mace import MACE, from_mace_torch, load_matching, to_mace_torch
from bevatron.models.mace.finetune import adapted_config

E0 = {1: -13.6, 6: -1029.0, 7: -1480.0, 8: -2041.0}


def adapted(source, numbers, heads=("default",)):
    energies = [[E0[z] for z in numbers] for _ in heads]
    config = adapted_config(
        source.config, atomic_numbers=numbers, heads=heads, atomic_energies=energies
    )
    torch.manual_seed(9)
    return MACE(config, torch.float64)


@pytest.mark.parametrize("kind", ["agnostic", "residual"])
@pytest.mark.parametrize("numbers", [(1, 8), (8, 1), (1, 6, 7, 8)], ids=str)
def test_a_subset_or_superset_of_elements_is_the_same_function(tiny, structures, kind, numbers):
    source = tiny(interaction_first=kind)
    model = adapted(source, numbers)
    rows = load_matching(model, source.state_dict(), source.config.heads)
    batch = structures.batch(structures.molecule(5, elements=(1, 8)))
    a, b = source(batch), model(batch)
    torch.testing.assert_close(a["energy"], b["energy"], rtol=1e-13, atol=0)
    torch.testing.assert_close(a["forces"], b["forces"], rtol=0, atol=1e-12)
    status = {row.name: row.status for row in rows}
    assert status["embedding.weight"] == "resized"
    assert status["readouts.0.weight"] == "loaded"
    assert set(status) == {name for name in model.state_dict() if name != "atomic_numbers"}


def test_a_new_head_stands_beside_the_old_one(tiny, structures):
    source = tiny()
    model = adapted(source, (1, 6, 8), ("new", "default"))
    load_matching(model, source.state_dict(), source.config.heads)
    sample = structures.molecule(5)
    old = source(structures.batch(sample))
    both = model(structures.batch({**sample, "head": 0}, {**sample, "head": 1}))
    torch.testing.assert_close(both["energy"], old["energy"].expand(2), rtol=1e-13, atol=0)
    torch.testing.assert_close(both["forces"][5:], old["forces"], rtol=0, atol=1e-12)
    load_matching(model, source.state_dict(), source.config.heads, new_heads="random")


def test_a_random_new_head_differs_and_keeps_the_old(tiny, structures):
    source = tiny()
    model = adapted(source, (1, 6, 8), ("default", "new"))
    load_matching(model, source.state_dict(), source.config.heads, new_heads="random")
    sample = structures.molecule(5)
    old = source(structures.batch(sample))
    both = model(structures.batch({**sample, "head": 0}, {**sample, "head": 1}))
    torch.testing.assert_close(both["forces"][:5], old["forces"], rtol=0, atol=1e-12)
    assert float((both["forces"][5:] - old["forces"]).abs().max()) > 1e-6


def test_one_of_two_heads_can_be_taken(tiny, structures):
    rows = ((-13.6, -1029.0, -2041.0), (-10.0, -1000.0, -2000.0))
    source = tiny(heads=("a", "b"), atomic_energies=rows, scale=(0.5, 2.0), shift=(0.0, 0.3))
    model = adapted(source, (1, 6, 8), ("b",))
    load_matching(model, source.state_dict(), source.config.heads)
    sample = structures.molecule(5)
    wanted = source(structures.batch({**sample, "head": 1}))
    found = model(structures.batch(sample))
    torch.testing.assert_close(found["energy"], wanted["energy"], rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", ["a", "new"])
def test_a_head_starts_from_the_one_that_is_named(tiny, structures, name):
    """Whether the old model has a head of that name or not."""
    rows = ((-13.6, -1029.0, -2041.0), (-10.0, -1000.0, -2000.0))
    source = tiny(heads=("a", "b"), atomic_energies=rows, scale=(0.5, 2.0), shift=(0.0, 0.3))
    start = {name: "b"}
    config = adapted_config(
        source.config,
        atomic_numbers=(1, 6, 8),
        heads=(name,),
        atomic_energies=rows[1:],
        start=start,
        default_head=name,
    )
    assert (config.scale, config.shift, config.default_head) == ((2.0,), (0.3,), name)
    model = MACE(config, torch.float64)
    load_matching(model, source.state_dict(), ("a", "b"), start=start, keep_energies=True)
    sample = structures.molecule(5)
    wanted = source(structures.batch({**sample, "head": 1}))
    found = model(structures.batch(sample))
    torch.testing.assert_close(found["energy"], wanted["energy"], rtol=1e-13, atol=0)


def test_own_energies_can_be_kept(tiny):
    source = tiny()
    source.atomic_energies += 100.0
    model = adapted(source, (1, 6, 8))
    load_matching(model, source.state_dict(), source.config.heads, keep_energies=True)
    assert model.atomic_energies.tolist() == [[-13.6, -1029.0, -2041.0]]
    load_matching(model, source.state_dict(), source.config.heads)
    assert model.atomic_energies.tolist() == source.atomic_energies.tolist()


def test_stored_coefficients_come_along(tiny, structures):
    state, config = to_mace_torch(tiny(correlation=3))
    name = "products.0.symmetric_contractions.contractions.0"
    state[f"{name}.U_matrix_3"] = 1.5 * state[f"{name}.U_matrix_3"][..., :2]
    state[f"{name}.weights_max"] = state[f"{name}.weights_max"][:, :2]
    source = from_mace_torch(state, config)
    model = adapted(source, (1, 6, 7, 8))
    load_matching(model, source.state_dict(), source.config.heads)
    batch = structures.batch(structures.crystal())
    torch.testing.assert_close(model(batch)["forces"], source(batch)["forces"], rtol=0, atol=1e-12)


def test_another_architecture_is_taken_as_far_as_it_fits(tiny):
    source, model = tiny(num_channels=8), tiny(seed=1)
    rows = load_matching(model, source.state_dict())
    status = {row.name: row.status for row in rows}
    assert status["radial_basis.frequencies"] == "loaded"
    assert status["embedding.weight"] == "new"
    extra = {**source.state_dict(), "something.else": torch.zeros(2)}
    assert load_matching(model, extra)[-1].status == "ignored"


def test_a_model_without_common_elements_is_refused(tiny):
    source = tiny()
    with pytest.raises(CheckpointError, match="no element"):
        load_matching(adapted(source, (7,)), source.state_dict())
    with pytest.raises(CheckpointError, match="not those of a MACE"):
        load_matching(source, {"a": torch.zeros(1)})
