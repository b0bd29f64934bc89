"""Two hundred malformed files of proteins, made from a few good ones, and who reads them."""

import bz2
import gzip
import io
import json
import lzma
import tarfile
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from protein_texts import A3M, COMPONENTS, SEQUENCE, SIDE, cif, component_text, pdb, tables_of

from bevatron.data.compressed import read_whole
from bevatron.data.proteins.clusters import read_clusters
from bevatron.data.readers.proteins import (
    AlignmentDatabase,
    open_components,
    read_alignment,
    read_duplicate_chains,
    read_hits,
    read_inputs,
    read_release_dates,
    read_structure,
)
from bevatron.data.readers.proteins.folders import find_protein_files
from bevatron.errors import DataError

ZEROS, TIMES = bytes(8 << 20), 40
"""A bomb expands to that many copies: formats join what was compressed one by one."""


@dataclass(frozen=True)
class Malformed:
    """A file and what reading it says; no word: it may be read, as long as nothing breaks."""

    name: str
    content: bytes
    read: Callable
    says: str | None = None

    def __repr__(self):
        return self.name


# ---- mmCIF ----


def at(category, tag, value, row=0):
    return cif({(category, tag, row): value})


def in_a_circle():
    """Bonds of CA 1 to CA 4, to CA 7 and back to CA 1."""
    tables = tables_of()
    links = {tag: column * 3 for tag, column in tables["struct_conn"].items()}
    links |= {"id": ["c1", "c2", "c3"], "ptnr1_label_seq_id": ["1", "4", "8"]}
    return tables | {"struct_conn": links | {"ptnr2_label_seq_id": ["4", "8", "1"]}}


def with_empty_chain():
    """A chain that the assembly names and that has no atom."""
    tables = tables_of()
    tables["struct_asym"] = {"id": ["A", "B"], "entity_id": ["1", "1"]}
    tables["pdbx_struct_assembly_gen"]["asym_id_list"] = ["A,B"]
    return tables


def atoms_twice():
    """Every atom twice, in two places."""
    tables = tables_of()
    tables["atom_site"] = {tag: column * 2 for tag, column in tables["atom_site"].items()}
    return tables


def cut_places(content, number):
    return [len(content) * part // (number + 1) for part in range(1, number + 1)]


NOISE = np.random.default_rng(3).bytes(4096)


def structures():
    """Damaged mmCIF files."""
    good = cif()
    made = {f"cut{i:02d}": (good[:place], None) for i, place in enumerate(cut_places(good, 24))}
    water = cif(drop=["entity", "entity_poly", "entity_poly_seq"])
    for code in SIDE:
        water = water.replace(code.encode(), b"HOH")
    made |= {
        "empty": (b"", "is empty"),
        "blanks": (b" \n\t\n" * 99, "is empty"),
        "mark": (b"\xef\xbb\xbf", "is"),
        "noise": (NOISE, "is neither"),
        "page": (b"<!DOCTYPE html><html><body>404 Not Found</body></html>", "is neither"),
        "utf16": (good.decode().encode("utf-16"), "is UTF-16"),
        "latin": (good.replace(b"X-RAY", b"\xe9-RAY"), "UTF-8"),
        "latin_atoms": (good.replace(b" OG ", b" O\xe9 "), "line"),
        "nul": (good.replace(b"ALA", b"A\0A"), None),
        "header_only": (b"data_X\n#\n", "holds no atoms"),
        "no_atoms": (cif(drop=["atom_site"]), "holds no atoms"),
        "atoms_without_rows": (b"data_X\nloop_\n_atom_site.Cartn_x\n#\n", "no atoms"),
        "row_too_short": (good[: good.rindex(b" ")] + b"\n", "line"),
        "twice_the_tag": (good.replace(b"Cartn_y", b"Cartn_x"), "line"),
        "open_quote": (cif(add="_x.y 'never ends\n"), "line"),
        "open_text": (cif(add="_x.y\n;never ends\n"), "line"),
        "binary_cif": (b"\x83\xa7encoder\xaadataBlocks", "BinaryCIF"),
        "only_water": (water, None),
        "only_hydrogen": (cif({("atom_site", "type_symbol", None): "H"}), None),
        "unknown_element": (cif({("atom_site", "type_symbol", None): "Qq"}), None),
        "unknown_component": (at("atom_site", "label_comp_id", "ZZZZZ", None), None),
        "unknown_atoms": (cif({("atom_site", "label_atom_id", None): "XX"}), None),
        "all_in_one_place": (
            cif({("atom_site", f"Cartn_{x}", None): "1.0" for x in "xyz"}), "at one place"),
        "far_away": (at("atom_site", "Cartn_x", "1e30"), "position"),
        "no_sequence_rows": (cif(drop=["entity_poly_seq"]), None),
        "no_entity": (cif(drop=["entity", "entity_poly"]), None),
        "no_operators": (cif(drop=["pdbx_struct_oper_list"]), "operator '2'"),
        "empty_chain": (cif(tables=with_empty_chain()), None),
        "atoms_twice": (cif(tables=atoms_twice()), None),
        "sequence_too_short": (cif({("entity_poly_seq", "num", 11): "11"}), "numbering"),
        "sequence_of_others": (cif({("entity_poly_seq", "mon_id", None): "TRP"}), None),
        "sequence_number_huge": (at("entity_poly_seq", "num", "2147483647", 11), "damaged"),
        "chain_of_no_entity": (at("struct_asym", "entity_id", "9"), None),
        "link_to_itself": (at("struct_conn", "ptnr2_label_seq_id", "1"), None),
        "link_to_nothing": (at("struct_conn", "ptnr2_label_seq_id", "77"), None),
        "link_number_huge": (at("struct_conn", "ptnr2_label_seq_id", "9" * 5000), None),
        "links_in_a_circle": (cif(tables=in_a_circle()), None),
        "charge_huge": (at("atom_site", "pdbx_formal_charge", "999"), None),
        "resolution_negative": (at("refine", "ls_d_res_high", "-3"), None),
        "resolution_infinite": (at("refine", "ls_d_res_high", "inf"), None),
        "resolution_absurd": (at("refine", "ls_d_res_high", "1e300"), None),
        "resolution_text": (at("refine", "ls_d_res_high", "good"), None),
        "date_impossible": (at("pdbx_audit_revision_history", "revision_date", "2001-99-99"), None),
        "date_far": (at("pdbx_audit_revision_history", "revision_date", "9999-12-31"), None),
        "occupancy_nan": (at("atom_site", "occupancy", "nan"), None),
        "occupancy_negative": (at("atom_site", "occupancy", "-1"), None),
        "occupancy_text": (at("atom_site", "occupancy", "full"), "row 1"),
        "b_factor_huge": (at("atom_site", "B_iso_or_equiv", "1e99"), None),
        "matrix_text": (at("pdbx_struct_oper_list", "matrix[1][1]", "one"), "row 1"),
        "matrix_nan": (at("pdbx_struct_oper_list", "matrix[1][1]", "nan"), "operator '1'"),
        "assembly_of_nothing": (at("pdbx_struct_assembly_gen", "asym_id_list", "Z"), "no chain"),
        "assembly_two": (at("pdbx_struct_assembly_gen", "assembly_id", "2"), "no assembly '1'"),
        "assembly_of_billions": (
            at("pdbx_struct_assembly_gen", "oper_expression", "(1-1000000000)"), "operator"),
        "assembly_of_products": (
            at("pdbx_struct_assembly_gen", "oper_expression", "(1,2)" * 40), "operators"),
        "assembly_of_copies": (
            at("pdbx_struct_assembly_gen", "oper_expression", "(1,2)" * 16), "operators"),
        "assembly_backwards": (
            at("pdbx_struct_assembly_gen", "oper_expression", "(9-1)"), "no chain"),
        "model_text": (at("atom_site", "pdbx_PDB_model_num", "one"), "row 1"),
    }  # fmt: skip
    for tag in ("Cartn_x", "Cartn_z"):
        for value in ("nan", "inf", "1e39", "?", "abc", "1.2.3"):
            made[f"{tag}_{value}".replace("?", "unknown")] = (
                at("atom_site", tag, value, 7),
                "row 8" if tag[-1] in "xz" else None,
            )
    for tag in ("label_seq_id", "auth_seq_id"):
        for value in ("2147483648", "1.5", "9" * 400, "x"):
            made[f"{tag}_{value[:12]}"] = (at("atom_site", tag, value, 3), "row 4")
    made["label_seq_id_negative"] = (at("atom_site", "label_seq_id", "-5", 3), None)
    read = assembled
    return [Malformed(f"{name}.cif", content, read, says) for name, (content, says) in made.items()]


def assembled(path):
    """Read a structure and its first assembly, as preparing does."""
    structure = read_structure(path)
    return structure.assembly("1") if structure.assemblies else structure


def pdb_files():
    """Damaged PDB files."""
    good = pdb()
    made = {f"cut{i:02d}": (good[:place], None) for i, place in enumerate(cut_places(good, 10))}
    line = good.split(b"\n")[4]
    made |= {
        "header_only": (b"HEADER    HYDROLASE\nEND\n", "is neither"),
        "no_numbers": (good.replace(line, line[:30] + b" " * 24), "line 5"),
        "nan": (good.replace(line, line[:30] + b"     nan" + line[38:]), "line 5"),
        "stars": (good.replace(line, line[:30] + b"********" + line[38:]), "line 5"),
        "shifted": (good.replace(line, line[:28] + line[30:]), None),
        "text": (good.replace(line, line[:30] + b"  a.b   " + line[38:]), "line 5"),
        "latin": (good.replace(b"CB ", b"C\xe9 ", 1), "UTF-8"),
        "seqres_of_others": (b"SEQRES   1 A    2  TRP TRP\n" + good, None),
        "model_never_ends": (b"MODEL        1\n" + good[:-9], None),
        "models_twice": ((b"MODEL        1\n" + good[:-4] + b"ENDMDL\n") * 2 + b"END\n", None),
        "number_hex": (good.replace(b"A   4 ", b"AA000 "), None),
    }
    return [
        Malformed(f"{name}.pdb", content, assembled, says) for name, (content, says) in made.items()
    ]


# ---- alignments ----

STO = (
    "# STOCKHOLM 1.0\n#=GS b/1-12 DE words\n\n"
    + "".join(f"{name}/1-12   {SEQUENCE}\n" for name in "abcd")
    + "//\n"
).encode()


def alignments():
    """Damaged alignments."""
    made = {f"cut{i:02d}.a3m": (A3M[:place], None) for i, place in enumerate(cut_places(A3M, 10))}
    made |= {f"cut{i:02d}.sto": (STO[:p], "cut off") for i, p in enumerate(cut_places(STO, 4))}
    made |= {
        "empty.a3m": (b"", "is empty"),
        "blanks.a3m": (b"\n \n", "is empty"),
        "comments.a3m": (b"#A3M#\n", "only comments"),
        "no_header.a3m": (SEQUENCE.encode(), "line 1"),
        "header_alone.a3m": (b">query\n", "line 1"),
        "lower_query.a3m": (b">query\nacde\n>b\nacde\n", "line 1"),
        "unequal.a3m": (A3M + b">last\nAG\n", "line 41"),
        "digit.a3m": (A3M.replace(b"GSAAGSGA\n>row7", b"GS1AGSGA\n>row7"), "line 13"),
        "utf16.a3m": (A3M.decode().encode("utf-16"), "UTF-16"),
        "nul.a3m": (A3M.replace(b">row5", b"\0>row5"), "line 11"),
        "noise.a3m": (NOISE, "NUL"),
        "structure.a3m": (cif(), "line 1"),
        "stockholm.a3m": (STO, "line"),
        "latin.a3m": (A3M.replace(b"row3", b"r\xf6w3"), None),
        "insertion_only.a3m": (A3M[: A3M.index(b">", 1)] + b">b\ngas\n", "line 3"),
        "a3m.sto": (A3M, "not a Stockholm"),
        "unequal.sto": (STO.replace(b"c/1-12   A", b"c/1-12   AA"), "row 'c/1-12'"),
        "second.sto": (STO * 2, "a second alignment"),
        "no_row.sto": (b"# STOCKHOLM 1.0\n//\n", "no row"),
        "name_alone.sto": (STO.replace(b"c/1-12   " + SEQUENCE.encode(), b"c/1-12"), "line 6"),
        "blocks.sto": (STO.replace(b"//", b"\na/1-12   GAS\nx/1-12   GAS\n//"), "line 10"),
        "gap_query.sto": (STO.replace(SEQUENCE.encode(), b"-" * 12), "no residue"),
    }
    return [
        Malformed(name, content, read_alignment, says) for name, (content, says) in made.items()
    ]


# ---- template hits ----

M8 = b"".join(
    b"query\t%dabc_A\t0.9\t5\t1\t1\t2\t6\t11\t14\t1e-9\t70\t3M1I1M\n" % i for i in range(1, 6)
)
HHR = b"""Query         query
Match_columns 12

 No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM
  1 1abc_A X                        99.0 1E-10   1E-14    90.0   0.0   12    1-12      3-14  (20)

No 1
>1abc_A X
Probab=99.00  E-value=1E-10  Score=90.00  Aligned_cols=12  Identities=100%  Sum_probs=11.0

Q query             1 AGSAGSAAGSGA   12 (12)
Q Consensus         1 AGSAGSAAGSGA   12 (12)
T Consensus         3 AGSAGSAAGSGA   14 (20)
T 1abc_A            3 AGSAGSAAGSGA   14 (20)

"""


def hits():
    """Damaged template hits."""
    first = M8.split(b"\n")[0]

    def column(place, value):
        fields = first.split(b"\t")
        fields[place] = value
        return b"\n".join([first, b"\t".join(fields), b""])

    no_alignment = b"q\t1abc_A\t0.9\t5\t0\t0\t1\t2000000000\t1\t2000000000\t1\t9\n"
    far = HHR.replace(b"   3 A", b"   99999999999 A").replace(b"   14 (", b"   100000000010 (")
    made = {f"cut{i}.m8": (M8[:place], None) for i, place in enumerate(cut_places(M8, 4))}
    made |= {f"cut{i}.hhr": (HHR[:place], None) for i, place in enumerate(cut_places(HHR, 6))}
    made |= {
        "text.m8": (b"not a table\n", "line 1"),
        "fewer.m8": (first + b"\na\tb\n", "line 2"),
        "start_zero.m8": (column(6, b"0"), "line 2"),
        "start_huge.m8": (column(6, b"9" * 40), "line 2"),
        "target_huge.m8": (column(8, b"3000000000"), "line 2"),
        "backwards.m8": (column(7, b"1"), "line 2"),
        "no_number.m8": (column(10, b"small"), "line 2"),
        "cigar_bomb.m8": (column(12, b"999999999999M"), "line 2"),
        "cigar_huge.m8": (column(12, b"9" * 60 + b"M"), "line 2"),
        "cigar_text.m8": (column(12, b"3M1Q"), "line 2"),
        "range_bomb.m8": (no_alignment, "line 1"),
        "noise.m8": (NOISE, "NUL"),
        "noise.hhr": (NOISE, "NUL"),
        "range.hhr": (HHR.replace(b"   3 A", b"  13 A"), "hit 1"),
        "huge.hhr": (far, "hit 1"),
        "length_huge.hhr": (HHR.replace(b"(20)\n", b"(99999999999)\n"), "hit 1"),
        "no_values.hhr": (HHR.replace(b"Probab=99.00", b"Probab=x"), "hit 1"),
        "columns.hhr": (HHR.replace(b"Aligned_cols=12", b"Aligned_cols=11"), "hit 1"),
        "unequal.hhr": (HHR.replace(b"3 AGSAGSAAGSGA", b"3 AGSAGS-AGSGA"), "hit 1"),
        "no_range.a3m": (b">query\nGAS\n>1abc_A\nGAS\n", "line 3"),
        "range_huge.a3m": (b">query\nGAS\n>1abc_A/99999999999-100000000001\nGAS\n", "line 3"),
        "unequal_hits.a3m": (b">query\nGAS\n>1abc_A/1-2\nAG\n", "line 3"),
    }  # fmt: skip
    return [Malformed(name, content, read_hits, says) for name, (content, says) in made.items()]


# ---- inputs of predictions ----

JOB = {
    "dialect": "alphafold3", "version": 1, "name": "x", "modelSeeds": [1],
    "sequences": [{"protein": {"id": ["A"], "sequence": SEQUENCE}}],
}  # fmt: skip


def inputs():
    """Broken inputs of predictions."""
    text = json.dumps(JOB, indent=1)

    def job(**changes):
        return json.dumps({**JOB, **changes}).encode()

    def protein(**changes):
        chain = {"id": ["A"], "sequence": SEQUENCE, **changes}
        return job(sequences=[{"protein": chain}])

    def server(**changes):
        chain = {"sequence": SEQUENCE, "count": 1, **changes}
        return json.dumps([{"name": "x", "sequences": [{"proteinChain": chain}]}]).encode()

    bomb = "a0: &a0 [x, x]\n" + "".join(
        f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
    )
    made = {
        f"cut{i}.json": (text[:place].encode(), "line")
        for i, place in enumerate(cut_places(text, 6))
    }
    made |= {
        "noise.json": (NOISE, "NUL"),
        "empty.json": (b"", "line 1"),
        "number.json": (b"7", "expected"),
        "list_of_numbers.json": (b"[1, 2]", "expected"),
        "deep.json": (b"[" * 100_000, "nested"),
        "deep.yaml": (b"[" * 5000, "nested"),
        "long_number.json": (b'{"version": ' + b"9" * 9000 + b"}", "number"),
        "twins.json": (b'{"dialect": "a", "dialect": "b"}', "twice"),
        "sequence_number.json": (protein(sequence=7), None),
        "sequence_letter.json": (protein(sequence="AG?"), "position 3"),
        "sequence_empty.json": (protein(sequence=""), "empty"),
        "modified_far.json": (
            protein(modifications=[{"ptmType": "SEP", "ptmPosition": 10**30}]), "residue"),
        "version_text.json": (job(version="one"), "version"),
        "version_unicode.json": (job(version="\u0661\u00b2"), "version"),
        "seed_huge.json": (job(modelSeeds=[10**30]), None),
        "seed_text.json": (job(modelSeeds=["a"]), "modelSeeds"),
        "sequences_text.json": (job(sequences="GAS"), "list"),
        "no_sequences.json": (job(sequences=[]), "no chain"),
        "kind.json": (job(sequences=[{"sugar": {"id": "A"}}]), "unknown"),
        "bond.json": (job(bondedAtomPairs=[[["Z", 1, "C"], ["A", 1, "C"]]]), "chain 'Z'"),
        "template.json": (
            protein(templates=[{"mmcif": "x", "queryIndices": [10**12], "templateIndices": [1]}]),
            "index"),
        "copies.json": (server(count=10**9), "count"),
        "copies_negative.json": (server(count=-1), "count"),
        "bomb.yaml": (f"version: 1\n{bomb}sequences: *a11\n".encode(), "expected"),
        "python.yaml": (b"sequences: !!python/object/apply:os.system ['true']\n", None),
        "tabs.yaml": (b"sequences:\n\t- protein:\n", "line 2"),
        "cut.yaml": (b"version: 1\nsequences:\n - protein: {id: A, seq", "line 3"),
        "circle.yaml": (b"sequences: &a [*a]\n", None),
        "twins.yaml": (b"version: 1\nversion: 2\n", "twice"),
        "header.fasta": (b">A|protein\n", "empty"),
        "letter.fasta": (b">A|protein\nAG?\n", "'?'"),
        "nothing.fasta": (b"", "is empty"),
    }  # fmt: skip
    return [Malformed(name, content, read_inputs, says) for name, (content, says) in made.items()]


# ---- tables beside structures, the dictionary ----


def tables():
    """Damaged lists, indices and dictionaries."""

    def index(entry):
        return json.dumps({"1abc_A": entry}).encode()

    def components(path):
        return open_components(path, path.with_name(f"{path.name}.index"))

    twin = COMPONENTS + component_text("ALA").encode()
    stranger = component_text("GLY", [("CA", "XX")]).encode()
    ala = COMPONENTS[: COMPONENTS.index(b"data_GLY")]
    made = [
        ("twins.txt", b"a b\nc a\n", read_duplicate_chains, "line 2"),
        ("noise.txt", NOISE, read_duplicate_chains, "NUL"),
        ("dates_cut.json", b'{"1abc": "2001-', read_release_dates, "line 1"),
        ("dates_text.json", b'{"1abc": "soon"}', read_release_dates, "1abc"),
        ("dates_list.json", b"[1]", read_release_dates, "expected"),
        ("dates_deep.json", b'{"a":' * 50_000, read_release_dates, "nested"),
        ("index_cut.index", index({"db": "x.db"})[:-4], AlignmentDatabase, "line 1"),
        ("index_out.index", index({"db": "../x", "files": []}), AlignmentDatabase, "not in its"),
        ("index_root.index", index({"db": "/etc/passwd", "files": []}), AlignmentDatabase, "not"),
        ("index_nul.index", index({"db": "a\0b", "files": []}), AlignmentDatabase, "a"),
        ("index_absent.index", index({"db": "x", "files": []}), AlignmentDatabase, "cannot"),
        ("index_huge.index", index({"db": "x", "files": [["a", 10**30, 1]]}),
         AlignmentDatabase, "damaged"),
        ("index_text.index", index("x"), AlignmentDatabase, "damaged"),
        ("clusters_twice.txt", b"a b\nb c\n", read_clusters, "line 2"),
        ("ccd_empty.cif", b"", components, "no component"),
        ("ccd_cut.cif", COMPONENTS[: len(COMPONENTS) // 2 + 3], components, None),
        ("ccd_twins.cif", twin, components, "duplicate"),
        ("ccd_stranger.cif", stranger, components, "bond"),
        ("ccd_charge.cif", ala.replace(b" 0 N N", b" x N N", 1), components, "dictionary"),
        ("ccd_charge_huge.cif", ala.replace(b" 0 N N", b" 1e99 N N", 1), components, "dictionary"),
        ("ccd_noise.cif", NOISE, components, "mmCIF"),
        ("ccd_utf16.cif", COMPONENTS.decode().encode("utf-16"), components, "mmCIF"),
    ]  # fmt: skip
    return [Malformed(*each) for each in made]


# ---- compression ----


def compressed():
    """Damaged and absurd compressed files."""
    good = cif()
    packed = gzip.compress(good)
    flipped = bytearray(packed)
    flipped[len(flipped) // 2] ^= 0x55
    letters = gzip.compress(b">q\n") + gzip.compress(ZEROS.replace(b"\0", b"A"), 9) * TIMES
    zstd = pa.compress(good, codec="zstd", asbytes=True)
    made = [
        ("cut.cif.gz", packed[: len(packed) // 2], "to the end"),
        ("head.cif.gz", packed[:8], "to the end"),
        ("flipped.cif.gz", bytes(flipped), "to the end"),
        ("noise.cif.gz", b"\x1f\x8b" + NOISE, "to the end"),
        ("trailing.cif.gz", packed + NOISE, "to the end"),
        ("bomb.cif.gz", gzip.compress(ZEROS, 9) * TIMES, "holds more than"),
        ("bomb.cif.bz2", bz2.compress(ZEROS) * TIMES, "holds more than"),
        ("bomb.cif.xz", lzma.compress(ZEROS, preset=0) * TIMES, "holds more than"),
        ("bomb.cif.zst", pa.compress(ZEROS, codec="zstd", asbytes=True) * TIMES, "holds more than"),
        ("cut.cif.bz2", bz2.compress(good)[:-9], "to the end"),
        ("cut.cif.xz", lzma.compress(good)[:-30], "to the end"),
        ("cut.cif.zst", zstd[: len(zstd) // 2], "to the end"),
        ("twice.cif.gz", gzip.compress(packed), "is neither"),
    ]
    found = [Malformed(name, content, assembled, says) for name, content, says in made]
    packed = gzip.compress(A3M)
    made = [
        ("cut.a3m.gz", packed[: len(packed) // 2], "to the end"),
        ("bomb.a3m.gz", letters, "holds more than"),
    ]
    return found + [Malformed(name, content, read_alignment, says) for name, content, says in made]


# ---- archives ----


def archived(path):
    """Read all files of an archive; what is refused of it is an error."""
    found = find_protein_files([path])
    for name, reason in found.refused:
        raise DataError(f"{name}: {reason}")
    for each in (*found.structures, *found.alignments):
        read_whole(each)


def tarred(name, *, kind=tarfile.REGTYPE, data=b"", size=None, pax=None):
    """A tar of one good file and one of a name, with a size that it may not have."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        good = tarfile.TarInfo("good.cif")
        good.size = len(cif())
        tar.addfile(good, io.BytesIO(cif()))
        entry = tarfile.TarInfo(name)
        entry.type, entry.linkname, entry.pax_headers = kind, "/etc/passwd", pax or {}
        entry.size = len(data) if size is None else size
        tar.addfile(entry)
        out.write(data + bytes(-len(data) % 512))
    return out.getvalue()


def archives():
    """Tars with names that lead out of them, links, absurd sizes; damaged ones."""
    out, link = "leads out of the archive", "is a link or a device"
    made = [
        ("up.tar", tarred("../up.cif"), out),
        ("far.tar", tarred("a/" * 30 + "../" * 40 + "far.cif"), out),
        ("root.tar", tarred("/root.cif"), out),
        ("inner.tar", tarred("a/../../inner.cif"), out),
        ("windows.tar", tarred("..\\windows.cif"), out),
        ("pax.tar", tarred("harmless.cif", pax={"path": "../pax.cif"}), out),
        ("soft.tar", tarred("soft.cif", kind=tarfile.SYMTYPE), link),
        ("hard.tar", tarred("hard.cif", kind=tarfile.LNKTYPE), link),
        ("device.tar", tarred("device.cif", kind=tarfile.CHRTYPE), link),
        ("pipe.tar", tarred("pipe.cif", kind=tarfile.FIFOTYPE), link),
        ("huge.tar", tarred("huge.cif", size=1 << 50), "holds 1,125,899,906,842,624 bytes"),
        ("cut.tar", tarred("cut.cif", data=cif())[: len(cif()) + 2000], "to the end"),
        ("noise.tar", tarred("noise.cif", data=NOISE)[:512] + NOISE, "to the end"),
        ("huge.tar.gz", gzip.compress(tarred("huge.cif", size=1 << 50)), "bytes; refused"),
        ("cut.tar.gz", gzip.compress(tarred("gz.cif", data=NOISE))[:300], "to the end"),
        ("bomb.tar.gz", gzip.compress(ZEROS, 9) * TIMES, None),
        ("empty.tar", b"", "to the end"),
        ("broken.index", b"{", "is not valid JSON"),
        ("climbing.index", json.dumps(
            {"../../x": {"db": "../../../etc/passwd", "files": [["a.a3m", 0, 9]]}}
        ).encode(), "is not in its folder"),
    ]  # fmt: skip
    return [Malformed(name, content, archived, says) for name, content, says in made]


def everything():
    """All of them."""
    groups = (structures, pdb_files, alignments, hits, inputs, tables, compressed, archives)
    return [each for group in groups for each in group()]
