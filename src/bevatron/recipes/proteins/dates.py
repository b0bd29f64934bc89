"""Release dates of structures: which are taken, and those of files that name none."""

import datetime as dt
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from xxhash import xxh3_128_hexdigest

from bevatron.data.readers.proteins import Structure
from bevatron.errors import ConfigError, DataError


class OtherDateError(DataError):
    """A structure that was released on a day that was not asked for."""


@dataclass(frozen=True)
class Released:
    """The structures that are taken, by their release dates.

    Raises ConfigError for what is no date, or if no date lies between them.

    Attributes
    ----------
    before, since : only those released before a day, or on it and later, as ISO dates; None for any
    known : dates by code in lower case, for files that name none
    """

    before: str | None = None
    since: str | None = None
    known: Mapping[str, dt.date] = field(default_factory=dict)

    def __post_init__(self) -> None:
        before, since = _date("before", self.before), _date("from", self.since)
        if before is not None and since is not None and since >= before:
            raise ConfigError(f"released_from: expected a day before {before}, got {since}")

    @property
    def settings(self) -> dict[str, Any]:
        """What entries of a store depend on; nothing where all dates are taken from the files."""
        dates = "\n".join(f"{code} {date}" for code, date in sorted(self.known.items()))
        found = {
            "released_before": self.before,
            "released_from": self.since,
            "release_dates": xxh3_128_hexdigest(dates.encode()) if dates else None,
        }
        return {name: value for name, value in found.items() if value is not None}

    def dated(self, structure: Structure, code: str) -> Structure:
        """Return a structure with its date, as far as it is known.

        Raises OtherDateError if it is not one of those that are taken.
        """
        date = structure.released or self.known.get(code)
        before, since = _date("before", self.before), _date("from", self.since)
        if (before or since) and date is None:
            raise OtherDateError("has no release date")
        if before is not None and date is not None and date >= before:
            raise OtherDateError(f"was released on {date}, not before {before}")
        if since is not None and date is not None and date < since:
            raise OtherDateError(f"was released on {date}, before {since}")
        return structure if date == structure.released else replace(structure, released=date)


def _date(name: str, text: str | None) -> dt.date | None:
    if text is None:
        return None
    with suppress(ValueError):
        date = dt.date.fromisoformat(text)
        if str(date) == text:  # a store is known by it: one spelling for a day
            return date
    raise ConfigError(f"released_{name}: expected a date such as 2021-09-30, got '{text}'")
