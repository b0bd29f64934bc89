"""Clusters of proteins that a user's file gives."""

import os
import time

import protein_texts as proteins
import pytest

from bevatron.data.proteins.clusters import cluster_proteins
from bevatron.errors import DataError
from bevatron.recipes.alphafold2 import stores as chains
from bevatron.recipes.alphafold3 import stores as complexes
from bevatron.recipes.proteins.clusters import CLUSTERS, write_clusters

SEQUENCES = {
    1: "MKVLAAGIVG" * 4,
    2: "WWYHHPRNDC" * 4,
    3: "MKVLAAGIVG" * 4 + "M",
    4: "TTTSSSQQQE" * 4,
}
NAMED = {"4hhb_A": 1, "4hhb_1": 1, "1abc_model_A": 2, "2xyz_a": 3, "2xyz_B": 4}

# Says its version, and gives each sequence a cluster of its own.
MMSEQS = """#!/bin/sh
if [ $1 = version ]; then echo {version}; exit; fi
sed -n 's/^>\\(.*\\)/\\1\t\\1/p' $2 > $3_cluster.tsv
"""


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


def clustered_by(monkeypatch, calls, seconds=0.0):
    """Note every clustering in a file, which other processes share."""

    def cluster(sequences, advance):
        with calls.open("a") as file:
            file.write(f"{len(sequences)}\n")
        time.sleep(seconds)
        return cluster_proteins(sequences, advance=advance)

    monkeypatch.setattr("bevatron.recipes.proteins.clusters.cluster_proteins", cluster)


def test_clusters_of_the_same_proteins_and_file_are_kept(tmp_path, monkeypatch):
    calls, file = tmp_path / "calls", tmp_path / "given.txt"
    clustered_by(monkeypatch, calls)
    file.write_text("4hhb_A 1abc_model_A\n")
    for _ in range(2):
        assert "2 of 4 distinct" in write_clusters(SEQUENCES, tmp_path, file, NAMED)[0]
    assert calls.read_text() == "2\n"
    file.write_text("4hhb_A 1abc_model_A 2xyz_B\n")
    assert "1 of 4 distinct" in write_clusters(SEQUENCES, tmp_path, file, NAMED)[0]
    write_clusters(SEQUENCES, tmp_path)
    write_clusters(SEQUENCES | {5: "MKVLY" * 9}, tmp_path)
    before = clusters(tmp_path)
    (tmp_path / CLUSTERS).write_text("1 2\n")
    write_clusters(SEQUENCES | {5: "MKVLY" * 9}, tmp_path)
    assert calls.read_text().split() == ["2", "1", "4", "5", "5"]
    assert clusters(tmp_path) == before


def test_clusters_are_of_a_version_of_mmseqs2_wherever_it_is(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    clustered_by(monkeypatch, calls)
    for folder, version in (("a", "14.7e284"), ("b", "14.7e284"), ("b", "15.6f452")):
        program = tmp_path / folder / "mmseqs"
        program.parent.mkdir(exist_ok=True)
        program.write_text(MMSEQS.format(version=version))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
        write_clusters(SEQUENCES, tmp_path)
    assert calls.read_text() == "4\n4\n"
    program.write_text("#!/bin/sh\necho no such library >&2\nexit 127\n")
    with pytest.raises(DataError, match="mmseqs: could not say its version: no such library"):
        write_clusters(SEQUENCES, tmp_path)


def test_clusters_of_chains_that_are_named_otherwise_now_are_made_anew(tmp_path):
    file = tmp_path / "given.txt"
    file.write_text("4hhb_A 1abc_model_A\n2xyz_B\n")
    write_clusters(SEQUENCES, tmp_path, file, NAMED)
    assert frozenset("12") in clusters(tmp_path)
    write_clusters(SEQUENCES, tmp_path, file, NAMED | {"4hhb_A": 4, "2xyz_B": 1})
    assert frozenset("42") in clusters(tmp_path)


def test_one_of_several_processes_clusters(tmp_path, monkeypatch):
    calls = tmp_path / "calls"
    clustered_by(monkeypatch, calls, seconds=0.3)
    children = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            write_clusters(SEQUENCES, tmp_path)
            os._exit(0 if len(clusters(tmp_path)) == 3 else 1)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0, 0, 0]
    assert calls.read_text() == "4\n"


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
