"""Hits beside structures reach samples of training, and those of an input its prediction."""

import json
import shutil

import numpy as np
import pytest

from bevatron.data.proteins.chain_index import UNKNOWN_DAY
from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.sample import SampleSizes
from bevatron.data.readers.proteins import read_hits, read_inputs, read_structure
from bevatron.errors import DataError, StoreError
from bevatron.recipes.alphafold2.data import ChainDataset, chain_table, templates_of
from bevatron.recipes.alphafold2.predict import chain_to_predict
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains
from bevatron.recipes.alphafold3.data import ComplexDataset
from bevatron.recipes.alphafold3.stores import open_complexes, prepare_complexes
from bevatron.recipes.proteins.inputs import known_of

pytestmark = pytest.mark.shared
NAMES = "4hhb", "1crr", "102m"


@pytest.fixture(scope="module")
def hits(shared):
    return shared / "data/proteins/templates/template_hits.tsv.gz"


@pytest.fixture(scope="module")
def folder(shared, tmp_path_factory):
    root = tmp_path_factory.mktemp("with") / "mmcif"
    root.mkdir()
    for name in NAMES:
        shutil.copy(shared / f"data/proteins/mmcif/{name}.cif.gz", root)
    return root


def chain_samples(store, seeds):
    table = chain_table(open_chains(store))
    sizes = ChainSizes(residues=40, msa_rows=2, extra_rows=1)
    data = ChainDataset(store, table.units, table.length, sizes, 1)
    return [[data.sample(n, seed) for seed in seeds] for n in range(len(data))], data


def test_chains_with_hits_show_templates_and_others_do_not_change(folder, hits, tmp_path):
    out = {}
    for name, files in (("with", [folder, hits]), ("without", [folder])):
        lines = prepare_chains(files, tmp_path / name, workers=0, progress=False)
        said = any("templates: 1, sequences with templates: 1" in line for line in lines)
        assert said == (name == "with")
        out[name], data = chain_samples(tmp_path / name, range(12))
    shown = []
    for number, (some, none) in enumerate(zip(out["with"], out["without"], strict=True)):
        for a, b in zip(some, none, strict=True):
            for field, value in b.items():
                if not field.startswith("template_"):
                    np.testing.assert_array_equal(a[field], value, field)
            assert (a["template_mask"].shape, b["template_mask"].shape) == ((4,), (1,))
            assert not b["template_mask"].any()
        if any(each["template_mask"].any() for each in some):
            shown.append(data.describe(number))
            counts = {int(each["template_mask"].sum()) for each in some}
            assert counts == {0, 1}
            assert any((each["template_torsions_mask"]).any() for each in some)
    # Only myoglobin has a hit that is old enough, and haemoglobin is it.
    assert [name.endswith("102m.cif.gz, chain A") for name in shown] == [True]


def test_complexes_with_hits_show_templates_and_others_do_not_change(
    folder, hits, tmp_path, shared, monkeypatch
):
    # To embed components takes longer than all the rest.
    monkeypatch.setattr("bevatron.data.proteins.conformers._embedded", lambda *_: [])
    components = str(shutil.copy(shared / "data/complexes/ccd_subset.cif.gz", tmp_path))
    samples = {}
    for name, files in (("with", [folder, hits]), ("without", [folder])):
        store = tmp_path / name
        prepare_complexes(files, store, components=components, workers=0, progress=False)
        entries = np.arange(len(open_complexes(store)))
        units = np.stack([entries, 0 * entries, 0 * entries], axis=1)
        sizes = SampleSizes(CropSizes(tokens=60, atoms=900), 4, best_templates=True)
        samples[name] = [ComplexDataset(store, units, sizes).sample(n, 0) for n in entries]
    for some, none in zip(samples["with"], samples["without"], strict=True):
        for field, value in none.items():
            if not field.startswith("template_"):
                np.testing.assert_array_equal(some[field], value, field)
        assert not none["template_backbone_mask"].any()
    assert [each["template_backbone_mask"].any(1).sum() for each in samples["with"]] == [1, 0, 0]
    shown = samples["with"][0]
    rows = shown["template_backbone"][0][shown["template_backbone_mask"][0]]
    lengths = np.linalg.norm(rows[:, 1] - rows[:, 0], axis=-1)
    assert np.median(lengths) == pytest.approx(1.46, abs=0.03)


def job(sequence, **protein):
    chain = {"protein": {"id": "A", "sequence": sequence, **protein}}
    return json.dumps({
        "name": "x", "modelSeeds": [1], "dialect": "alphafold3", "version": 1, "sequences": [chain]
    })  # fmt: skip


def templates(source, searches=()):
    (given,) = read_inputs(source)
    with known_of(given, searches) as known:
        query = chain_to_predict(given.entities[0])["query"]
        return templates_of(query, known.templates, UNKNOWN_DAY)


def test_an_error_beside_an_input_keeps_its_kind(tmp_path):
    (tmp_path / "x.json").write_text(job("ACDE"))
    (given,) = read_inputs(tmp_path / "x.json")
    with pytest.raises(StoreError, match=r"^rows are damaged$"), known_of(given):
        raise StoreError("rows are damaged")


def test_templates_of_an_input_and_of_searches_are_the_same(shared, folder, hits, tmp_path):
    mmcif = shared / "data/proteins/mmcif"
    found, template = read_hits(hits), mmcif / "1mvo.cif.gz"
    pairs = found.pairs_of(found.queries.index("3cfy_A"))
    sequence = read_structure(mmcif / "3cfy.cif.gz").sequence(0)
    indices = {"queryIndices": pairs[:, 0].tolist(), "templateIndices": pairs[:, 1].tolist()}
    (tmp_path / "x.fasta").write_text(f">3cfy_A\n{sequence}\n")
    by_search = templates(tmp_path / "x.fasta", [hits, template])
    assert not templates(tmp_path / "x.fasta")

    def given(*chosen):
        (tmp_path / "x.json").write_text(job(sequence, templates=chosen))
        return templates(tmp_path / "x.json", [hits, template])

    assert not given()
    by_input = given({"mmcifPath": str(template), **indices})
    assert by_input.keys() == by_search.keys()
    for name in by_input.keys() - {"template_released"}:
        np.testing.assert_array_equal(by_input[name], by_search[name], name)
    boltz = tmp_path / "x.yaml"
    boltz.write_text(
        f"version: 1\nsequences:\n  - protein:\n      id: A\n      sequence: {sequence}\n"
        f"      msa: empty\ntemplates:\n  - cif: {template}\n    chain_id: A\n"
        "    template_id: A\n"
    )
    aligned = templates(boltz)["template_aatype"] == by_input["template_aatype"]
    assert aligned.mean() > 0.5
    unlike = read_structure(template).sequence(0)[:20] + "W" * 100
    boltz.write_text(boltz.read_text().replace(sequence, unlike))
    with pytest.raises(DataError, match="is too unlike the chain to be aligned"):
        templates(boltz)
    with pytest.raises(
        DataError, match=r"x\.json, chain A, template 1: its structure has 4 protein"
    ):
        given({"mmcifPath": str(folder / "4hhb.cif.gz"), **indices})
    indices["queryIndices"] = [len(sequence)] * len(pairs)
    with pytest.raises(DataError, match=f"template 1: aligns residue {len(sequence)} of"):
        given({"mmcifPath": str(template), **indices})
