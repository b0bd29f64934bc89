"""A system registered from outside gets all of the command line; what the systems declare is true.

The toy system of this module fits y = a x to the lines "x y" of files that end in .toy.
"""

import dataclasses
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import numpy as np
import pytest
import torch

import bevatron as bv
from bevatron.cli import main, usage
from bevatron.errors import ConfigError
from bevatron.models.common import model_folder
from bevatron.recipes import SYSTEMS, recipe, system, systems
from bevatron.recipes.arguments import Files, Model, Out, Source
from bevatron.recipes.demo import WIDTH, Part, run_demo
from bevatron.recipes.dispatch import of_samples, system_command
from bevatron.recipes.kinds import newest_model
from bevatron.recipes.run_config import RunConfig, SaveModel
from bevatron.recipes.system import System
from bevatron.task import Loss
from bevatron.train.run import Run
from bevatron.train.settings import BatchConfig, TrainConfig

# ---- the toy system: what stands in a folder of recipes ----

TOY = System(
    name="toy",
    package=__name__,
    kind="line",
    summary="straight lines",
    samples="points",
    config=":ToyRun",
    build=":build",
    commands={
        "prepare": ":prepare", "evaluate": ":evaluate", "predict": ":predict",
        "slope": ":slope", "convert toy": ":slope",
    },
    usage=(("slope RUN", "the slope of a line"),),
    recognises=":is_toy",
    api="api",
    demo=":demo",
)  # fmt: skip
SYSTEM = TOY


class ToyApi(ModuleType):
    """The module ``api`` of the toy system."""

    @staticmethod
    def load(model):
        return ToyLine(_slope(Path(model)))

    @staticmethod
    def evaluate(model, sources):
        return {"slope": _slope(Path(model)), "sources": sources}

    @staticmethod
    def predict(model, source, out):
        line = model if isinstance(model, ToyLine) else ToyApi.load(model)
        return [line.slope * x for x in source]


class ToyLine:
    __module__ = f"{__name__}.api"

    def __init__(self, slope):
        self.slope = slope


@dataclass(frozen=True)
class ToyData:
    train: tuple[Path, ...] = ()


@dataclass(frozen=True)
class ToyModel:
    slope: float = 0.0


@dataclass(frozen=True, kw_only=True)
class ToyRun(RunConfig):
    recipe: ClassVar[str] = "toy"

    data: ToyData = field(default_factory=ToyData)
    model: ToyModel = field(default_factory=ToyModel)
    batch: BatchConfig = field(default_factory=lambda: BatchConfig(capacity={"atoms": 4}))
    train: TrainConfig = field(default_factory=lambda: TrainConfig(device="cpu", epochs=2))

    @classmethod
    def preset_values(cls, name):
        known = {None: {}, "steep": {"model": {"slope": 5.0}}, "flat": {"model": {"slope": 1.0}}}
        if name not in known:
            raise ConfigError(f"preset: there is no '{name}' (known: flat, steep)")
        return known[name]


@dataclass(frozen=True)
class Points:
    x: torch.Tensor
    y: torch.Tensor
    weight: torch.Tensor
    sample_indices: np.ndarray

    @property
    def sizes(self):
        return {"graphs": len(self.x), "atoms": len(self.x)}

    def to(self, device, dtype=None, non_blocking=False):
        x, y, weight = (value.to(device, dtype) for value in (self.x, self.y, self.weight))
        return Points(x, y, weight, self.sample_indices)

    def pin_memory(self):
        return self


def collate(samples, indices, weights):
    x, y = (torch.tensor([float(sample[name]) for sample in samples]) for name in "xy")
    return Points(x.double(), y.double(), torch.tensor(weights).double(), np.asarray(indices))


class PointData:
    def __init__(self, paths):
        self.rows = [tuple(map(float, line.split())) for p in paths for line in p.open()]

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        x, y = self.rows[index]
        return {"x": np.array(x), "y": np.array(y)}

    def describe(self, index):
        return f"point {index}"

    def lengths(self, field):
        return np.ones(len(self), dtype=np.int64)


class Line(torch.nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = torch.nn.Parameter(torch.tensor(slope, dtype=torch.float64))


class Sums:
    names = ("loss",)
    values = torch.zeros(2, dtype=torch.float64)

    def update(self, batch, outputs):
        error = (batch.weight * (outputs["y"] - batch.y) ** 2).sum()
        self.values = self.values + torch.stack([error, batch.weight.sum()])

    def sums(self):
        return self.values

    def load_sums(self, sums):
        self.values = sums

    def compute(self):
        return {"loss": float(self.values[0] / self.values[1])}


class ToyTask:
    collate = staticmethod(collate)

    def begin_epoch(self, epoch):
        pass

    def normalisers(self, batch):
        return {"points": batch.weight.sum()}

    def loss(self, model, batch, normalisers):
        error = (batch.weight * (model.slope * batch.x - batch.y) ** 2).sum()
        total = error / normalisers["points"]
        return Loss(total, {"error": total.detach()})

    def predict(self, model, batch):
        return {"y": (model.slope * batch.x).detach()}

    def metrics(self):
        return Sums()


def build(config, *, resume=False):
    data = PointData(config.data.train)
    sizes = {"atoms": data.lengths("x")}
    model = Line(config.model.slope)
    return Run(
        model=model, task=ToyTask(), train=data, sizes=sizes, valid=data, valid_sizes=sizes,
        folder=config.output, settings=config.settings, resume=resume,
        save_model=SaveModel("line", config.model),
    )  # fmt: skip


def is_toy(path):
    return path.suffix == ".toy"


def prepare(files: Files, out: Path, times: int = 1) -> None:
    """Join files.

    Parameters
    ----------
    files
        To join.
    out
        The joined file.
    times
        How often each is taken.
    """
    out.write_text("".join(file.read_text() for file in files) * times)


def evaluate(model: Model, file: Source) -> None:
    """Print the error."""
    data = PointData([file])
    print("error", max(abs(_slope(model) * x - y) for x, y in data.rows))


def predict(model: Model, source: Source, out: Out) -> None:
    """Write predictions."""
    out.write_text("".join(f"{_slope(model) * x}\n" for x, _ in PointData([source]).rows))


def slope(model: Model) -> None:
    """Print the slope."""
    print("slope", _slope(model))


def _slope(model):
    return float(model_folder.load_model_folder(newest_model(model)).state["slope"])


def demo(out):
    print(f"a long line of the toy: {'word ' * 40}")
    (out / "toy.txt").write_text("")
    return Part("lines have slopes", (("toy.txt", "nothing"),))


# ---- the tests ----


@pytest.fixture
def toy(monkeypatch, tmp_path):
    """Register the toy system by its one line, in a folder with data."""
    monkeypatch.setitem(sys.modules, f"{__name__}.api", ToyApi("api"))
    monkeypatch.setitem(SYSTEMS, "toy", __name__)
    monkeypatch.chdir(tmp_path)
    Path("a.toy").write_text("".join(f"{x} {3 * x}\n" for x in range(1, 9)))
    return tmp_path


def train(*options):
    command = ["train", "toy", "--data", "a.toy", "--output", "run", "--no-report", *options]
    return main(command)


def test_a_system_from_outside_trains_evaluates_and_predicts(toy, capsys):
    assert train("--optim.lr", "0.5", "--train.epochs", "80", "--optim.ema", "0.5") == 0
    assert json.loads(Path("run/model.json").read_text())["kind"] == "line"
    assert main(["evaluate", "run", "a.toy"]) == 0
    assert main(["predict", "run", "a.toy", "out.txt"]) == 0
    assert main(["slope", "run"]) == 0
    assert main(["convert", "toy", "run"]) == 0
    said = capsys.readouterr().out
    assert float(re.findall(r"error (\S+)", said)[-1]) < 0.5
    assert np.loadtxt("out.txt") == pytest.approx(3 * np.arange(1, 9), abs=0.5)
    slopes = re.findall(r"^slope (\S+)", said, flags=re.MULTILINE)
    assert len(slopes) == 2
    assert float(slopes[0]) == pytest.approx(3, abs=0.1)


def test_a_yaml_file_names_the_system_and_is_resumed(toy):
    Path("run.yaml").write_text("{recipe: toy, output: run, data: {train: [a.toy]}, report: false}")
    assert main(["train", "run.yaml"]) == 0
    assert main(["train", "run.yaml", "--resume", "must", "--train.epochs", "3"]) == 0
    lines = Path("run/metrics.jsonl").read_text().splitlines()
    epochs = [json.loads(line)["epoch"] for line in lines]
    assert max(epochs) == 2


def test_a_system_from_outside_is_used_in_python(toy):
    done = bv.train("toy", data="a.toy", output="run", report=False, preset="steep")
    assert done.finished == "epochs"
    line = bv.load("run")
    assert bv.evaluate("run", "a.toy") == {"slope": line.slope, "sources": "a.toy"}
    assert bv.predict(line, [2.0]) == bv.predict("run", [2.0]) == [2 * line.slope]


def test_a_system_without_uses_in_python_says_so(toy, monkeypatch):
    assert train() == 0
    without = dataclasses.replace(TOY, api=None)
    monkeypatch.setattr(sys.modules[__name__], "SYSTEM", without)
    with pytest.raises(ConfigError, match="toy: its models are used by commands only"):
        bv.load("run")


def test_runs_of_a_system_from_outside_are_compared(toy, capsys):
    assert train() == 0
    command = ["train", "toy", "--data", "a.toy", "--output", "b", "--no-report", "--train.seed"]
    assert main([*command, "1"]) == 0
    capsys.readouterr()
    assert main(["compare", "run", "b"]) == 0
    said = capsys.readouterr().out
    assert re.search(r"train.seed +0 +1", said)
    assert re.search(r"validation loss +\S+ +\S+", said)


def test_a_system_without_a_starter_configuration_or_a_result_says_so(toy, refused):
    assert "init: toy has no starter configuration" in refused("init", "toy")
    assert "`bevatron slope` has no result to print as JSON" in refused("slope", "run", "--json")
    assert main(["train", "toy", "--help"]) == 0


def test_of_a_repeated_preset_the_last_counts(toy):
    assert train("--preset", "flat", "--preset", "steep", "--train.epochs", "0") == 0
    assert json.loads(Path("run/model.json").read_text())["config"]["slope"] == 5.0


def test_files_are_prepared_by_the_system_that_recognises_them(toy, refused, capsys):
    assert main(["prepare", "a.toy", "--out", "b.toy"]) == 0
    assert main(["prepare", "--out", "c.toy", "a.toy"]) == 0
    assert main(["prepare", "toy", "a.toy", "--out", "d.toy", "--times", "2"]) == 0
    assert Path("b.toy").read_text() == Path("c.toy").read_text() == Path("a.toy").read_text()
    assert len(Path("d.toy").read_text()) == 2 * len(Path("a.toy").read_text())
    said = refused("prepare", "a.toy", "x.xyz", "--out", "e")
    assert "points (a.toy) and structures (x.xyz) cannot go into one store" in said
    # Without a system the options are those of the default one, and where the others are is said.
    assert main(["prepare", "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "prepare exists for mace, gpspp, alphafold2, alphafold3, toy" in said
    assert "bevatron prepare toy --help" in said
    assert "--cutoff" in said


def test_a_graph_needs_no_preparation_and_says_so(refused):
    for arguments in (("cora.npz",), ("graph", "cora.npz")):
        assert "graphs need no preparation; `bevatron train graph" in refused("prepare", *arguments)


def test_a_file_that_two_systems_recognise_must_be_told_to_one(toy, refused, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "is_toy", lambda path: path.suffix == ".csv")
    assert "choose `bevatron prepare gpspp` (" in refused("prepare", "a.csv", "--out", "s")


def test_usage_and_errors_name_the_system(toy, refused):
    assert "toy: straight lines\n  bevatron slope RUN  " in usage()
    assert "(known: alphafold2, alphafold3, gpspp, graph, mace, toy)" in refused("train", "tyo")
    assert "needs a recipe (alphafold2, alphafold3, gpspp, graph, mace, toy)" in refused("train")
    assert "did you mean 'slope'" in refused("slop")
    assert "from-toy" not in refused("convert")
    assert "needs one of: mace-torch, to-mace-torch, " in refused("convert")
    assert refused("convert").endswith(", toy")
    assert "toy has none, got 'x'" not in refused("train", "toy", "--preset", "x")


def test_a_command_that_a_system_does_not_have_is_named(toy, refused, monkeypatch):
    assert train() == 0
    assert "expected 'mace'" in refused("relax", "run", "a.xyz", "b.xyz")
    monkeypatch.delitem(TOY.commands, "evaluate")
    assert "evaluate: toy has no such command (it has: prepare" in refused("evaluate", "run")


def test_the_demo_has_a_part_of_every_system_and_no_line_is_too_wide(toy, monkeypatch, capsys):
    monkeypatch.setattr("bevatron.recipes.demo.systems", lambda: [TOY])
    assert run_demo(Path("demo")) == 0
    said = capsys.readouterr().out
    assert "== toy: straight lines" in said
    assert "what was learned:\ntoy  lines have slopes\n" in said
    assert "toy.txt  nothing" in said
    assert said.count("word") == 40
    assert max(map(len, said.splitlines())) <= WIDTH


# ---- the systems of the package ----


def test_declarations_are_light():
    code = (
        "import sys; from bevatron.cli import usage; usage(); "
        "print([m for m in ('torch', 'numpy', 'tyro', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_everything_that_a_system_declares_is_there(name):
    found = system(name)
    assert found.name == name
    config, make = recipe(name)
    assert config.recipe == name
    assert issubclass(config, RunConfig)
    package = sys.modules[SYSTEMS[name]]
    assert getattr(package, config.__name__) is config
    assert package.build is make
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing
    for command in found.commands:
        assert found.command(command).__doc__
    assert found.demo is None or callable(found.load(found.demo))
    assert f"recipe: {name}\n" in found.starter_text()
    assert {"load", "evaluate", "predict"} <= set(vars(found.used()))
    assert of_samples(found.samples) is of_samples(name) is found
    folder = Path(package.__file__).parent
    files = {path.stem for path in folder.glob("*.py")}
    assert {"run", "data", "predict", "evaluate", "report", "commands", "api"} <= files
    if found.inspect is not None:
        assert {"describe", "draw", "sizes"} <= set(vars(found.inspected()))


def test_kinds_and_samples_are_of_one_system_each():
    for names in ("name", "kind", "samples"):
        values = [getattr(each, names) for each in systems()]
        assert len(values) == len(set(values))
    assert sum(each.recognises is None and "prepare" in each.commands for each in systems()) == 1


def test_a_system_without_stores_has_nothing_to_inspect():
    with pytest.raises(ConfigError, match="inspect: graph has no stores"):
        system("graph").inspected()
    with pytest.raises(ConfigError, match=r"no system for crystals \(known: structures, molecules"):
        of_samples("crystals")


def test_a_folder_named_as_a_system_is_a_model_all_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mace").mkdir()
    Path("mace/model.json").write_text('{"kind": "gpspp"}')
    function, rest, _ = system_command("predict", ["mace", "a.csv", "b.csv"])
    assert function.__module__ == "bevatron.recipes.gpspp.commands"
    assert rest[0] == "mace"


@pytest.mark.parametrize("name", list(SYSTEMS))
def test_no_system_imports_another(name):
    folder = Path(system(name).module("").__file__).parent
    others = "|".join(other for other in SYSTEMS if other != name)
    for path in folder.glob("*.py"):
        found = re.search(rf"bevatron\.recipes(\.| import )({others})\b", path.read_text())
        assert found is None, f"{path.name}: {found}"
