"""A system from outside the package, in one file: texts of words of letters, ragged in two axes.

Its samples are texts, which the model scores by their letters. It trains, is captured, resumes
after a kill and predicts through the same loop as the systems of the package.
"""

import ast
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import tiny
import torch
from torch import nn

import bevatron.train
from bevatron.data.padding import Axis, BatchShape, Paddable, PaddingRule, Ragged, StaticBatch, pad
from bevatron.errors import ConfigError
from bevatron.parallel.mesh import Mesh
from bevatron.task import Loss, StepNumbers
from bevatron.train import Run, describe, evaluate, fit, predict
from bevatron.train.capture import step as captured_module
from bevatron.train.capture.cuda_graphs import GraphPool
from bevatron.train.capture.inference import CapturedInference
from bevatron.train.capture.step import CapturedStep, obstacle
from bevatron.train.loop import begin_state
from bevatron.train.step import out_of_memory

# ---- the system ----


@dataclass(frozen=True)
class TextBatch:
    """Letters [L], the word of each; the text of each word [W]; scores and weights of texts [T]."""

    letters: torch.Tensor
    word: torch.Tensor
    text: torch.Tensor
    score: torch.Tensor
    weight: torch.Tensor
    sample_indices: np.ndarray

    padding: ClassVar[PaddingRule] = PaddingRule(
        (Axis("letters", 32), Axis("words", spare=1), Axis("texts", 4, spare=1, counts_work=False)),
        samples="texts",
    )
    ragged: ClassVar[Mapping[str, Ragged]] = {
        "letters": Ragged("letters"),
        "word": Ragged("letters"),
        "text": Ragged("words"),
        "score": Ragged("texts"),
        "weight": Ragged("texts"),
    }

    @property
    def sizes(self):
        return {"texts": len(self.score), "letters": len(self.letters), "words": len(self.text)}

    def padding_rows(self, shape):
        """Padding letters make one word of one text that has no weight."""
        return {"word": len(self.text), "text": len(self.score)}

    def over(self, tensors):
        return replace(self, **tensors, sample_indices=np.zeros(0, dtype=np.int64))

    def to(self, device, dtype=None, non_blocking=False):
        def moved(value):
            return value.to(device, dtype if value.is_floating_point() else None)

        return replace(self, **{name: moved(getattr(self, name)) for name in self.ragged})

    def pin_memory(self):
        return replace(self, **{name: getattr(self, name).pin_memory() for name in self.ragged})


def collate(samples, indices, weights):
    words = [len(sample["lengths"]) for sample in samples]
    lengths = np.concatenate([sample["lengths"] for sample in samples])
    return TextBatch(
        letters=torch.from_numpy(np.concatenate([sample["letters"] for sample in samples])),
        word=torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths)),
        text=torch.from_numpy(np.repeat(np.arange(len(samples)), words)),
        score=torch.tensor([float(sample["score"]) for sample in samples], dtype=torch.float64),
        weight=torch.tensor(weights, dtype=torch.float64),
        sample_indices=np.asarray(indices, dtype=np.int64),
    )


class Texts:
    """A data set of random texts: 1 to 6 words of 1 to 9 letters; the score counts vowels."""

    def __init__(self, count, seed=0):
        random = np.random.default_rng(seed)
        self.lengths_of_words = [
            random.integers(1, 10, random.integers(1, 7)) for _ in range(count)
        ]
        self.letters = [random.integers(0, 26, lengths.sum()) for lengths in self.lengths_of_words]

    def __len__(self):
        return len(self.letters)

    def __getitem__(self, index):
        letters = self.letters[index]
        score = np.array(np.isin(letters, [0, 4, 8, 14, 20]).sum() / 4)
        return {"letters": letters, "lengths": self.lengths_of_words[index], "score": score}

    def describe(self, index):
        return f"text {index}"

    def lengths(self, field):
        return np.array([len(self[i][field]) for i in range(len(self))], dtype=np.int64)

    @property
    def sizes(self):
        return {"letters": self.lengths("letters"), "words": self.lengths("lengths")}


class Scorer(nn.Module):
    """Score of a text: the sum over its words of a function of the sum of its letters."""

    def __init__(self, width=6):
        super().__init__()
        torch.manual_seed(0)
        self.letter = nn.Embedding(26, width)
        self.word = nn.Linear(width, 1)

    def forward(self, batch):
        letters = self.letter(batch.letters)
        words = letters.new_zeros(len(batch.text), letters.shape[1])
        per_word = self.word(torch.tanh(words.index_add(0, batch.word, letters))).squeeze(1)
        scores = torch.zeros_like(batch.score).index_add(0, batch.text, per_word)
        return {"score": scores, "word_score": per_word}


class ErrorSums:
    names = "loss", "texts"

    def __init__(self):
        self.values = torch.zeros(2, dtype=torch.float64)

    def update(self, batch, outputs):
        errors = batch.weight * (outputs["score"] - batch.score) ** 2
        added = torch.stack([errors.sum(), batch.weight.sum()])
        self.values = self.values.to(added.device) + added

    def sums(self):
        return self.values

    def load_sums(self, sums):
        self.values = sums

    def compute(self):
        return {"loss": float(self.values[0] / self.values[1]), "texts": float(self.values[1])}


class ScoreTask:
    collate = staticmethod(collate)

    def __init__(self, killed_in_step=None):
        self.steps, self.killed_in_step = 0, killed_in_step

    def begin_epoch(self, epoch):
        pass

    def constants(self):
        return ()

    def normalisers(self, batch):
        self.steps += 1
        if self.steps == self.killed_in_step:
            raise KilledError
        return {"texts": batch.weight.sum()}

    def loss(self, model, batch, normalisers):
        errors = batch.weight * (model(batch)["score"] - batch.score) ** 2
        total = errors.sum() / normalisers["texts"]
        return Loss(total, {"score": total.detach()})

    def predict(self, model, batch):
        return {name: value.detach() for name, value in model(batch).items()}

    def metrics(self):
        return ErrorSums()


class NumberedTask(ScoreTask):
    """A loss that differs from step to step: by a choice, and by a number in a tensor."""

    def __init__(self, device="cpu"):
        super().__init__()
        self.shift = torch.zeros((), dtype=torch.float64, device=device)

    def begin_step(self, numbers):
        self.shift.fill_(numbers.draw("shift", below=1000) / 1000)
        self.passes = 1 + numbers.draw("passes", below=3)
        return {"passes": self.passes}

    def loss(self, model, batch, normalisers):
        errors = batch.weight * (model(batch)["score"] - batch.score - self.shift) ** 2
        total = self.passes * errors.sum() / normalisers["texts"]
        return Loss(total, {"score": total.detach()})


class KilledError(Exception):
    """Ends a run that has no time to save anything."""


def make_run(folder: Path, *, task=None, resume=False, **groups) -> Run:
    train, valid = Texts(40), Texts(9, seed=1)
    batch = {"capacity": {"letters": 90, "words": 24}, "cost": {"letters": 1.0, "words": 2.0}}
    return Run(
        model=Scorer(),
        task=task or ScoreTask(),
        train=train,
        sizes=train.sizes,
        folder=folder,
        settings=tiny.settings(**{"batch": batch, **groups}),
        valid=valid,
        valid_sizes=valid.sizes,
        identity={"model": {"width": 6}},
        resume=resume,
    )


# ---- what it gets from the package ----


@pytest.fixture
def capturing(monkeypatch):
    """Let runs on a CPU take the captured step."""
    monkeypatch.setattr(captured_module, "obstacle", lambda *_: None)


def test_it_trains(tmp_path):
    result = fit(make_run(tmp_path, optim={"lr": 0.05}, train={"epochs": 6}))
    losses = tiny.losses(tmp_path)
    assert result.finished == "epochs"
    assert np.mean(losses[-3:]) < 0.5 * np.mean(losses[:3])
    log = (tmp_path / "log.txt").read_text()
    assert " texts/s" in log
    assert " letters/s" in log
    step = next(record for record in tiny.records(tmp_path) if record["kind"] == "step")
    assert list(step["sizes"]) == ["texts", "letters", "words"]


def test_its_batches_are_balanced_by_its_own_costs():
    run = make_run(Path("unused"), batch={"capacity": 60, "cost": {"words": 1.0, "constant": 0.5}})
    assert describe(run)["largest_batch"].keys() == {"letters"}
    run.settings = tiny.settings(batch={"cost": {"lines": 1.0}})
    with pytest.raises(ConfigError, match=r"'lines' is not counted here \(known: letters, words\)"):
        describe(run)


def test_its_batches_are_padded_in_both_axes():
    assert isinstance(example(), Paddable)
    batch, shape = example(), BatchShape(letters=64, words=16, texts=8)
    padded = pad(batch, shape)
    assert padded.sizes == dict(shape.lengths)
    assert padded.sample_indices.tolist() == batch.sample_indices.tolist()
    found, expected = Scorer().double()(padded), Scorer().double()(batch)
    assert torch.allclose(found["score"][:3], expected["score"], rtol=1e-14)
    assert not BatchShape(letters=64, words=len(batch.text), texts=8).fits(batch)
    static = StaticBatch(shape, torch.float32, like=batch)
    static.fill(batch)
    assert static.batch.score.dtype == torch.float32
    assert torch.equal(static.batch.word, padded.word)


def example():
    data = Texts(3)
    return collate([data[i] for i in range(3)], np.arange(3), [1.0] * 3)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_captured_steps_have_the_losses_of_plain_ones(tmp_path, capturing, accumulate):
    optim = {"lr": 0.05, "accumulate": accumulate}
    fit(make_run(tmp_path / "plain", optim=optim, train={"cuda_graphs": False}))
    fit(make_run(tmp_path / "captured", optim=optim))
    found, expected = tiny.losses(tmp_path / "captured"), tiny.losses(tmp_path / "plain")
    assert found == pytest.approx(expected, rel=1e-12)
    log = (tmp_path / "captured" / "log.txt").read_text()
    assert "steps are captured as CUDA graphs, batches padded to " in log
    assert "% of letters and " in log


def check_numbered_steps(folder, device="cpu", task=None):
    """Captured steps whose work differs have the losses of plain ones."""
    groups = {"optim": {"lr": 0.05}, "train": {"epochs": 4, "device": device}}
    fit(make_run(folder / "captured", task=task or NumberedTask(device), **groups))
    groups["train"]["cuda_graphs"] = False
    fit(make_run(folder / "plain", task=NumberedTask(device), **groups))
    found, expected = tiny.losses(folder / "captured"), tiny.losses(folder / "plain")
    assert found == pytest.approx(expected, rel=1e-9)
    assert "steps are captured" in (folder / "captured" / "log.txt").read_text()
    steps = [record for record in tiny.records(folder / "plain") if record["kind"] == "step"]
    assert len({record["numbers"]["passes"] for record in steps}) == 3


def test_captured_steps_whose_work_differs_have_the_losses_of_plain_ones(
    tmp_path, capturing, monkeypatch
):
    """With graphs that, as on a GPU, keep the work that they were captured with."""
    task = NumberedTask()

    def capture(self, work, warm_up=None):
        captured = getattr(task, "passes", 0)

        def replay():
            present, task.passes = task.passes, captured
            work()
            task.passes = present

        return replay

    monkeypatch.setattr(GraphPool, "capture", capture)
    check_numbered_steps(tmp_path, task=task)


def test_each_choice_has_graphs_of_its_own_for_every_shape(tmp_path):
    run = make_run(tmp_path, task=NumberedTask())
    run.task.begin_step(StepNumbers(0, 0))
    step = CapturedStep(run, begin_state(run, Mesh(), None), Mesh())
    step.plan([(np.array([0]), np.ones(1)), (np.arange(40), np.ones(40))])
    batch = collate([run.train[0]], np.array([0]), [1.0])
    for choice in [(("passes", 1),), (("passes", 2),), (("passes", 1),)]:
        step([batch], lr=1e-3, choice=choice).result()
    assert len(step.buckets.shapes) == 2
    assert set(step._graphs._graphs) == {
        (shape, (("passes", passes),)) for shape in step.buckets.shapes for passes in (1, 2)
    }


def test_nothing_is_in_the_way_of_capturing_it_on_a_gpu(tmp_path):
    run, mesh = make_run(tmp_path), Mesh(device=torch.device("cuda"))
    state = begin_state(run, Mesh(), None)
    assert obstacle(run, state, mesh) is None
    run.sizes = {"letters": run.sizes["letters"]}
    assert obstacle(run, state, mesh) == "the words of the samples are not counted"


def test_all_its_shapes_are_captured_by_the_first_step(tmp_path):
    run = make_run(tmp_path)
    step = CapturedStep(run, begin_state(run, Mesh(), None), Mesh())
    few, many = np.array([0]), np.arange(40)
    line = step.plan([(few, np.ones(1)), (many, np.ones(40))])
    assert len(step.buckets.shapes) == 2
    assert all(f"{shape.letters} letters" in line for shape in step.buckets.shapes)
    batch = collate([run.train[0]], few, [1.0])
    step([batch], lr=1e-3).result()
    assert {key for key, _ in step._graphs._graphs} == set(step.buckets.shapes)


@pytest.mark.parametrize("captured", [False, True])
def test_it_goes_on_after_a_kill(tmp_path, monkeypatch, captured):
    if captured:
        monkeypatch.setattr(captured_module, "obstacle", lambda *_: None)
    groups = {"checkpoint": {"every_steps": 2}, "optim": {"ema": 0.9}}
    fit(make_run(tmp_path / "whole", **groups))
    with pytest.raises(KilledError):
        fit(make_run(tmp_path / "cut", task=ScoreTask(killed_in_step=6), **groups))
    assert len(tiny.losses(tmp_path / "cut")) < len(tiny.losses(tmp_path / "whole"))
    fit(make_run(tmp_path / "cut", resume=True, **groups))
    assert tiny.records(tmp_path / "cut") == tiny.records(tmp_path / "whole")


def test_it_predicts_in_the_order_of_its_samples_by_captured_inference_too(tmp_path):
    run = make_run(tmp_path)
    fit(run)
    model, task = run.model.requires_grad_(requires_grad=False), run.task
    data = Texts(25, seed=2)
    inference = CapturedInference(
        partial(task.predict, model),
        torch.device("cpu"),
        torch.float64,
        rows={"word_score": "words"},
        patience=0,
    )
    seen = []
    for batch, outputs in predict(task, model, data, data.sizes, batch=run.settings.batch):
        found = inference.launch(batch)()
        for name, values in outputs.items():
            assert found[name].shape == values.shape
            assert torch.allclose(found[name], values, rtol=1e-13, atol=1e-14)
        seen += batch.sample_indices.tolist()
    assert seen == list(range(25))
    assert 1 <= inference.num_captured <= len(inference.shapes)
    assert evaluate(task, model, data, data.sizes)["texts"] == 25


def test_messages_name_its_own_counts(tmp_path):
    run = make_run(tmp_path)
    said = str(out_of_memory(run, example(), Mesh()))
    assert " letters, " in said
    assert "(now 90 letters, 24 words)" in said


# ---- the rule that makes it possible ----

COUNTED = {"atoms", "nodes", "molecules", "structures", "edges", "pairs"}
BATCHES = {"StructureBatch", "MoleculeBatch", "GraphBatch", "AtomBatch", "WholeGraph"}


def test_the_trainer_names_no_kind_of_batch():
    """Neither in identifiers nor in strings, apart from docstrings and the old keys of the cost."""
    folder = Path(inspect.getfile(bevatron.train)).parent
    found = [
        f"{path.relative_to(folder)}: {word}"
        for path in sorted(folder.rglob("*.py"))
        if path.relative_to(folder).parts[0] != "report"
        for word in words_of(path.read_text())
        if word in BATCHES | COUNTED or COUNTED & set(word.split("_"))
    ]
    old = {"nodes", "edges", "cost_nodes", "cost_edges"}
    assert [one for one in found if one not in {f"settings.py: {word}" for word in old}] == []


def words_of(source):
    """Identifiers and words of strings, without docstrings."""
    tree = ast.parse(source)
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    for node in ast.walk(tree):
        if isinstance(node, documented) and ast.get_docstring(node):
            node.body = node.body[1:]
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value.value = ""  # of an attribute
    for node in ast.walk(tree):
        for name in ("id", "attr", "arg", "name"):
            if isinstance(getattr(node, name, None), str):
                yield getattr(node, name)
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from re.findall(r"\w+", node.value)
