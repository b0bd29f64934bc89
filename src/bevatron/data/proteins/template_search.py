"""Templates of a sequence: found by searches, read from the structures they name."""

import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from bevatron.data.archives import state_of
from bevatron.data.proteins.chain_index import UNKNOWN_DAY
from bevatron.data.proteins.template_atoms import chain_templates
from bevatron.data.proteins.template_hits import EMBARGO
from bevatron.data.readers.proteins import read_hits, read_structure
from bevatron.data.readers.proteins.hits import TemplateHits, joined
from bevatron.data.readers.proteins.structure import Structure
from bevatron.errors import DataError, reason_of
from bevatron.typing import Arrays

_STRUCTURES_HELD = 64


@dataclass(frozen=True)
class HitsOf:
    """Hits of a sequence.

    Attributes
    ----------
    query : the query whose hits count; None for all in the file
    first : residue of the sequence at which the search's query begins
    """

    path: Path
    query: str | None = None
    first: int = 0


@dataclass(frozen=True)
class TemplateQuery:
    """A distinct sequence for which a search has found hits.

    Attributes
    ----------
    sequence : in one letter for each residue
    classes : the same as classes of the alphabet, int8
    hits : better searches first
    released : days of the chains of this sequence; `UNKNOWN_DAY` for one without a date
    own : entries of the chains without a date, which are not templates of themselves
    """

    sequence: str
    classes: bytes
    hits: tuple[HitsOf, ...]
    released: tuple[int, ...] = (UNKNOWN_DAY,)
    own: frozenset[str] = frozenset()


class FoundTemplates(NamedTuple):
    """Templates of a sequence.

    Attributes
    ----------
    templates : `TEMPLATE_FIELDS`
    reasons : lines ``file TAB reason`` of what could not be used
    absent : codes of entries that hits name and that are not among the structures
    """

    templates: Arrays
    reasons: list[str]
    absent: list[str]


def find_templates(
    query: TemplateQuery,
    structures: Mapping[str, Path],
    dates: Mapping[str, int] | None = None,
    *,
    strict: bool = False,
) -> FoundTemplates:
    """Find the templates of a sequence; parameters as for `TemplateFinder`."""
    dates = {} if dates is None else dates
    latest = max(query.released) if min(query.released) != UNKNOWN_DAY else None
    reasons: dict[str, None] = {}
    absent: dict[str, None] = {}

    def opened(code: str) -> Structure | None:
        if code in query.own:
            return None
        if latest is not None and dates.get(code, UNKNOWN_DAY) > latest - EMBARGO.days:
            return None
        if code not in structures:
            absent[code] = None
            return None
        try:
            path = structures[code]
            found = _structure(path, state_of(path))
            date = found.released or _date(dates.get(code, UNKNOWN_DAY))
            return found if date == found.released else replace(found, released=date)
        except DataError as error:
            if strict:
                raise
            reasons[f"{path}\t{reason_of(error, path)}"] = None
            return None

    parts = []
    for each in query.hits:
        try:
            parts.append(_hits(each, len(query.sequence)))
        except DataError as error:
            if strict:
                raise
            reasons[f"{each.path}\t{reason_of(error, each.path)}"] = None
    days = [_date(day) for day in sorted(set(query.released))]
    found = chain_templates(query.sequence, joined(parts), opened, days)
    return FoundTemplates(found, list(reasons), list(absent))


def _date(day: int) -> dt.date | None:
    return None if day == UNKNOWN_DAY else dt.date(1970, 1, 1) + dt.timedelta(days=day)


@lru_cache(maxsize=_STRUCTURES_HELD)
def _structure(path: Path, state: tuple[int, int]) -> Structure:  # noqa: ARG001  of the cache
    return read_structure(path)


@lru_cache(maxsize=4)  # a file may hold the hits of many queries, which are read one after another
def _all_hits(
    path: Path,
    state: tuple[int, int],  # noqa: ARG001  of the cache
) -> tuple[TemplateHits, dict[str, list[int]]]:
    hits = read_hits(path)
    rows: dict[str, list[int]] = {}
    for row, query in enumerate(hits.queries):
        rows.setdefault(query, []).append(row)
    return hits, rows


def queries_of(path: Path) -> tuple[str, ...]:
    """Return the names of the queries of a file of hits; empty texts where it has none."""
    return tuple(_all_hits(path, state_of(path))[1])


def _hits(source: HitsOf, length: int) -> TemplateHits:
    """Read the hits of a sequence, the best first.

    HH-suite's sums of probabilities rank its hits, as OpenFold does.
    """
    hits, rows = _all_hits(source.path, state_of(source.path))
    chosen = np.arange(len(hits)) if source.query is None else np.array(rows[source.query])
    found = hits.take(chosen)
    if len(found) and np.isfinite(found.sum_probabilities).all():
        found = found.take(np.argsort(-found.sum_probabilities, kind="stable"))
    last = int(found.query_ranges.max(initial=0))
    if source.first == 0 and last > length:
        raise DataError(
            f"{source.path}: aligns residue {last} of its query, but the chain has {length}; these "
            "are hits of another sequence"
        )
    return found.moved(source.first)
