"""E0 of a model to fine-tune: the old ones, changed as far as the new data determine it."""

import ase.io
import numpy as np
import pytest
from ase.build import molecule

from bevatron.models.mace import load_model
from bevatron.recipes.mace import finetune
from bevatron.recipes.mace.calculator import BevatronCalculator
from bevatron.recipes.mace.run import MaceRun, build

ELEMENTS = (1, 6, 8)


@pytest.fixture(scope="module")
def ethanol(shared, tmp_path_factory):
    """Six structures of ethanol; those of `alcohols` are methanol."""
    frames = ase.io.read(shared / "data/mace/ethanol_methanol_train.extxyz.gz", "400:900:10")
    target = tmp_path_factory.mktemp("data") / "ethanol.xyz"
    ase.io.write(target, [atoms for atoms in frames if len(atoms) == 9][:6])
    return target


@pytest.fixture
def relabel(converted, tmp_path):
    """Write structures of files with the model's own energies and forces, E0 shifted."""

    def make(*paths, shift=(0.0, 0.0, 0.0), name="own.xyz", **info):
        frames = [atoms for path in paths for atoms in ase.io.read(path, ":")]
        calculator = BevatronCalculator(converted, device="cpu")
        for atoms in frames:
            atoms.calc = calculator
            counts = [(atoms.numbers == z).sum() for z in ELEMENTS]
            energy = atoms.get_potential_energy() + float(np.dot(shift, counts))
            forces = atoms.get_forces()
            atoms.calc = None
            atoms.info = {"energy": energy, **info}
            atoms.arrays["forces"] = forces
        target = tmp_path / name
        ase.io.write(target, frames, columns=["symbols", "positions", "forces"])
        return target

    return make


@pytest.fixture
def run(converted, tmp_path):
    """Builds a fine-tuning run of files."""

    def make(*files, data=None, **changes):
        values = {
            "output": str(tmp_path / "run"),
            "start_from": str(converted),
            "data": {"prepare_workers": 1, **(data or {"train": [str(f) for f in files]})},
            "report": False,
            "train": {"device": "cpu", "dtype": "float64"},
        }
        return build(MaceRun.from_values({**values, **changes}))

    return make


def change(run, converted, head=0):
    """E0 of H, C and O less those of the old model."""
    old = np.array(load_model(converted).config.atomic_energies[0])
    assert run.model.config.atomic_numbers == ELEMENTS
    new = np.array(run.model.config.atomic_energies[head])
    np.testing.assert_array_equal(run.model.get_buffer("atomic_energies").numpy()[head], new)
    return new - old


def origin(run, head="default"):
    (line,) = (note for note in run.notes if note.startswith(f"E0 of head '{head}': "))
    return line


def test_own_labels_of_one_composition_change_no_energy_of_any_molecule(
    run, relabel, acac, alcohols, converted
):
    made = run(relabel(acac))
    np.testing.assert_allclose(change(made, converted), 0, atol=1e-9)
    methanol = ase.io.read(alcohols, 0)
    energies = []
    for model in (converted, made.model):
        methanol.calc = BevatronCalculator(model, device="cpu")
        energies.append(methanol.get_potential_energy())
    assert energies[1] == pytest.approx(energies[0], abs=1e-8)
    assert "1 of 3 elements determined, H, C, O only in combinations" in origin(made)


def test_a_shift_of_one_element_is_recovered_where_the_compositions_determine_it(
    run, relabel, acac, alcohols, ethanol, converted
):
    shift = (0.0, 0.0, 3.0)
    made = run(relabel(acac, alcohols, ethanol, shift=shift))
    np.testing.assert_allclose(change(made, converted), shift, atol=1e-6)
    assert "at most 3 eV (O); 3 of 3 elements determined" in origin(made)


def test_a_shift_that_is_not_determined_is_the_smallest(run, relabel, acac, converted):
    composition = np.array([8, 5, 2])
    made = run(relabel(acac, shift=(0.0, 0.0, 3.0)))
    expected = 6 * composition / (composition @ composition)
    np.testing.assert_allclose(change(made, converted), expected, atol=1e-6)
    assert "energies of other compositions shift too, unless data.e0 gives" in origin(made)


def test_an_element_is_refitted_however_rare_it_is(run, relabel, acac, tmp_path, monkeypatch):
    """Only the last of many structures holds nitrogen, whose E0 the old model does not know."""
    monkeypatch.setattr(finetune, "REFIT_STRUCTURES", 2)
    frames = ase.io.read(relabel(acac), ":")
    ammonia = molecule("NH3")
    ammonia.info["energy"] = -1500.0
    ammonia.arrays["forces"] = np.zeros((4, 3))
    path = tmp_path / "with-ammonia.xyz"
    for atoms in frames:
        atoms.info["energy"] = atoms.get_potential_energy()
        atoms.arrays["forces"] = atoms.get_forces()
        atoms.calc = None
    ase.io.write(path, [*frames, ammonia], columns=["symbols", "positions", "forces"])
    made = run(data={"train": [str(path)], "valid_size": 0.0})
    ammonia.calc = BevatronCalculator(made.model, device="cpu")
    assert ammonia.get_potential_energy() == pytest.approx(-1500.0, abs=1e-6)


def test_isolated_atoms_of_every_element_are_taken(run, relabel, acac, tmp_path, converted):
    atoms = tmp_path / "atoms.xyz"
    lines = [
        f"1\nProperties=species:S:1:pos:R:3 energy={e} config_type=IsolatedAtom\n{s} 0 0 0\n"
        for s, e in (("H", -13.5), ("C", -1030.0), ("O", -2040.0))
    ]
    atoms.write_text("".join(lines))
    made = run(relabel(acac), atoms, data={"train": [str(relabel(acac)), str(atoms)]})
    assert made.model.config.atomic_energies[0] == (-13.5, -1030.0, -2040.0)
    assert origin(made).endswith(": from isolated atoms")


def test_the_log_names_the_origin_that_e0_have(run, relabel, acac, converted):
    data = relabel(acac)
    old = load_model(converted).config.atomic_energies[0]
    kept = run(data, finetune={"e0": "keep"})
    assert origin(kept) == "E0 of head 'default': kept, those of the old model's head 'default'"
    np.testing.assert_array_equal(change(kept, converted), 0)
    fitted = run(data, finetune={"e0": "data"})
    assert "least squares over 11 structures" in origin(fitted)
    values = dict(zip("HCO", old, strict=True))
    given = run(data={"train": [str(data)], "e0": values})
    assert origin(given) == "E0 of head 'default': given"
    fresh = run(data, start_from=None, preset="small")
    assert "least squares over 11 structures" in origin(fresh)


def test_the_log_names_the_origin_for_replayed_and_kept_heads(run, relabel, acac, alcohols):
    replay, new = relabel(alcohols, name="replay.xyz"), relabel(acac, shift=(1.0, 1.0, 1.0))
    heads = {"default": {"train": [str(replay)]}, "new": {"train": [str(new)]}}
    made = run(data={"heads": heads}, finetune={"keep_heads": True})
    kept = "kept, those of the old model's head 'default'"
    assert origin(made) == f"E0 of head 'default': {kept}"
    assert "smallest change" in origin(made, "new")
    alone = run(new, finetune={"keep_heads": True})
    assert origin(alone) == f"E0 of head 'default': {kept}"
    assert "smallest change" in origin(alone, "finetuned")
    assert sum("least squares" in note for note in made.notes) == 0
