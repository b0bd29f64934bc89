"""What an interatomic potential must obey, whatever its weights."""

import dataclasses

import numpy as np
import pytest
import torch

from bevatron.errors import ConfigError, DataError
from bevatron.models.mace import MACE, MaceConfig, hessian

VARIANTS = {
    "plain": {},
    "residual": {"interaction_first": "residual", "max_L": 2, "correlation": 3},
    "density": {
        "interaction_first": "density",
        "interaction": "density_residual",
        "distance_transform": "agnesi",
        "pair_repulsion": True,
        "apply_cutoff": False,
    },
    "one layer": {"num_interactions": 1, "max_L": 0, "correlation": 1},
    "three layers": {"num_interactions": 3, "scale_shift": False},
}


@pytest.fixture(params=VARIANTS, scope="module")
def model(request, tiny):
    return tiny(**VARIANTS[request.param])


def transformed(sample, matrix, shift=(0.0, 0.0, 0.0)):
    """Positions and cell turned by an orthogonal matrix; edges stay."""
    return {
        **sample,
        "positions": sample["positions"] @ matrix.T + np.array(shift),
        "cell": sample["cell"] @ matrix.T,
    }


def rotation(seed, determinant=1.0):
    matrix, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return matrix * np.sign(np.linalg.det(matrix)) * determinant


@pytest.mark.parametrize("determinant", [1.0, -1.0], ids=["rotation", "reflection"])
def test_energy_stays_and_forces_and_stress_turn(model, structures, determinant):
    sample, matrix = structures.crystal(1), rotation(2, determinant)
    compute = ("forces", "stress")
    before = model(structures.batch(sample), compute=compute)
    after = model(structures.batch(transformed(sample, matrix, (0.3, -1.0, 2.0))), compute=compute)
    r = torch.from_numpy(matrix)
    torch.testing.assert_close(after["energy"], before["energy"], rtol=1e-11, atol=0)
    torch.testing.assert_close(after["forces"], before["forces"] @ r.T, rtol=0, atol=1e-10)
    torch.testing.assert_close(after["stress"], r @ before["stress"] @ r.T, rtol=0, atol=1e-10)


def test_the_order_of_the_atoms_does_not_matter(model, structures):
    sample = structures.molecule(6, seed=3)
    order = np.random.default_rng(0).permutation(6)
    again = structures.sample(sample["atomic_numbers"][order], sample["positions"][order])
    before = model(structures.batch(sample))
    after = model(structures.batch(again))
    torch.testing.assert_close(after["energy"], before["energy"], rtol=1e-12, atol=0)
    torch.testing.assert_close(after["forces"], before["forces"][order], rtol=0, atol=1e-11)


def test_structures_of_a_batch_do_not_see_each_other(model, structures):
    samples = [
        structures.molecule(5, seed=1),
        structures.crystal(2),
        structures.sample([8], [0, 0, 0]),
    ]
    compute = ("forces", "stress", "virials", "descriptors")
    together = model(structures.batch(*samples), compute=compute)
    apart = [model(structures.batch(sample), compute=compute) for sample in samples]
    for name, value in together.items():
        expected = torch.cat([outputs[name] for outputs in apart])
        torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)


def test_forces_are_minus_the_slope_of_the_energy(model, structures):
    sample = structures.crystal(4)
    forces = model(structures.batch(sample))["forces"].detach().numpy()
    step = 1e-4
    for atom, axis in ((0, 0), (1, 2), (2, 1)):
        energies = []
        for sign in (1, -1):
            positions = sample["positions"].copy()
            positions[atom, axis] += sign * step
            moved = structures.batch({**sample, "positions": positions})
            energies.append(float(model(moved, compute=())["energy"].detach()[0]))
        slope = (energies[0] - energies[1]) / (2 * step)
        assert forces[atom, axis] == pytest.approx(-slope, rel=1e-5, abs=2e-6)


def test_stress_is_the_slope_of_the_energy_by_strain_over_the_volume(model, structures):
    sample = structures.crystal(5)
    outputs = model(structures.batch(sample), compute=("stress", "virials"))
    volume, step = abs(np.linalg.det(sample["cell"])), 1e-4
    for i, j in ((0, 0), (1, 2), (2, 0)):
        energies = []
        for sign in (1, -1):
            strain = np.eye(3)
            strain[i, j] += sign * step / 2
            strain[j, i] += sign * step / 2
            moved = {
                **sample,
                "positions": sample["positions"] @ strain,
                "cell": sample["cell"] @ strain,
            }
            energies.append(float(model(structures.batch(moved), compute=())["energy"].detach()[0]))
        slope = (energies[0] - energies[1]) / (2 * step)
        assert float(outputs["stress"][0, i, j]) == pytest.approx(
            slope / volume, rel=1e-5, abs=1e-7
        )
        assert float(outputs["virials"][0, i, j]) == pytest.approx(-slope, rel=1e-5, abs=2e-6)


def test_forces_can_be_differentiated_by_weights_and_positions(model, structures):
    batch = structures.batch(structures.molecule(4, seed=6))
    positions = batch.positions.clone().requires_grad_()
    shaken = dataclasses.replace(batch, positions=positions)
    forces = model(shaken, create_graph=True)["forces"]
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(forces.square().sum(), [positions, *parameters])
    step, parameter = 1e-5, model.embedding.weight

    def value(offset):
        with torch.no_grad():
            parameter[0, 1] += offset
        result = float(model(batch)["forces"].detach().square().sum())
        with torch.no_grad():
            parameter[0, 1] -= offset
        return result

    slope = (value(step) - value(-step)) / (2 * step)
    index = next(i for i, p in enumerate(parameters) if p is parameter)
    assert float(gradients[1 + index][0, 1]) == pytest.approx(slope, rel=1e-5, abs=1e-7)


def test_hessian_is_symmetric_and_the_slope_of_the_forces(tiny, structures):
    model, sample = tiny(), structures.molecule(3, seed=7)
    batch = structures.batch(sample)
    found = hessian(model, batch)
    assert found.shape == (3, 3, 3, 3)
    flat = found.reshape(9, 9)
    torch.testing.assert_close(flat, flat.T, rtol=0, atol=1e-9)
    forces = []
    for sign in (1, -1):
        positions = sample["positions"].copy()
        positions[1, 2] += sign * 1e-4
        forces.append(
            model(structures.batch({**sample, "positions": positions}))["forces"].detach()
        )
    torch.testing.assert_close(found[1, 2], (forces[1] - forces[0]) / 2e-4, rtol=0, atol=1e-5)


def test_a_repeat_of_the_cell_has_eight_times_the_energy(model, structures):
    sample = structures.crystal(8)
    shifts = np.stack(np.meshgrid([0, 1], [0, 1], [0, 1], indexing="ij"), -1).reshape(-1, 3)
    positions = (sample["positions"][None] + (shifts @ sample["cell"])[:, None]).reshape(-1, 3)
    large = structures.sample(
        np.tile(sample["atomic_numbers"], 8), positions, 2 * sample["cell"], True
    )
    single = model(structures.batch(sample), compute=("forces", "stress"))
    repeat = model(structures.batch(large), compute=("forces", "stress"))
    torch.testing.assert_close(repeat["energy"], 8 * single["energy"], rtol=1e-12, atol=0)
    torch.testing.assert_close(repeat["forces"], single["forces"].repeat(8, 1), rtol=0, atol=1e-10)
    torch.testing.assert_close(repeat["stress"], single["stress"], rtol=0, atol=1e-11)


def test_energy_and_forces_are_continuous_at_the_cutoff(model, structures):
    base = structures.molecule(4, seed=9)
    results = []
    for offset in (1e-4, -1e-4):
        far = np.array([3.5 + offset, 0.0, 0.0]) + base["positions"][0]
        positions = np.concatenate([base["positions"], [far]])
        # Only the first atom lies at the distance of the cutoff.
        positions[1:4, 0] = np.minimum(positions[1:4, 0], base["positions"][0, 0])
        sample = structures.sample([*base["atomic_numbers"], 8], positions)
        results.append((sample, model(structures.batch(sample))))
    (outside, beyond), (inside, within) = results
    assert len(inside["edges"]) == len(outside["edges"]) + 2
    assert abs(float((beyond["energy"] - within["energy"]).detach())) < 1e-6
    assert float((beyond["forces"] - within["forces"]).abs().max()) < 1e-6


@pytest.mark.parametrize("kind", ["agnostic", "density"])
def test_an_isolated_atom_has_exactly_e0(tiny, structures, kind):
    model = tiny(interaction_first=kind, shift=(0.0,))
    batch = structures.batch(*(structures.sample([z], [0.1, 0.2, 0.3]) for z in (1, 6, 8)))
    outputs = model(batch, compute=("forces", "stress"))
    assert outputs["energy"].tolist() == [-13.6, -1029.0, -2041.0]
    assert not outputs["forces"].any()
    assert not outputs["stress"].any()


def test_an_isolated_atom_can_be_trained_on(model, structures):
    batch = structures.batch(structures.sample([8], [0, 0, 0]))
    outputs = model(batch, create_graph=True)
    loss = outputs["energy"].sum() + outputs["forces"].square().sum()
    gradients = torch.autograd.grad(loss, list(model.parameters()), materialize_grads=True)
    assert all(torch.isfinite(gradient).all() for gradient in gradients)


def test_every_parameter_takes_part_in_a_training_step(model, structures):
    model.zero_grad()
    outputs = model(structures.batch(structures.molecule(3, seed=2)), create_graph=True)
    (outputs["energy"].sum() + outputs["forces"].square().sum()).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_heads_read_the_same_features_differently(tiny, structures):
    energies = ((-13.6, -1029.0, -2041.0), (-10.0, -1000.0, -2000.0))
    model = tiny(heads=("a", "b"), atomic_energies=energies, scale=(0.5, 2.0), shift=(0.0, 0.3))
    sample = structures.molecule(4, seed=1)
    batch = structures.batch({**sample, "head": 0}, {**sample, "head": 1})
    outputs = model(batch, compute=("forces", "descriptors"))
    assert abs(float(outputs["energy"][0] - outputs["energy"][1])) > 1.0
    first, second = outputs["descriptors"].chunk(2)
    torch.testing.assert_close(first, second)
    alone = model(structures.batch({**sample, "head": 1}))
    torch.testing.assert_close(alone["energy"], outputs["energy"][1:])


def test_energies_of_atoms_add_up(model, structures):
    batch = structures.batch(structures.molecule(4), structures.crystal(0))
    outputs = model(batch, compute=("node_energy",))
    total = torch.zeros(2, dtype=torch.float64).index_add(0, batch.graph, outputs["node_energy"])
    torch.testing.assert_close(outputs["energy"], total)


def test_single_precision_agrees_with_double(structures, tiny):
    sample = structures.crystal(3)
    double = tiny()(structures.batch(sample), compute=("forces", "stress"))
    batch = structures.batch(sample).to("cpu", torch.float32)
    single = tiny(torch.float32)(batch, compute=("forces", "stress"))
    assert single["energy"].dtype == torch.float64
    assert single["forces"].dtype == torch.float32
    assert abs(float(single["energy"] - double["energy"])) < 2e-4
    torch.testing.assert_close(single["forces"].double(), double["forces"], rtol=1e-4, atol=1e-4)


def test_forces_are_there_without_gradients_around(model, structures):
    batch = structures.batch(structures.molecule(4))
    with torch.no_grad():
        inside = model(batch)["forces"]
    torch.testing.assert_close(inside, model(batch)["forces"].detach())


def test_an_unknown_element_is_named(tiny, structures):
    batch = structures.batch(structures.sample([1, 79], [[0, 0, 0], [1.0, 0, 0]]))
    with pytest.raises(DataError, match=r"contain Au.*knows H, C, O"):
        tiny()(batch)


def test_an_unknown_output_is_refused(tiny, structures):
    with pytest.raises(ConfigError, match="dipole"):
        tiny()(structures.batch(structures.molecule(3)), compute=("dipole",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"l_max": 5}, "l_max: expected 0 to 4"),
        ({"max_L": 4}, "max_L"),
        ({"correlation": 4, "l_max": 4}, "correlation: 4 needs l_max <= 3"),
        ({"r_max": -1.0}, "r_max"),
        ({"atomic_numbers": (1, 1)}, "holds an element twice"),
        ({"heads": ("a", "b"), "atomic_energies": ((1.0,),)}, "one row for each of 2 heads"),
        ({"avg_num_neighbors": 0.0}, "avg_num_neighbors"),
    ],
)
def test_a_wrong_configuration_is_one_sentence(changes, message):
    with pytest.raises(ConfigError, match=message):
        MaceConfig(**changes)


def test_a_preset_is_the_published_model():
    paper = MaceConfig.preset("paper")
    assert (paper.hidden_irreps, paper.correlation, paper.l_max) == ("128x0e+128x1o", 2, 3)
    with pytest.raises(ConfigError, match="no 'huge'"):
        MaceConfig.preset("huge")


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("paper", 3_583_376), ("mp-0-small", 3_847_696), ("mp-0-medium", 4_688_656)],
)
def test_presets_have_the_published_numbers_of_parameters_for_89_elements(name, parameters):
    data = {"atomic_numbers": tuple(range(1, 90)), "atomic_energies": ((0.0,) * 89,)}
    model = MACE(MaceConfig.preset(name).with_data(**data, avg_num_neighbors=1.0), torch.float32)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
