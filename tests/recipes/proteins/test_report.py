"""The page of a run on structures: measures by the names that people know them by."""

import json
import re

from torch import nn

from bevatron.models.alphafold3.metrics import NAMES
from bevatron.recipes.alphafold2.evaluate import print_table_of
from bevatron.recipes.alphafold2.report import report_of_run as chains_report
from bevatron.recipes.alphafold3.report import report_of_run
from bevatron.train.report import plots
from bevatron.train.run import FitResult

EPOCH = {
    "kind": "epoch", "epoch": 0, "step": 8, "stage": "initial", "loss": 2.0, "lr": 0.1,
    "grad_norm": 1.0, "terms": {}, "best": True, "valid": {"lddt": 0.5},
    "time": {"seconds": 1.0, "wait_share": 0.0, "samples_per_s": 2.0},
}  # fmt: skip


def test_measures_have_their_names_and_the_rest_is_a_table(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(EPOCH) + "\n")
    metrics = {"distogram": 3.0, "lddt": 0.5, "lddt_ligand": 0.25}
    result = FitResult(tmp_path, "steps", None, 1, 8, metrics, 0.5, 0, 1.0)
    page = report_of_run(tmp_path, nn.Linear(2, 1), [], result).read_text()
    cards = re.findall(r"<b>([^<]*)</b><span>([^<]*)</span>", page)
    assert cards[:2] == [("0.5000", "lDDT"), ("3.000", "cross entropy of the distogram")]
    assert ("3", "parameters") in cards
    assert '<td>lDDT ligand</td><td class="number">0.2500</td>' in page


def panels_of(valid, folder, monkeypatch):
    drawn = []

    def curves(panels, *rest, draw=plots.curves):
        drawn.extend(panels)
        return draw(panels, *rest)

    monkeypatch.setattr(plots, "curves", curves)
    (folder / "config.yaml").write_text("train: {}\n")
    (folder / "metrics.jsonl").write_text(json.dumps({**EPOCH, "valid": valid}) + "\n")
    result = FitResult(folder, "steps", None, 1, 8, valid, 0.5, 0, 1.0)
    report_of_run(folder, nn.Linear(2, 1), [], result)
    return {panel.title: [curve.label for curve in panel.curves] for panel in drawn}


def test_kinds_of_molecules_and_interfaces_have_curves_of_their_own(tmp_path, monkeypatch):
    found = panels_of(dict.fromkeys(NAMES, 0.5), tmp_path, monkeypatch)
    assert found["lDDT by kind"] == ["protein", "RNA", "DNA", "ligand"]
    assert {"protein protein", "protein DNA", "ligand ligand"} < set(found["lDDT by interface"])
    assert len(found["lDDT by interface"]) == 10


def test_the_only_kind_of_a_validation_is_named(tmp_path, monkeypatch):
    valid = {"lddt": 0.5, "lddt_protein": 0.5, "lddt_dna_ligand": 0.5}
    found = panels_of(valid, tmp_path, monkeypatch)
    assert {"lDDT by kind: protein", "lDDT by interface: DNA ligand"} < set(found)


def test_a_measure_has_one_name_on_the_page_and_on_the_terminal(tmp_path, capsys):
    (tmp_path / "config.yaml").write_text("train: {}\n")
    metrics = {"lddt_ca": 0.5, "distogram": 3.0, "lddt": 0.4}
    (tmp_path / "metrics.jsonl").write_text(json.dumps({**EPOCH, "valid": metrics}) + "\n")
    result = FitResult(tmp_path, "steps", None, 1, 8, metrics, 0.5, 0, 1.0)
    page = chains_report(tmp_path, nn.Linear(2, 1), [], result).read_text()
    print_table_of({"mean": metrics, "chains": []})
    printed = capsys.readouterr().out
    for name in ("lDDT of CA atoms", "cross entropy of the distogram"):
        assert f"<span>{name}</span>" in page
        assert name in printed


def test_a_run_that_was_over_when_it_was_resumed_keeps_its_measures(tmp_path):
    (tmp_path / "config.yaml").write_text("train: {}\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps(EPOCH) + "\n")
    result = FitResult(tmp_path, "steps", None, 1, 8, {}, 0.5, 0, 1.0)
    page = report_of_run(tmp_path, nn.Linear(2, 1), [], result).read_text()
    assert "<b>0.5000</b><span>lDDT</span>" in page
