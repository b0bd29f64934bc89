"""Times of attention: rows with true entries and intervals, the paper's sweeps, pictures."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from benchmarks.paper import graph_benchmark_plots as plots
from benchmarks.paper.graph_benchmark import (
    FIELDS,
    GraphCase,
    append_rows,
    main,
    median_interval,
    run_cases,
    sweep_cases,
)
from benchmarks.paper.graph_benchmark_plots import plot_times

from bevatron.errors import ConfigError, DataError


def test_rows_tell_true_entries_and_an_interval(tmp_path):
    out = tmp_path / "times.csv"
    cases = [
        GraphCase(model=model, vertices=70, edges=700, features=4, layers=2, inference=only)
        for model in ("VA", "AGNN", "GAT") for only in (True, False)
    ]  # fmt: skip
    rows = run_cases(cases, repeat=2, warmup=0, device="cpu", out=out)
    assert [row["mode"] for row in rows] == ["inference", "training"] * 3
    for row in rows:
        assert row["vertices"] == 64
        assert 64 <= row["nnz"] < 640
        assert float(row["low_ms"]) <= float(row["median_ms"]) <= float(row["high_ms"])
        assert row["finite"]
    with out.open() as file:
        written = list(csv.DictReader(file))
    assert [row["nnz"] for row in written] == [str(row["nnz"]) for row in rows]
    plot_times(out, tmp_path / "times.png")
    assert (tmp_path / "times.png").stat().st_size > 1000


def test_interval_of_the_median():
    values = np.random.default_rng(0).normal(5, 1, 400).tolist()
    median, low, high = median_interval(values)
    assert median == np.median(values)
    assert low < median < high
    assert high - low == pytest.approx(2 * 1.96 * 1.2533 / 20, rel=0.3)


@pytest.mark.parametrize("kind", ["float32", "float64", "bfloat16"])
def test_types_and_uniform_graphs(kind):
    case = GraphCase(dataset="uniform", vertices=30, edges=90, features=4, layers=1, dtype=kind)
    (row,) = run_cases([case], repeat=1, warmup=0, device="cpu")
    assert row["vertices"] == 30
    assert 60 <= row["nnz"] <= 90


def test_sweeps_are_the_papers_configurations():
    strong = list(sweep_cases("strong", GraphCase(), ranks=16))
    assert {(c.vertices, c.edges) for c in strong} == {
        (131_072, 171_798_692), (262_144, 687_194_767), (1_048_576, 109_951_163),
        (2_097_152, 439_804_651),
    }  # fmt: skip
    assert {(c.model, c.features, c.inference) for c in strong} == {
        (m, k, i) for m in ("VA", "AGNN", "GAT") for k in (16, 128) for i in (True, False)
    }
    weak = list(sweep_cases("weak", GraphCase(), ranks=4))
    assert {c.vertices for c in weak} == {262_144}
    assert {c.edges for c in weak if c.dataset == "kronecker"} == {
        687_194_767, 68_719_477, 6_871_948,
    }  # fmt: skip
    small = list(sweep_cases("strong", GraphCase(), ranks=1, shrink=1024))
    assert small[0].vertices == 128


@pytest.mark.parametrize("dataset", ["kronecker", "uniform"])
def test_weak_scaling_keeps_the_entries_of_a_process(dataset):
    stored = []
    for ranks in (1, 2, 3, 4):
        cases = sweep_cases("weak", GraphCase(), ranks, shrink=64)
        first = next(c for c in cases if c.dataset == dataset)
        case = replace(first, features=1, layers=1, model="GAT", inference=True)
        (row,) = run_cases([case], repeat=1, warmup=0, device="cpu")
        assert row["vertices"] == case.vertices == round(131_072 * ranks**0.5) // 64
        stored.append(row["nnz"] / ranks)
    assert stored == pytest.approx([stored[0]] * 4, rel=0.15)


def test_mistakes_are_one_sentence(tmp_path, capsys):
    words = ["--device", "cpu", "--repeat", "1"]
    for extra, message in (
        (["--dataset", "file"], "file: goes with --dataset file"),
        (["--vertices", "1"], "vertices: expected 2 or more, got 1"),
        (["--features", "0"], "features: expected 1 or more, got 0"),
        (["--repeat", "0"], "repeat: expected 1 or more, got 0"),
        (["--sweep", "weak", "--shrink", "0"], "shrink: expected 1 or more, got 0"),
        (["--model", "GCN"], "GCN"),
        (["--dataset", "file", "--file", "no.npz"], "no.npz: there is no such file"),
        (["--vertices", "8", "--edges", "16", "--features", "4", "--plot", "x.png"],
         "plot: draws the rows of a CSV file; name it with --out"),
    ):  # fmt: skip
        assert main([*words, *extra]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"other\.csv: holds another table; choose a new file"):
        append_rows(tmp_path / "other.csv", [])
    (tmp_path / "empty.csv").write_text(",".join(FIELDS) + "\n")
    with pytest.raises(DataError, match="holds no times to draw"):
        plot_times(tmp_path / "empty.csv", tmp_path / "x.png")
    with pytest.raises(ConfigError, match="layers: expected 1 or more, got 0"):
        GraphCase(layers=0)


def test_command_times_a_file_and_adds_rows(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ring.txt").write_text("".join(f"{i} {(i + 1) % 9}\n" for i in range(9)))
    words = "--dataset file --file ring.txt --features 4 8 --layers 1 2 --inference"
    options = ["--repeat", "2", "--warmup", "0", "--device", "cpu", "--out", "t.csv"]
    assert main([*words.split(), *options]) == 0
    assert main([*words.split(), *options, "--plot", "t.png"]) == 0
    assert capsys.readouterr().out.count("file 9 vertices, 9 entries") == 8
    assert len((tmp_path / "t.csv").read_text().splitlines()) == 9
    assert (tmp_path / "t.png").exists()


@pytest.mark.parametrize("kind", ["strong", "weak"])
def test_pictures_follow_the_number_of_processes(kind, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "_panel", lambda ax, key, rows: drawn.append((key, len(rows))))
    rows = []
    for ranks in (1, 2, 4):
        rows.extend(
            {
                "model": case.model, "dataset": case.dataset, "vertices": case.vertices,
                "edges": case.edges, "nnz": case.edges, "features": case.features, "layers": 3,
                "mode": "inference" if case.inference else "training", "ranks": ranks,
                "median_ms": "2", "low_ms": "1", "high_ms": "3",
            }
            for case in sweep_cases(kind, GraphCase(), ranks)
        )  # fmt: skip
    append_rows(tmp_path / "t.csv", rows)
    plot_times(tmp_path / "t.csv", tmp_path / "t.png")
    assert {count for _, count in drawn} == {9}  # three models on 1, 2 and 4 processes
    first = drawn[0][0]
    assert first[1] == ("131,072 vertices" if kind == "strong" else "density 0.01")
