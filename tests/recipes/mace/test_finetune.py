"""Fine-tuning: what a run begins with when it starts from another model."""

import json

import numpy as np
import pytest
import torch

from bevatron.errors import BevatronError, CheckpointError, ConfigError
from bevatron.models.mace import load_model
from bevatron.recipes.mace.evaluate import evaluate_dataset
from bevatron.recipes.mace.potential import Potential
from bevatron.recipes.mace.run import MaceRun, _slow_here, build
from bevatron.train.loop import fit

TRAIN = {"epochs": 1, "device": "cpu", "dtype": "float64"}


@pytest.fixture
def run(acac_store, converted, tmp_path):
    """Builds a fine-tuning run from changes to a plain configuration."""

    def make(data=None, resume=False, output="run", **changes):
        values = {
            "output": str(tmp_path / output),
            "start_from": str(converted),
            "data": {"prepare_workers": 1, **(data or {"train": [str(acac_store)]})},
            "report": False,
            "train": TRAIN,
        }
        return build(MaceRun.from_values({**values, **changes}), resume=resume)

    return make


@pytest.fixture
def write(tmp_path):
    """Writes structures of given elements with random labels as extended XYZ."""

    def make(symbols, count=6, per_atom=-100.0, name="made.xyz"):
        random = np.random.default_rng(1)
        places = np.stack(np.meshgrid(*[np.arange(3.0)] * 3), -1).reshape(-1, 3)[: len(symbols)]
        lines = []
        for _ in range(count):
            positions = 1.1 * places + random.normal(scale=0.03, size=places.shape)
            forces = random.normal(size=places.shape)
            energy = per_atom * len(symbols) + random.normal(scale=0.01)
            lines += [
                str(len(symbols)),
                f"Properties=species:S:1:pos:R:3:forces:R:3 energy={energy:.6f}",
            ]
            for symbol, r, f in zip(symbols, positions, forces, strict=True):
                lines.append(" ".join([symbol, *(f"{x:.6f}" for x in (*r, *f))]))
        path = tmp_path / name
        path.write_text("\n".join(lines) + "\n")
        return path

    return make


def samples_of(run):
    return [run.train[i] for i in range(len(run.train))]


def interaction(model, samples, head=None):
    """Energies without E0."""
    potential = Potential(model, head=head)
    potential.model.get_buffer("atomic_energies").zero_()
    index = np.array(potential.head, dtype=np.int32)
    samples = [{**sample, "head": index} for sample in samples]
    return np.array([float(r["energy"]) for r in potential.evaluate(samples, ("energy",))])


def test_it_begins_with_the_source_interaction_and_energies_of_the_new_theory(run, converted):
    made = run()
    samples = samples_of(made)
    before, after = (interaction(model, samples) for model in (load_model(converted), made.model))
    np.testing.assert_allclose(after, before, rtol=0, atol=1e-6)
    errors = evaluate_dataset(Potential(made.model), made.train).total
    assert errors["energy_per_atom_rmse"] < 0.02  # eV; the two theories are 570 eV/atom apart
    assert any("explains its errors" in line for line in made.notes)
    assert not any("least squares" in line for line in made.notes)
    kept = evaluate_dataset(Potential(converted), made.train).total
    assert kept["energy_per_atom_rmse"] > 100


def test_energies_of_isolated_atoms_are_kept_taken_from_the_data_or_given(run, converted):
    old = load_model(converted).config.atomic_energies
    kept = run(finetune={"e0": "keep"}, output="keep").model
    np.testing.assert_allclose(kept.config.atomic_energies, old)
    np.testing.assert_allclose(kept.get_buffer("atomic_energies").numpy(), old)
    given = {"H": -13.6, "C": -1035.0, "O": -2041.0}
    data = {**run().config["data"], "e0": given}
    for choice in ("data", "refit"):
        model = run(data, finetune={"e0": choice}, output=choice).model
        np.testing.assert_allclose(model.config.atomic_energies, [list(given.values())])


def test_configuration_and_weights_agree_on_the_refitted_energies(run):
    model = run().model
    np.testing.assert_allclose(
        model.get_buffer("atomic_energies").numpy(), model.config.atomic_energies
    )


def test_a_subset_of_the_elements_leaves_the_interaction_as_it_was(run, write, converted):
    water = write(["O", "H", "H"])
    small = run({"train": [str(water)]}, output="subset")
    assert small.model.config.atomic_numbers == (1, 8)
    samples = samples_of(small)
    expected = interaction(load_model(converted), samples)
    np.testing.assert_allclose(interaction(small.model, samples), expected, rtol=0, atol=1e-6)
    everything = run({"train": [str(water)]}, finetune={"elements": "all"}, output="all")
    assert everything.model.config.atomic_numbers == (1, 6, 8)
    np.testing.assert_allclose(interaction(everything.model, samples), expected, rtol=0, atol=1e-6)
    carbon = load_model(converted).config.atomic_energies[0][1]
    assert everything.model.config.atomic_energies[0][1] == pytest.approx(carbon)


def test_a_new_element_joins_and_energies_still_fit(run, write):
    made = run({"train": [str(write(["N", "H", "H", "H"]))]}, output="new")
    assert made.model.config.atomic_numbers == (1, 7)
    table = [line for line in made.notes if line.startswith("embedding.weight")]
    assert "resized" in table[0]
    assert "1 elements taken, 1 new, 2 left" in table[0]
    errors = evaluate_dataset(Potential(made.model), made.train).total
    assert errors["energy_per_atom_rmse"] < 1.0


def test_a_new_element_has_no_energy_to_keep(run, write):
    nitrogen = {"train": [str(write(["N", "H", "H"]))]}
    with pytest.raises(ConfigError, match=r"finetune.e0: 'keep' has no energy .* \[7\]"):
        run(nitrogen, finetune={"e0": "keep"})


def test_data_without_any_element_of_the_source_are_refused(run, write):
    with pytest.raises(BevatronError, match="no element"):
        run({"train": [str(write(["N", "N"]))]})


@pytest.mark.parametrize("plain", [True, False])
def test_old_heads_predict_as_before_beside_a_new_one(run, acac_store, converted, plain):
    new = {"train": [str(acac_store)]}
    data = new if plain else {"heads": {"fine": new}}
    made = run(data, finetune={"keep_heads": True})
    name = "finetuned" if plain else "fine"
    assert made.model.config.heads == ("default", name)
    samples = [{**sample, "head": np.array(0, np.int32)} for sample in samples_of(made)]
    old, kept = (
        [r["energy"] for r in Potential(model, head="default").evaluate(samples)]
        for model in (converted, made.model)
    )
    np.testing.assert_allclose(kept, old, rtol=0, atol=1e-6)
    assert {int(sample["head"]) for sample in samples_of(made)} == {1}
    evaluation = evaluate_dataset(Potential(made.model, head=name), made.train)
    assert evaluation.total["energy_per_atom_rmse"] < 0.02
    assert list(evaluation.tables["head"]) == [name]


def test_old_and_new_data_train_heads_of_their_own_in_one_run(run, acac_store, write):
    water = write(["O", "H", "H"], per_atom=-25.0)
    heads = {"default": {"train": [str(water)]}, "fine": {"train": [str(acac_store)]}}
    made = run({"heads": heads}, finetune={"keep_heads": True})
    assert made.model.config.heads == ("default", "fine")
    assert {int(sample["head"]) for sample in samples_of(made)} == {0, 1}
    result = fit(made)
    assert result.finished == "epochs"
    assert load_model(made.folder).config.heads == ("default", "fine")


def test_frozen_parts_do_not_move_and_the_table_is_in_the_log(run):
    made = run(finetune={"frozen": ["embedding.*", "interactions.0.*"]}, optim={"ema": None})
    before = {name: value.clone() for name, value in made.model.state_dict().items()}
    fit(made)
    after = made.model.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert not any(name.startswith(("embedding.", "interactions.0.")) for name in moved)
    assert any(name.startswith("interactions.1.") for name in moved)
    log = (made.folder / "log.txt").read_text()
    assert "embedding.weight" in log
    assert "start: " in log


@pytest.mark.parametrize(
    ("frozen", "sentence"),
    [(["embeddingz.*"], "no parameter matches 'embeddingz"), (["*"], "nothing would be learnt")],
)
def test_a_frozen_pattern_must_match_something_and_leave_something(run, frozen, sentence):
    with pytest.raises(ConfigError, match=sentence):
        run(finetune={"frozen": frozen})


def test_another_architecture_than_the_source_has_is_refused(run):
    with pytest.raises(ConfigError, match=r"model.num_channels: is 8, .* is 16"):
        run(model={"num_channels": 8})


def test_a_file_to_start_from_is_to_be_converted_first(run, acac):
    with pytest.raises(CheckpointError, match="bevatron convert mace-torch"):
        run(start_from=str(acac))


def losses(folder):
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "step"]


def test_a_fine_tuning_run_resumes_to_the_same_losses(run):
    batch, twice = {"capacity": 45}, {**TRAIN, "epochs": 2}
    whole = run(output="whole", train=twice, batch=batch)
    fit(whole)
    fit(run(output="halves", batch=batch))
    halves = run(output="halves", resume=True, train=twice, batch=batch)
    fit(halves)
    assert len(losses(whole.folder)) > 4
    assert losses(halves.folder) == losses(whole.folder)


def test_only_a_new_model_of_the_default_size_is_said_to_be_slow_on_a_cpu(converted):
    new = {"output": "run", "data": {"train": ["a.xyz"]}, "train": TRAIN}
    assert "preset small" in _slow_here(MaceRun.from_values(new))[0]
    for change in ({"preset": "small"}, {"start_from": str(converted)}):
        assert not _slow_here(MaceRun.from_values({**new, **change}))
