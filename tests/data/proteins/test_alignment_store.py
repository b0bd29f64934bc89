"""Alignments in a store: each row once, any part as in the files, damage is noticed."""

import time
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.proteins.alignment_files import AlignmentReader, species_number, species_of
from bevatron.data.proteins.alignments import Alignments, merge_alignment, prepare_alignments
from bevatron.data.proteins.stored_alignment import BLOCK, GROUP, StoredAlignment, pack_rows
from bevatron.data.readers.proteins import parse_names, read_alignment
from bevatron.data.readers.proteins.alphabet import CLASSES, GAP
from bevatron.errors import DataError, StoreError

AMINO = np.array(list(CLASSES[:20]))


def write_a3m(path, rows, names=None):
    names = names or [f"row{i}" for i in range(len(rows))]
    path.write_text("".join(f">{name}\n{row}\n" for name, row in zip(names, rows, strict=True)))
    return path


def random_rows(rng, num_rows, num_columns):
    """Rows of an a3m file with gaps and insertions; the first has neither."""
    letters = rng.choice([*AMINO, "-"], (num_rows, num_columns))
    letters[0] = rng.choice(AMINO, num_columns)
    inserted = rng.random((num_rows, num_columns)) < 0.05
    inserted[0] = False
    return [
        "".join(
            ("acd" * 120 if dense else "") + letter for letter, dense in zip(row, at, strict=True)
        )
        for row, at in zip(letters, inserted, strict=True)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("alignments")


@pytest.fixture(scope="module")
def paths(folder):
    rng = np.random.default_rng(0)
    short, wide = random_rows(rng, 90, 30), random_rows(rng, 70, 2 * BLOCK + 40)
    return [
        write_a3m(folder / "short.a3m", short[:60]),
        write_a3m(folder / "wide.a3m", wide),
        write_a3m(folder / "more.a3m", [short[0], *short[40:]]),
    ]


@pytest.fixture(scope="module")
def alignments(folder, paths):
    return prepare_alignments(AlignmentReader(paths), folder / "store", workers=0)


def test_each_sequence_is_stored_once_and_found_by_its_letters(alignments, paths):
    assert len(alignments) == 2
    for place, path in enumerate(paths):
        query = read_alignment(path).rows[0]
        assert alignments.find(query) == place % 2
    assert alignments.find(query[:-1]) is None
    assert "more.a3m" in AlignmentReader(paths).describe(0)


def test_equal_rows_of_several_files_are_stored_once_with_their_source(alignments, paths):
    sample = alignments.store[0]
    assert sample["files"].tolist() == [0, 2]
    assert sample["file_rows"].tolist() == [60, 30]
    expected = np.concatenate([read_alignment(paths[0]).rows, read_alignment(paths[2]).rows[21:]])
    found = alignments[0].read(slice(None), np.arange(30))[0]
    np.testing.assert_array_equal(found, expected)


@given(data=st.data())
def test_any_rows_and_columns_are_those_of_the_file(alignments, paths, data):
    whole = read_alignment(paths[1])
    num_rows, num_columns = whole.rows.shape
    rows = np.array(data.draw(st.lists(st.integers(0, num_rows - 1), max_size=5)), dtype=np.int64)
    columns = data.draw(st.lists(st.integers(0, num_columns - 1), max_size=9))
    columns = np.array(columns, dtype=np.int64)
    residues, deletions = alignments[1].read(rows, columns)
    np.testing.assert_array_equal(residues, whole.rows[np.ix_(rows, columns)])
    expected = np.minimum(whole.deletions, 255)[np.ix_(rows, columns)]
    np.testing.assert_array_equal(deletions, expected)
    assert deletions.dtype == np.uint8
    assert residues.dtype == np.int8


def test_more_deletions_than_a_byte_holds_are_255(alignments, paths):
    assert read_alignment(paths[1]).deletions.max() == 360
    assert max(deletions.max() for _, deletions in alignments[1].stream()) == 255


def test_a_stream_yields_all_rows_in_order(alignments, paths):
    parts = list(alignments[1].stream(rows_at_once=16))
    assert [len(residues) for residues, _ in parts] == [16, 16, 16, 16, 6]
    joined = np.concatenate([residues for residues, _ in parts])
    np.testing.assert_array_equal(joined, read_alignment(paths[1]).rows)


def test_profile_and_mean_deletions_are_of_all_distinct_rows(alignments, paths):
    whole = read_alignment(paths[1])
    one_hot = whole.rows[..., None] == np.arange(len(CLASSES))
    np.testing.assert_allclose(alignments[1].profile, one_hot.mean(axis=0), rtol=1e-6)
    mean = whole.deletions.mean(axis=0)
    np.testing.assert_allclose(alignments[1].deletion_mean, mean, rtol=1e-6)
    assert alignments[1].profile[:, GAP].any()


# ---- species ----


def test_a_row_of_two_species_is_stored_once_and_belongs_to_both(tmp_path):
    names = ["query", "D_MOUSE", "A_HUMAN", "B_HUMAN", "C_MOUSE", "none"]
    rows = ["ACDE", "AGGG", "ACDF", "ACDE", "ACDF", "ACDG"]
    path = write_a3m(tmp_path / "a.a3m", rows, names)
    alignment = prepare_alignments(AlignmentReader([path]), tmp_path / "s", workers=0)[0]
    assert alignment.num_rows == 4
    human, mouse = species_number("HUMAN", 0), species_number("MOUSE", 0)
    assert alignment.species.tolist() == [mouse, mouse, human, human]
    # By similarity to the query: rows 0 (ACDE), 2 (ACDF), 1 (AGGG).
    assert alignment.species_row.tolist() == [2, 1, 0, 2]


NAMES = st.sampled_from(
    [
        "sp|P69905|HBA_HUMAN OX=9606",
        "UniRef100_P01942_10090/",
        "UniRef90_A0A4U1FNC5/3-139 n=1 TaxID=40151 RepID=A0A4U1FNC5_MONMO",
        "FUBP2_HUMAN/426-491",
        "query",
        "x taxid:12",
        "OX_1",
    ]
) | st.text(st.sampled_from("AZ_09 |=:/OXTaxid"), max_size=20)


@given(st.lists(NAMES, max_size=8))
def test_species_are_those_of_the_parsed_names(names):
    origins = parse_names(names)
    expected = [
        species_number(m, int(t)) for m, t in zip(origins.species, origins.taxa, strict=True)
    ]
    assert species_of(names).tolist() == expected


@given(st.lists(st.from_regex(r"[A-Z][A-Z0-9]{1,4}|9[A-Z]{4}", fullmatch=True), min_size=2))
def test_different_species_have_different_numbers(mnemonics):
    numbers = {species_number(mnemonic, 0) for mnemonic in mnemonics}
    assert len(numbers) == len(set(mnemonics))
    assert all(-(2**31) <= number < 0 for number in numbers)


# ---- damage ----


def damaged_store(paths, out, name, place):
    """A store of which one bit of an array of the wide alignment is flipped."""
    path = prepare_alignments(AlignmentReader(paths), out, workers=0).store.path
    shard = path / "shard-000000.arrow"
    content = bytearray(shard.read_bytes())
    victim = getattr(Alignments.open(path)[1], name)
    content[content.index(victim.tobytes()) + victim.itemsize * place] ^= 1
    shard.write_bytes(content)
    return Alignments.open(path)[1]


def test_a_flipped_bit_is_noticed_by_who_reads_its_block_only(paths, tmp_path):
    # Row 7 of the second block of columns.
    words = BLOCK // 3
    damaged = damaged_store(paths, tmp_path / "s", "residues", 70 * words + 7 * words + 5)
    damaged.read(np.array([6, 8]), np.arange(2 * BLOCK + 40))
    damaged.read(np.array([7]), np.arange(BLOCK))
    sentence = rf"wide.a3m, query 0: row 7 of the alignment is damaged at columns {BLOCK} to"
    with pytest.raises(StoreError, match=sentence):
        damaged.read(np.array([6, 7]), np.array([BLOCK + 30]))
    with pytest.raises(StoreError, match="row 7"):
        list(damaged.stream())


@pytest.mark.parametrize(
    "name", ["deletion_ptr", "deletion_column", "deletion_count", "deletion_checksums"]
)
def test_a_flipped_bit_in_deletions_is_noticed_by_who_reads_its_block_only(name, paths, tmp_path):
    rng = np.random.default_rng(4)
    deep = write_a3m(tmp_path / "deep.a3m", random_rows(rng, GROUP + 60, BLOCK + 20))
    whole = read_alignment(deep)
    packed = pack_rows(whole.rows, whole.deletions)
    first = packed["deletion_ptr"]
    at = GROUP + 40  # a row of the second group of the first block
    place = {"deletion_ptr": at, "deletion_checksums": 1}.get(name, int(first[at]))
    damaged = damaged_store([paths[0], deep], tmp_path / "s", name, place)
    damaged.read(np.arange(GROUP), np.arange(BLOCK + 20))
    damaged.read(np.arange(GROUP + 60), np.arange(BLOCK, BLOCK + 20))
    sentence = rf"deletions of rows {GROUP} to {GROUP + 59} are damaged at columns 0 to {BLOCK - 1}"
    with pytest.raises(StoreError, match=sentence):
        damaged.read(np.array([GROUP + 1]), np.array([0]))


def test_other_stores_and_files_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "empty.a3m").write_text("")
    with pytest.raises(DataError, match=r"empty.a3m: is empty"):
        AlignmentReader([tmp_path / "empty.a3m"])
    with pytest.raises(DataError, match=r"absent.a3m: cannot be read"):
        AlignmentReader([tmp_path / "absent.a3m"])
    (tmp_path / "b.a3m").write_text(">q\nAC?\n>r\nACD\n")
    with pytest.raises(DataError, match=r"b.a3m, line 1 .*'\?' is neither"):
        AlignmentReader([tmp_path / "b.a3m"])


# ---- speed and memory ----


def deep_alignment(num_rows, num_columns):
    rng = np.random.default_rng(2)
    raw = {
        "rows": rng.integers(0, 21, (num_rows, num_columns)).astype(np.int8),
        "deletions": np.zeros((num_rows, num_columns), dtype=np.uint16),
        "species": np.zeros(num_rows, dtype=np.int32),
        "files": np.zeros(1, dtype=np.int32),
        "file_rows": np.full(1, num_rows, dtype=np.int32),
    }
    return StoredAlignment.of(merge_alignment(raw), "deep")


def test_memory_to_read_rows_or_stream_all_does_not_grow_with_depth():
    used = []
    for depth in (1_000, 30_000):
        alignment = deep_alignment(depth, 300)
        tracemalloc.start()
        alignment.read(np.arange(0, depth, depth // 64), np.arange(300))
        for _ in alignment.stream(64):
            pass
        used.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert used[1] < 1.5 * used[0]


def test_a_deep_alignment_is_read_by_row_much_faster_than_whole():
    alignment = deep_alignment(12_096, 400)
    rng = np.random.default_rng(3)
    rows, columns = np.sort(rng.permutation(12_096)[:1024]), np.arange(384)

    def fastest(read):
        times = []
        for _ in range(7):
            start = time.perf_counter()
            read()
            times.append(time.perf_counter() - start)
        return min(times)

    drawn = fastest(lambda: alignment.read(rows, columns))
    whole = fastest(lambda: alignment.read(slice(None), columns))
    assert drawn < whole / 4


def test_real_alignments_are_stored_whole(shared, tmp_path):
    found = sorted((shared / "data/complexes/msa/7a4d").glob("*.a3m.gz"))
    alignments = prepare_alignments(AlignmentReader(found), tmp_path / "s", workers=0)
    assert len(alignments) == 4
    for place, path in enumerate(found):
        whole = read_alignment(path)
        _, first = np.unique(whole.rows, axis=0, return_index=True)
        kept = np.sort(first)
        joined = np.concatenate([rows for rows, _ in alignments[place].stream(1000)])
        np.testing.assert_array_equal(joined, whole.rows[kept])


def test_a_damaged_file_is_left_out_and_told_of(folder, tmp_path):
    good = write_a3m(tmp_path / "good.a3m", ["ACD", "A-D"])
    longer = write_a3m(tmp_path / "longer.a3m", ["ACD", "AACD"])
    alone = write_a3m(tmp_path / "alone.a3m", ["WY", "WYY"])
    empty = tmp_path / "empty.a3m"
    empty.write_text("")
    paths = [longer, good, alone, empty]
    with pytest.raises(DataError, match=r"empty\.a3m"):
        AlignmentReader(paths)
    reader = AlignmentReader(paths, strict=False)
    assert [file for file, _ in reader.rejects] == [str(empty)]
    made = prepare_alignments(reader, tmp_path / "store", workers=0)
    assert [made[i].num_rows for i in range(2)] == [2, 1]
    assert [file for file, _ in made.rejects()] == [str(longer), str(alone)]
    assert all("row" in reason or "record" in reason for _, reason in made.rejects())
