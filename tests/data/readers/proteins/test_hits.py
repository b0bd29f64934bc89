"""Template hits: aligned positions, values and damaged files of every format."""

import csv
import datetime as dt
import gzip

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.readers.proteins import parse_hits, read_hits
from bevatron.errors import DataError

COLUMNS = st.lists(st.sampled_from("MID"), min_size=1, max_size=30).filter(
    lambda columns: "M" in columns and {"M", "I"} & set(columns) and {"M", "D"} & set(columns)
)


def rows_of(columns):
    """Aligned rows in which M has residues of both, I of the query, D of the target."""
    query = "".join("-" if x == "D" else "ACDE"[i % 4] for i, x in enumerate(columns))
    target = "".join("-" if x == "I" else "FGHIKL"[i % 6] for i, x in enumerate(columns))
    return query, target


def one_sentence(error):
    assert "\n" not in str(error)


def expected_pairs(columns, query, target):
    pairs = []
    for column in columns:
        if column == "M":
            pairs.append([query, target])
        query += column != "D"
        target += column != "I"
    return pairs


def cigar_of(columns):
    text, count = "", 0
    for place, column in enumerate(columns):
        count += 1
        if columns[place + 1 : place + 2] != [column]:
            text += f"{count}{column}"
            count = 0
    return text


@given(st.lists(st.tuples(COLUMNS, st.integers(1, 50), st.integers(1, 50)), max_size=5))
def test_hits_of_a_table_are_read_as_they_were_written(written):
    plain, named = [], ["query\ttarget\tqstart\tqend\ttstart\ttend\tevalue\tpident\tqaln\ttaln"]
    for number, (columns, query, target) in enumerate(written):
        q_end = query + sum(x != "D" for x in columns) - 1
        t_end = target + sum(x != "I" for x in columns) - 1
        start = f"q\t{number}abc_A"
        ranges = f"{query}\t{q_end}\t{target}\t{t_end}"
        plain.append(
            f"{start}\t0.25\t{len(columns)}\t0\t1\t{ranges}\t1e-5\t70\t{cigar_of(columns)}"
        )
        named.append("\t".join([start, ranges, "1e-5", "25.0", *rows_of(columns)]))
    for lines in (plain, named):
        for end in ("\n", "\r\n"):
            hits = parse_hits((end.join(lines) + end).encode(), "x", "m8")
            assert len(hits) == len(written)
            assert hits.pairs.dtype == np.int32
            for number, (columns, query, target) in enumerate(written):
                wanted = expected_pairs(columns, query - 1, target - 1)
                assert hits.pairs_of(number).tolist() == wanted
                assert hits.identities[number] == 0.25
                assert hits.e_values[number] == 1e-5


HHR = """Query         {name} some protein
Match_columns 99
Command       hhsearch -i a.a3m

 No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM
{listed}
{hits}
"""


def hhr_hit(number, columns, query, target, width):
    q_row, t_row = rows_of(columns)
    text = f"No {number}\n>{number}ABC_B Some; name {{of}} a protein\n"
    pairs = sum(x == "M" for x in columns)
    text += f"Probab=99.50  E-value=1.2e-30  Score=33.25  Aligned_cols={pairs}  "
    text += "Identities=40%  Similarity=0.5  Sum_probs=17.5  Template_Neff=5.7\n\n"
    for start in range(0, len(columns), width):
        for mark, name, row, at in (("Q", "the_query", q_row, query), ("T", "x", t_row, target)):
            part = row[start : start + width]
            first = at + sum(x != "-" for x in row[:start])
            last = first + sum(x != "-" for x in part) - 1
            text += f"{mark} ss_pred             {'c' * len(part)}\n"
            text += f"{mark} {name:14} {first:4} {part} {last:4} (300)\n"
            text += f"{mark} Consensus      {first:4} {'~' * len(part)} {last:4} (300)\n"
            text += f"{'':21} ||.+\n" if mark == "Q" else ""
        text += "\n\n"
    return text


@given(
    st.lists(st.tuples(COLUMNS, st.integers(1, 50), st.integers(1, 50)), max_size=4),
    st.integers(1, 40),
    st.integers(1, 2),
)
def test_hits_of_hhsearch_are_read_as_they_were_written(written, width, runs):
    hits = [hhr_hit(i, *hit, width) for i, hit in enumerate(written, start=1)]
    listed = [
        f"  {i} 1ABC_B Some  99.5 1.2E-30  1E-9 33.2 0.0 1 1-2 1-2 (300)" for i in range(len(hits))
    ]
    text = HHR.format(name="the_query", listed="\n".join(listed), hits="".join(hits))
    found = parse_hits((text * runs).encode(), "x", "hhr")
    assert found.queries == ("the_query",) * (len(written) * runs)
    for number, (columns, query, target) in enumerate(written * runs):
        assert found.pairs_of(number).tolist() == expected_pairs(columns, query - 1, target - 1)
        assert found.sequences[number] == rows_of(columns)[1].replace("-", "")
        assert found.descriptions[number] == "Some; name {of} a protein"
        assert found.target_lengths[number] == 300
        values = (found.probabilities, found.sum_probabilities, found.scores, found.identities)
        assert [round(float(x[number]), 4) for x in values] == [0.995, 17.5, 33.25, 0.4]
        assert found.e_values[number] == 1.2e-30
    assert set(found.chains) <= {"B"}


@given(st.lists(st.tuples(COLUMNS, st.integers(1, 50)), min_size=1, max_size=5), st.booleans())
def test_hits_of_hmmsearch_are_read_as_they_were_written(written, stockholm):
    width = 2 + max(sum(x != "D" for x in columns) for columns, _ in written)
    rows, names, wanted = [], [], []
    for number, (columns, target) in enumerate(written):
        t_row = rows_of(columns)[1]
        cells = [t.lower() if x == "D" else t for x, t in zip(columns, t_row, strict=True)]
        end = target + sum(x != "I" for x in columns) - 1
        gaps = "-" * (width - 1 - sum(x != "D" for x in columns))
        rows.append(f"-{''.join(cells)}{gaps}")
        names.append(f"{number}abc_C/{target}-{end}")
        wanted.append(expected_pairs(columns, 1, target - 1))
    description = "[subseq from] mol:protein length:321  NAME"
    if stockholm:
        longest = max(map(len, rows))
        text = "# STOCKHOLM 1.0\n"
        text += "".join(f"#=GS {name} DE {description}\n" for name in names)
        text += "".join(f"{n} {r.ljust(longest, '.')}\n" for n, r in zip(names, rows, strict=True))
        hits = parse_hits((text + "//\n").encode(), "x", "stockholm")
    else:
        text = f">query\n{'A' * width}\n"
        for name, row in zip(names, rows, strict=True):
            text += f">{name} {description}\n{row[:7]}\n{row[7:]}\n"
        hits = parse_hits(text.encode(), "x", "a3m")
    assert [hits.pairs_of(i).tolist() for i in range(len(hits))] == wanted
    assert set(hits.target_lengths.tolist()) == {321}
    assert set(hits.descriptions) == {description}


def test_aligned_pairs_are_residues_of_the_chains(shared):
    folder = shared / "data" / "proteins"
    with (folder / "chains.csv").open() as file:
        rows = list(csv.DictReader(file))
    sequences = {f"{row['pdb_id']}_{row['auth_chain']}": row["sequence"] for row in rows}
    hits = read_hits(folder / "templates" / "template_hits.tsv.gz")
    with gzip.open(folder / "templates" / "template_hits.tsv.gz", "rt") as file:
        table = list(csv.DictReader(file, delimiter="\t"))
    compared = 0
    for number, row in enumerate(table):
        aligned = [
            (q, t) for q, t in zip(row["qaln"], row["taln"], strict=True) if "-" not in q + t
        ]
        pairs = hits.pairs_of(number)
        assert len(pairs) == len(aligned)
        for side, chain in enumerate((row["query"], row["target"])):
            if chain in sequences:
                letters = [sequences[chain][place] for place in pairs[:, side]]
                assert letters == [pair[side] for pair in aligned]
                compared += 1
    assert compared > 400


def test_every_shared_file_of_hits_is_read(shared):
    samples = shared / "data" / "proteins" / "format_samples"
    counts = {
        "209d-assembly1C_protein_pdball_230102_db.m8": 0,
        "721p-assembly1A_protein_pdball_230102_db.m8": 300,
        "7a4d-assembly1E_protein_pdball_230102_db.m8": 7,
        "pdb70_220313_db.m8": 498,
        "1a02_F.pdb70_hits.hhr.gz": 500,
        "1a0g_A.pdb70_hits.hhr.gz": 112,
        "1a2y_B.pdb70_hits.hhr.gz": 500,
        "1a3p_A.pdb70_hits.hhr.gz": 432,
        "6KWC_1.hhsearch_output.hhr": 60,
        "MGYP004658859411.concat.hhr.gz": 500,
        "9fm7.hmmsearch.a3m.gz": 2229,
    }
    for name, count in counts.items():
        hits = read_hits(samples / name)
        assert len(hits) == count
        for number in range(count):
            pairs = hits.pairs_of(number)
            assert (np.diff(pairs, axis=0) > 0).all()
            assert pairs[0].tolist() == [
                hits.query_ranges[number, 0],
                hits.target_ranges[number, 0],
            ]
            stop = [hits.query_ranges[number, 1] - 1, hits.target_ranges[number, 1] - 1]
            assert pairs[-1].tolist() == stop
            length = hits.target_lengths[number]
            assert length == 0 or hits.target_ranges[number, 1] <= length


def test_a_real_hit_of_hhsearch_has_the_values_in_the_file(shared):
    path = shared / "data" / "proteins" / "format_samples" / "6KWC_1.hhsearch_output.hhr"
    hits = read_hits(path)
    assert (hits.targets[5], hits.entries[5], hits.chains[5]) == ("1XNK_A", "1xnk", "A")
    assert hits.descriptions[5].startswith("endoxylanase 11A (E.C.3.2.1.8)")
    assert hits.query_ranges[5].tolist() == [3, 191]
    assert hits.target_ranges[5].tolist() == [3, 191]
    assert hits.target_lengths[5] == 196
    assert hits.e_values[5] == 1.3e-65
    assert hits.sum_probabilities[5] == np.float32(181.0)
    # Hit 7 has a gap in the query's row: 'GLTL-GTMDYQ' above 'GLNVTGDHYYQ'.
    assert len(hits.pairs_of(6)) == 188
    assert (hits.pairs_of(6)[166] - hits.pairs_of(6)[0]).tolist() == [166, 167]


def test_dates_of_release_are_looked_up_by_entry(shared):
    path = shared / "data" / "proteins" / "format_samples"
    hits = read_hits(path / "7a4d-assembly1E_protein_pdball_230102_db.m8")
    dates = {"7a4d": dt.date(2021, 8, 4)}
    released = hits.released(dates)
    assert released.dtype == np.dtype("datetime64[D]")
    assert [str(x) for x in released[:3]] == ["NaT", "NaT", "2021-08-04"]


@pytest.mark.parametrize("format_", ["m8", "hhr", "a3m", "stockholm"])
def test_an_empty_file_has_no_hits(format_):
    hits = parse_hits(b"", "x", format_)
    assert len(hits) == 0
    assert hits.pairs.shape == (0, 2)
    assert hits.pair_ptr.tolist() == [0]
    assert hits.query_ranges.shape == (0, 2)


def test_a_table_without_alignment_pairs_hits_without_gaps_alone():
    lines = ["q\tt_A\t97.5\t3\t0\t0\t1\t3\t5\t7\t1e-9\t50", "q\tu_A\t50\t3\t0\t1\t1\t3\t5\t8\t1\t9"]
    hits = parse_hits("\n".join(lines).encode(), "x", "m8")
    assert hits.pairs_of(0).tolist() == [[0, 4], [1, 5], [2, 6]]
    assert len(hits.pairs_of(1)) == 0
    assert hits.identities.tolist() == [np.float32(0.975), 0.5]


M8 = b"q\tt_A\t1.0\t3\t0\t0\t1\t3\t5\t7\t1e-9\t50\t3M\n"
HIT = hhr_hit(1, list("MMDM"), 3, 4, 80)
LISTED = "  1 1ABC_B Some  99.5 1.2E-30  1E-9 33.2 0.0 1 1-2 1-2 (300)"
RUN = HHR.format(name="q", listed=LISTED, hits=HIT)


@pytest.mark.parametrize(
    ("data", "format_", "sentence"),
    [
        (M8[:-20], "m8", "x, line 1: has 6 columns; expected the 12"),
        (M8 + M8[:-10], "m8", "x, line 2: has 11 columns, expected 13"),
        (M8.replace(b"3M", b"4M"), "m8", "range 1 to 3 has 3 residues, its alignment 4"),
        (M8.replace(b"3M", b"3Q"), "m8", "expected the 12"),
        (M8 + M8.replace(b"3M", b"3Q"), "m8", "x, line 2: cigar is '3Q'"),
        (M8.replace(b"1e-9", b"high"), "m8", "evalue is 'high', not a number"),
        (M8.replace(b"\t1\t3", b"\tone\t3"), "m8", "qstart is 'one', not a position"),
        (M8.replace(b"\t1\t3", b"\t0\t3"), "m8", "range 0 to 3 of the query"),
        (M8.replace(b"\t1\t3", b"\t3\t1"), "m8", "range 3 to 1 of the query"),
        (b"query\ttarget\n", "m8", "x: has no column qstart or qend"),
        (M8.decode().encode("utf-16"), "m8", "x: is written in UTF-16"),
        (b"<html>\n", "hhr", "x: is not a result of HHsearch.*'<html>'"),
        (RUN[: RUN.index(" No Hit")].encode(), "hhr", "x: is cut off"),
        (RUN[: RUN.index("No 1\n")].encode(), "hhr", "lists 1 hits of the query 'q' and aligns 0"),
        (RUN.replace("Probab=", "Pr=").encode(), "hhr", "x, hit 1 of 'q': has no name, values"),
        (RUN[:-60].encode(), "hhr", "x, hit 1 of 'q': has no name, values or alignment"),
        (RUN.replace("E-value=1.2e-30", "E-value=low").encode(), "hhr", "E-value is 'low'"),
        (RUN.replace("cols=3", "cols=9").encode(), "hhr", "aligns 3 pairs.*Aligned_cols are 9"),
        (RUN.replace("   3 AC-E", "   3 ACDE").encode(), "hhr", "range 3 to 5 has 3 residues"),
        (b">1abc_A/1-3\nACD\n>2abc_A/1-2\nAC\n", "a3m", "line 3 .*has 2 match columns, .* 3"),
        (b">1abc_A/1-3\nACD\n>2abc_A\nACD\n", "a3m", "line 3 .*its name has no range"),
        (b">1abc_A/1-9\nACD\n", "a3m", "range 1 to 9 has 9 residues, its alignment 3"),
        (b">1abc_A/1-9\n---\n", "a3m", "has no aligned residue"),
    ],
)
def test_a_damaged_file_is_one_sentence(data, format_, sentence):
    with pytest.raises(DataError, match=sentence):
        parse_hits(data, "x", format_)


@pytest.mark.parametrize("share", [0.01, 0.05, 0.2, 0.5, 0.7, 0.9, 0.99, 1.0])
def test_a_result_of_hhsearch_that_is_cut_off_is_refused(shared, share):
    path = shared / "data" / "proteins" / "format_samples" / "6KWC_1.hhsearch_output.hhr"
    data = path.read_bytes()
    # After the last row of the last target only predictions of its secondary structure follow.
    data = data[: data.rindex(b"  216 (256)")]
    for offset in range(0, 200, 23):
        with pytest.raises(
            DataError, match=r"6KWC_1.hhr.*(cut off|damaged|not a result|not a number)"
        ):
            parse_hits(data[: int(len(data) * share) - offset], "6KWC_1.hhr", "hhr")


@given(st.binary(max_size=60), st.sampled_from(["m8", "hhr", "a3m", "stockholm"]))
def test_any_bytes_are_read_or_refused(data, format_):
    for start in (b"", M8, RUN.encode(), b">1abc_A/1-3\nACD\n>", b"# STOCKHOLM 1.0\n"):
        try:
            parse_hits(start + data, "x", format_)
        except DataError as error:
            one_sentence(error)


def test_the_format_is_found_by_the_name(tmp_path):
    with pytest.raises(DataError, match=r"hits\.txt: is not in a known format of template hits"):
        read_hits(tmp_path / "hits.txt")
