"""Reference poses: made once, kept in a file, drawn and moved for each sample."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from bevatron.data.proteins.conformers import (
    component_key,
    component_of_smiles,
    heavy_atoms,
    make_poses,
)
from bevatron.data.proteins.featurize import featurize
from bevatron.data.proteins.poses import (
    collected,
    make_pools,
    open_poses,
    prepare_poses,
    random_rotations,
    write_poses,
)
from bevatron.data.readers.proteins.structures import read_structure
from bevatron.errors import DataError

rdDistGeom = pytest.importorskip("rdkit.Chem.rdDistGeom")


def distances(points):
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


def handedness(component, position, *names):
    """Sign of the volume that four atoms span."""
    listed = component.atoms[heavy_atoms(component)].tolist()
    a, b, c, d = (position[listed.index(name)] for name in names)
    return np.sign(np.linalg.det(np.stack([b - a, c - a, d - a])))


def test_poses_have_the_bond_lengths_and_the_handedness_of_the_component(dictionary):
    component = dictionary["THR"]
    heavy = heavy_atoms(component)
    poses = make_poses(component, 5)
    assert poses.shape == (5, len(heavy), 3)
    place = {atom: row for row, atom in enumerate(heavy.tolist())}
    bonds = np.array([[place[i], place[j]] for i, j in component.bonds if {i, j} <= set(place)])
    ideal = component.ideal[heavy]
    for pose in poses:
        lengths, wanted = (distances(x)[bonds[:, 0], bonds[:, 1]] for x in (pose, ideal))
        np.testing.assert_allclose(lengths, wanted, atol=0.12)
        for centre in (("CA", "N", "C", "CB"), ("CB", "CA", "OG1", "CG2")):
            assert handedness(component, pose, *centre) == handedness(component, ideal, *centre)
    assert np.abs(distances(poses[0]) - distances(poses[1])).max() > 0.1


def test_poses_repeat_and_fewer_are_the_first_of_more(dictionary):
    poses = make_poses(dictionary["GOL"], 4)
    np.testing.assert_array_equal(make_poses(dictionary["GOL"], 4), poses)
    np.testing.assert_array_equal(make_poses(dictionary["GOL"], 1), poses[:1])


def test_without_rdkit_the_ideal_coordinates_are_used_and_said(dictionary, monkeypatch, capsys):
    from bevatron.data.proteins import conformers

    conformers._say_once.cache_clear()
    monkeypatch.setitem(sys.modules, "rdkit.Chem", None)
    component = dictionary["ATP"]
    poses = make_poses(component)
    make_poses(dictionary["GTP"])
    np.testing.assert_array_equal(poses, component.ideal[heavy_atoms(component)][None])
    said = "".join(capsys.readouterr())
    assert said.count("pip install 'bevatron[molecules]'") == 1
    assert "ideal coordinates" in said


def test_what_cannot_be_embedded_has_its_ideal_or_else_its_model_coordinates(
    dictionary, monkeypatch
):
    cage, complex_ = dictionary["60C"], dictionary["IRI"]
    np.testing.assert_array_equal(make_poses(cage, 2)[0], cage.ideal[heavy_atoms(cage)])
    assert np.isnan(complex_.ideal[heavy_atoms(complex_)]).any()
    monkeypatch.setattr("bevatron.data.proteins.conformers._embedded", lambda *_: [])
    poses = make_poses(complex_, 2)
    np.testing.assert_array_equal(poses[0], complex_.model[heavy_atoms(complex_)])


def test_the_key_of_a_component_is_that_of_its_content(dictionary):
    component = dictionary["GOL"]
    key = component_key(component)
    assert key == component_key(dictionary["GOL"]) >= 0
    assert key != component_key(replace(component, charges=component.charges + 1))
    assert key != component_key(dictionary["EDO"])


def test_pools_are_the_same_from_a_file(dictionary, tmp_path):
    wanted = [dictionary[code] for code in ("GOL", "MG", "ALA")]
    pools = make_pools(wanted, 3)
    write_poses(pools, tmp_path / "poses.arrow")
    found = open_poses(tmp_path / "poses.arrow")
    for component in wanted:
        key = component_key(component)
        np.testing.assert_array_equal(found.of(key), pools.of(key))
    assert found.of(component_key(dictionary["MG"])).shape == (1, 1, 3)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_file_gets_the_pools_that_it_lacks(dictionary, tmp_path, monkeypatch, workers):
    path = tmp_path / "poses.arrow"
    first = prepare_poses(path, dictionary, ["GOL", "MG"], workers=workers)
    expected = make_pools([dictionary["GOL"], dictionary["MG"]])
    np.testing.assert_array_equal(first.positions, expected.positions)
    made = []

    def counted(component, number):
        made.append(component.code)
        return make_poses(component, number)

    monkeypatch.setattr("bevatron.data.proteins.poses.make_poses", counted)
    more = prepare_poses(path, dictionary, ["EDO", "GOL"])
    assert made == ["EDO"]
    codes = ("EDO", "GOL", "MG")
    assert set(more.keys) == {component_key(dictionary[code]) for code in codes}
    for code in codes:
        component = dictionary[code]
        np.testing.assert_array_equal(more.of(component_key(component)), make_poses(component))
    assert [file.name for file in tmp_path.iterdir()] == ["poses.arrow"]


def test_parts_of_a_killed_call_are_not_made_again(dictionary, tmp_path, monkeypatch):
    path, codes = tmp_path / "poses.arrow", ("EDO", "GOL", "MG")
    monkeypatch.setattr("bevatron.data.proteins.poses._PER_PART", 1)
    made = []

    def stopped(component, number):
        made.append(component.code)
        if len(made) == 3:
            raise KeyboardInterrupt
        return make_poses(component, number)

    monkeypatch.setattr("bevatron.data.proteins.poses.make_poses", stopped)
    with pytest.raises(KeyboardInterrupt):
        prepare_poses(path, dictionary, codes)
    assert not path.exists()
    made.clear()
    prepare_poses(path, dictionary, codes)
    assert made == ["MG"]
    assert [file.name for file in tmp_path.iterdir()] == ["poses.arrow"]


def test_flipped_bytes_of_poses_are_named_when_read(dictionary, tmp_path):
    path = tmp_path / "poses.arrow"
    whole = prepare_poses(path, dictionary, ["GOL", "MG"])
    content = bytearray(path.read_bytes())
    content[content.index(whole.of(int(whole.keys[0])).tobytes()) + 7] ^= 4
    path.write_bytes(content)
    damaged = open_poses(path)
    np.testing.assert_array_equal(damaged.of(int(whole.keys[1])), whole.of(int(whole.keys[1])))
    with pytest.raises(DataError, match=r"poses.arrow: the conformers of component 0 are damaged"):
        damaged.of(int(whole.keys[0]))


def test_poses_of_another_version_are_made_anew(dictionary, tmp_path, monkeypatch):
    path = tmp_path / "poses.arrow"
    first = prepare_poses(path, dictionary, ["MG"])
    monkeypatch.setattr("bevatron.data.proteins.poses.FORMAT", b"bevatron poses 99")
    with pytest.raises(DataError, match="of this version; prepare again"):
        open_poses(path)
    assert prepare_poses(path, dictionary, ["MG"]).keys.tolist() == first.keys.tolist()


def test_a_file_that_is_none_is_refused(tmp_path):
    (tmp_path / "poses.arrow").write_bytes(b"no arrow")
    with pytest.raises(DataError, match=r"poses\.arrow: is not a file of reference conformers"):
        open_poses(tmp_path / "poses.arrow")


@pytest.mark.shared
def test_drawn_poses_are_rigid_copies_of_those_of_the_pool(shared, dictionary):
    structure = read_structure(shared / "data/complexes/mmcif/1pfe.cif.gz")
    entry = featurize(structure, dictionary)
    codes = {"A", *np.unique(structure.residues.component).tolist()} & set(dictionary)
    pools = make_pools((dictionary[code] for code in sorted(codes)), 2)
    fields = entry["component"], entry["ref_space_uid"], entry["pose_atom"]
    position, known = pools.draw(*fields, np.random.default_rng(3))
    assert known.all()
    assert position.dtype == np.float32
    again, _ = pools.draw(*fields, np.random.default_rng(3))
    other, _ = pools.draw(*fields, np.random.default_rng(4))
    np.testing.assert_array_equal(position, again)
    assert np.abs(position - other).min(axis=1).max() > 0.1
    for residue, key in enumerate(entry["component"]):
        atoms = np.flatnonzero(entry["ref_space_uid"] == residue)
        of_pool = pools.of(int(key))[:, entry["pose_atom"][atoms]]
        found = distances(position[atoms])
        assert min(np.abs(found - distances(pose)).max() for pose in of_pool) < 1e-4


def test_poses_of_a_crop_need_only_its_atoms(dictionary):
    pools = make_pools([dictionary["ALA"], dictionary["GLY"]], 1)
    keys = np.array([component_key(dictionary[code]) for code in ("ALA", "GLY", "ALA")])
    position, known = pools.draw(
        keys, np.array([0, 0, 2]), np.array([1, 4, 0]), np.random.default_rng(0)
    )
    pool = pools.of(int(keys[0]))[0]
    expected = np.linalg.norm(pool[1] - pool[4])
    assert known.all()
    assert np.linalg.norm(position[0] - position[1]) == pytest.approx(expected, abs=1e-4)


def test_drawn_poses_lie_about_the_origin_wherever_the_pool_lies(dictionary):
    pools = make_pools([dictionary["GOL"]], 1)
    far = collected({int(pools.keys[0]): pools.of(int(pools.keys[0])) + np.float32(100)})
    number, atoms = 500, int(pools.num_atoms[0])
    residue, atom = np.repeat(np.arange(number), atoms), np.tile(np.arange(atoms), number)
    position, _ = far.draw(far.keys[np.zeros(number, int)], residue, atom, np.random.default_rng(0))
    centre = position.reshape(number, atoms, 3).mean(axis=1)
    assert np.abs(centre.mean(axis=0)).max() < 0.2
    assert centre.std(axis=0) == pytest.approx(1, abs=0.15)


def test_a_component_without_poses_is_refused(dictionary):
    pools = make_pools([dictionary["GLY"]], 1)
    keys = np.array([component_key(dictionary["ALA"])])
    with pytest.raises(DataError, match="lacks 1 components of the entry"):
        pools.draw(keys, np.array([0]), np.array([0]), np.random.default_rng(0))


def test_rotations_are_proper_and_uniform():
    found = random_rotations(20000, np.random.default_rng(0))
    np.testing.assert_allclose(
        found @ found.transpose(0, 2, 1), np.eye(3)[None].repeat(20000, 0), atol=1e-12
    )
    np.testing.assert_allclose(np.linalg.det(found), 1)
    assert np.abs(found.mean(axis=0)).max() < 0.03
    # The angle of a uniform rotation has the density (1 - cos) / pi.
    angle = np.arccos((np.trace(found, axis1=1, axis2=2) - 1) / 2)
    assert angle.mean() == pytest.approx(np.pi / 2 + 2 / np.pi, abs=0.02)


def test_smiles_become_a_component_with_named_atoms_and_their_stereochemistry():
    left, right = (component_of_smiles(text, "L") for text in ("C[C@H](N)O", "C[C@@H](N)O"))
    heavy = heavy_atoms(left)
    assert left.atoms[heavy].tolist() == ["C1", "C2", "N1", "O1"]
    signs = {
        handedness(made, pose, "C2", "C1", "N1", "O1")
        for made in (left, right)
        for pose in make_poses(made, 3)
    }
    assert signs == {-1, 1}
    assert (
        len({handedness(left, pose, "C2", "C1", "N1", "O1") for pose in make_poses(left, 3)}) == 1
    )


def test_bonds_to_a_metal_have_no_order():
    made = component_of_smiles("[Zn+2]<-NCC", "L")
    metal = made.atoms.tolist().index("ZN1")
    assert made.orders[(made.bonds == metal).any(axis=1)].tolist() == [0]
    assert np.isfinite(make_poses(made, 1)).all()


def test_a_string_that_is_no_smiles_is_refused():
    with pytest.raises(DataError, match=r"'C\(' is not valid SMILES"):
        component_of_smiles("C(", "B")


def test_a_pose_that_was_interrupted_is_no_failure(dictionary, monkeypatch):
    # RDKit takes Ctrl-C for itself, and returns -1 as where there is no pose.
    component, embed = dictionary["ATP"], rdDistGeom.EmbedMolecule
    failures = iter([True])

    def interrupted(*given):
        return -1 if next(failures, False) else embed(*given)

    monkeypatch.setattr(rdDistGeom, "EmbedMolecule", interrupted)
    with pytest.raises(KeyboardInterrupt):
        make_poses(component, 1)
    failures = iter([True])
    with pytest.raises(KeyboardInterrupt):
        component_of_smiles("CCO", "LIG")
    monkeypatch.setattr(rdDistGeom, "EmbedMolecule", lambda *_: -1)
    assert np.array_equal(make_poses(component, 1)[0], component.ideal[heavy_atoms(component)])
