"""What lies in a laboratory's folders, and what is asked of them by mistake."""

import csv
import errno
import gzip
import os
import tarfile
from pathlib import Path

import protein_texts as proteins
import pytest

from bevatron.cli import main
from bevatron.data.proteins.alignments import Alignments
from bevatron.data.readers.proteins.folders import find_protein_files
from bevatron.errors import ConfigError, DataError, StoreError
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains
from bevatron.recipes.alphafold2.stores import prepared as chain_stores
from bevatron.recipes.alphafold3.stores import prepare_complexes
from bevatron.recipes.inspect import inspect_store
from bevatron.recipes.proteins import clusters, copies, inspect
from bevatron.recipes.proteins.data import ProteinDataConfig
from bevatron.recipes.proteins.stores import find_structures
from bevatron.recipes.rejects import rejects_file


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "files"
    (place / "ab").mkdir(parents=True)
    (place / "1abc.cif").write_bytes(proteins.cif())
    return place


def prepare(folder, out, **options):
    lines = prepare_chains([folder], out, workers=0, progress=False, **options)
    return open_chains(out), lines


def test_copies_of_a_structure_are_left_out_and_named(folder, tmp_path):
    (folder / "ab/1ABC.cif.gz").write_bytes(gzip.compress(proteins.cif()))
    (folder / "ab/1abc.pdb").write_bytes(proteins.pdb())
    for name in ("copy of 1abc.cif", "copy of 1abc.cif.gz"):
        content = proteins.cif()
        (folder / "ab" / name).write_bytes(gzip.compress(content) if ".gz" in name else content)
    other = {("atom_site", "Cartn_x", 0): "1.5"}  # of the same size
    (folder / "ab/2abc.cif").write_bytes(proteins.cif(other))
    assert len(proteins.cif(other)) == len(proteins.cif())
    store, lines = prepare(folder, tmp_path / "s")
    assert [Path(path).name for path in store.manifest["sources"]] == [
        "1abc.cif", "1abc.pdb", "2abc.cif",
    ]  # fmt: skip
    reason = f"is a copy of {folder / '1abc.cif'}, which is read instead"
    with (tmp_path / "s-rejects.csv").open(newline="") as file:
        listed = list(csv.reader(file))[1:]
    assert listed == [
        [str(folder / name), reason]
        for name in ("ab/1ABC.cif.gz", "ab/copy of 1abc.cif", "ab/copy of 1abc.cif.gz")
    ]
    assert any(reason in line for line in lines)


def test_structures_of_a_size_and_a_name_of_their_own_are_not_read_to_find_copies(
    folder, tmp_path, monkeypatch
):
    with tarfile.open(folder / "more.tar", "w") as tar:
        for name, text in (("2abc.cif", b""), ("3abc.cif", b"#"), ("4abc.cif", b"#")):
            (tmp_path / name).write_bytes(proteins.cif() + b"# " + text)
            tar.add(tmp_path / name, name)
    hashed = []
    monkeypatch.setattr(copies, "content_hash", lambda p: hashed.append(p.name) or p.name)
    assert len(find_structures([folder]).structures) == 4
    assert hashed == ["3abc.cif", "4abc.cif"]


def test_a_file_that_is_like_two_others_makes_them_copies_too(folder, tmp_path):
    (folder / "1abc.cif").unlink()
    (folder / "a copy.cif").write_bytes(proteins.cif())
    for name in ("ab/1abc.cif.gz", "b/1abc.cif"):
        (folder / name).parent.mkdir(exist_ok=True)
        content = proteins.cif()
        (folder / name).write_bytes(gzip.compress(content) if ".gz" in name else content)
    store, lines = prepare(folder, tmp_path / "s")
    assert store.manifest["sources"] == [str(folder / "b/1abc.cif")]
    reason = f"is a copy of {folder / 'b/1abc.cif'}, which is read instead"
    left = {line.partition(": ")[2] for line in lines if line.startswith("left out: ")}
    assert left == {f"{folder / name}: {reason}" for name in ("a copy.cif", "ab/1abc.cif.gz")}


def test_empty_files_are_no_copies_of_each_other(folder, tmp_path):
    for name in ("2abc.cif", "ab/2abc.cif.gz", "ab/3abc.pdb"):
        (folder / name).write_bytes(b"")
    _, lines = prepare(folder, tmp_path / "s")
    left = [line for line in lines if line.startswith("left out: ")]
    assert len(left) == 3
    assert all(": is empty; expected" in line for line in left)


def test_a_folder_that_may_not_be_listed_is_named(folder, tmp_path, monkeypatch):
    (folder / "ab/2abc.cif").write_bytes(proteins.cif())
    listed = os.scandir

    def scandir(place):
        if str(place).endswith("/ab"):
            raise PermissionError(errno.EACCES, "Permission denied", str(place))
        return listed(place)

    monkeypatch.setattr(os, "scandir", scandir)
    store, lines = prepare(folder, tmp_path / "s")
    assert store.manifest["sources"] == [str(folder / "1abc.cif")]
    reason = "is a folder that cannot be read (Permission denied); check its permissions"
    assert f"left out: {folder / 'ab'}: {reason}" in lines


def test_links_to_folders_are_followed_once(folder, tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "2abc.cif").write_bytes(proteins.cif())
    (folder / "ab/3abc.cif").write_bytes(proteins.cif())
    for name, target in {
        "again": folder,
        "above": tmp_path,
        "0": folder / "ab",
        "linked": elsewhere,
        "twice": elsewhere,
    }.items():
        (folder / name).symlink_to(target)
    found = find_protein_files([folder]).structures
    assert found == tuple(folder / name for name in ("1abc.cif", "ab/3abc.cif", "linked/2abc.cif"))


def test_the_next_command_is_quoted_for_a_shell(folder, tmp_path):
    _, lines = prepare(folder, tmp_path / "my store")
    out = tmp_path / "my store"
    assert lines[-1] == f"train with: bevatron train alphafold2 --data '{out}' --output RUN"


@pytest.mark.parametrize("text", ["no key\n", "1\n2 1\n", None], ids=["text", "twice", "missing"])
def test_damaged_clusters_of_a_store_are_named(folder, tmp_path, text):
    store, _ = prepare(folder, tmp_path / "s")
    path = store.path / "clusters.txt"
    path.unlink()
    if text is not None:
        path.write_text(text)
    with pytest.raises(
        StoreError, match=r"clusters\.txt: is missing or damaged; run prepare again"
    ):
        clusters.clusters_of(store.path)
    with pytest.raises(
        StoreError, match=r"clusters\.txt: is missing or damaged; run prepare again"
    ):
        inspect_store(store.path, tmp_path / "page")


def test_validation_on_no_sample_is_refused():
    with pytest.raises(ConfigError, match="valid_most: expected 1 or more, got 0"):
        ProteinDataConfig(valid_most=0)


def test_a_long_reason_ends_at_a_word(folder, tmp_path):
    store, _ = prepare(folder, tmp_path / "s")
    reason = "six words of twenty six letters " * 9
    (tmp_path / "s-rejects.csv").write_text(f"file,reason\na.cif,{reason}\n")
    kinds, listed = inspect.rejects(store)
    assert kinds.rows[0][0] == listed.rows[0][1]
    assert listed.rows[0][1] == f"{reason[:116]}…"


def test_of_many_files_one_is_named_for_each_reason(folder, tmp_path):
    for number in range(12):
        (folder / f"strange{number:02}.a3m").write_text(f">q\n{'MKTAYIAKQRQISFVKSHFS' * 2}\n")
    (folder / "damaged.cif").write_text("data_x\n")
    store, lines = prepare(folder, tmp_path / "s")
    left = [line for line in lines if "left out" in line]
    assert len(left) == 3
    assert left[0].startswith(f"left out: {folder / 'damaged.cif'}: ")
    assert left[1].startswith(f"left out: {folder / 'strange00.a3m'} and 11 others: its first")
    assert left[2] == "files left out: 13"
    assert f"all are listed in {rejects_file(store)}" in lines


def test_hits_may_name_the_copy_of_a_structure(folder, tmp_path):
    (folder / "2abc.cif").write_bytes(proteins.cif())
    tables = proteins.tables_of(("GLY", *proteins.RESIDUES[1:]))
    tables["pdbx_audit_revision_history"]["revision_date"] = ["2000-02-03"]
    for name in ("3abc", "4abc"):
        (folder / f"{name}.cif").write_bytes(proteins.cif(tables=tables))
    hit = "2abc_A\t4abc_A\t0.9\t12\t1\t0\t1\t12\t1\t12\t1e-9\t70\t12M\n"
    (folder / "hits.m8").write_text(hit)
    _, lines = prepare(folder, tmp_path / "s")
    assert "usable: 2 of 2 structures" in lines
    assert "template hit files: 1, templates: 1, sequences with templates: 1" in lines


def test_a_run_keeps_its_data(folder, tmp_path):
    out = tmp_path / "run/prepared"
    assert chain_stores((folder,), out) == (out,)
    (folder / "2abc.pdb").write_bytes(proteins.pdb())
    with pytest.raises(StoreError, match=r"prepared: .* other inputs .*; a run keeps its") as found:
        chain_stores((folder,), out)
    assert "overwrite" not in str(found.value)


def test_one_process_says_what_a_run_has_prepared(folder, tmp_path, capsys, monkeypatch):
    for rank, said in ((0, True), (1, False)):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "2")
        chain_stores((folder,), tmp_path / "prepared")
        assert ("usable: 1 of 1" in capsys.readouterr().out) == said


def test_files_of_one_name_and_other_content_are_all_kept(folder, tmp_path):
    for number, value in enumerate(("1.0", "2.0", "nan")):
        (folder / str(number)).mkdir()
        content = proteins.cif({("atom_site", "Cartn_x", 0): value})
        (folder / str(number) / "ranked_0.cif").write_bytes(content)
    store, _ = prepare(folder, tmp_path / "s")
    assert len(store) == 4
    with (tmp_path / "s-rejects.csv").open(newline="") as file:
        ((path, reason),) = list(csv.reader(file))[1:]
    assert path == str(folder / "2/ranked_0.cif")
    assert "position" in reason


def test_aligned_fasta_is_an_alignment(folder, tmp_path):
    rows = f">q\n{proteins.SEQUENCE}\n>other\n{proteins.SEQUENCE[:-2]}--\n"
    (folder / "x.afa").write_text(rows)
    (folder / "sequences.fasta").write_text(">q\nACD\n")
    _, lines = prepare(folder, tmp_path / "s")
    (alignment,) = Alignments.open(tmp_path / "s/alignments")
    assert alignment.num_rows == 2
    assert "files of other kinds, ignored: 1" in lines


def test_no_folder_at_all_is_asked_for():
    with pytest.raises(DataError, match="no file or folder is given"):
        find_structures([])


def test_a_file_of_clusters_is_read_before_the_work(folder, tmp_path):
    with pytest.raises(DataError, match=r"nowhere\.txt: cannot be read"):
        prepare(folder, tmp_path / "s", clusters=tmp_path / "nowhere.txt")
    assert not (tmp_path / "s").exists()


def test_a_structure_is_no_dictionary_of_components(folder, tmp_path):
    content = proteins.cif(add="loop_\n_chem_comp.id\nALA\nGLY\nSER\n#\n")
    (folder / "1abc.cif").write_bytes(content)
    with pytest.raises(DataError, match=r"1abc\.cif: names components but not their atoms"):
        prepare_complexes([folder], tmp_path / "s", components=str(folder / "1abc.cif"))
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["1abc.cif"]


def test_numbers_that_make_no_sense_are_refused(folder, tmp_path):
    with pytest.raises(ConfigError, match="max_tokens: expected at least 1, got -3"):
        prepare_complexes([folder], tmp_path / "s", max_tokens=-3)
    with pytest.raises(ConfigError, match="workers: expected at least 0, got -1"):
        prepare_chains([folder], tmp_path / "s", workers=-1)


def test_too_many_proteins_for_the_built_in_clusters_are_clusters_of_their_own(
    folder, tmp_path, monkeypatch
):
    (folder / "2abc.cif").write_bytes(proteins.cif(tables=proteins.tables_of(("GLY", "SER") * 8)))
    monkeypatch.setattr(clusters, "MOST_CLUSTERED", 1)
    monkeypatch.setattr(clusters.shutil, "which", lambda _: None)
    _, lines = prepare(folder, tmp_path / "s")
    assert any("2 distinct proteins are too many to cluster without mmseqs2" in x for x in lines)
    assert not (tmp_path / "s/clusters.txt").read_text()  # what is in no cluster is one


@pytest.mark.parametrize("system", ["alphafold2", "alphafold3"])
def test_a_store_without_any_usable_structure_is_an_error_that_names_the_list(
    folder, tmp_path, system, capsys
):
    for name in ("1abc", "2abc"):
        (folder / f"{name}.cif").write_text(f"data_{name}\n")
    out, rejects = tmp_path / "s", tmp_path / "s-rejects.csv"
    (tmp_path / "components.cif").write_bytes(proteins.COMPONENTS)
    options = ["--components", str(tmp_path / "components.cif")] if system == "alphafold3" else []
    words = ["prepare", system, str(folder), "--out", str(out), "--workers", "0", *options]
    for _ in range(2):  # also of the finished store
        assert main(words) == 2
        said = capsys.readouterr()
        assert said.err.splitlines()[-1] == (
            f"error: {out}: holds no usable structure: 2 structures left out, listed with the "
            f"reasons in {rejects}"
        )
        assert f"left out: {folder / '1abc.cif'}: holds no atoms" in said.out
        assert "train with" not in said.out
    with rejects.open(newline="") as file:
        listed = [row[0] for row in csv.reader(file)][1:]
    assert listed == [str(folder / f"{name}.cif") for name in ("1abc", "2abc")]
    assert main(["inspect", str(out)]) == 0
    assert "holds no atoms" in capsys.readouterr().out


def test_one_of_a_kind_is_counted_as_one(folder, tmp_path):
    _, lines = prepare(folder, tmp_path / "s")
    residues = len(proteins.RESIDUES)
    assert "usable: 1 of 1 structure" in lines
    assert f"1 chain of {residues} residues, {residues} resolved" in lines
