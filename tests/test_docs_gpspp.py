"""What docs/gpspp.md tells a user to type works as it is written, one after the other."""

import csv
import gzip
import shlex
from importlib.resources import files

import numpy as np
import pytest

from bevatron import cli
from bevatron.recipes.training import configuration
from doc_pages import ROOT, blocks, lines, text_of

PAGE = "docs/gpspp.md"
DEMO = files("bevatron.recipes") / "demo_data" / "molecules.csv.gz"
MODEL = "--model.num-layers 1 --model.node-width 16 --model.edge-width 8 --model.num-heads 2"
RUN = "--molecules 16 --train.epochs 1 --train.device cpu --train.threads 1"
WITH_FILES = {"train": ["--data.prepare-workers", "1"], "prepare": ["--workers", "1"]}


def commands():
    """Commands of the page in their order, those of running text last; OGB's data are not here."""
    found = [shlex.split(line) for line in lines(PAGE) if line.startswith("bevatron ")]
    return [words[1:] for words in found if "ogb" not in words]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with the files that the page speaks of."""
    folder = tmp_path_factory.mktemp("tutorial")
    with gzip.open(str(DEMO), "rt") as file:
        rows = list(csv.DictReader(file))[:40]
    flat = [{"smiles": row["smiles"].split(" ")[0], "gap": row["gap"]} for row in rows]
    toxic = [
        {"smiles": row["smiles"], "toxic": i % 2, "logp": "" if i % 5 == 0 else i / 10}
        for i, row in enumerate(flat)
    ]
    unknown = [{"name": i, "smiles": row["smiles"]} for i, row in enumerate(flat[:5])]
    tables = {
        "molecules": flat, "test": flat[:8], "small": flat[:20], "structures": rows,
        "toxicity": toxic, "unknown": [*unknown, {"name": 5, "smiles": "none"}],
    }  # fmt: skip
    for name, table in tables.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0]))
            writer.writeheader()
            writer.writerows(table)
    return folder


def test_commands_of_the_page_run_in_their_order(place, monkeypatch, capsys):
    pytest.importorskip("rdkit.Chem")
    monkeypatch.chdir(place)
    assert {words[0] for words in commands()} >= {
        *("train", "prepare", "predict", "evaluate", "embed"),
    }
    for words in commands():
        small = list(words)
        if words[0] == "train":
            # A trained model's sizes are given; all the others are made small.
            small += [*([] if "--start-from" in words else MODEL.split()), *RUN.split()]
            small += [] if "molecules-store" in words else WITH_FILES["train"]
        elif words[0] == "prepare":
            small += WITH_FILES["prepare"]
        assert cli.main(small) == 0, (words, capsys.readouterr().err)
    with (place / "ensemble.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["name"] for row in rows] == list("012345")
    assert rows[5]["reason"]
    assert all(float(row["predicted_gap_std"]) > 0 for row in rows[:5])
    with np.load(place / "embeddings.npz") as found:
        assert np.isnan(found["graph"][5]).all()
    (code,) = blocks(PAGE, "python")
    exec(compile(code, PAGE, "exec"), {"__name__": "page"})
    assert "nan" in capsys.readouterr().out


def test_page_says_that_there_are_no_pretrained_weights():
    assert "No pretrained weights are included" in text_of(PAGE)


def test_recipe_for_pcqm4mv2_has_the_settings_of_the_paper():
    config = configuration(str(ROOT / "examples" / "gpspp_pcqm4mv2.yaml"))
    model, optim, schedule = config.model, config.optim, config.schedule
    assert (model.num_layers, model.node_width, model.attention) == (16, 256, True)
    assert (config.molecules, config.train.epochs, config.data.split) == (921, 450, "given")
    assert (optim.lr, optim.clip, optim.clip_norm, optim.ema) == (4e-4, 5.0, "tensor", None)
    assert (schedule.kind, schedule.warmup_epochs, schedule.per_epoch) == ("linear", 10, True)
    assert (config.loss.node_weight, config.corruption.masking) == (1.2, (1.0, 3.0, 1.0))
