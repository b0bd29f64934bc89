"""A report that fails does not fail the run, which took hours and is saved."""

import csv
import gzip
from importlib.resources import files
from itertools import islice

import pytest
from graph_data_sets import write as write_graph
from matplotlib.backends.backend_agg import FigureCanvasAgg

from bevatron.cli import main

STRUCTURES = files("bevatron.recipes") / "demo_data" / "structures.extxyz.gz"
CHANGES = {
    "mace": "--preset small --model.num-channels 4 --model.l-max 1 --model.max-L 0"
    " --model.correlation 1 --model.r-max 2.0 --data.prepare-workers 1",
    "gpspp": "--model.num-layers 1 --model.node-width 16 --model.edge-width 8"
    " --model.global-width 4 --model.num-heads 2 --model.ffn-width 16 --data.prepare-workers 1",
    "graph": "--model.hidden 4 --model.heads 2",
}


def data(system, folder):
    if system == "mace":
        with gzip.open(str(STRUCTURES), "rt") as file:
            (folder / "data.xyz").write_text("".join(islice(file, 14 * 8)))  # of six atoms each
        return folder / "data.xyz"
    if system == "graph":
        return write_graph(folder / "g.npz")
    pytest.importorskip("rdkit")
    with (folder / "molecules.csv").open("w", newline="") as file:
        chains = ["C" * size for size in range(1, 25)]
        csv.writer(file).writerows([("smiles", "y"), *((each, len(each)) for each in chains)])
    return folder / "molecules.csv"


@pytest.mark.parametrize("system", CHANGES)
def test_a_run_whose_pictures_cannot_be_drawn_ends_well(system, tmp_path, monkeypatch, capsys):
    def broken(*_, **__):
        raise TypeError("print_png() got an unexpected\nkeyword argument")

    monkeypatch.setattr(FigureCanvasAgg, "print_png", broken)
    run = tmp_path / "run"
    command = f"train {system} --data {data(system, tmp_path)} --output {run} {CHANGES[system]}"
    assert main([*command.split(), "--train.epochs", "1", "--train.device", "cpu"]) == 0
    printed = capsys.readouterr()
    warning = (
        f"warning: {run / 'report.html'} could not be written "
        "(TypeError: print_png() got an unexpected keyword argument); the model is saved"
    )
    assert printed.out.splitlines().count(warning) == 1
    assert warning in (run / "log.txt").read_text()
    assert "Traceback" not in printed.out + printed.err
    assert "report: " not in printed.out
    assert f"bevatron predict {run}" in printed.out
    assert (run / "model.json").is_file()
    assert (run / "metrics.jsonl").stat().st_size > 0
