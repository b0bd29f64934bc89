"""Accession and species in the names of rows, in the forms of every source."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bevatron.data.readers.proteins import parse_names, read_alignment


@pytest.mark.parametrize(
    ("name", "accession", "species", "taxon"),
    [
        ("sp|P69905|HBA_HUMAN Hemoglobin OS=Homo sapiens OX=9606 PE=1", "P69905", "HUMAN", 9606),
        ("tr|A0A0K0ME10|A0A0K0ME10_9STAP/1-51 [subseq from]", "A0A0K0ME10", "9STAP", 0),
        ("sp|P69905-2|HBA_HUMAN", "P69905", "HUMAN", 0),
        (
            "UniRef90_A0A4U1FNC5/3-139 [subseq from] zeta n=1 TaxID=40151 RepID=A0A4U1FNC5_MONMO",
            "A0A4U1FNC5",
            "MONMO",
            40151,
        ),
        (
            "UniRef90_UPI00165BF47D/1-9 n=1 TaxID=8078 RepID=UPI00165BF47D",
            "UPI00165BF47D",
            "",
            8078,
        ),
        ("UniRef100_A0A2H1A674_498019/\t268\t0.985\t6.443E-78", "A0A2H1A674", "", 498019),
        ("UniRef100_A0A2K6QFJ4\t351\t0.950\t0\t260\tTaxId=61622", "A0A2K6QFJ4", "", 61622),
        ("UniRef100_P10966-4\t62\t0.264", "P10966", "", 0),
        ("A0A1A7XAT7\t117\t0.285", "A0A1A7XAT7", "", 0),
        ("UPI0001761C5D\t40", "UPI0001761C5D", "", 0),
        ("FUBP2_HUMAN/426-491", "", "HUMAN", 0),
        ("Q3TIS5_MOUSE/98-160", "Q3TIS5", "MOUSE", 0),
        ("pfam|Q811C3_MOUSE/23-130", "Q811C3", "MOUSE", 0),
        ("mmseqsex|tr|L8GLQ1|L8GLQ1_ACACA", "L8GLQ1", "ACACA", 0),
        ("MGYP000836687451/14-154 [subseq from] PL=01", "MGYP000836687451", "", 0),
        ("SRR4030088_93701\t60\t0.328", "", "", 0),
        ("ERR1719334_3036786", "", "", 0),
        ("6KWC_1", "", "", 0),
        ("4HHB_A", "", "", 0),
        ("16061|Ga0209224_1019984_1|-2|01\t267", "", "", 0),
        ("M3XU60_10893215|ERR599230_k119_118031|+|148", "", "", 0),
        ("query", "", "", 0),
        ("", "", "", 0),
        (f"UniRef90_P69905 TaxID={10**30}", "P69905", "", 0),
    ],
)
def test_a_name_gives_accession_and_species(name, accession, species, taxon):
    found = parse_names([name])
    assert (found.accessions, found.species) == ((accession,), (species,))
    assert found.taxa.tolist() == [taxon]


@given(st.lists(st.text(max_size=30)))
def test_any_names_are_read(names):
    found = parse_names(names)
    assert len(found.accessions) == len(found.species) == len(found.taxa) == len(names)


def test_rows_for_pairing_have_a_taxon(shared):
    path = shared / "data" / "complexes" / "msa_only" / "protenix_with_taxid_3.a3m.gz"
    alignment = read_alignment(path)
    found = parse_names(alignment.names)
    for name, accession, taxon in zip(
        alignment.names, found.accessions, found.taxa.tolist(), strict=True
    ):
        if name.startswith("UniRef100_") and "/" in name:
            assert name.startswith(f"UniRef100_{accession}_{taxon}/")
        else:
            assert taxon == 0
    assert (found.taxa > 0).sum() > 3000
