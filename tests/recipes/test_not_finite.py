"""Predictions that are NaN or infinite are refused by name; nothing is written."""

import ase.io
import numpy as np
import pytest
import torch
from ase import Atoms
from graph_data_sets import write

from bevatron.data.graphs import read_graph
from bevatron.errors import DivergenceError
from bevatron.models.gpspp import Target, build, save_model
from bevatron.models.graph_attention import GraphAttentionConfig, NodeClassifier
from bevatron.models.mace import MACE, MaceConfig
from bevatron.recipes.gpspp.embed import embed_file
from bevatron.recipes.gpspp.evaluate import evaluate_files as evaluate_molecules
from bevatron.recipes.gpspp.predict import predict_file as predict_molecules
from bevatron.recipes.gpspp.predictor import MoleculePredictor
from bevatron.recipes.graph.predict import predict_graph
from bevatron.recipes.mace.calculator import BevatronCalculator
from bevatron.recipes.mace.evaluate import evaluate_files
from bevatron.recipes.mace.predict import predict_file, relax_file
from bevatron.recipes.mace.relax import relax


@pytest.fixture
def potential():
    """One that predicts NaN wherever there is oxygen."""
    config = MaceConfig.preset(
        "small", num_channels=4, l_max=1, max_L=0, r_max=3.0, correlation=1
    ).with_data(atomic_numbers=(1, 8), atomic_energies=((-13.0, -430.0),), avg_num_neighbors=2.0)
    model = MACE(config, torch.float64)
    model.atomic_energies[0, 1] = torch.nan
    return model


@pytest.fixture
def structures(tmp_path):
    path = tmp_path / "a.xyz"
    hydrogen, water = Atoms("H2", [[0, 0, 0], [0, 0, 0.8]]), Atoms("OH", [[0, 0, 0], [0, 0, 1]])
    for atoms in (hydrogen, water):
        atoms.info["REF_energy"] = -1.0
        atoms.arrays["REF_forces"] = np.ones((2, 3))
    ase.io.write(path, [hydrogen, hydrogen, water, hydrogen])
    return path


@pytest.mark.parametrize("capacity", [1, 1024])
def test_a_structure_is_named_by_file_and_frame(potential, structures, tmp_path, capacity):
    out = tmp_path / "out.xyz"
    with pytest.raises(
        DivergenceError, match=r"a\.xyz, frame 2: the model predicts NaN or infinity \(.*energy"
    ):
        predict_file([potential], structures, out, capacity=capacity)
    with pytest.raises(
        DivergenceError, match=r"a\.xyz, frame 2: the model predicts NaN or infinity \(.*energy"
    ):
        evaluate_files(potential, [structures], capacity=capacity, out=tmp_path / "out.json")
    with pytest.raises(DivergenceError, match=r"structure 2 \(OH\), step 0: the model predicts"):
        relax_file(potential, structures, out, steps=1)
    assert {path.name for path in tmp_path.iterdir()} == {"a.xyz"}


def test_forces_that_are_infinite_are_named(potential):
    potential.atomic_energies[0, 1] = -430.0
    potential.scale[:] = 1e308
    potential.readouts[0].weight.data[:] = 1e5
    together = Atoms("H2", [[0, 0, 0], [0, 0, 0.7]])
    with pytest.raises(DivergenceError, match="structure 0"):
        relax(potential, [together], steps=1)


def test_a_calculator_refuses_with_the_formula(potential):
    atoms = Atoms("OH2", [[0, 0, 0], [0, 0, 1], [0, 1, 0]])
    atoms.calc = BevatronCalculator(potential)
    with pytest.raises(
        DivergenceError, match=r"OH2: the model predicts NaN or infinity \(.*energy"
    ):
        atoms.get_potential_energy()
    atoms = Atoms("H2", [[0, 0, 0], [0, 0, 0.8]], calculator=atoms.calc)
    assert np.isfinite(atoms.get_potential_energy())


@pytest.fixture
def molecules(tmp_path):
    pytest.importorskip("rdkit")
    path = tmp_path / "m.csv"
    path.write_text("smiles,gap\nno molecule,1\nCCO,2\nC,3\n")
    return path


def test_a_molecule_is_named_by_line(molecules, tmp_path):
    model = build("gpspp-4", num_layers=1, targets=(Target("gap"),))
    predictor = MoleculePredictor(model)
    predict_molecules(predictor, molecules, tmp_path / "fine.csv")
    next(predictor.models[0].parameters()).data[:] = torch.nan
    line = r"m\.csv, line 3: the model predicts NaN or infinity \("
    with pytest.raises(DivergenceError, match=line + "gap"):
        predict_molecules(predictor, molecules, tmp_path / "out.csv")
    with pytest.raises(DivergenceError, match=line + "gap"):
        evaluate_molecules(predictor, [molecules], out=tmp_path / "out.json")
    with pytest.raises(DivergenceError, match=line + "embedding"):
        embed_file(predictor, molecules, tmp_path / "out.npz")
    assert {path.name for path in tmp_path.iterdir()} == {"m.csv", "fine.csv"}


def test_in_double_precision_the_mean_of_the_labels_is_exact(molecules, tmp_path):
    """A model that float32 has been trained in: the labels' mean is in model.json, all digits."""
    target = Target("gap", mean=0.1, std=1e-30)
    save_model(build("gpspp-4", num_layers=1, targets=(target,)), tmp_path / "model")
    predictor = MoleculePredictor(tmp_path / "model", precision="float64")
    assert predictor.predict(["CCO"]).values[0, 0] == 0.1


def test_a_vertex_is_named(tmp_path):
    graph = read_graph(write(tmp_path / "g.npz"))
    config = GraphAttentionConfig().with_data(inputs=graph.num_features, outputs=3)
    model = NodeClassifier(config)
    predict_graph(model, graph)
    next(model.parameters()).data[:] = torch.nan
    with pytest.raises(
        DivergenceError, match=r"g\.npz, vertex \d+: the model predicts NaN or infinity"
    ):
        predict_graph(model, graph)
