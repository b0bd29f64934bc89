"""The demo, shortened; the whole of it takes minutes and is what `make demo` runs."""

import contextlib
import functools
import io
import re
import sys
from pathlib import Path

import ase.io
import numpy as np
import pytest
from ase.calculators.lj import LennardJones

import bevatron
from bevatron.cli import main
from bevatron.errors import ConfigError
from bevatron.recipes import demo as whole
from bevatron.recipes import system
from bevatron.recipes.alphafold3 import demo as alphafold3_demo
from bevatron.recipes.demo import WIDTH, claim
from bevatron.recipes.gpspp import demo as gpspp_demo
from bevatron.recipes.graph import demo as graph_demo
from bevatron.recipes.mace import demo
from bevatron.recipes.mace.stores import prepare_structures
from tiny_sizes import GPSPP

SHORT_ALPHAFOLD3 = {
    "initial": {"steps": 20, "evaluate_every": 20, "step": {"copies": 4, "confidence_every": 0}}
}
TINY_MACE = {
    "num_channels": 4, "l_max": 1, "max_L": 0, "correlation": 1, "num_interactions": 1,
    "r_max": 3.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def demonstration(tmp_path_factory):
    """The demo run twice, with tiny models for few epochs: its folder and what it printed."""
    pytest.importorskip("rdkit")
    pytest.importorskip("gemmi")
    place = tmp_path_factory.mktemp("demo")
    run_dynamics = functools.partial(demo.run_dynamics, steps=20)
    with pytest.MonkeyPatch.context() as patch, contextlib.chdir(place):
        patch.setitem(demo.SETTINGS, "model", TINY_MACE)
        patch.setattr(demo, "run_dynamics", run_dynamics)
        patch.setitem(gpspp_demo.SETTINGS, "model", GPSPP)
        patch.setitem(alphafold3_demo.SETTINGS, "stages", SHORT_ALPHAFOLD3)
        patch.setattr(alphafold3_demo, "STEPS", 10)
        for settings, epochs in ((demo, 1), (gpspp_demo, 2), (graph_demo, 3)):
            patch.setitem(settings.SETTINGS["train"], "epochs", epochs)
        printed = []
        for _ in range(2):
            text = io.StringIO()
            with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
                assert main(["demo"]) == 0
            printed.append(text.getvalue())
    return place / "demo-run", *printed


def test_demonstration_leaves_what_it_promises(demonstration):
    folder, printed, again = demonstration
    promised = printed.partition("\nin demo-run:\n")[2].splitlines()
    assert len(promised) == 10
    for line in promised:
        assert (folder / line.split()[0]).exists(), line
    assert "all labelled" in printed
    assert len((folder / "graph/classes.csv").read_text().splitlines()) == 1501
    assert "c1ccccc1O" in printed
    for name in ("run", "graph", "molecules", "proteins"):
        assert (folder / name / "model.json").exists()
    assert (folder / "proteins/trp-cage/rank1.cif").read_text().count("\nATOM ") == 154
    # Again: what is done is not done again.
    assert "epoch 1/1  loss" in printed
    assert "epoch 1/1  loss" not in again
    assert "trained on\n" not in printed + again  # no structure is also validated on


def test_the_demo_says_in_a_line_what_each_system_has_learned(demonstration):
    learned = demonstration[1].partition("what was learned:\n")[2].splitlines()[:4]
    assert [line.split()[0] for line in learned] == ["mace", "gpspp", "graph", "alphafold3"]
    units = ("meV/Å", "eV in 3D", "test vertices", "lDDT")
    for line, unit in zip(learned, units, strict=True):
        assert unit in line
        assert len(line) <= WIDTH
    before, after = re.findall(r"\d\.\d\d", learned[3])
    assert float(after) > float(before) + 0.05


def test_no_line_of_the_demo_is_wider_than_a_terminal_or_names_the_package(demonstration):
    _, printed, again = demonstration
    site = Path(bevatron.__file__).parent
    for line in (printed + again).splitlines():
        assert len(line) <= WIDTH, line
        assert str(site) not in line
        assert sys.prefix not in line


def test_without_a_package_the_demo_says_what_it_left_out(tmp_path, monkeypatch, capsys):
    for name in [name for name in sys.modules if name.partition(".")[0] == "rdkit"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rdkit", None)
    monkeypatch.setattr(whole, "systems", lambda: [system("gpspp")])
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    sentence = (
        "left out: the package 'rdkit' is not installed; `pip install 'bevatron[molecules]'` "
        "brings it; then run `bevatron demo` again"
    )
    assert said.count(sentence) == 2  # where the part would be, and at the end
    assert f"gpspp {sentence}" in said


def test_long_lines_are_broken_between_words_only_where_no_terminal_does_it():
    with contextlib.redirect_stdout(io.StringIO()) as text, whole.folded_output():
        print("word " * 30)
        print("  a table of two   columns")
        print("x" * 100)
        print("end", end="")
    lines = text.getvalue().split("\n")
    assert max(map(len, lines[:2])) <= WIDTH
    assert " ".join(" ".join(lines[:2]).split()) == ("word " * 30).strip()
    assert lines[2:] == ["  a table of two   columns", "x" * 100, "end"]


def test_settings_are_a_valid_configuration_of_bundled_data(tmp_path):
    config = demo.configuration(tmp_path)
    assert config.data.train[0].is_file()
    assert config.data.test_size > 0


def test_a_folder_of_something_else_is_left_alone(tmp_path):
    out = tmp_path / "demo"
    claim(out)
    claim(out)  # its own folder is taken again
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.tex").write_text("")
    with pytest.raises(ConfigError, match="holds something else"):
        claim(other)
    assert [path.name for path in other.iterdir()] == ["thesis.tex"]


def test_dynamics_conserve_energy_and_are_drawn(tmp_path):
    places = np.stack(np.meshgrid(*[np.arange(2.0)] * 3), -1).reshape(-1, 3) * 1.3
    lines = "".join("Ar {:.3f} {:.3f} {:.3f} 0.1 0 0\n".format(*place) for place in places)
    source = tmp_path / "argon.xyz"
    source.write_text(f"8\nProperties=species:S:1:pos:R:3:REF_forces:R:3 REF_energy=-1.0\n{lines}")
    store = prepare_structures([source], tmp_path / "store", 3.0, workers=1)
    calculator = LennardJones(sigma=1.1, epsilon=0.05, rc=6.0)
    drift = demo.run_dynamics(calculator, store, tmp_path, steps=100)
    assert abs(drift) < 1e-3
    assert len(ase.io.read(tmp_path / "dynamics.extxyz", ":")) == 6
    assert (tmp_path / "dynamics.png").stat().st_size > 1000
