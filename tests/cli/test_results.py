"""What commands print: tables, JSON, nothing; runs side by side; the device."""

import inspect
import json
import re
from dataclasses import is_dataclass

import pytest
import torch

from bevatron.cli import main
from bevatron.recipes import SYSTEMS, system
from bevatron.recipes.devices import announce
from cli_runs import TINY


def test_evaluate_prints_tables_and_writes_them(shelf, tmp_path, capsys):
    out = tmp_path / "errors.json"
    arguments = [shelf / "run", shelf / "store", "--out", out]
    assert main(["evaluate", *map(str, arguments)]) == 0
    said = capsys.readouterr().out
    assert "force RMSE" in said
    assert "by element" in said
    errors = json.loads(out.read_text())
    assert errors["total"]["forces_rmse"] > 0
    assert set(errors["element"]) == {"H", "C", "O"}


JSON_COMMANDS = {
    "evaluate": ("{run}", "{data}"),
    "predict": ("{run}", "{data}", "{out}.xyz"),
    "relax": ("{run}", "{data}", "{out}.xyz", "--steps", "1"),
    "inspect": ("{store}", "--out", "{out}", "--plan"),
    "compare": ("{run}", "{again}", "--out", "{out}.png"),
    "bench store": ("{store}",),
    "bench cost": ("{store}", "--model", "{run}", "--device", "cpu", "--most", "200"),
    "env": (),
    "init": ("mace",),
}


@pytest.mark.parametrize("command", JSON_COMMANDS)
def test_as_json_a_result_is_all_that_is_printed(command, shelf, again, tmp_path, capsys):
    names = {"run": shelf / "run", "again": again, "store": shelf / "store"}
    names |= {"data": shelf / "data.xyz", "out": tmp_path / "out"}
    arguments = [argument.format(**names) for argument in JSON_COMMANDS[command]]
    assert main([*command.split(), *arguments, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    if command == "evaluate":
        assert values["total"]["forces_rmse"] > 0
    if command == "predict":
        assert values == {"structures": 14, "out": str(tmp_path / "out.xyz")}
    if command == "compare":
        settings = [run["settings"] for run in values.values()]
        assert settings == [{"train.seed": "0"}, {"train.seed": "1"}]


def test_what_a_command_prints_while_it_works_is_no_part_of_its_json(monkeypatch, capsys):
    def describe():
        print("progress")
        return [("bevatron", [("version", "0")])]

    monkeypatch.setattr("bevatron.recipes.environment.describe_environment", describe)
    assert main(["env", "--json"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out) == {"bevatron": {"version": "0"}}
    assert said.err == "progress\n"


def test_what_has_no_result_is_not_printed_as_json(refused, shelf, tmp_path):
    assert "`bevatron demo` has no result" in refused("demo", tmp_path / "demo", "--json")
    assert not (tmp_path / "demo").exists()


def test_a_quiet_command_prints_only_its_result(shelf, train, tmp_path, capsys):
    announce.cache_clear()
    assert main(["evaluate", str(shelf / "run"), str(shelf / "data.xyz"), "-q"]) == 0
    said = capsys.readouterr()
    assert "force RMSE" in " ".join(said.out.split())
    assert said.err == ""
    assert train("--quiet") == 0
    assert capsys.readouterr().out == ""
    assert "epoch 1/1" in (tmp_path / "run" / "log.txt").read_text()


@pytest.fixture(scope="session")
def again(shelf):
    """A second run, which differs from that of the shelf in its seed."""
    folder = shelf / "again"
    arguments = ["--data", str(shelf / "store"), "--output", str(folder), *TINY]
    assert main(["train", "mace", *arguments, "--train.seed", "1"]) == 0
    return folder


def test_compare_shows_settings_that_differ_and_errors_side_by_side(shelf, again, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["compare", str(shelf / "run"), str(again), "--out", str(page)]) == 0
    said = capsys.readouterr().out
    assert re.search(r"train.seed +0 +1 *\n", said)
    assert "train.epochs" not in said
    (first,) = re.findall(r"force RMSE \(meV/Å\) +(\S+) +\S+ *\n", said)
    best = json.loads((shelf / "run" / "best" / "best.json").read_text())
    error = 1e3 * best["metrics"]["forces_rmse"]
    assert float(first.replace(",", "")) == pytest.approx(error, rel=1e-3)
    assert "train.seed" in page.read_text()
    assert "data:image/png" in page.read_text()


def test_compare_refuses_what_is_no_run(shelf, again, refused, tmp_path):
    run = shelf / "run"
    assert "two runs or more" in refused("compare", run)
    other = run / ".." / "run"
    assert refused("compare", other, run) == f"{other}: is given twice"
    said = refused("compare", run, shelf / "store")
    assert f"{shelf / 'store'}: holds no run, there is no metrics.jsonl in it" in said
    assert "ends in .html or .png" in refused("compare", run, again, "--out", tmp_path / "a.pdf")


@pytest.mark.parametrize("command", ["evaluate", "predict", "relax"])
def test_device_and_precision_are_chosen_and_printed(command, shelf, tmp_path, capsys):
    announce.cache_clear()
    out = [] if command == "evaluate" else [str(tmp_path / "out.xyz")]
    steps = ["--steps", "1"] if command == "relax" else []
    assert main([command, str(shelf / "run"), str(shelf / "data.xyz"), *out, *steps]) == 0
    device = "cuda" if torch.cuda.is_available() else "cpu"
    found = re.findall(r"^running on (\w+).* in (\w+)$", capsys.readouterr().err, re.MULTILINE)
    assert found == [(device, "float64")]


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_every_command_takes_a_gpu_if_there_is_one(name):
    for command in system(name).commands:
        function = system(name).command(command)
        defaults = {key: one.default for key, one in inspect.signature(function).parameters.items()}
        options = [defaults, *(vars(each) for each in defaults.values() if is_dataclass(each))]
        assert {each["device"] for each in options if "device" in each} <= {"auto"}
