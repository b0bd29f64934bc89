"""Alignments: what is written is read, real files agree with other implementations."""

import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.readers.proteins import parse_alignment, read_alignment
from bevatron.data.readers.proteins.alphabet import CLASSES, GAP, LETTERS, POLYMERS, UNKNOWN
from bevatron.errors import DataError

HHBLITS = "ACDEFGHIKLMNPQRSTVWYX-"
STANDARD = {"protein": CLASSES[:21], "rna": CLASSES[21:26], "dna": CLASSES[26:31]}


@st.composite
def alignments(draw):
    """Kind, rows of letters or gaps, insertions before each column and after the last."""
    kind = draw(st.sampled_from(POLYMERS))
    width = draw(st.integers(1, 12))
    residue = st.sampled_from(STANDARD[kind])
    rows = [draw(st.text(residue, min_size=width, max_size=width))]
    inserted = [[""] * (width + 1)]
    for _ in range(draw(st.integers(0, 6))):
        letter = residue | st.just("-")
        rows.append(draw(st.text(letter, min_size=width, max_size=width)))
        inserted.append(
            draw(st.lists(st.text(residue, max_size=3), min_size=width + 1, max_size=width + 1))
        )
    return kind, rows, inserted


def one_sentence(error):
    assert "\n" not in str(error)


def expect(alignment, kind, rows, inserted, names):
    first = {"protein": 0, "rna": 21, "dna": 26}[kind]
    codes = [[GAP if x == "-" else first + STANDARD[kind].index(x) for x in row] for row in rows]
    assert alignment.rows.dtype == np.int8
    assert alignment.rows.flags.c_contiguous
    assert alignment.rows.tolist() == codes
    assert alignment.deletions.dtype == np.uint16
    assert alignment.deletions.tolist() == [[len(x) for x in row[:-1]] for row in inserted]
    assert alignment.names == tuple(names)


@given(alignments(), st.sampled_from(["\n", "\r\n", "\r"]), st.integers(1, 30), st.booleans())
def test_an_a3m_file_is_read_as_it_was_written(alignment, end, width, comment):
    kind, rows, inserted = alignment
    names = [f"row {number} OX={number}" for number in range(len(rows))]
    text = "#12,3\t1,1\n" if comment else ""
    for name, row, between in zip(names, rows, inserted, strict=True):
        pairs = zip(between, [*row, ""], strict=True)
        body = "".join(insert.lower() + letter for insert, letter in pairs)
        lines = [body[i : i + width] for i in range(0, len(body), width)]
        text += f">{name}\n" + "\n".join(lines) + "\n"
    data = text.replace("\n", end).encode()
    expect(parse_alignment(data, "x", "a3m", kind), kind, rows, inserted, names)
    expect(parse_alignment(data.rstrip(), "x", "a3m", kind), kind, rows, inserted, names)


def columns_of(rows, inserted):
    """Rows of equal length: as many columns before each residue as the longest insertion."""
    depth = [max(len(row[i]) for row in inserted) for i in range(len(inserted[0]))]
    for row, between in zip(rows, inserted, strict=True):
        pairs = zip(between, depth, [*row, ""], strict=True)
        yield "".join(insert.ljust(wide, "-") + letter for insert, wide, letter in pairs)


@given(alignments(), st.integers(1, 30), st.booleans())
def test_a_stockholm_file_is_read_as_it_was_written(alignment, width, lower):
    kind, rows, inserted = alignment
    wide = list(columns_of(rows, inserted))
    if lower:
        wide = [row.lower().replace("-", ".") for row in wide]
    names = [f"r{number}/1-9" for number in range(len(rows))]
    text = "# STOCKHOLM 1.0\n#=GF ID x\n\n#=GS r0/1-9 DE the query OX=1\n\n"
    for start in range(0, len(wide[0]), width):
        for name, row in zip(names, wide, strict=True):
            text += f"{name:12} {row[start : start + width]}\n"
        text += f"#=GC RF      {'x' * len(wide[0][start : start + width])}\n\n"
    names[0] += " the query OX=1"
    found = parse_alignment((text + "//\n").encode(), "x", "stockholm", kind)
    expect(found, kind, rows, inserted, names)


@given(alignments(), st.booleans())
def test_an_aligned_fasta_file_is_read_as_it_was_written(alignment, lower):
    kind, rows, inserted = alignment
    names = [f"row {number}" for number in range(len(rows))]
    wide = columns_of(rows, inserted)
    text = "".join(f">{name}\n{row}\n" for name, row in zip(names, wide, strict=True))
    data = (text.lower() if lower else text).encode()
    expect(parse_alignment(data, "x", "fasta", kind), kind, rows, inserted, names)


@pytest.mark.parametrize("chain", ["1ckb_A", "1d66_A"])
def test_rows_and_deletions_are_those_of_another_implementation(shared, chain):
    golden = np.load(shared / "golden" / "alphafold2" / f"features_raw_{chain}.npz")
    processed = np.load(shared / "golden" / "alphafold2" / f"features_nonensembled_{chain}.npz")
    seen = set()
    rows, deletions = [], []
    for path in sorted((shared / "data" / "proteins" / "msa" / chain).glob("*.a3m.gz")):
        alignment = read_alignment(path)
        for row, counts in zip(alignment.rows[:300], alignment.deletions[:300], strict=True):
            if row.tobytes() not in seen:
                seen.add(row.tobytes())
                rows.append(row)
                deletions.append(counts)
    ours = np.array(rows)
    to_hhblits = np.array([HHBLITS.index(x) for x in CLASSES[:21]] + [0] * 10 + [21])
    np.testing.assert_array_equal(to_hhblits[ours], golden["msa"])
    np.testing.assert_array_equal(np.array(deletions), golden["deletion_matrix_int"])
    np.testing.assert_array_equal(np.where(ours == GAP, 21, ours), processed["msa"])


def plain(text):
    """Rows and deletions of an a3m file, letter by letter."""
    rows, deletions = [], []
    for record in text.split("\n>"):
        row, counts, count = "", [], 0
        for letter in "".join(record.split("\n")[1:]):
            if letter.islower():
                count += 1
            else:
                row += letter
                counts.append(count)
                count = 0
        rows.append(row)
        deletions.append(counts)
    return rows, deletions


def test_real_files_are_those_read_letter_by_letter(shared):
    data = shared / "data"
    paths = sorted((data / "proteins" / "msa").glob("*/*.a3m.gz"))[::12]
    paths += sorted((data / "complexes" / "msa_only").glob("boltz*.a3m.gz"))
    letters = dict.fromkeys("ABCDEFGHIJKLMNOPQRSTUVWXYZ", 20) | LETTERS["protein"] | {"-": GAP}
    for path in paths:
        alignment = read_alignment(path)
        rows, deletions = plain(gzip.decompress(path.read_bytes()).decode())
        assert alignment.rows.tolist() == [[letters[x] for x in row] for row in rows]
        assert alignment.deletions.tolist() == deletions


def test_every_shared_alignment_is_read(shared):
    paths = [*(shared / "data").rglob("*.a3m.gz"), *(shared / "data").rglob("*hits.sto*")]
    for path in paths:
        if "hmmsearch" in path.name:
            continue
        alignment = read_alignment(path, "rna" if "9gmw" in path.name else "protein")
        assert len(alignment.names) == len(alignment.rows) == len(alignment.deletions)
        assert GAP not in alignment.rows[0]
    assert len(paths) > 800


def test_a_stockholm_file_of_jackhmmer_keeps_the_columns_of_the_query(shared):
    samples = shared / "data" / "proteins" / "format_samples"
    small = read_alignment(samples / "2q2k_A.uniprot_hits.sto")
    assert small.rows.shape == (21, 70)
    assert "".join(CLASSES[x] for x in small.rows[0]).startswith("MGSSHHHHHHSSG")
    assert "".join(CLASSES[x] for x in small.rows[20, -51:-40]) == "MSKQETNHLLK"
    assert small.names[1].endswith("Staphylococcus schleiferi OX=1295 GN=NP71_p00120 PE=4 SV=1")
    large = read_alignment(samples / "6KWC_1.mgnify_hits.sto.gz")
    assert large.rows.shape == (1698, 191)
    assert "".join(CLASSES[x] for x in large.rows[1, 6:14]) == "QTGIHDGY"
    # Every residue of the range 36-224 is in a column or a deletion; none follows the last column.
    assert large.names[1].startswith("MGYP000510094044/36-224 ")
    assert (large.rows[1] != GAP).sum() + large.deletions[1].sum() == 224 - 36 + 1


def test_letters_of_ambiguous_residues_are_read_as_alphafold_reads_them():
    found = parse_alignment(b">q\nDECXXAXNNUT\n>r\nBZUJOAXRYWK\n".replace(b"UT", b"GG"), "x")
    assert (found.rows[0, :5] == found.rows[1, :5]).all()
    rna = parse_alignment(b">q\nACGUN\n>r\nacgACGTR\n", "x", kind="rna")
    assert rna.rows.tolist() == [[21, 23, 22, 24, 25], [21, 23, 22, 24, UNKNOWN["rna"]]]
    dna = parse_alignment(b">q\nACGTN\n>r\nACGUR\n", "x", kind="dna")
    assert (dna.rows[0] == dna.rows[1]).all()


def test_insertions_longer_than_a_byte_are_counted_and_saturate_at_two_bytes():
    text = f">q\nAC\n>r\nA{'g' * 300}C\n>s\n{'g' * 70_000}AC{'g' * 9}\n"
    found = parse_alignment(text.encode(), "x")
    assert found.deletions.tolist() == [[0, 0], [0, 300], [65_535, 0]]


def test_a_hundred_thousand_residues_and_twin_names_are_read():
    text = (">same\n" + "ACDEFGHIKL" * 10_000 + "\n") * 3
    found = parse_alignment(text.encode(), "x")
    assert found.rows.shape == (3, 100_000)
    assert found.names == ("same",) * 3


def test_names_in_other_encodings_and_ends_of_databases_do_no_harm():
    assert parse_alignment(">qué\nAC\n".encode("latin-1"), "x").names == ("qué",)
    assert parse_alignment("\ufeff>qué\nAC\n".encode(), "x").names == ("qué",)
    assert parse_alignment(b">q\nAC\n\0", "x").rows.shape == (1, 2)


@pytest.mark.parametrize(
    ("data", "format_", "sentence"),
    [
        (b"", "a3m", "x: is empty"),
        (b"\n\n", "a3m", "x: is empty"),
        (b"#1\t1\n", "a3m", "x: holds only comments"),
        (b"ACDE\n>q\nAC\n", "a3m", "x, line 1: 'ACDE' is not a header"),
        (b">q\n", "a3m", r"x, line 1 \(record 'q'\): the first record is the query"),
        (b">q\nacde\n", "a3m", "no residue in upper case"),
        (b">q\nACDE\n>r\nAC-E\n>s\nACgD\n", "a3m", r"line 5 \(record 's'\): has 3 residues"),
        (b">q\nACDE\n>r\n", "a3m", r"line 3 \(record 'r'\): has 0 residues and gaps"),
        (b">q\nAC\nDE\n>r\nAC\n", "a3m", r"line 4 \(record 'r'\): has 2 residues"),
        (
            b">q\nACDE\n>r\nAC1E\n",
            "a3m",
            r"line 3 \(record 'r'\): '1' is neither a residue of protein",
        ),
        (
            b">q\r\nACDE\r\n>r\r\nAC1E\r\n",
            "a3m",
            r"line 3 \(record 'r'\): '1' is neither a residue of protein",
        ),
        (b">q\nACDE\n>r\nAC>E\n", "a3m", "'>' is neither"),
        (b">q\nACDE\n>r\nAC*E\n", "a3m", r"'\*' is neither a residue of protein"),
        (b">q\nAC\xc3\xa9E\n", "a3m", "is neither a residue of protein nor a gap"),
        (">q\nACDE\n".encode("utf-16"), "a3m", "x: is written in UTF-16; save it in UTF-8"),
        (b">q\nAC\0>r\nAC\0", "a3m", "x, line 2: holds a NUL byte"),
        (b">q\nACDE\n>r\nACD\n", "fasta", r"line 3 \(record 'r'\): has 3 columns"),
        (b">q\n----\n>r\nACDE\n", "fasta", "the first row is the query and has no residue"),
        (b">q\n\n>r\n\n", "fasta", "no residue"),
        (b">q\nAC1E\n", "fasta", "'1' is neither a residue of protein"),
        (b"", "stockholm", "x: is not a Stockholm file; .* an empty file"),
        (b">q\nAC\n", "stockholm", "x: is not a Stockholm file; .*'>q'"),
        (b"# STOCKHOLM 1.0\nq AC\n", "stockholm", "x: is cut off, its last line is not '//'"),
        (b"# STOCKHOLM 1.0\n//\n", "stockholm", "x: holds no row"),
        (b"# STOCKHOLM 1.0\nq AC\nr A\n//\n", "stockholm", "x, row 'r': has 1 columns"),
        (b"# STOCKHOLM 1.0\nq AC\nr\n//\n", "stockholm", "x, line 3: expected a name and a row"),
        (b"# STOCKHOLM 1.0\nq A\nr A\n\nq C\ns A\n//\n", "stockholm", "line 6: .*expected 'r'"),
        (b"# STOCKHOLM 1.0\nq A\n\nq C\ns A\n//\n", "stockholm", "line 5: .*no further row"),
        (b"# STOCKHOLM 1.0\nq A\nr A\n\nq C\n//\n", "stockholm", "row 'r': has 1 columns"),
        (b"# STOCKHOLM 1.0\nq A\n//\n# STOCKHOLM 1.0\n", "stockholm", "a second alignment"),
        (
            b"# STOCKHOLM 1.0\nq A\nr 1\n//\n",
            "stockholm",
            "x, row 'r': '1' is neither a residue of protein",
        ),
    ],
)
def test_a_damaged_file_is_one_sentence(data, format_, sentence):
    with pytest.raises(DataError, match=sentence):
        parse_alignment(data, "x", format_)


@given(st.binary(max_size=60), st.sampled_from(["a3m", "fasta", "stockholm"]))
def test_any_bytes_are_read_or_refused(data, format_):
    for start in (b"", b">q\nAC\n>", b"# STOCKHOLM 1.0\n"):
        try:
            parse_alignment(start + data, "x", format_)
        except DataError as error:
            one_sentence(error)


def test_the_format_is_found_by_the_name(tmp_path):
    path = tmp_path / "q.A3M.GZ"
    path.write_bytes(gzip.compress(b">q\nAC\n"))
    assert read_alignment(path).rows.tolist() == [[0, 4]]
    with pytest.raises(DataError, match=r"q\.clustal: is not in a known alignment format"):
        read_alignment(tmp_path / "q.clustal")
