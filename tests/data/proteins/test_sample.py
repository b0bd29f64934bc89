"""Samples of AlphaFold3: what is in them is that of the entry, and a seed is all of chance."""

import dataclasses
import time

import numpy as np
import pytest
import torch

from bevatron.data.proteins.alignment_files import AlignmentReader
from bevatron.data.proteins.alignments import prepare_alignments, sequence_key
from bevatron.data.proteins.complex_batch import collate_complex
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.featurize import describe, featurize
from bevatron.data.proteins.poses import make_pools
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.proteins.template_store import TemplatesInMemory
from bevatron.data.proteins.templates import NUM_TEMPLATES, Templates
from bevatron.data.readers.proteins.alignments import read_alignment
from bevatron.data.readers.proteins.alphabet import GAP, sequence_classes
from bevatron.data.readers.proteins.structures import read_structure
from bevatron.errors import DataError
from bevatron.models.alphafold3.permutation import permute_truth

pytestmark = pytest.mark.shared

NAMES = ["7a4d", "2hhb", "721p", "5ugo", "1pfe"]
TYPES = {
    "int64": "restype residue_index token_index asym_id entity_id sym_id molecule_type ref_element "
    "ref_atom_name_chars ref_space_uid atom_to_token token_bonds centre_atom representative_atom "
    "frame_atoms polymer_ligand_bonds molecule molecule_entity molecule_copies molecule_copy "
    "permutation_ptr permutation_atoms seed",
    "bool": "token_mask ref_mask atom_mask msa_mask resolved has_frame copy_resolved "
    "template_pseudo_beta_mask template_backbone_mask",
    "float32": "ref_pos ref_charge profile deletion_mean position resolution copy_position "
    "template_pseudo_beta template_backbone",
    "int8": "msa template_restype",
    "uint8": "deletion",
}


@pytest.fixture(scope="module")
def entries(shared, dictionary):
    found = {}
    for name in NAMES:
        structure = read_structure(shared / f"data/complexes/mmcif/{name}.cif.gz")
        found[name] = featurize(structure.assembly("1"), dictionary)
    return found


def made_up_templates(entry, seed=0):
    rng = np.random.default_rng(seed)
    found = TemplatesInMemory()
    for chain in describe(entry)["chains"]:
        if chain["kind"] == "protein":
            classes = sequence_classes("protein", chain["sequence"])
            number = int(rng.integers(0, 8))
            rows = number * len(classes)
            found[sequence_key(classes)] = {
                "template_aatype": rng.integers(0, 20, rows).astype(np.int8),
                "template_positions": rng.normal(size=(rows, 4, 3)).astype(np.float32),
                "template_atom_mask": rng.random((rows, 4)) < 0.8,
                "template_torsions": np.zeros((rows, 7, 2), dtype=np.float32),
                "template_torsions_mask": np.zeros((rows, 7), dtype=bool),
                "template_released": np.zeros(number, dtype=np.int32),
            }
    return found


@pytest.fixture(scope="module")
def sources(shared, entries, dictionary, tmp_path_factory):
    codes = {code for entry in entries.values() for code in describe(entry)["components"]}
    files = [
        path
        for name in NAMES
        for path in sorted((shared / f"data/complexes/msa/{name}").glob("*.a3m.gz"))
    ]
    out = tmp_path_factory.mktemp("alignments") / "store"
    alignments = prepare_alignments(AlignmentReader(files), out, workers=0)
    templates = TemplatesInMemory()
    for entry in entries.values():
        templates.update(made_up_templates(entry))
    return Sources(make_pools([dictionary[c] for c in codes], 2), alignments, templates)


def sizes(tokens, rows=64, atoms=100_000, shares=(0.2, 0.4, 0.4)):
    return SampleSizes(CropSizes(tokens, atoms, shares), rows)


def same(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.tobytes() == second[name].tobytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_a_seed_gives_the_same_bytes_and_another_does_not(entries, sources, name):
    entry = entries[name]
    for seed in (0, 7, 2**63 - 1):
        first = sample(entry, seed, sources, sizes(60))
        same(first, sample({k: v.copy() for k, v in entry.items()}, seed, sources, sizes(60)))
        other = sample(entry, seed ^ 1, sources, sizes(60))
        assert first["ref_pos"].tobytes() != other["ref_pos"].tobytes()


def test_every_draw_has_a_stream_of_its_own(entries, sources):
    few = sample(entries["7a4d"], 5, sources, sizes(100, rows=3))
    many = sample(entries["7a4d"], 5, sources, sizes(100, rows=900))
    assert few["msa"].shape != many["msa"].shape
    for name in few.keys() - {"msa", "deletion", "msa_mask"}:
        assert few[name].tobytes() == many[name].tobytes(), name


@pytest.mark.parametrize("name", NAMES)
def test_types_are_those_of_the_contract(entries, sources, name):
    found = sample(entries[name], 1, sources, sizes(80))
    expected = {key: dtype for dtype, keys in TYPES.items() for key in keys.split()}
    assert {key: str(value.dtype) for key, value in found.items()} == expected


@pytest.mark.parametrize("name", NAMES)
def test_a_crop_is_a_part_of_the_entry(entries, sources, name):
    entry = entries[name]
    first = np.cumsum(entry["num_atoms"]) - entry["num_atoms"]
    for seed in range(12):
        atoms = int(np.random.default_rng(seed).integers(100, 900))
        found = sample(entry, seed, sources, sizes(100, atoms=atoms))
        tokens = found["token_index"]
        assert len(tokens) <= 100
        assert len(found["position"]) <= atoms
        of_entry = np.concatenate([first[t] + np.arange(entry["num_atoms"][t]) for t in tokens])
        np.testing.assert_array_equal(found["position"], entry["position"][of_entry])
        np.testing.assert_array_equal(found["resolved"], entry["resolved"][of_entry])
        np.testing.assert_array_equal(found["ref_element"] + 1, entry["ref_element"][of_entry])
        np.testing.assert_array_equal(found["ref_charge"], entry["ref_charge"][of_entry])
        for key in ("restype", "asym_id", "entity_id", "sym_id", "residue_index", "molecule_type"):
            np.testing.assert_array_equal(found[key], entry[key][tokens])
        for key in ("centre_atom", "representative_atom"):
            np.testing.assert_array_equal(of_entry[found[key]], entry[key][tokens])
            np.testing.assert_array_equal(
                found["atom_to_token"][found[key]], np.arange(len(tokens))
            )
        inside = np.isin(entry["frame_atoms"][tokens], of_entry).all(axis=1)
        np.testing.assert_array_equal(found["has_frame"], inside & entry["has_frame"][tokens])
        framed = found["has_frame"]
        np.testing.assert_array_equal(
            of_entry[found["frame_atoms"][framed]], entry["frame_atoms"][tokens][framed]
        )
        kept = np.isin(entry["token_bonds"], tokens).all(axis=1)
        np.testing.assert_array_equal(tokens[found["token_bonds"]], entry["token_bonds"][kept])
        kept = np.isin(entry["polymer_ligand_bonds"], of_entry).all(axis=1)
        np.testing.assert_array_equal(
            of_entry[found["polymer_ligand_bonds"]], entry["polymer_ligand_bonds"][kept]
        )


@pytest.mark.parametrize("name", NAMES)
def test_indices_are_in_range_and_values_finite(entries, sources, name):
    for seed in range(8):
        found = sample(entries[name], seed, sources, sizes(70))
        tokens, atoms = len(found["restype"]), len(found["position"])
        for key in ("centre_atom", "representative_atom", "frame_atoms", "polymer_ligand_bonds"):
            assert ((found[key] >= 0) & (found[key] < atoms)).all(), key
        assert ((found["token_bonds"] >= 0) & (found["token_bonds"] < tokens)).all()
        assert (np.diff(found["atom_to_token"]) >= 0).all()
        assert set(found["atom_to_token"].tolist()) == set(range(tokens))
        assert (np.diff(found["ref_space_uid"]) >= 0).all()
        residues = int(found["ref_space_uid"][-1]) + 1
        assert set(found["ref_space_uid"].tolist()) == set(range(residues))
        assert len(found["permutation_ptr"]) == residues + 1
        assert found["permutation_ptr"][-1] == len(found["permutation_atoms"])
        assert ((found["msa"] >= 0) & (found["msa"] <= GAP)).all()
        assert ((found["ref_atom_name_chars"] >= 0) & (found["ref_atom_name_chars"] < 64)).all()
        assert ((found["ref_element"] >= 0) & (found["ref_element"] < 128)).all()
        for key, value in found.items():
            if value.dtype == np.float32 and key != "resolution":
                assert np.isfinite(value).all(), key


@pytest.mark.parametrize("name", NAMES)
def test_permutations_keep_the_bonds_inside_the_crop(entries, sources, name):
    entry = entries[name]
    bonds = {tuple(sorted(pair)) for pair in entry["bonds"].tolist()}
    first = np.cumsum(entry["num_atoms"]) - entry["num_atoms"]
    listed = 0
    for seed in range(6):
        found = sample(entry, seed, sources, sizes(50, shares=(0, 1, 0)))
        of_entry = np.concatenate(
            [first[t] + np.arange(entry["num_atoms"][t]) for t in found["token_index"]]
        )
        ptr = found["permutation_ptr"]
        for residue in np.flatnonzero(np.diff(ptr)):
            atoms = of_entry[found["ref_space_uid"] == residue]
            rows = found["permutation_atoms"][ptr[residue] : ptr[residue + 1]]
            rows = rows.reshape(-1, len(atoms))
            assert len(rows) > 1
            assert len(np.unique(rows, axis=0)) == len(rows)
            assert rows[0].tolist() == list(range(len(atoms)))
            inner = [
                (i, j) for i in range(len(atoms)) for j in range(i) if (atoms[j], atoms[i]) in bonds
            ]
            for row in rows:
                assert sorted(row) == list(range(len(atoms)))
                for i, j in inner:
                    assert tuple(sorted((atoms[row[i]], atoms[row[j]]))) in bonds
            listed += len(rows)
    assert listed > 10


@pytest.mark.parametrize("name", NAMES)
def test_copies_of_a_molecule_are_those_of_the_whole_entry(entries, sources, name):
    entry = entries[name]
    token_of_atom = np.repeat(np.arange(len(entry["restype"])), entry["num_atoms"])
    chain = entry["asym_id"][token_of_atom] - 1
    names = [tuple(row) for row in entry["ref_atom_name_chars"].tolist()]
    place = {  # chain, number of the residue, name of the atom
        (int(c), int(entry["residue_index"][t]), n): a
        for a, (c, t, n) in enumerate(zip(chain, token_of_atom, names, strict=True))
    }
    molecule_of_chain, kinds = entry["molecule_id"], entry["molecule_entity"]
    alone = np.bincount(molecule_of_chain)[molecule_of_chain] == 1
    for seed in range(4):
        found = sample(entry, seed, sources, sizes(60))
        atoms = np.flatnonzero(np.isin(token_of_atom, found["token_index"]))
        of_atom = found["molecule"][found["atom_to_token"]]
        own = found["molecule_copy"][of_atom]
        columns = np.arange(len(atoms))
        np.testing.assert_array_equal(found["copy_position"][own, columns], found["position"])
        np.testing.assert_array_equal(found["copy_resolved"][own, columns], found["resolved"])
        assert len(found["copy_position"]) == found["molecule_copies"].max()
        beyond = np.arange(len(found["copy_position"]))[:, None] >= found["molecule_copies"]
        assert not found["copy_resolved"][beyond[:, of_atom]].any()
        checked = 0
        for column in columns[::7]:
            atom = atoms[column]
            if not alone[chain[atom]]:
                continue
            copies = [c for c in range(len(kinds)) if kinds[c] == kinds[chain[atom]]]
            copies = list(dict.fromkeys(molecule_of_chain[c] for c in copies))
            assert found["molecule_copies"][of_atom[column]] == len(copies)
            for k, molecule in enumerate(copies):
                other = int(np.flatnonzero(molecule_of_chain == molecule)[0])
                number = int(entry["residue_index"][token_of_atom[atom]])
                there = place.get((other, number, names[atom]))
                seen = there is not None and bool(entry["resolved"][there])
                assert found["copy_resolved"][k, column] == seen
                if seen:
                    at = found["copy_position"][k, column]
                    np.testing.assert_array_equal(at, entry["position"][there])
            checked += 1
        assert checked


def test_rows_and_profiles_are_those_of_the_chains(entries, sources):
    entry = entries["7a4d"]
    found = sample(entry, 3, sources, sizes(300, rows=500))
    chains = describe(entry)["chains"]
    assert found["msa"].shape == found["deletion"].shape == found["msa_mask"].shape
    with_rows = 0
    for number, chain in enumerate(chains, start=1):
        tokens = np.flatnonzero(found["asym_id"] == number)
        if not len(tokens):
            continue
        if chain["kind"] != "protein":
            assert (found["msa"][:, tokens] == GAP).all()
            assert (found["profile"][tokens, GAP] == 1).all()
            continue
        column = entry["column"][found["token_index"][tokens]]
        classes = sequence_classes("protein", chain["sequence"])
        np.testing.assert_array_equal(found["msa"][0, tokens], classes[column])
        place = sources.alignments.find(classes)
        if place is None:
            assert (found["msa"][1:, tokens] == GAP).all()
        else:
            alignment = sources.alignments[place]
            np.testing.assert_array_equal(found["profile"][tokens], alignment.profile[column])
            rows = {
                tuple(row)
                for row, _ in [alignment.read(slice(None), column)]
                for row in row.tolist()
            }
            drawn = found["msa"][:, tokens].tolist()
            assert all(tuple(row) in rows or set(row) == {GAP} for row in drawn)
            with_rows += any(set(row) != {GAP} for row in drawn[1:])
    assert with_rows >= 2


def test_templates_are_drawn_for_each_sequence(entries, sources):
    entry = entries["721p"]
    classes = sequence_classes("protein", describe(entry)["chains"][0]["sequence"])
    source = made_up_templates(entry, seed=1)
    templates = Templates.of(source[sequence_key(classes)], len(classes))
    assert len(templates.restype) > NUM_TEMPLATES
    numbers = set()
    for seed in range(40):
        own = dataclasses.replace(sources, templates=source)
        found = sample(entry, seed, own, sizes(200, rows=2))
        shown = (found["template_restype"] != GAP).any(axis=1)
        number = int(shown.sum())
        assert shown.tolist() == [True] * number + [False] * (NUM_TEMPLATES - number)
        bare = dataclasses.replace(sources, templates=None)
        without = sample(entry, seed, bare, sizes(200, rows=2))
        assert (without["template_restype"] == GAP).all()
        assert len(without["template_restype"]) == 1
        numbers.add(number)
        tokens = np.flatnonzero(found["molecule_type"] == 0)
        column = entry["column"][found["token_index"][tokens]]
        for t in range(number):
            which = [
                k
                for k in range(len(templates.restype))
                if (found["template_restype"][t, tokens] == templates.restype[k, column]).all()
            ]
            assert len(which) == 1
            np.testing.assert_array_equal(
                found["template_backbone"][t, tokens], templates.backbone[which[0], column]
            )
        others = np.flatnonzero(found["molecule_type"] != 0)
        assert not found["template_pseudo_beta_mask"][:, others].any()
    assert numbers == {0, 1, 2, 3, 4}
    best = sample(entry, 0, own, dataclasses.replace(sizes(200, rows=2), best_templates=True))
    shown = best["template_restype"][:, best["molecule_type"] == 0]
    column = entry["column"][best["token_index"][best["molecule_type"] == 0]]
    np.testing.assert_array_equal(shown, templates.restype[:NUM_TEMPLATES, column])


def test_without_alignments_every_chain_has_its_own_sequence(entries, sources):
    alone = Sources(sources.poses)
    found = sample(entries["1pfe"], 0, alone, sizes(40))
    assert found["msa"].shape[0] == 1
    polymer = entries["1pfe"]["column"][found["token_index"]] >= 0
    np.testing.assert_array_equal(found["msa"][0, polymer], found["restype"][polymer])
    assert (found["msa"][0, ~polymer] == GAP).all()
    assert not found["template_backbone_mask"].any()


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_holds_a_sample_and_its_padded_shape(entries, sources, name):
    found = sample(entries[name], 3, sources, sizes(50))
    batch = collate_complex([found], np.array([0]), [1.0])
    for key, value in found.items():
        np.testing.assert_array_equal(getattr(batch, key).numpy(), value, key)
    assert batch.sizes["tokens"] == len(found["restype"])


@pytest.mark.parametrize("name", ["2hhb", "721p"])
def test_copies_and_atoms_that_were_exchanged_are_found_again(entries, sources, name):
    """A prediction in which copies of chains have changed places is no error."""
    found = sample(entries[name], 1, sources, sizes(10_000))
    batch = {key: torch.from_numpy(np.asarray(value)) for key, value in found.items()}
    moved = 0
    rollout = batch["position"].clone()
    of_atom = found["molecule"][found["atom_to_token"]]
    for molecule, (copy, copies) in enumerate(
        zip(found["molecule_copy"].tolist(), found["molecule_copies"].tolist(), strict=True)
    ):
        atoms = torch.from_numpy(np.flatnonzero(of_atom == molecule))
        rollout[atoms] = batch["copy_position"][(copy + 1) % copies, atoms]
        moved += copies > 1
    position, resolved = permute_truth(rollout, batch)
    assert moved
    error = (position - rollout)[resolved].square().sum(-1).mean().sqrt()
    before = (batch["position"] - rollout)[batch["resolved"]].square().sum(-1).mean().sqrt()
    assert before > 5.0
    assert error < 1.0


def test_a_component_without_poses_is_named_as_missing(entries):
    with pytest.raises(DataError, match="lacks"):
        sample(entries["1pfe"], 0, Sources(make_pools([])), sizes(40))


def test_a_sample_of_a_deep_complex_takes_less_than_to_read_its_files(shared, entries, sources):
    def median(function):
        times = []
        for seed in range(5):
            start = time.process_time()
            function(seed)
            times.append(time.process_time() - start)
        return np.median(times)

    files = sorted((shared / "data/complexes/msa/7a4d").glob("*.a3m.gz"))
    parsed = median(lambda _: [read_alignment(file) for file in files])
    entry = entries["7a4d"]
    drawn = median(lambda seed: sample(entry, seed, sources, sizes(384, rows=1024)))
    assert drawn < parsed / 3
