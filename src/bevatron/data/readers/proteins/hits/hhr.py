"""Results of HHsearch and HHblits, one run or several in a file."""

import re

from bevatron.data.readers.proteins.fasta import as_text
from bevatron.data.readers.proteins.hits.table import (
    Hit,
    checked,
    has_residue,
    residue_number,
    residues,
)
from bevatron.errors import DataError

_RUN = re.compile(r"^(?=Query {2,}\S)", re.MULTILINE)
_QUERY = re.compile(r"Query +(\S+)")
_LISTED = re.compile(r"^ *(\d+) .*\d\s*\(\d+\)\s*$", re.MULTILINE)
_HIT = re.compile(r"^No (\d+) *\n", re.MULTILINE)
_ROW = re.compile(
    r"^([QT]) (?!(?:ss|sa)_|Consensus\b)(\S+) +(\d+) (\S+) +(\d+) \((\d+)\)", re.MULTILINE
)
_VALUE = re.compile(r"(\S+)=(\S+)")
# With these options HH-suite prints fewer alignments than lines of its list.
_FEWER = re.compile(r"^Command .* -[Bb] ", re.MULTILINE)


def parse_hhr(data: bytes, name: str) -> list[Hit]:
    """Read the alignments of all hits.

    Raises DataError naming the hit that is damaged, or a run that is cut off: it lists more hits
    than follow.
    """
    runs = [run for run in _RUN.split(as_text(data, name)) if run.strip()]
    hits = []
    for run in runs:
        query = _QUERY.match(run)
        if query is None:
            shown = run.strip().split("\n")[0][:40]
            raise DataError(
                f"{name}: is not a result of HHsearch; expected 'Query', found '{shown}'"
            )
        parts = _HIT.split(run)
        numbers, blocks = parts[1::2], parts[2::2]
        listed = len(_LISTED.findall(parts[0]))
        if " No Hit" not in parts[0] or (listed > len(blocks) and not _FEWER.search(parts[0])):
            raise DataError(
                f"{name}: is cut off, it lists {listed} hits of the query '{query[1]}' and aligns "
                f"{len(blocks)}; copy or compute it again"
            )
        hits += [
            _hit(query[1], block, f"{name}, hit {number} of '{query[1]}'")
            for number, block in zip(numbers, blocks, strict=True)
        ]
    return hits


def _hit(query: str, block: str, where: str) -> Hit:
    title, _, rest = block.partition("\n")
    target, _, description = title.removeprefix(">").strip().partition(" ")
    values = dict(_VALUE.findall(rest.partition("\n")[0]))
    rows = _ROW.findall(rest)
    parts = {side: [row for row in rows if row[0] == side] for side in "QT"}
    if not title.startswith(">") or not parts["Q"] or not parts["T"] or "Probab" not in values:
        raise DataError(f"{where}: has no name, values or alignment; the file is damaged")
    aligned = {side: "".join(row[3] for row in found).encode() for side, found in parts.items()}
    ranges = {
        side: (
            residue_number(found[0][2], "a first residue", where) - 1,
            residue_number(found[-1][4], "a last residue", where),
        )
        for side, found in parts.items()
    }
    hit = Hit(
        query,
        target,
        ranges["Q"],
        ranges["T"],
        has_residue(aligned["Q"]),
        has_residue(aligned["T"]),
        description=description.strip(),
        sequence=residues(aligned["T"]),
        target_length=residue_number(parts["T"][0][5], "the target's length", where),
        e_value=_number(values, "E-value", where),
        probability=_number(values, "Probab", where) / 100,
        sum_probability=_number(values, "Sum_probs", where),
        score=_number(values, "Score", where),
        identity=_number(values, "Identities", where) / 100,
    )
    hit = checked(hit, where)
    pairs, expected = (hit.in_query & hit.in_target).sum(), _number(values, "Aligned_cols", where)
    if pairs != expected:
        raise DataError(
            f"{where}: aligns {pairs} pairs of residues, its Aligned_cols are {expected:.0f}; the "
            "file is cut off or damaged"
        )
    return hit


def _number(values: dict[str, str], key: str, where: str) -> float:
    try:
        return float(values[key].rstrip("%"))
    except (KeyError, ValueError):
        raise DataError(f"{where}: {key} is '{values.get(key, '')}', not a number") from None
