"""FASTA of chains for a prediction, in the forms of all sources."""

import gzip

import pytest

from bevatron.data.readers.proteins import read_inputs
from bevatron.data.readers.proteins.inputs.complexes import chain_names
from bevatron.errors import DataError


@pytest.mark.parametrize(
    ("text", "entities"),
    [
        (
            ">A|protein|./a.a3m\nMKV\n>B|dna\nACGT\n>C|rna\nACGU\n>D|smiles\nCC(=O)O\n>E|ccd\natp\n",
            [
                ("protein", ("A",), "MKV"),
                ("dna", ("B",), "ACGT"),
                ("rna", ("C",), "ACGU"),
                ("ligand", ("D",), ""),
                ("ligand", ("E",), ""),
            ],
        ),
        (
            ">protein|name=a\nmkv\n>ligand|name=b\nCCO\n",
            [("protein", ("A",), "MKV"), ("ligand", ("B",), "")],
        ),
        (">x some words\nMK\nV\n", [("protein", ("A",), "MKV")]),
        (
            ">sp|ABC|X\nMK\n>pdb|1abc|A\nMV\n>lcl|query\nMKV\n>gi|12\nMV\n>a|b c\nMV\n",
            [
                ("protein", (x,), s)
                for x, s in zip("ABCDE", ("MK", "MV", "MKV", "MV", "MV"), strict=True)
            ],
        ),
        (
            ">dimer\nMKV:MKV:\nMKL\n",
            [("protein", (x,), s) for x, s in zip("ABC", ("MKV", "MKV", "MKL"), strict=True)],
        ),
        (
            ">4HHB_1|Chains A, C[auth X]|Globin\nVLS\n>1B_1|Chain B|DNA (5'-D(*C)-3')\nCGC\n",
            [("protein", ("A", "C"), "VLS"), ("dna", ("B",), "CGC")],
        ),
        (
            ">1a_A mol:protein length:2\nAG\n>1a_B mol:na length:2\nGU\n>1a_C mol:na\nGT\n",
            [("protein", ("A",), "AG"), ("rna", ("B",), "GU"), ("dna", ("C",), "GT")],
        ),
    ],
)
def test_fasta_is_read_in_the_forms_of_all_sources(tmp_path, text, entities):
    path = tmp_path / "x.fasta.gz"
    path.write_bytes(gzip.compress(text.replace("\n", "\r\n").encode()))
    (found,) = read_inputs(path)
    assert [(e.kind, e.chains, e.sequence) for e in found.entities] == entities
    assert found.name == "x"


def test_fasta_names_alignments_ligands_and_descriptions(tmp_path):
    text = ">A|protein|a.a3m\nMKV\n>B|protein|empty\nMKV\n>C|ccd\natp\n>D|smiles\nCc1ccccc1\n"
    path = tmp_path / "x.fa"
    path.write_text(text)
    (found,) = read_inputs(path)
    assert [e.unpaired for e in found.entities] == [tmp_path / "a.a3m", "", None, None]
    assert found.entities[2].codes == ("ATP",)
    assert found.entities[3].smiles == "Cc1ccccc1"
    assert found.entities[0].description == "A|protein|a.a3m"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "a.fasta: is empty"),
        ("MKV", "a.fasta, line 1: 'MKV' is not a header"),
        (">a\nMKV\n>b\n", r"a.fasta, line 3 \(record 'b'\): the sequence is empty"),
        (">a\nMKV:\n", "the sequence is empty"),
        (">a\nACGT\n", r"line 1 \(record 'a'\): its letters are those of nucleotides"),
        (">a\nMK-V\n", "'-' at position 3 is not a residue of protein"),
        (">a|rna\nACGUZ1\n", "'Z' at position 5 is not a residue of rna"),
        (
            ">a|dna\nACGT\n>b|dna\nAcuT\n",
            r"line 3 \(record 'b\|dna'\): 'U' at position 3 is not a residue of dna; write T, and",
        ),
        (
            ">4xyz_A mol:na\nGATCUG\n",
            r"\(record '4xyz_A'\): holds both T and U; write '>NAME\|dna'",
        ),
        (">A|protein\nMK\n>A|protein\nMK\n", "chain 'A' occurs twice"),
        (">A|ccd\n", "the ligand is empty"),
        (">A|lipid\nMKV\n", r"line 1 \(record 'A\|lipid'\): the kind 'lipid' is unknown; write"),
        (">A|Peptide|x.a3m\nMKV\n", "the kind 'Peptide' is unknown"),
        (">glycan|name=x\nMKV\n", "the kind 'glycan' is unknown"),
    ],
)
def test_a_record_that_does_not_fit_is_one_sentence(tmp_path, text, sentence):
    path = tmp_path / "a.fasta"
    path.write_text(text)
    with pytest.raises(DataError, match=sentence):
        read_inputs(path)


def test_chains_are_named_as_on_the_alphafold_server():
    names = chain_names()
    found = [next(names) for _ in range(26 + 26 * 26 + 1)]
    assert (found[0], found[25], found[26], found[27], found[52]) == ("A", "Z", "AA", "BA", "AB")
    assert len(set(found)) == len(found)
