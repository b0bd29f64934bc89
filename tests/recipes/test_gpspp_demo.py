"""The demonstration on molecules, shortened."""

from bevatron.recipes.gpspp import demo as gpspp_demo

TINY = {
    "num_layers": 1, "node_width": 16, "edge_width": 8, "global_width": 4, "num_heads": 2,
    "ffn_width": 16, "expansion": 2, "embedding_width": 4, "num_kernels": 4,
}  # fmt: skip


def test_demonstration_leaves_what_it_promises(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(gpspp_demo.SETTINGS, "model", TINY)
    monkeypatch.setitem(gpspp_demo.SETTINGS["train"], "epochs", 2)
    learned = gpspp_demo.run_demo(tmp_path).learned
    there = {path.name for path in (tmp_path / "molecules").iterdir()}
    assert {"report.html", "predicted.csv", "model.json"} <= there
    out = capsys.readouterr().out
    assert "eV in 2D" in learned
    assert "c1ccccc1O" in out
    assert gpspp_demo.run_demo(tmp_path).exit_code == 0  # again: what is done is not done again
    assert "epoch 3  loss" not in capsys.readouterr().out
