"""Malformed files of proteins are one sentence each, and nothing beside them is lost."""

import csv
import os
import resource
import signal
import time
from pathlib import Path

import malformed_proteins as malformed
import numpy as np
import protein_texts as proteins
import pytest

from bevatron.data.proteins.alignments import Alignments
from bevatron.data.readers.proteins import read_structure
from bevatron.errors import DataError
from bevatron.recipes.alphafold2.stores import open_chains, prepare_chains
from bevatron.recipes.alphafold3.stores import ComplexFeaturizer, open_complexes, prepare_complexes

CASES = malformed.everything()
MEMORY, SECONDS = 700 << 20, 30
LONGEST = 400
"""Characters of a sentence besides the path."""


@pytest.fixture(autouse=True)
def bounded():
    """Little memory and time: what asks for more fails."""

    def late(*_):
        raise AssertionError(f"not done after {SECONDS} s")

    size = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (size + MEMORY, before[1]))
    handler = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, handler)
    resource.setrlimit(resource.RLIMIT_AS, before)


def test_there_are_two_hundred():
    assert len({case.name for case in CASES}) == len(CASES) >= 200


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_a_malformed_file_is_one_sentence_that_names_it(tmp_path, case):
    path = tmp_path / case.name
    path.write_bytes(case.content)
    begun = time.process_time()
    try:
        case.read(path)
    except DataError as error:
        sentence = str(error)
        # An assembly is asked of what was read; `prepare` adds the file.
        assert str(path) in sentence or sentence.startswith("GOOD: ")
        assert "\n" not in sentence
        assert len(sentence) < LONGEST + len(str(path))
        assert case.says is None or case.says in sentence
    else:
        assert case.says is None
    assert time.process_time() - begun < 5


# ---- through prepare ----


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All malformed structures, alignments and archives in one folder, good files among them."""
    root = tmp_path_factory.mktemp("malformed") / "files"
    for case in CASES:
        if case.read in (malformed.assembled, malformed.read_alignment, malformed.archived):
            place = root / case.name[0]
            place.mkdir(parents=True, exist_ok=True)
            (place / case.name).write_bytes(case.content)
    good = root / "good"
    good.mkdir()
    (good / "good.cif").write_bytes(proteins.cif())
    (good / "other.pdb").write_bytes(proteins.pdb())
    (good / "good.a3m").write_bytes(proteins.A3M)
    (root / "nowhere.cif").symlink_to(root / "absent.cif")
    (root / "circle.a3m").symlink_to(root / "circle.a3m")
    (root / "again").symlink_to(root)
    (root / "folder.cif").mkdir()
    (root / "noise.png").write_bytes(malformed.NOISE)
    return root


@pytest.fixture(scope="module")
def components(tmp_path_factory):
    path = tmp_path_factory.mktemp("components") / "components.cif"
    path.write_bytes(proteins.COMPONENTS)
    return str(path)


def prepare(system, files, out, components, **options):
    options = {"workers": 0, "progress": False} | options
    if system == "alphafold3":
        prepare_complexes(files, out, components=components, **options)
        return open_complexes(out)
    prepare_chains(files, out, **options)
    return open_chains(out)


@pytest.fixture(scope="module", params=["alphafold3", "alphafold2"])
def prepared(request, folder, components, tmp_path_factory):
    """A system and its store of that folder."""
    out = tmp_path_factory.mktemp(request.param) / "s"
    return request.param, prepare(request.param, [folder], out, components)


def test_what_is_good_beside_malformed_files_is_in_the_store(
    prepared, folder, components, tmp_path
):
    system, store = prepared
    alone = prepare(system, [folder / "good"], tmp_path / "good", components)
    names = [Path(path).name for path in store.manifest["sources"]]
    for entry in alone:
        place = names.index(Path(alone.manifest["sources"][entry["source"][0]]).name)
        for field, value in entry.items():
            if field != "source":
                np.testing.assert_array_equal(store[place][field], value, field)
    found, expected = (Alignments.open(each.path / "alignments") for each in (store, alone))
    for index in range(len(expected)):
        query = expected[index].read(slice(0, 1), np.arange(expected[index].num_columns))[0][0]
        rows = [
            {row.tobytes() for part, _ in each[each.find(query)].stream() for row in part}
            for each in (found, expected)
        ]
        assert rows[0] >= rows[1]


def test_every_malformed_file_is_listed_with_its_reason(prepared):
    system, store = prepared
    with store.path.with_name("s-rejects.csv").open(newline="") as file:
        rows = list(csv.reader(file))[1:]
    # The good files of the archives are copies of one.
    copies = [path for path, reason in rows if reason.startswith("is a copy of ")]
    assert {Path(path).name for path in copies} == {"good.cif"}
    listed = {Path(path).name: reason for path, reason in rows if path not in copies}
    no_assemblies = system == "alphafold2"
    for case in CASES:
        if case.read is malformed.read_alignment or case.read is malformed.assembled:
            if no_assemblies and case.name.startswith("assembly"):
                continue
            if case.says is not None:
                assert case.says in f"{case.name}, {listed[case.name]}", case
        elif case.read is malformed.archived and case.says is not None:
            (stem, _, _), names = case.name.partition("."), set(listed)
            assert {case.name, f"{stem}.cif", f"..\\{stem}.cif"} & names, case
    assert {"nowhere.cif", "circle.a3m"} <= set(listed)
    assert not {"good.cif", "other.pdb", "good.a3m", "noise.png"} & set(listed)
    for name, reason in listed.items():
        assert reason, name
        assert "\n" not in reason, name
        assert len(reason) < LONGEST, name


@pytest.mark.parametrize("system", ["alphafold3", "alphafold2"])
@pytest.mark.parametrize("name", ["Cartn_x_nan.cif", "unequal.a3m", "cut.cif.gz"])
def test_strictly_a_malformed_file_stops_with_its_name(system, name, folder, components, tmp_path):
    victim = folder / name[0] / name
    with pytest.raises(DataError, match=rf"{name}"):
        prepare(system, [folder / "good", victim], tmp_path / "s", components, strict=True)


def test_a_hundred_thousand_residues_are_read_and_refused_by_number(components, tmp_path):
    path = tmp_path / "long.cif"
    residues = ("GLY",) * 100_000
    path.write_bytes(proteins.calphas(residues))
    structure = read_structure(path)
    assert len(structure.residues.number) == 100_000
    featurize = ComplexFeaturizer(components, max_tokens=5_000, keep_all=True)
    raw = {"path": np.frombuffer(str(path).encode(), np.uint8), "number": np.array(0)}
    reason = featurize(raw)["reason"].tobytes().decode()
    assert "100,000 tokens, more than 5,000" in reason
