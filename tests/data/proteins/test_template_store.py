"""Hits find their chains, and templates are stored once for each sequence."""

import gzip
import pickle
import shutil

import numpy as np
import pytest

from bevatron.data.proteins.alignments import sequence_key
from bevatron.data.proteins.chain_index import UNKNOWN_DAY, day_number
from bevatron.data.proteins.hit_files import NamedChain, template_queries
from bevatron.data.proteins.places import ChainSequences
from bevatron.data.proteins.template_search import HitsOf, TemplateQuery
from bevatron.data.proteins.template_store import StoredTemplates, prepare_templates
from bevatron.data.readers.proteins import read_structure
from bevatron.data.readers.proteins.alphabet import sequence_classes
from bevatron.errors import DataError

pytestmark = pytest.mark.shared
COLUMNS = ["query", "target", "qstart", "qend", "tstart", "tend", "evalue", "bits", "qaln", "taln"]


@pytest.fixture(scope="module")
def haemoglobin(shared):
    return read_structure(shared / "data/proteins/mmcif/4hhb.cif.gz")


@pytest.fixture(scope="module")
def sequence(haemoglobin):
    return haemoglobin.sequence(0)


def classes(text):
    return sequence_classes("protein", text).tobytes()


def write_hits(path, sequence, *targets, query="q"):
    """Hits of the first 60 residues, of 61, and so on."""
    lines = ["\t".join(COLUMNS)]
    for number, target in enumerate(targets, start=60):
        part = sequence[:number]
        lines.append("\t".join(map(str, [query, target, 1, number, 1, number, 0, 9, part, part])))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path


def owners(files, chains, alignments=None, duplicates=()):
    sequences = ChainSequences(chain.classes for chain in chains)
    found, rejects = template_queries(files, chains, sequences, alignments or {}, duplicates)
    return {each.sequence: each.hits for each in found}, rejects


def test_hits_belong_to_chains_by_name_and_by_the_alignments_beside_them(tmp_path, sequence):
    one, two = sequence, sequence[::-1]
    chains = [NamedChain("1abc", ("A",), classes(one)), NamedChain("1abc", ("B",), classes(two))]
    beside = {tmp_path / "x/a3m/uniref90_hits.a3m": classes(two)}
    cases = {
        "any.m8": ("1ABC_B", two), "1abc_A.hits.m8": ("101", one), "1abc_B/hits.m8": ("q", two),
        "1abc-assembly1B_all.m8": ("101", two), "x/hhr/hits.m8": ("q", two),
        "2xyz_A/hits.m8": ("q", one), "1abc_C/hits.m8": ("q", None), "alone.m8": ("q", None),
    }  # fmt: skip
    for name, (query, expected) in cases.items():
        path = write_hits(tmp_path / name, one, "4hhb_A", query=query)
        found, rejects = owners([path], chains, beside, [("1abc_A", "2xyz_A")])
        assert found == ({expected: (HitsOf(path, query),)} if expected else {}), name
        assert [file for file, _ in rejects] == ([] if expected else [str(path)])
    assert owners([tmp_path / "alone.m8"], chains[:1])[0].keys() == {one}


def test_hits_of_a_part_are_moved_to_the_chain(tmp_path, sequence):
    chain = NamedChain("1abc", ("A",), classes("A" * 9 + sequence))
    path = write_hits(tmp_path / "x/hits.m8", sequence, "4hhb_A")
    found, _ = owners([path], [chain], {tmp_path / "x/hits.a3m": classes(sequence)})
    assert list(found.values()) == [(HitsOf(path, "q", 9),)]


@pytest.fixture
def entries(shared, tmp_path, haemoglobin):
    """A structure, the same without a date, and a damaged one."""
    folder = tmp_path / "mmcif"
    folder.mkdir()
    shutil.copy(shared / "data/proteins/mmcif/4hhb.cif.gz", folder)
    (folder / "1bad.cif").write_text("data_1bad\n#\n")
    return {"4hhb": folder / "4hhb.cif.gz", "1bad": folder / "1bad.cif"}


def test_a_chain_sees_what_was_released_before_it(tmp_path, entries, sequence, haemoglobin):
    query = sequence + "A" * 20
    path = write_hits(tmp_path / "hits.m8", sequence, "1bad_A", "4hhb_A", "9zzz_A")
    day = day_number(haemoglobin.released)
    days = (UNKNOWN_DAY, day + 59, day + 60)
    one = TemplateQuery(query, classes(query), (HitsOf(path, "q"),), days)
    found = prepare_templates([one], entries, tmp_path / "store", workers=0)
    key = sequence_key(np.frombuffer(classes(query), dtype=np.int8))
    again = pickle.loads(pickle.dumps(StoredTemplates.open(tmp_path / "store")))
    for store in (found, again):
        assert store.find(key, day + 59) is None
        for allowed in (UNKNOWN_DAY, day + 60):
            templates = store.find(key, allowed)
            assert (templates["template_aatype"] != 21).sum() == 61
            assert len(templates["template_positions"]) == len(query)
    assert found.find(b"0" * 16, UNKNOWN_DAY) is None
    rejects = dict(found.rejects())
    assert rejects.keys() == {str(entries["1bad"]), "template hits"}
    assert "9zzz" in rejects["template hits"]
    with pytest.raises(DataError, match="1bad"):
        prepare_templates([one], entries, tmp_path / "strict", workers=0, strict=True)


def test_a_file_without_a_date_is_a_template_by_the_date_that_is_known_of_it(
    tmp_path, entries, sequence
):
    text = gzip.decompress(entries["4hhb"].read_bytes()).decode()
    for category in ("pdbx_audit_revision_history", "database_PDB_rev"):
        text = text.replace(f"_{category}.", f"_no_{category}.")
    undated = tmp_path / "4hhb.cif"
    undated.write_text(text)
    query = sequence + "A" * 20
    path = write_hits(tmp_path / "hits.m8", sequence, "4hhb_A")
    one = TemplateQuery(query, classes(query), (HitsOf(path, "q"),), (9_000, 9_060))
    for name, dates in (("without", {}), ("with", {"4hhb": 9_000})):
        found = prepare_templates([one], {"4hhb": undated}, tmp_path / name, dates=dates, workers=0)
        key = sequence_key(np.frombuffer(one.classes, dtype=np.int8))
        assert found.find(key, 9_059) is None
        assert (found.find(key, 9_060) is not None) == bool(dates)


def test_an_undated_chain_is_no_template_of_itself(tmp_path, entries, sequence):
    query = sequence + "A" * 20
    path = write_hits(tmp_path / "hits.m8", sequence, "4hhb_A")
    one = TemplateQuery(query, classes(query), (HitsOf(path, "q"),), own=frozenset({"4hhb"}))
    found = prepare_templates([one], entries, tmp_path / "store", workers=0)
    assert found.counts().tolist() == [0]


def test_hits_of_a_longer_sequence_are_refused(tmp_path, entries, sequence):
    path = write_hits(tmp_path / "hits.m8", sequence, "4hhb_A")
    one = TemplateQuery(sequence[:40], classes(sequence[:40]), (HitsOf(path, "q"),))
    found = prepare_templates([one], entries, tmp_path / "store", workers=0)
    assert "aligns residue 60" in dict(found.rejects())[str(path)]
