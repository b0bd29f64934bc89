"""Joining what was trained on real graphs in several runs; the training itself needs a GPU."""

import json

import pytest
from benchmarks.graph import learning


def cell(run, test, hardware="nvidia-h200", **more):
    seeds = [{"seed": n, "valid": 0.8, "test": one, "epochs": 9} for n, one in enumerate(test)]
    plain = {"run": run, "by": "bevatron", "bf16": False, "seeds": seeds}
    return {**plain, "hardware": hardware, "versions": {}, **more}


def written(tmp_path, earlier, later):
    page = tmp_path / "page.json"
    page.write_text(json.dumps({"date": "2026-01-02", "extra": {"cells": [earlier]}}))
    for n, one in enumerate(later):
        (tmp_path / "rows").mkdir(exist_ok=True)
        (tmp_path / "rows" / f"{n}.json").write_text(json.dumps(one))
    return tmp_path / "rows", page


def test_a_run_measured_again_replaces_the_page_and_others_keep_their_date(tmp_path):
    wide = cell("gat-cora", [0.5], bf16=True)
    again = cell("gat-cora", [0.7, 0.9], measured="2026-03-04")
    again["seeds"] = [{**one, "test by loss": 0.6} for one in again["seeds"]]
    folder, page = written(tmp_path, [wide, cell("gat-cora", [0.1])], [again])
    found = learning.trained(folder, page)
    line = learning.row(found["gat-cora"])
    assert (line["ours"], line["ours seeds"]) == ("80.00 ± 14.14", 2)
    assert (line["ours bf16"], line["ours by loss"]) == ("50.00", "60.00 ± 0.00")
    assert "ours bf16 by loss" not in line
    assert line["measured"] == "2026-01-02, 2026-03-04"


def test_results_of_two_machines_are_not_joined(tmp_path):
    folder, page = written(tmp_path, [cell("gat-cora", [0.5])], [cell("agnn-cora", [0.5], "other")])
    with pytest.raises(SystemExit, match="one machine"):
        learning.trained(folder, page)


def test_the_picture_names_what_is_drawn_and_nothing_else():
    measured = cell("gat-cora", [0.7, 0.8])
    both = cell("agnn-cora", [0.7, 0.8])
    both["seeds"] = [{**one, "test by loss": 0.75} for one in both["seeds"]]
    figure = learning.draw({"gat-cora": [measured], "agnn-cora": [both]})
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names == ["published", "ours", "ours, by loss"]
