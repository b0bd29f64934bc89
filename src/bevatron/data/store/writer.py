"""Writing a store: which shards exist, which are missing, and the manifest at the end.

``preparation.json`` holds the inputs of the store, every shard their fingerprint, and
``manifest.json`` is written last. The folder is the only state, so a process may stop at any moment
and others may continue, also several at once.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bevatron import config, files
from bevatron.data.samples import Field
from bevatron.data.store.shards import Columns, check_size, read_metadata, write_shard
from bevatron.data.store.store import (
    MANIFEST,
    PREPARATION,
    STORE_FORMAT,
    STORE_KIND,
    fields_to_plain,
    manifest_checksum,
    read_manifest,
)
from bevatron.data.summary import structures as summary
from bevatron.errors import OtherInputsError, StoreError

REPLACE = "; choose another folder, or `overwrite=True` to replace it"
"""What to do where a folder holds a store of other inputs."""


@dataclass
class StoreWriter:
    """Writes the shards and the manifest of one store.

    Attributes
    ----------
    inputs
        Plain values that determine the content: the reader's fingerprint and sources, the settings,
        the fields, the format. Their hash is the store's fingerprint.
    num_samples, samples_per_shard
        The layout; a folder begun with another ``samples_per_shard`` keeps its own.
    report : what the reader reports about its files, line by line
    """

    out: Path
    fields: tuple[Field, ...]
    inputs: Mapping[str, Any]
    num_samples: int
    samples_per_shard: int
    report: Sequence[str] = ()
    _finished: set[int] = field(default_factory=set)

    @property
    def fingerprint(self) -> str:
        """Hash of everything that determines the content."""
        return config.fingerprint(self.inputs)

    @property
    def num_shards(self) -> int:
        """Number of shards of the whole store."""
        return -(-self.num_samples // self.samples_per_shard)

    def samples_of(self, number: int) -> range:
        """Return the indices of the samples in a shard."""
        start = number * self.samples_per_shard
        return range(start, min(start + self.samples_per_shard, self.num_samples))

    def shard_path(self, number: int) -> Path:
        """Path of a shard."""
        return self.out / f"shard-{number:06d}.arrow"

    def begin(self, overwrite: bool = False) -> None:
        """Create the folder, or continue an unfinished store in it.

        Raises StoreError if the folder holds other files, or a store of other inputs and
        ``overwrite`` is False; the message says what differs.
        """
        with files.explained(self.out, StoreError):
            self.out.mkdir(parents=True, exist_ok=True)
        found = self._read(PREPARATION)
        finished = self._read(MANIFEST)
        if found is None and finished is None:
            self._refuse_foreign()
        for existing in (found, finished):
            if existing is not None and not self._is_ours(existing) and not overwrite:
                raise OtherInputsError(self._difference(existing))
        if self._is_ours(found) or self._is_ours(finished):
            agreed = found if self._is_ours(found) else finished
            assert agreed is not None
            self.samples_per_shard = int(agreed["samples_per_shard"])
        else:
            self._announce()
        # From here on neither file may describe other inputs.
        with files.explained(self.out, StoreError):
            for name, values in ((MANIFEST, finished), (PREPARATION, found)):
                current = self._read(name) if values is not None else None
                if current is not None and not self._is_ours(current):
                    (self.out / name).unlink(missing_ok=True)
                    files.fsync_folder(self.out)

    def _is_ours(self, values: Mapping[str, Any] | None) -> bool:
        return values is not None and values.get("fingerprint") == self.fingerprint

    def _announce(self) -> None:
        values = {
            "kind": STORE_KIND,
            "format": STORE_FORMAT,
            "fingerprint": self.fingerprint,
            "inputs": self.inputs,
            "num_samples": self.num_samples,
            "samples_per_shard": self.samples_per_shard,
        }
        with self._unless_complete():
            files.write_json_atomically(self.out / PREPARATION, values, StoreError)
        # If several processes start at once, the file of the last one counts.
        agreed: Mapping[str, Any] = self._read(PREPARATION) or self._read(MANIFEST) or values
        if agreed["fingerprint"] != self.fingerprint:
            raise OtherInputsError(self._difference(agreed))
        self.samples_per_shard = int(agreed["samples_per_shard"])

    def _read(self, name: str) -> dict[str, Any] | None:
        path = self.out / name
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreError(f"{path}: cannot be read ({error}); choose another folder") from None
        if not isinstance(values, dict) or values.get("kind") != STORE_KIND:
            raise StoreError(f"{path}: not written by bevatron; choose another folder")
        return values

    def _refuse_foreign(self) -> None:
        # A process killed early leaves only the temporary file of preparation.json.
        strangers = sorted(
            path.name for path in self.out.iterdir() if not path.name.startswith(PREPARATION)
        )
        if strangers:
            raise StoreError(
                f"{self.out}: the folder holds something else ('{strangers[0]}'); choose an empty "
                "or a new folder"
            )

    def _difference(self, existing: Mapping[str, Any]) -> str:
        before, now = (_flatten(values) for values in (existing.get("inputs", {}), self.inputs))
        changes = [
            _change(key, before.get(key), now.get(key))
            for key in sorted(before.keys() | now.keys())
            if before.get(key) != now.get(key)
        ]
        shown = "; ".join(changes[:3]) + ("; ..." if len(changes) > 3 else "")
        return f"{self.out}: the folder holds a store made from other inputs ({shown}){REPLACE}"

    def is_finished(self, number: int) -> bool:
        """Whether a shard is complete and was written from the same inputs."""
        if number in self._finished:
            return True
        path = self.shard_path(number)
        if not path.exists():
            return False
        try:
            metadata = read_metadata(path)
        except StoreError:
            return False
        found = (metadata["fingerprint"], metadata["number"], metadata["samples"])
        if found != (self.fingerprint, number, len(self.samples_of(number))):
            return False
        self._finished.add(number)
        return True

    def missing(self) -> list[int]:
        """Numbers of the shards still to be written."""
        return [number for number in range(self.num_shards) if not self.is_finished(number)]

    def write(self, number: int, columns: Columns, part: Mapping[str, Any]) -> None:
        """Write one shard with the summary of its samples."""
        metadata = {
            "fingerprint": self.fingerprint,
            "number": number,
            "samples": columns.num_samples,
            "rows": {name: int(offsets[-1]) for name, offsets in columns.offsets.items()},
            "summary": part,
        }
        with self._unless_complete():
            write_shard(self.shard_path(number), self.fields, columns, metadata)

    def is_complete(self) -> bool:
        """Whether the store is finished and every shard has the size in the manifest."""
        try:
            manifest = read_manifest(self.out)
            if manifest["fingerprint"] != self.fingerprint:
                return False
            for entry in manifest["shards"]:
                check_size(self.out / entry["name"], entry["size"])
        except StoreError:
            return False
        return True

    def finish(self) -> None:
        """Write the manifest once all shards exist, and tidy up; may be repeated."""
        described = [read_metadata(self.shard_path(n)) for n in range(self.num_shards)]
        shards = [
            {
                "name": self.shard_path(number).name,
                "size": self.shard_path(number).stat().st_size,
                "samples": values["samples"],
            }
            for number, values in enumerate(described)
        ]
        manifest = {
            "kind": STORE_KIND,
            "format": STORE_FORMAT,
            "fingerprint": self.fingerprint,
            "num_samples": self.num_samples,
            "samples_per_shard": self.samples_per_shard,
            "sources": self.inputs["sources"],
            "settings": self.inputs["settings"],
            "fields": fields_to_plain(self.fields),
            "counts": summary.merge([values["rows"] for values in described]),
            "summary": summary.merge([values["summary"] for values in described]),
            "report": list(self.report),
            "inputs": self.inputs,
            "shards": shards,
        }
        # As it will be read: keys are text then.
        manifest["checksum"] = manifest_checksum(json.loads(json.dumps(manifest)))
        with self._unless_complete():
            files.write_json_atomically(self.out / MANIFEST, manifest, StoreError)
        self.tidy()

    @contextmanager
    def _unless_complete(self) -> Iterator[None]:
        """Ignore a failed write if another process has finished the store in the meantime.

        When that process tidies up, it removes all unfinished files, including ours.
        """
        try:
            yield
        except StoreError:
            if not self.is_complete():
                raise

    def tidy(self) -> None:
        """Remove files that are no longer needed once the manifest exists."""
        known = {self.shard_path(number).name for number in range(self.num_shards)}
        with suppress(OSError):  # a read-only store is fine
            (self.out / PREPARATION).unlink(missing_ok=True)
            for path in self.out.glob("shard-*.arrow"):
                if path.name not in known:
                    path.unlink(missing_ok=True)
            files.remove_leftovers(self.out)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{key}."))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def _change(key: str, before: Any, now: Any) -> str:
    if key == "reader":
        return "the content of the input files or how their labels are read has changed"
    if key == "fields":
        return "the fields of a sample have changed"
    if key in {"settings.features", "settings.features_version"}:
        return f"its features are of version {before or 1}, this release makes version {now}"
    name = key.removeprefix("settings.")
    return f"{name} was {_short(before)}, is now {_short(now)}"


def _short(value: Any) -> str:
    text = "absent" if value is None else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
