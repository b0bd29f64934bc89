"""Names of alignment rows: accession and species, by which chains are paired."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_ACCESSION = (
    r"(?:[OPQ][0-9][A-Z0-9]{3}[0-9]|[A-NR-Z][0-9](?:[A-Z][A-Z0-9]{2}[0-9]){1,2}"
    r"|UPI[0-9A-F]{10}|MGYP[0-9]{12})"
)
# A mnemonic has a letter first, or is 9 and four letters for a group of species: without that, runs
# of sequencing (SRR4030088_93701) and PDB chains (6KWC_1) would have a species.
_SPECIES = r"(?P<species>[A-Z][A-Z0-9]{2,4}|9[A-Z]{4})(?=[\s/]|$)"

# In the order in which they are tried; databases put their own prefix before UniProt's forms.
_FORMS = tuple(
    re.compile(rf"(?:^|\|){form}")
    for form in (
        rf"(?:sp|tr)\|(?P<accession>{_ACCESSION})(?:[-_]\d+)?\|[A-Z0-9]{{1,10}}_{_SPECIES}",
        rf"UniRef\d+_(?P<accession>{_ACCESSION})(?:-\d+)?(?:_(?P<taxon>\d+))?(?![A-Z0-9])",
        rf"(?P<accession>{_ACCESSION})(?:[.-]\d+)?(?=[\s/|]|$)",
        rf"(?P<accession>{_ACCESSION})_{_SPECIES}",
        rf"[A-Z0-9]{{1,10}}_{_SPECIES}",
    )
)
_TAXON = re.compile(r"(?:\bOX|\bTaxI[Dd]|\btaxid)[=:]\s?(\d+)")
_REPRESENTATIVE = re.compile(rf"\bRepID=[A-Z0-9]{{1,10}}_{_SPECIES}")


@dataclass(frozen=True)
class Origins:
    """Origins of sequences, parsed from the names of rows.

    Attributes
    ----------
    accessions : [rows]
        Accession in UniProt, UniParc or MGnify; empty if the name has none.
    species : [rows]
        UniProt's mnemonic, HUMAN, 9BACI; empty if the name has none.
    taxa : int32 [rows]
        NCBI's taxonomy identifier, 9606; 0 if the name has none.
    """

    accessions: tuple[str, ...]
    species: tuple[str, ...]
    taxa: npt.NDArray[np.int32]


def parse_names(names: Sequence[str]) -> Origins:
    """Find accession and species in the names of rows.

    Recognised are UniProt (``sp|P69905|HBA_HUMAN ... OX=9606``), UniRef
    (``UniRef90_A0A4U1FNC5/3-139 ... TaxID=40151 RepID=A0A4U1FNC5_MONMO``, or with the taxon
    appended: ``UniRef100_A0A2H1A674_498019/``), Pfam (``FUBP2_HUMAN/426-491``), MGnify and plain
    accessions (ColabFold), each also after a prefix (``pfam|...``).

    Examples
    --------
    >>> origins = parse_names(["sp|P69905|HBA_HUMAN OX=9606", "UniRef100_P01942_10090/", "query"])
    >>> origins.accessions, origins.species, origins.taxa.tolist()
    (('P69905', 'P01942', ''), ('HUMAN', '', ''), [9606, 10090, 0])
    """
    found = [_parse(name) for name in names]
    taxa = np.array([taxon for _, _, taxon in found], dtype=np.int32)
    return Origins(
        tuple(accession for accession, _, _ in found),
        tuple(species for _, species, _ in found),
        taxa,
    )


def _parse(name: str) -> tuple[str, str, int]:
    title = name.split(None, 1)[0] if name.strip() else ""
    parts: dict[str, str | None] = {}
    for form in _FORMS:
        match = form.search(title)
        if match:
            parts = match.groupdict()
            break
    accession, species = parts.get("accession") or "", parts.get("species") or ""
    taxon = parts.get("taxon")
    if len(name) > len(title):
        described = _TAXON.search(name)
        taxon = described[1] if described else taxon
        if not species and (match := _REPRESENTATIVE.search(name)):
            species = match["species"]
    number = int(taxon or 0)
    return accession, species, number if number <= np.iinfo(np.int32).max else 0
