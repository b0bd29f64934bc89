"""Templates of distinct sequences in a store, found once by the hits of searches.

A chain sees templates released before it; a store keeps the best templates for each date of a
sequence's chains, and a sample takes those that its own date allows.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from bevatron.data.proteins.alignments import places_by_key, sequence_key
from bevatron.data.proteins.chain_index import UNKNOWN_DAY
from bevatron.data.proteins.template_atoms import TEMPLATE_FIELDS
from bevatron.data.proteins.template_hits import EMBARGO, MAX_TEMPLATES
from bevatron.data.proteins.template_search import TemplateQuery, find_templates
from bevatron.data.readers.base import content_hash
from bevatron.data.samples import Field
from bevatron.data.store.prepare import prepare
from bevatron.data.store.store import Store
from bevatron.errors import DataError
from bevatron.typing import Array, Arrays, IntArray

STORED_FIELDS = (
    *TEMPLATE_FIELDS,
    Field("key", "uint8", (16,), False, "xxh3_128 of the sequence's classes"),
    Field("source", "int64", (2,), False, "(first file of hits, 0)"),
    Field("reason", "uint8", (), True, "lines 'file TAB reason' of what could not be used, UTF-8"),
    Field("absent", "uint8", (), True, "codes of entries that are not among the structures"),
)
"""Fields of the templates of a sequence in a store."""

_VERSION = 1
_SEQUENCES_PER_SHARD = 64
_LISTED = 5


class TemplateReader:
    """Sequences as raw samples: ``number``, their place among ``queries``.

    Parameters
    ----------
    structures : files of the entries that may be templates, by code in lower case
    """

    def __init__(self, queries: Sequence[TemplateQuery], structures: Mapping[str, Path]) -> None:
        self.queries = tuple(queries)
        files = dict.fromkeys(hits.path for each in queries for hits in each.hits)
        self._places = {path: place for place, path in enumerate(files)}
        self.sources = [str(path) for path in files]
        whole = xxhash.xxh3_128()
        for path in files:
            whole.update(f"{path} {content_hash(path)}\n".encode())
        for each in self.queries:
            whole.update(each.classes + f" {each.hits} {each.released} {sorted(each.own)}".encode())
        whole.update("".join(f"{code} {path}\n" for code, path in structures.items()).encode())
        self.fingerprint = whole.hexdigest()
        self.num_samples = len(self.queries)

    def read(self, start: int, stop: int) -> Iterator[Arrays]:
        """Yield the number of each sequence, and of its first file."""
        for number in range(start, stop):
            first = self._places[self.queries[number].hits[0].path]
            yield {"number": np.array(number), "file": np.array(first)}

    def describe(self, index: int) -> str:
        """Return the files of a sequence."""
        return ", ".join(str(hits.path) for hits in self.queries[index].hits)


@dataclass(frozen=True)
class TemplateFinder:
    """From the number of a sequence to its templates, or to the reason why it has none.

    Attributes
    ----------
    structures : files of the entries that may be templates, by code in lower case
    dates : days on which they were released, as far as they are known before they are opened
    strict : an unusable file is an error
    """

    queries: Sequence[TemplateQuery]
    structures: Mapping[str, Path]
    dates: Mapping[str, int]
    strict: bool = False

    def __call__(self, raw: Arrays) -> Arrays:
        """Find the templates of one sequence."""
        query = self.queries[int(raw["number"])]
        found = find_templates(query, self.structures, self.dates, strict=self.strict)
        key = sequence_key(query.classes)
        return {
            **found.templates,
            "key": np.frombuffer(key, dtype=np.uint8),
            "source": np.array([int(raw["file"]), 0], dtype=np.int64),
            "reason": np.frombuffer("\n".join(found.reasons).encode(), dtype=np.uint8),
            "absent": np.frombuffer(" ".join(found.absent).encode(), dtype=np.uint8),
        }


class StoredTemplates:
    """The templates of a store, by sequence; see `bevatron.data.proteins.sample.TemplateSource`.

    Raises DataError if it is a store of something else.

    Parameters
    ----------
    store : written by `prepare_templates`
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        if store.manifest["settings"].get("templates") != _VERSION:
            raise DataError(
                f"{store.path}: holds no templates of this version; prepare the store again"
            )
        self._places = places_by_key(store)

    @classmethod
    def open(cls, path: str | Path) -> "StoredTemplates":
        """Open a store of templates."""
        return cls(Store.open(path))

    def __len__(self) -> int:
        return len(self.store)

    def find(self, key: bytes, released: int) -> Arrays | None:
        """Return the best templates of a sequence that were released early enough.

        Parameters
        ----------
        key : `bevatron.data.proteins.alignments.sequence_key`
        released : day on which the chain was released; `UNKNOWN_DAY` allows every template

        Returns
        -------
        `TEMPLATE_FIELDS`, at most `MAX_TEMPLATES`, the best first; None if there is none.
        """
        place = self._places.get(key)
        if place is None:
            return None
        found = self.store[place]
        days = found["template_released"]
        allowed = np.ones(len(days), dtype=np.bool_)
        if released != UNKNOWN_DAY:
            latest = released - EMBARGO.days
            allowed = np.not_equal(days, UNKNOWN_DAY) & np.less_equal(days, latest)
        chosen = np.flatnonzero(allowed)[:MAX_TEMPLATES]
        return taken({field.name: found[field.name] for field in TEMPLATE_FIELDS}, chosen)

    def counts(self) -> IntArray:
        """Return the number of templates of each sequence, [sequences]."""
        return self.store.lengths("template_released")

    def keys(self) -> list[bytes]:
        """Return `sequence_key` of each sequence, in order."""
        return list(self._places)

    def rejects(self) -> list[tuple[str, str]]:
        """List (file, reason) of unusable files."""
        lines = {line: None for row in self._with("reason") for line in row.splitlines()}
        pairs = [line.partition("\t") for line in lines]
        found = [(file, reason) for file, _, reason in pairs]
        absent = list(dict.fromkeys(code for row in self._with("absent") for code in row.split()))
        if absent:
            listed = ", ".join(absent[:_LISTED]) + (" ..." if len(absent) > _LISTED else "")
            reason = (
                f"{len(absent)} entries that they name are not among the structures ({listed}); "
                "they are not templates"
            )
            found.append(("template hits", reason))
        return found

    def _with(self, field: str) -> Iterator[str]:
        """Yield the texts of a field that are not empty."""
        for row in np.flatnonzero(self.store.lengths(field)).tolist():
            yield self.store[row][field].tobytes().decode()


class TemplatesInMemory(dict[bytes, Arrays]):
    """Templates of a prediction, by sequence; see `StoredTemplates`."""

    def find(self, key: bytes, released: int) -> Arrays | None:  # noqa: ARG002  a prediction has none
        """Return the best templates of a sequence, of any date."""
        found = self.get(key)
        if found is None:
            return None
        return taken(found, np.arange(min(len(found["template_released"]), MAX_TEMPLATES)))


def taken(templates: Arrays, chosen: Array) -> Arrays | None:
    """Return some of the stored templates, `TEMPLATE_FIELDS`; None if there are none."""
    count = len(templates["template_released"])
    if not len(chosen):
        return None
    return {
        name: (rows := values.reshape(count, -1, *values.shape[1:]))[chosen].reshape(
            -1, *rows.shape[2:]
        )
        for name, values in templates.items()
    }


def prepare_templates(
    queries: Sequence[TemplateQuery],
    structures: Mapping[str, Path],
    out: str | Path,
    *,
    dates: Mapping[str, int] | None = None,
    fingerprint: str = "",
    strict: bool = False,
    workers: int | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> StoredTemplates:
    """Write the templates of sequences as a store, or continue an earlier call.

    Parameters
    ----------
    queries, structures, dates, strict : see `TemplateFinder`
    fingerprint : fingerprint of the content of the structures
    workers, overwrite, progress : as in `bevatron.data.store.prepare.prepare`
    """
    store = prepare(
        TemplateReader(queries, structures),
        TemplateFinder(queries, structures, {} if dates is None else dates, strict),
        out,
        STORED_FIELDS,
        {"templates": _VERSION, "structures": fingerprint, "unit": "sequence"},
        samples_per_shard=_SEQUENCES_PER_SHARD,
        workers=workers,
        overwrite=overwrite,
        progress=progress,
    )
    return StoredTemplates(store)
