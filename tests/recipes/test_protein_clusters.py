"""Clusters of proteins that a user's file gives."""

import protein_texts as proteins
import pytest

from bevatron.errors import DataError
from bevatron.recipes.alphafold2 import stores as chains
from bevatron.recipes.alphafold3 import stores as complexes
from bevatron.recipes.protein_clusters import CLUSTERS, write_clusters

SEQUENCES = {
    1: "MKVLAAGIVG" * 4,
    2: "WWYHHPRNDC" * 4,
    3: "MKVLAAGIVG" * 4 + "M",
    4: "TTTSSSQQQE" * 4,
}
NAMED = {"4hhb_A": 1, "4hhb_1": 1, "1abc_model_A": 2, "2xyz_a": 3, "2xyz_B": 4}


def clusters(folder):
    return {frozenset(line.split()) for line in (folder / CLUSTERS).read_text().splitlines()}


@pytest.mark.parametrize(
    "text",
    [
        "4HHB_1 1ABC_model_A 9ZZZ_A\n2XYZ_a 8YYY_C\n",
        "4hhb_A\t4hhb_A\n4hhb_A\t1abc_model_A\n2xyz_a\t2xyz_a\n",
    ],
)
def test_a_file_decides_on_the_proteins_that_it_names(tmp_path, text):
    file = tmp_path / "clusters.tsv"
    file.write_text(text)
    said = write_clusters(SEQUENCES, tmp_path, file, NAMED)
    assert said == [
        f"1 of 4 distinct proteins are not in {file}; they are clustered among themselves"
    ]
    # The third is nearly the first, and the file has it apart.
    assert clusters(tmp_path) == {frozenset("12"), frozenset("3"), frozenset("4")}
    assert write_clusters(SEQUENCES, tmp_path) == []
    assert clusters(tmp_path) == {frozenset("13"), frozenset("2"), frozenset("4")}


def test_a_file_of_other_proteins_is_refused(tmp_path):
    file = tmp_path / "clusters.txt"
    file.write_text("9ZZZ_A 8YYY_C\n")
    with pytest.raises(DataError, match=r"names no protein of the structures; .*such as 4hhb_A"):
        write_clusters(SEQUENCES, tmp_path, file, NAMED)


@pytest.mark.parametrize("system", [complexes, chains], ids=["alphafold3", "alphafold2"])
def test_chains_of_a_store_have_the_names_of_their_files(system, tmp_path, monkeypatch):
    monkeypatch.setattr("bevatron.data.proteins.conformers._embedded", lambda *_: [])
    (tmp_path / "1abc.cif").write_bytes(proteins.cif())
    (tmp_path / "damaged.cif").write_text("data_x")
    (tmp_path / "components.txt").write_bytes(proteins.COMPONENTS)
    out, file = tmp_path / "s", tmp_path / "clusters.txt"
    file.write_text("1ABC_A\n")
    options = {"clusters": file, "workers": 0, "progress": False}
    files = [tmp_path / "1abc.cif", tmp_path / "damaged.cif"]
    if system is complexes:
        system.prepare_complexes(files, out, components=str(tmp_path / "components.txt"), **options)
        store = system.open_complexes(out)
    else:
        system.prepare_chains(files, out, **options)
        store = system.open_chains(out)
    entry = next(entry for entry in store if len(entry["chain_key"]))
    assert system.named_keys(store)["1abc_A"] == entry["chain_key"][0]
