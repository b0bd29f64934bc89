"""Models to mace-torch's layout and back."""

import json
import sys

import pytest
import torch

from bevatron.errors import CheckpointError, ConfigError, MissingPackageError, TrustError
from bevatron.models.mace import (
    from_mace_torch,
    load_mace_torch_file,
    load_model,
    save_model,
    to_mace_torch,
)

TWO_HEADS = {
    "heads": ("a", "b"),
    "atomic_energies": ((-13.6, -1029.0, -2041.0), (-10.0, -1000.0, -2000.0)),
    "scale": (0.5, 2.0),
    "shift": (0.0, 0.3),
}
VARIANTS = {
    "agnostic": {"max_L": 2},
    "residual": {"interaction_first": "residual", "correlation": 3},
    "density": {
        "interaction_first": "density",
        "interaction": "density_residual",
        "distance_transform": "agnesi",
        "pair_repulsion": True,
        "apply_cutoff": False,
    },
    "two heads": TWO_HEADS,
    "one layer": {"num_interactions": 1},
    "plain": {"scale_shift": False, "num_interactions": 3, "scale": (1.0,), "shift": (0.0,)},
}


@pytest.fixture
def _annotations_unchecked(monkeypatch):
    """Tests check annotations, users do not."""
    if "shape_checks" in sys.modules:
        monkeypatch.setattr(sys.modules["shape_checks"], "checking", False)


@pytest.fixture(params=VARIANTS)
def model(request, tiny):
    return tiny(**VARIANTS[request.param])


def test_there_and_back_is_the_same_model(model):
    state, config = to_mace_torch(model)
    again = from_mace_torch(state, json.loads(json.dumps(config)))
    assert again.config == model.config
    assert all(torch.equal(a, model.state_dict()[n]) for n, a in again.state_dict().items())


def test_a_model_folder_holds_all_of_it(model, structures, tmp_path):
    save_model(model, tmp_path / "m")
    again = load_model(tmp_path / "m")
    batch = structures.batch(structures.crystal())
    assert again.config == model.config
    assert torch.equal(model(batch)["forces"], again(batch)["forces"])
    assert sorted(p.name for p in (tmp_path / "m").iterdir()) == [
        "model.json",
        "weights.safetensors",
    ]


def test_other_coefficients_are_kept_and_saved(tiny, structures, tmp_path):
    model = tiny(correlation=3)
    state, config = to_mace_torch(model)
    turned, batch = reduce_basis(state), structures.batch(structures.crystal())
    converted = from_mace_torch(turned, config)
    assert converted.config.coefficients == "stored"
    name = "products.0.contraction.0.weights.2"
    assert converted.state_dict()[name].shape[1] == 2 < model.state_dict()[name].shape[1]
    assert float((converted(batch)["forces"] - model(batch)["forces"]).abs().max()) > 1e-5
    save_model(converted, tmp_path / "m")
    again = load_model(tmp_path / "m")
    assert torch.equal(converted(batch)["forces"], again(batch)["forces"])
    back, _ = to_mace_torch(again)
    assert all(torch.equal(back[key], value) for key, value in turned.items())


def test_another_basis_of_the_same_paths_is_the_same_function(tiny, structures):
    model, batch = tiny(correlation=3), structures.batch(structures.crystal())
    state, config = to_mace_torch(model)
    name = "products.0.symmetric_contractions.contractions.1"
    paths = state[f"{name}.weights_max"].shape[1]
    basis = torch.eye(paths) + 0.3 * torch.randn(paths, paths)
    basis = basis.double()
    state[f"{name}.U_matrix_3"] = state[f"{name}.U_matrix_3"] @ basis
    state[f"{name}.weights_max"] = torch.linalg.solve(basis, state[f"{name}.weights_max"])
    converted = from_mace_torch(state, config)
    assert converted.config.coefficients == "stored"
    torch.testing.assert_close(
        converted(batch)["forces"], model(batch)["forces"], rtol=0, atol=1e-10
    )


def reduce_basis(state):
    """Keep the first two paths of the triple product, as a reduced basis has fewer."""
    name = "products.0.symmetric_contractions.contractions.0"
    u, weights = f"{name}.U_matrix_3", f"{name}.weights_max"
    return {**state, u: state[u][..., :2].contiguous(), weights: state[weights][:, :2].contiguous()}


def test_single_precision_survives_the_round_trip(tiny):
    model = tiny(torch.float32)
    state, config = to_mace_torch(model)
    again = from_mace_torch(state, config)
    assert again.embedding.weight.dtype == torch.float32
    assert all(torch.equal(a, again.state_dict()[n]) for n, a in model.state_dict().items())


def test_an_old_checkpoint_lacks_flags_and_names_classes_by_repr(tiny, structures):
    model = tiny()
    state, config = to_mace_torch(model)
    old = {name: value for name, value in state.items() if "zeroed" not in name}
    old["radial_embedding.cutoff_fn.p"] = torch.tensor(5.0, dtype=torch.float64)
    first, other = config["interaction_cls_first"], config["interaction_cls"]
    config = {
        **config,
        "interaction_cls_first": f"<class 'mace.modules.blocks.{first}'>",
        "interaction_cls": f"<class 'mace.modules.blocks.{other}'>",
        "heads": None,
        "gate": "<function silu at 0x7f904452f380>",
        "class": "ScaleShiftMACE",
    }
    batch = structures.batch(structures.crystal())
    assert torch.equal(from_mace_torch(old, config)(batch)["energy"], model(batch)["energy"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"extra.weight": torch.zeros(3)}, "not understood: 'extra.weight'"),
        ({"embedding": None, "node_embedding.linear.weight": None}, "has no 'node_embedding"),
        ({"interactions.1.linear.weight": torch.zeros(7)}, "interactions.1.linear.weight"),
        ({"interactions.0.skip_tp.weight": torch.zeros(9999)}, "interactions.0.skip_tp.weight"),
        ({"products.0.symmetric_contractions.weight": torch.zeros(1)}, "cuEquivariance"),
        ({"atomic_numbers": torch.tensor([1, 6, 9])}, "'atomic_numbers' is not as expected"),
        ({"r_max": torch.tensor(9.0)}, "'r_max' is 9.0"),
    ],
)
def test_a_state_dict_that_does_not_fit_is_refused_by_name(tiny, change, message):
    state, config = to_mace_torch(tiny())
    state.update(change)
    state = {name: value for name, value in state.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        from_mace_torch(state, config)


@pytest.mark.usefixtures("_annotations_unchecked")
def test_what_is_no_state_dict_is_refused(tiny):
    state, config = to_mace_torch(tiny())
    name = "node_embedding.linear.weight"
    for wrong, said in (
        ("model.pt", "state_dict is a str, expected the state dict"),
        ({"model": state}, "state_dict: 'model' is a dict, expected a tensor"),
        ({**state, name: state[name].numpy()}, f"'{name}' is a numpy.ndarray, expected a tensor"),
    ):
        with pytest.raises(CheckpointError, match=said):
            from_mace_torch(wrong, config)


def test_a_state_dict_of_several_processes_is_taken(tiny):
    state, config = to_mace_torch(tiny())
    again = from_mace_torch({f"module.{name}": value for name, value in state.items()}, config)
    assert torch.equal(again.embedding.weight, from_mace_torch(state, config).embedding.weight)


@pytest.mark.usefixtures("_annotations_unchecked")
def test_a_folder_before_the_model_is_refused(tiny, tmp_path):
    with pytest.raises(CheckpointError, match="the model first and the folder second"):
        save_model(str(tmp_path / "m"), tiny())
    assert not (tmp_path / "m").exists()


def test_other_signs_of_the_coupling_are_refused(tiny):
    state, config = to_mace_torch(tiny())
    name = "interactions.1.conv_tp._compiled_main_left_right._w3j_1_1_2"
    state[name] = -state[name]
    with pytest.raises(CheckpointError, match="other signs"):
        from_mace_torch(state, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"interaction_cls": "RealAgnosticResidualNonLinearInteractionBlock"}, "interaction_cls"),
        ({"radial_type": "gaussian"}, "radial_type"),
        ({"distance_transform": "Soft"}, "distance_transform"),
        ({"gate": "tanh"}, "gate"),
        ({"hidden_irreps": "8x0e+4x1o"}, "hidden_irreps"),
        ({"edge_irreps": "8x0e"}, "edge_irreps"),
        ({"readout_cls": "NonLinearBiasReadoutBlock"}, "readout_cls"),
        ({"avg_num_neighbors": None}, "avg_num_neighbors: missing"),
    ],
)
def test_an_option_that_is_not_supported_is_refused_by_name(tiny, change, message):
    state, config = to_mace_torch(tiny())
    with pytest.raises(ConfigError, match=message):
        from_mace_torch(state, {**config, **change})


def test_a_pickle_is_not_opened_without_trust(tmp_path):
    with pytest.raises(TrustError, match="`trust=True`"):
        load_mace_torch_file(tmp_path / "x.model")


def test_a_missing_mace_torch_is_said(tmp_path):
    try:
        import mace  # noqa: F401
    except ImportError:
        with pytest.raises(MissingPackageError, match="mace"):
            load_mace_torch_file(tmp_path / "x.model", trust=True)


def test_a_folder_that_is_no_model_is_said(tmp_path, model):
    with pytest.raises(CheckpointError, match=r"no model.json"):
        load_model(tmp_path)
    save_model(model, tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="is damaged"):
        load_model(tmp_path)
