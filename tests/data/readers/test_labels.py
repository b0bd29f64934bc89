"""Labels are found under their common names, brought to one form, or refused in one sentence."""

import numpy as np
import pytest

from bevatron.config import from_dict, to_dict
from bevatron.data.readers import LabelOptions, open_reader
from bevatron.errors import DataError

CUBE = 'Lattice="2 0 0 0 2 0 0 0 2"'


def frame(info, columns="", atoms=("He 0 0 0", "He 1 1 1"), lattice=CUBE):
    properties = f"Properties=species:S:1:pos:R:3{columns}"
    return f"{len(atoms)}\n{lattice} {properties} {info}\n" + "\n".join(atoms) + "\n"


WITH_FORCES = ("He 0 0 0 1 0 0", "He 1 1 1 -1 0 0")


def opened(tmp_path, text, **options):
    path = tmp_path / "train.xyz"
    path.write_text(text)
    return open_reader(path, LabelOptions(**options))


def samples(tmp_path, text, **options):
    reader = opened(tmp_path, text, **options)
    return list(reader.read(0, reader.num_samples))


@pytest.mark.parametrize(
    "name",
    ["REF_energy", "ref_energy", "dft_energy", "DFT_energy", "energy", "Energy", "free_energy"],
)
def test_common_names_of_energy_are_found(tmp_path, name):
    (sample,) = samples(tmp_path, frame(f"{name}=-3.5"))
    assert sample["energy"] == -3.5


@pytest.mark.parametrize("name", ["REF_forces", "dft_forces", "DFT_force", "forces", "force"])
def test_common_names_of_forces_are_found(tmp_path, name):
    (sample,) = samples(tmp_path, frame("energy=-1", f":{name}:R:3", WITH_FORCES))
    assert sample["forces"].tolist() == [[1, 0, 0], [-1, 0, 0]]


FULL = np.array([[1.0, 6, 5], [6, 2, 4], [5, 4, 3]])


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ('REF_stress="1 6 5 6 2 4 5 4 3"', FULL),
        ('stress="1 2 3 4 5 6"', FULL),
        ("dft_stress=[[1, 6, 5], [6, 2, 4], [5, 4, 3]]", FULL),
        ('stress="_JSON [[1, 6, 5], [6, 2, 4], [5, 4, 3]]"', FULL),
        ('REF_virials="1 6 5 6 2 4 5 4 3"', -FULL / 8),
        ('virial="1 2 3 4 5 6"', -FULL / 8),
    ],
)
def test_stress_and_virials_in_every_form_become_one_stress(tmp_path, info, expected):
    (sample,) = samples(tmp_path, frame(f"energy=-1 {info}"))
    np.testing.assert_allclose(sample["stress"], expected)


def test_ase_agrees_on_the_order_of_six_numbers(tmp_path):
    from ase.stress import voigt_6_to_full_3x3_stress

    assert (voigt_6_to_full_3x3_stress(np.arange(1.0, 7)) == FULL).all()


def test_an_explicit_name_outranks_a_plain_one_and_the_report_says_so(tmp_path):
    reader = opened(tmp_path, frame("energy=-1 REF_energy=-2"))
    assert next(reader.read(0, 1))["energy"] == -2
    assert "energy: all from REF_energy" in reader.report()[0]
    assert "not used: energy" in reader.report()[0]


def test_plain_energy_outranks_free_energy(tmp_path):
    (sample,) = samples(tmp_path, frame("free_energy=-1.1 energy=-1"))
    assert sample["energy"] == -1


def test_a_given_name_is_used_whatever_else_is_there(tmp_path):
    text = frame("energy=-1 REF_energy=-2 mine=-3", ":force:R:3", WITH_FORCES)
    (sample,) = samples(tmp_path, text, energy_key="mine", forces_key="")
    assert sample["energy"] == -3
    assert sample["forces"].shape == (0, 3)


def test_mixed_availability_is_normal_and_counted(tmp_path):
    text = (
        frame('energy=-1 stress="1 1 1 0 0 0"', ":forces:R:3", WITH_FORCES)
        + frame('energy=-2 virial="1 1 1 0 0 0"', ":forces:R:3", WITH_FORCES)
        + frame("energy=-3")
        + frame("config_type=unlabelled")
    )
    reader = opened(tmp_path, text)
    first, second, third, fourth = reader.read(0, 4)
    assert first["stress"][0, 0] == 1
    assert second["stress"][0, 0] == pytest.approx(-1 / 8)
    assert np.isnan(third["stress"]).all()
    assert third["forces"].shape == (0, 3)
    assert np.isnan(fourth["energy"])
    (line,) = reader.report()
    assert "4 frames; energy: 3 of 4 from energy; forces: 2 of 4 from forces" in line
    assert "stress: 2 of 4 from stress, virial" in line


def test_stress_of_a_molecule_is_left_out_and_reported(tmp_path):
    reader = opened(tmp_path, frame('energy=-1 stress="0 0 0 0 0 0"', lattice=""))
    assert np.isnan(next(reader.read(0, 1))["stress"]).all()
    assert "stress: none (left out in 1 without periodic axes)" in reader.report()[0]


def test_weights_groups_and_heads(tmp_path):
    text = frame(
        "energy=-1 config_type=bulk config_weight=2 config_energy_weight=3 forces_weight=4 "
        "config_stress_weight=0 head=b"
    ) + frame("energy=-2")
    first, second = samples(tmp_path, text, heads=("a", "b"), group_weights={"bulk": 10.0})
    assert first["weights"].tolist() == [20, 3, 4, 0]
    assert int(first["head"]) == 1
    assert bytes(first["group"]) == b"bulk"
    assert second["weights"].tolist() == [1, 1, 1, 1]
    assert int(second["head"]) == 0
    assert len(second["group"]) == 0


def test_isolated_atoms_keep_their_group_and_their_zero_forces(tmp_path):
    text = frame(
        "energy=-1 config_type=IsolatedAtom", ":forces:R:3", ["H 0 0 0 0 0 0"], ""
    ) + frame("energy=-2", ":forces:R:3", WITH_FORCES)
    atom, _ = samples(tmp_path, text)
    assert bytes(atom["group"]) == b"IsolatedAtom"
    assert atom["forces"].tolist() == [[0, 0, 0]]


def test_a_file_of_isolated_atoms_may_be_all_zero(tmp_path):
    text = frame("energy=0 config_type=IsolatedAtom", ":forces:R:3", ["H 0 0 0 0 0 0"], "")
    assert samples(tmp_path, text)[0]["energy"] == 0


def test_two_explicit_names_with_one_value_are_no_contradiction(tmp_path):
    assert samples(tmp_path, frame("REF_energy=-2 dft_energy=-2.0000001"))[0]["energy"] == -2


STRESS = 'stress="1 1 1 0 0 0"'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            frame("REF_energy=-1 dft_energy=-2"),
            r"frame 0: both 'REF_energy' \(-1\) and 'dft_energy' \(-2\) hold energy and differ",
        ),
        (
            frame(
                "energy=-1",
                ":REF_forces:R:3:dft_forces:R:3",
                ["He 0 0 0 1 0 0 2 0 0", "He 1 1 1 -1 0 0 -2 0 0"],
            ),
            "frame 0: both 'REF_forces' .* and 'dft_forces' .* hold forces and differ",
        ),
        (
            frame(f'energy=-1 {STRESS} virial="8 8 8 0 0 0"'),
            "frame 0: both 'stress' .* and 'virial' .* hold stress and differ",
        ),
        (
            frame("REF_energy=-1") + frame("energy=-1"),
            "frame 1: has 'energy' where other frames have 'REF_energy'; set energy_key",
        ),
        (frame("E0=-1 spin=2"), r"no frame has an energy \(the names found are 'E0', 'spin'\)"),
        (frame("xtb_energy=-1"), "set energy_key='xtb_energy' if that is the energy"),
        (
            frame("energy=-1", ":xtb_forces:R:3", WITH_FORCES),
            "no forces under a common name, but 'xtb_forces' looks like one; set forces_key='xtb",
        ),
        (frame('energy=-1 xtb_stress="1 1 1 0 0 0"'), "set stress_key='xtb_stress'"),
        (frame("energy=0") + frame("energy=0.0"), "the energy 'energy' is zero in every frame"),
        (
            frame("energy=-1", ":forces:R:3", ["He 0 0 0 0 0 0", "He 1 1 1 0 -0.0 0"]),
            "the forces 'forces' are zero on every atom of every frame",
        ),
        (frame('energy=-1 stress="0 0 0 0 0 0"'), "the stress 'stress' is zero in every frame"),
        (frame("energy=nan"), "frame 0: the energy 'energy' holds NaN"),
        (
            frame("energy=-1") + frame("energy=-inf"),
            "frame 1: the energy 'energy' holds NaN or inf",
        ),
        (
            frame("energy=-1", ":forces:R:3", ["He 0 0 0 1 0 0", "He 1 1 1 0 1e300 0"]),
            r"frame 0: the forces 'forces' holds .* a number beyond 3\.4e\+38",
        ),
        (frame("energy=much"), "frame 0: 'energy' is 'much', not numbers"),
        (frame('energy="1 2"'), "the energy 'energy' has 2 numbers; expected one"),
        (
            frame("energy=-1", ":forces:R:3", ["He 0 0 0 1 0 0", "He 1 1 1 nan 0 0"]),
            "frame 0: the forces 'forces' holds NaN",
        ),
        (
            frame("energy=-1", ":forces:R:1", ["He 0 0 0 1", "He 1 1 1 2"]),
            r"frame 0: the forces 'forces' have shape \(2, 1\); expected \(2, 3\)",
        ),
        (frame('energy=-1 stress="1 2 3"'), "the stress 'stress' have 3 numbers; expected 9"),
        (frame('energy=-1 stress="1 2 3 4 5 nan"'), "the stress 'stress' holds NaN"),
        (frame('energy=-1 stress="1 2 3 4 5 6 7 8 9"'), "the stress 'stress' are not symmetric"),
        (
            frame(f'energy=-1 {STRESS} pbc="T T F"', lattice='Lattice="2 0 0 0 2 0 0 0 0"'),
            "the stress 'stress' are given, but the cell has no volume",
        ),
        (frame("energy=-1 config_weight=-1"), "the weight 'config_weight' is '-1'"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_in_one_sentence(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        samples(tmp_path, text)
    assert str(tmp_path / "train.xyz") in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"energy_key": "E"},
            r"no frame has the energy 'E' \(the names found are 'energy', 'head'\)",
        ),
        ({"forces_key": "F"}, "no frame of any file has the forces 'F'"),
        ({"stress_key": "S"}, "no frame of any file has the stress 'S'"),
        ({"heads": ("a",)}, "the head 'b' in 'head' is not one of a"),
    ],
)
def test_a_wrong_option_is_refused(tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        samples(tmp_path, frame("energy=-1 head=b"), **options)


def test_zeros_are_taken_on_request(tmp_path):
    text = frame("energy=0", ":forces:R:3", ["He 0 0 0 0 0 0", "He 1 1 1 0 0 0"])
    assert samples(tmp_path, text, allow_zero_labels=True)[0]["energy"] == 0


def test_zero_forces_of_one_file_among_others_are_a_note(tmp_path):
    zero = frame("energy=-1", ":forces:R:3", ["He 0 0 0 0 0 0", "He 1 1 1 0 0 0"])
    (tmp_path / "a.xyz").write_text(zero)
    (tmp_path / "b.xyz").write_text(frame("energy=-1", ":forces:R:3", WITH_FORCES))
    report = open_reader([tmp_path / "a.xyz", tmp_path / "b.xyz"]).report()
    assert "a.xyz: note: the forces 'forces' are zero on every atom" in report[-1]


def test_for_prediction_nothing_needs_a_label_and_nan_is_none(tmp_path):
    text = frame("xtb_energy=-1") + frame("energy=nan", ":forces:R:3", WITH_FORCES)
    first, second = samples(tmp_path, text, allow_unlabelled=True)
    assert np.isnan(first["energy"])
    assert np.isnan(second["energy"])
    assert len(second["forces"]) == 2


def test_for_prediction_contradicting_labels_do_not_matter(tmp_path):
    text = frame('REF_energy=-1 dft_energy=-2 stress="1 1 1 0 0 0" virial="9 9 9 0 0 0"') + frame(
        "dft_energy=-3"
    )
    first, second = samples(tmp_path, text, allow_unlabelled=True)
    assert first["energy"] == -1
    assert np.isnan(second["energy"])


def test_options_survive_a_configuration_file():
    options = LabelOptions(energy_key="E", heads=("a", "b"), group_weights={"bulk": 2.0})
    assert from_dict(LabelOptions, to_dict(options)) == options


def test_without_energies_on_request(tmp_path):
    (sample,) = samples(tmp_path, frame("x=1", ":forces:R:3", WITH_FORCES), energy_key="")
    assert np.isnan(sample["energy"])
    assert len(sample["forces"]) == 2
