"""The report of a run shows what the run wrote and what its model gets wrong."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml

from bevatron.data.packing import pack
from bevatron.models.common.metrics import error_rows
from bevatron.recipes.mace.evaluate import Predictions, summarise
from bevatron.recipes.mace.report import isolated_energies, write_report
from bevatron.recipes.mace.report_errors import constant_shifts
from bevatron.train.report import plots
from bevatron.train.report.training import duration
from bevatron.train.settings import BatchConfig


def epoch_record(epoch):
    return {
        "kind": "epoch", "epoch": epoch, "step": 10 * (epoch + 1), "loss": 1 / (epoch + 1),
        "terms": {"energy": 0.1, "forces": 0.2}, "lr": 0.01, "grad_norm": 1.0,
        "sizes": {"graphs": 10, "atoms": 90, "edges": 900}, "samples": 10,
        "valid": {"forces_rmse": 0.1, "forces_mae": 0.05, "energy_per_atom_rmse": 0.01},
        "best": epoch == 1,
        "time": {"seconds": 2.0, "atoms_per_s": 45.0, "graphs_per_s": 5.0, "wait_share": 0.1,
                 "validation_seconds": 0.5},
    }  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    records = [{"kind": "step", "step": 1, "epoch": 0, "loss": 2.0}]
    records += [epoch_record(0), epoch_record(1)]
    records.append({"kind": "resume", "step": 25, "epoch": 2, "changes": {"num_ranks": [4, 8]}})
    records.append({"kind": "repacked", "step": 25, "epoch": 2, "repacked": True})
    records.append(epoch_record(2))
    lines = [json.dumps(record) for record in records]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    config = {"train": {"dtype": "float64"}, "loss": {"stage_two": {"start_epoch": 1}}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    return tmp_path


@pytest.fixture
def evaluation():
    rng = np.random.default_rng(0)
    num_atoms = np.array([3, 1, 6, 3])
    total = int(num_atoms.sum())
    forces = rng.normal(size=(total, 3))
    forces[3] = np.nan
    stress = np.full((4, 3, 3), np.nan)
    stress[2] = 0.01
    energy = np.array([-10.0, -1.0, np.nan, -11.0])
    values = Predictions(
        num_atoms=num_atoms,
        num_edges=2 * num_atoms,
        energy=energy,
        predicted_energy=np.array([-10.3, -1.0, -20.0, -11.3]),
        forces=forces,
        predicted_forces=np.nan_to_num(forces) + 0.05,
        atomic_numbers=np.array([8, 1, 1, 1, 6, 1, 1, 1, 8, 1, 8, 1, 1]),
        stress=stress,
        predicted_stress=np.full((4, 3, 3), 0.012),
        group=["water", "atom", "methanol", "water"],
        file=["a.xyz", "a.xyz", "b.xyz", "b.xyz"],
        head=["default"] * 4,
    )
    owner = torch.as_tensor(np.repeat(np.arange(4), num_atoms))
    has = torch.tensor([True, False, True, True])
    per_atom = torch.as_tensor(np.nan_to_num((values.predicted_energy - values.energy) / num_atoms))
    error = torch.as_tensor(np.nan_to_num(values.predicted_forces - values.forces))
    rows = {
        "energy_per_atom": error_rows(per_atom, torch.as_tensor(np.isfinite(energy))),
        "forces": error_rows(error, has, owner, 4),
    }
    return summarise(rows, values)


def test_everything_is_in_the_page_and_all_pictures_are_written(folder, evaluation):
    plan = pack(np.array([3, 1, 6, 3] * 10), 12, 2)
    page = write_report(
        folder,
        {"test": evaluation, "training": evaluation},
        plan=plan,
        batch=BatchConfig(capacity=12),
        energies={"default": {1: -0.5, 6: -2.0, 8: -3.0}},
        figures={"epochs": 3, "training time": duration(75)},
        found=["a.xyz: energy from REF_energy"],
    ).read_text()
    for words in (
        "resumed in epoch 3, after step 25, with other settings: num_ranks was 4, is 8",
        "repacked",
        "force RMSE, test (meV/Å)",
        "50.00",
        "1 min 15 s",
        "water",
        "b.xyz",
        "stage two (epoch 2)",
        "Best validation in epoch 2",
        "REF_energy",
        "balanced",
        "45 atoms/s",
        "structures per batch",
        "dtype: float64",
        "torch",
    ):
        assert words in page, words
    names = {path.stem for path in (folder / "plots").glob("*.png")}
    assert names == {
        "learning_curves", "errors_by_group", "errors_by_file", "errors_by_element",
        "parity_energy", "parity_forces", "parity_stress", "batch_balance", "timing",
    }  # fmt: skip


def test_a_symmetric_stress_is_drawn_once(folder, evaluation, monkeypatch):
    drawn, draw = {}, plots.parity
    monkeypatch.setattr(
        plots,
        "parity",
        lambda label, said, name, *rest: (
            drawn.update({name: np.isfinite(label).sum()}) or draw(label, said, name, *rest)
        ),
    )
    write_report(folder, {"test": evaluation})
    assert drawn["stress component"] == 6


def test_coverage_of_labels_is_told(folder, evaluation):
    page = write_report(folder, {"test": evaluation}).read_text()
    row = page[page.index("<td>test</td>") :].split("</tr>")[0]
    cells = [cell.split(">")[-1] for cell in row.split("</td>")[:-1]]
    assert cells[:8] == ["test", "4", "13", "1 - 6", "2.000", "3", "3", "1"]
    assert cells[-1] == "H C O"


def test_a_run_without_validation_or_evaluation_still_gets_a_report(folder, evaluation):
    record = {**epoch_record(0), "valid": {}}
    (folder / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert "Timing" in write_report(folder, {}).read_text()
    (folder / "metrics.jsonl").write_text("")
    bare = replace(evaluation, tables={})
    assert "Parity" in write_report(folder, {"test": bare}).read_text()


def test_isolated_energies_come_from_the_model():
    class Model(torch.nn.Module):
        class config:
            heads = ("a", "b")
            atomic_numbers = (1, 8)
            atomic_energies = ((-1.0, -2.0), (-3.0, -4.0))

    assert isolated_energies(Model()) == {"a": {1: -1.0, 8: -2.0}, "b": {1: -3.0, 8: -4.0}}


def shifted(evaluation, error):
    """The same structures twice, with these energy errors per atom, in eV."""
    old = evaluation.predictions
    energy = np.array([-10.0, -1.0, -20.0, -11.0] * 2)
    count = np.tile(old.num_atoms, 2)
    return replace(
        old,
        num_atoms=count,
        energy=energy,
        predicted_energy=energy + np.asarray(error) * count,
        head=["default"] * 8,
    )


def test_energy_errors_that_are_one_constant_are_called_so(evaluation):
    noise = 0.01 * np.array([1, -1] * 4)
    (sentence,) = constant_shifts(shifted(evaluation, 0.25 + noise))
    assert "one constant shift of +250 meV/atom" in sentence
    assert "without it the RMSE is 10 instead of 250 meV/atom" in sentence
    assert constant_shifts(shifted(evaluation, 0.01 + noise)) == []
    assert constant_shifts(evaluation.predictions) == []  # three energies agree by chance


def test_the_shift_of_one_head_is_that_head_s(folder, evaluation):
    noise = 0.01 * np.array([1, -1] * 8)
    one = shifted(evaluation, noise[:8])
    values = replace(
        one,
        num_atoms=np.tile(one.num_atoms, 2),
        energy=np.tile(one.energy, 2),
        predicted_energy=np.concatenate(
            [one.predicted_energy, one.predicted_energy - 3.0 * one.num_atoms]
        ),
        head=["a"] * 8 + ["b"] * 8,
    )
    (sentence,) = constant_shifts(values)
    assert "The energy error of head 'b' is mostly one constant shift of -3e+03" in sentence


def test_a_shift_is_in_the_page(folder, evaluation):
    many = np.arange(4).repeat(3)
    old = evaluation.predictions
    values = replace(
        old,
        **{name: getattr(old, name)[many] for name in ("num_atoms", "num_edges", "stress",
                                                       "predicted_stress")},
        **{name: [getattr(old, name)[i] for i in many] for name in ("group", "file", "head")},
        energy=np.full(12, -10.0),
        predicted_energy=-10.0 + 0.5 * old.num_atoms[many],
        forces=np.zeros((39, 3)), predicted_forces=np.zeros((39, 3)),
        atomic_numbers=np.ones(39, dtype=np.int64),
    )  # fmt: skip
    page = write_report(folder, {"test": replace(evaluation, predictions=values)}).read_text()
    assert "one constant shift of +500 meV/atom" in page
