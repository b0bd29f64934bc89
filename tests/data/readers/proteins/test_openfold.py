"""OpenFold's files: groups of chains, dates, alignment databases."""

import datetime as dt
import gzip
import json
import pickle

import pytest

from bevatron.data.readers.proteins import (
    AlignmentDatabase,
    parse_alignment,
    parse_hits,
    read_duplicate_chains,
    read_release_dates,
)
from bevatron.errors import DataError


def test_groups_of_chains_are_read(tmp_path):
    path = tmp_path / "duplicate_pdb_chains.txt"
    path.write_bytes(b"6kwc_A\r\n\r\n3lrm_A 3lrm_B  3lrm_C\r\n")
    assert read_duplicate_chains(path) == (("6kwc_A",), ("3lrm_A", "3lrm_B", "3lrm_C"))
    path.write_bytes(b"")
    assert read_duplicate_chains(path) == ()


@pytest.mark.parametrize("text", ["3lrm_A 3lrm_B\n6kwc_A 3lrm_B\n", "6kwc_A\n3lrm_B 3lrm_B"])
def test_a_chain_in_two_groups_is_named(tmp_path, text):
    path = tmp_path / "d.txt"
    path.write_text(text)
    with pytest.raises(DataError, match=r"d\.txt, line 2: chain '3lrm_B' is in line"):
        read_duplicate_chains(path)


def test_dates_are_read_from_all_caches(tmp_path):
    wanted = {"3lrm": dt.date(2010, 6, 30), "6kwc": dt.date(2021, 1, 27)}
    caches = (
        {"3lrm": {"release_date": "2010-06-30"}, "6KWC": {"release_date": "2021-01-27"}},
        {
            "3lrm_A": {"release_date": "2010-06-30", "seq": "M"},
            "3lrm_B": {"release_date": "2010-06-30"},
            "6kwc_A": {"release_date": "2021-01-27"},
        },
        {"3lrm": "2010-06-30", "6kwc": "2021-01-27"},
    )
    path = tmp_path / "cache.json.gz"
    for cache in caches:
        path.write_bytes(gzip.compress(json.dumps(cache).encode()))
        assert read_release_dates(path) == wanted


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ('{"3lrm": {}}', "entry '3lrm' has the release date null"),
        ('{"3lrm": "soon"}', "entry '3lrm' has the release date \"soon\"; expected YYYY-MM-DD"),
        ('{"a_A": "2010-06-30", "a_B": "2010-07-01"}', "'a_B' was released on 2010-07-01"),
        ('{"3lrm": ', "line 1, column 10: is not valid JSON"),
        ("[]", "holds no names"),
        ("[" * 100_000, "nested too deeply"),
    ],
)
def test_a_damaged_cache_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "cache.json"
    path.write_text(text)
    with pytest.raises(DataError, match=f"cache.json.*{sentence}"):
        read_release_dates(path)


@pytest.fixture
def database(tmp_path, shared):
    """Files of real chains joined as OpenFold joins them, and what they hold."""
    samples = shared / "data" / "proteins" / "format_samples"
    alignment = shared / "data" / "complexes" / "msa_only" / "boltz_msa_seq2.a3m.gz"
    contents = {
        "uniref90_hits.a3m": gzip.decompress(alignment.read_bytes()),
        "pdb70_hits.hhr": (samples / "6KWC_1.hhsearch_output.hhr").read_bytes(),
        "uniprot_hits.sto": (samples / "2q2k_A.uniprot_hits.sto").read_bytes(),
    }
    index, joined = {}, [bytearray(b"other"), bytearray()]
    for number, chain in enumerate(("6kwc_A", "2q2k_A")):
        files = []
        for name, data in contents.items():
            files.append([name, len(joined[number]), len(data)])
            joined[number] += data
        index[chain] = {"db": f"alignment_db_{number}.db", "files": files}
        (tmp_path / f"alignment_db_{number}.db").write_bytes(joined[number])
    index["6kwc_B"] = index["6kwc_A"]
    (tmp_path / "alignment_db.index").write_text(json.dumps(index))
    return tmp_path / "alignment_db.index", contents, index


def test_files_are_read_where_they_lie(database):
    path, contents, _ = database
    opened = pickle.loads(pickle.dumps(AlignmentDatabase(path)))
    assert opened.chains == ("6kwc_A", "2q2k_A", "6kwc_B")
    for chain in opened.chains:
        assert opened.files(chain) == tuple(contents)
        for name, data in contents.items():
            assert opened.read(chain, name) == data
    found = parse_alignment(opened.read("6kwc_B", "uniref90_hits.a3m"), "6kwc_B")
    assert found.rows.shape == (84, 136)
    assert len(parse_hits(opened.read("2q2k_A", "pdb70_hits.hhr"), "2q2k_A", "hhr")) == 60


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"db": "../alignment_db_0.db"}, "names the database '../alignment_db_0.db', which is not"),
        ({"db": "/etc/passwd"}, "names the database '/etc/passwd', which is not in its folder"),
        ({"db": "none.db"}, "names the database 'none.db', which cannot be read"),
        ({"files": [["a", "b"]]}, "the entry of '6kwc_A' is damaged"),
        ({"files": 3}, "the entry of '6kwc_A' is damaged"),
    ],
)
def test_a_damaged_index_is_one_sentence(database, change, sentence):
    path, _, index = database
    index["6kwc_A"] |= change
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=f"alignment_db.index: {sentence}"):
        AlignmentDatabase(path)


def test_a_database_that_is_cut_off_is_named(database):
    path, contents, index = database
    (path.parent / "alignment_db_0.db").write_bytes(b"other")
    with pytest.raises(DataError, match=r"alignment_db_0.db: has 5 bytes, but .* lies from 5 to"):
        AlignmentDatabase(path).read("6kwc_A", next(iter(contents)))
    index["2q2k_A"]["files"] = [["a.a3m", -1, 20]]
    path.write_text(json.dumps(index))
    with pytest.raises(DataError, match=r"alignment_db_1.db: .* 'a.a3m' of '2q2k_A' lies from -1"):
        AlignmentDatabase(path).read("2q2k_A", "a.a3m")


def test_an_index_without_chains_is_empty(tmp_path):
    (tmp_path / "alignment_db.index").write_text("{}")
    assert AlignmentDatabase(tmp_path / "alignment_db.index").chains == ()


def test_what_is_not_in_a_database_is_named(database):
    opened = AlignmentDatabase(database[0])
    with pytest.raises(DataError, match="holds no chain '1abc_A'"):
        opened.files("1abc_A")
    with pytest.raises(DataError, match=r"'6kwc_A' has no 'x\.a3m', it has uniref90"):
        opened.read("6kwc_A", "x.a3m")
