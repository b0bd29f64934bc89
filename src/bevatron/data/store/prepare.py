"""Preparing a store: features that do not change, computed once, in parallel, killed or not.

The samples of a reader are cut into shards. Any process may write any shard, twice if need be:
what a shard holds depends only on the inputs. Whoever finds all shards finished writes the
manifest. So a killed preparation continues when it is started again, and processes of many nodes
share the work through nothing but the folder.
"""

import json
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from bevatron.data.processes import own_cpus
from bevatron.data.readers.base import SampleReader
from bevatron.data.samples import Field
from bevatron.data.store.progress import progress as show_progress
from bevatron.data.store.shards import Columns, concatenate
from bevatron.data.store.store import STORE_FORMAT, Store, fields_to_plain
from bevatron.data.store.workers import Advance, run_jobs
from bevatron.data.store.writer import StoreWriter
from bevatron.errors import BevatronError, ConfigError, DataError
from bevatron.typing import Arrays

Featurize = Callable[[Arrays], Arrays]
"""Picklable; turns a raw sample into the sample to store. If it has a method ``many``, from a list
of raw samples to the list of theirs, a shard's samples are given to that at once."""

Summarise = Callable[[Sequence[Arrays]], dict[str, Any]]
"""Picklable; describes the samples of a shard in numbers that add up.

See `bevatron.data.summary.structures`.
"""

_PLACES_IN_ENVIRONMENT = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)

_SECONDS_TO_START = 2.0
"""About what a worker process needs before it begins."""


def prepare(
    reader: SampleReader,
    featurize: Featurize | None,
    out: str | Path,
    fields: Sequence[Field],
    settings: Mapping[str, Any],
    *,
    samples_per_shard: int | None = None,
    workers: int | None = None,
    rank: int | None = None,
    world: int | None = None,
    progress: bool | None = None,
    summarise: Summarise | None = None,
    overwrite: bool = False,
    patience: float = 120.0,
) -> Store:
    """Compute the features of all samples and write them as a store, or continue doing so.

    Parameters
    ----------
    reader
        Where the samples come from.
    featurize
        Picklable function from a raw sample to a stored one; None stores raw samples.
    out
        Folder of the store.
    fields
        What is stored of every sample; ``featurize`` must give all of them.
    settings
        Plain values that decide the features (a cutoff, ...); part of the fingerprint.
    samples_per_shard
        None chooses between 16 and 1024 from the number of samples.
    workers
        Processes; 0 works in this one; None begins in this one and, if that takes longer than
        starting others does, goes on with as many as there are CPUs that it may use.
    rank, world
        This process's share when several call `prepare` with the same folder; None takes them from
        torchrun's, Open MPI's or Slurm's environment variables.
    progress
        Whether to show progress; None shows that of rank 0.
    summarise
        Picklable function whose results over all shards become ``manifest["summary"]``.
    overwrite
        Whether a store of other inputs in ``out`` may be replaced.
    patience
        Seconds without any new shard after which this process takes over what other ranks have
        not finished.

    Returns
    -------
    Store
        The finished store; every rank waits for it.

    Raises
    ------
    DataError
        If a sample cannot be read or featurized; it is named.
    StoreError
        If ``out`` holds something else or a store of other inputs, a worker died, or the folder
        cannot be written.
    """
    rank, world = place(rank, world)
    writer = _begin(reader, out, fields, settings, samples_per_shard, overwrite)
    if writer.is_complete():
        writer.tidy()
        return Store.open(writer.out)
    job = ShardJob(writer, reader, featurize, summarise)
    progress = rank == 0 if progress is None else progress
    _do_share(job, rank, world, workers, progress)
    _take_over_rest(job, rank, workers, progress, patience)
    if not writer.is_complete():
        writer.finish()
    return Store.open(writer.out)


def prepare_share(
    reader: SampleReader,
    featurize: Featurize | None,
    out: str | Path,
    fields: Sequence[Field],
    settings: Mapping[str, Any],
    *,
    rank: int,
    world: int,
    samples_per_shard: int | None = None,
    workers: int = 0,
    progress: bool = False,
    summarise: Summarise | None = None,
) -> bool:
    """Do one share of `prepare` without waiting for the others, as in a Slurm array.

    Returns
    -------
    bool
        Whether the store is finished; the share that finds it so writes the manifest.
    """
    rank, world = place(rank, world)
    writer = _begin(reader, out, fields, settings, samples_per_shard, overwrite=False)
    if not writer.is_complete():
        _do_share(ShardJob(writer, reader, featurize, summarise), rank, world, workers, progress)
        if writer.missing():
            return False
        writer.finish()
    return True


def write_store(
    out: str | Path,
    fields: Sequence[Field],
    shards: Iterable[Columns],
    *,
    settings: Mapping[str, Any] | None = None,
    sources: Sequence[str] = (),
    overwrite: bool = False,
) -> Store:
    """Write a store from flat arrays, one `Columns` per shard, without any reader.

    Parameters
    ----------
    out
        Folder of the store.
    fields
        Type and shape of every column.
    shards
        All of the same number of samples but the last, which may have fewer.
    settings, sources
        Kept in the manifest.
    overwrite
        Whether a store in ``out`` may be replaced.

    Raises
    ------
    StoreError
        If ``out`` holds something else.
    ValueError
        If a shard in the middle has another number of samples.
    """
    remaining = iter(shards)
    first = next(remaining, None)
    size = first.num_samples if first is not None else 1
    # What the arrays hold is known only at the end, so this store is like no other.
    inputs = _inputs(f"arrays {secrets.token_hex(8)}", sources, fields, settings or {})
    writer = StoreWriter(Path(out), tuple(fields), inputs, 0, max(size, 1))
    writer.begin(overwrite)
    for number, columns in enumerate(chain([] if first is None else [first], remaining)):
        if writer.num_samples != number * size or not 0 < columns.num_samples <= size:
            raise ValueError("all shards but the last must hold the same number of samples, not 0")
        writer.write(number, columns, {})
        writer.num_samples += columns.num_samples
    writer.finish()
    return Store.open(writer.out)


@dataclass(frozen=True)
class ShardJob:
    """Reads, featurizes and writes one shard; runs in worker processes."""

    writer: StoreWriter
    reader: SampleReader
    featurize: Featurize | None
    summarise: Summarise | None

    def __call__(self, number: int, advance: Advance) -> None:
        """Write shard ``number`` unless it is there.

        Raises
        ------
        DataError
            If a sample cannot be read or featurized or lacks a field; it is named.
        StoreError
            If the shard cannot be written.
        """
        indices = self.writer.samples_of(number)
        if self.writer.is_finished(number):
            advance(len(indices))
            return
        raw = self.reader.read(indices.start, indices.stop)
        many = getattr(self.featurize, "many", None)
        samples = [] if many is None else self._at_once(raw, indices, many)
        advance(len(samples))
        for index in indices[len(samples) :]:
            samples.append(self._sample(raw, index, self.featurize))
            advance(1)
        part = self.summarise(samples) if self.summarise is not None else {}
        self.writer.write(number, concatenate(samples, self.writer.fields), part)

    def _at_once(
        self,
        raw: Iterator[Arrays],
        indices: range,
        many: Callable[[Sequence[Arrays]], Sequence[Arrays]],
    ) -> list[Arrays]:
        given = [self._sample(raw, index, None, stored=False) for index in indices]
        try:
            samples = list(many(given))
            for sample in samples:
                self._check(sample)
        except Exception:  # noqa: BLE001  whose fault it is comes out one by one
            again = iter(given)
            samples = [self._sample(again, index, self.featurize) for index in indices]
        return samples

    def _sample(
        self,
        raw: Iterator[Arrays],
        index: int,
        featurize: Featurize | None,
        *,
        stored: bool = True,
    ) -> Arrays:
        """Read and featurize one sample; what goes wrong is told with its name."""
        try:
            sample = next(raw)
            if featurize is not None:
                sample = featurize(sample)
            if not stored:
                return sample
            self._check(sample)
        except BevatronError as error:
            where = self.reader.describe(index)
            if where in str(error):
                raise
            raise type(error)(f"{where}: {error}") from error
        except StopIteration:
            where = self.reader.describe(index)
            raise DataError(f"{where}: the file ends before this sample") from None
        except Exception as error:
            where = self.reader.describe(index)
            raise DataError(f"{where}: {type(error).__name__}: {error}") from error
        return sample

    def _check(self, sample: Arrays) -> None:
        for spec in self.writer.fields:
            if spec.name not in sample:
                raise DataError(f"the field '{spec.name}' is missing")
            spec.check(sample[spec.name])


def place(rank: int | None = None, world: int | None = None) -> tuple[int, int]:
    """Rank of this process and number of processes: given, or from the environment, or 0 of 1.

    Raises
    ------
    ConfigError
        If only one of both is given or the rank is not below the number of processes.
    """
    if (rank is None) != (world is None):
        raise ConfigError("rank and world: give both or neither")
    if rank is None or world is None:
        rank, world = 0, 1
        for rank_name, world_name in _PLACES_IN_ENVIRONMENT:
            if rank_name in os.environ and world_name in os.environ:
                rank, world = int(os.environ[rank_name]), int(os.environ[world_name])
                break
    if not 0 <= rank < world:
        raise ConfigError(f"rank: expected 0 to {world - 1}, got {rank}")
    return rank, world


def _begin(
    reader: SampleReader,
    out: str | Path,
    fields: Sequence[Field],
    settings: Mapping[str, Any],
    samples_per_shard: int | None,
    overwrite: bool,
) -> StoreWriter:
    num_samples = reader.num_samples
    if num_samples == 0:
        raise DataError(f"{', '.join(reader.sources) or 'the input'}: holds no samples")
    if samples_per_shard is None:
        samples_per_shard = min(max(num_samples // 64, 16), 1024)
    elif samples_per_shard < 1:
        raise ConfigError(f"samples_per_shard: expected at least 1, got {samples_per_shard}")
    inputs = _inputs(reader.fingerprint, reader.sources, fields, settings)
    report = getattr(reader, "report", None)
    writer = StoreWriter(
        out=Path(out),
        fields=tuple(fields),
        inputs=inputs,
        num_samples=num_samples,
        samples_per_shard=samples_per_shard,
        report=list(report()) if callable(report) else [],
    )
    writer.begin(overwrite)
    return writer


def _inputs(
    reader: str, sources: Sequence[str], fields: Sequence[Field], settings: Mapping[str, Any]
) -> dict[str, Any]:
    values = {
        "format": STORE_FORMAT,
        "reader": reader,
        "sources": list(sources),
        "fields": fields_to_plain(tuple(fields)),
        "settings": dict(settings),
    }
    try:
        # As it will be read again: tuples are lists.
        return dict(json.loads(json.dumps(values, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"settings: expected plain values ({error})") from None


def _do_share(job: ShardJob, rank: int, world: int, workers: int | None, progress: bool) -> None:
    writer = job.writer
    share = range(rank, writer.num_shards, world)
    todo = [number for number in share if not writer.is_finished(number)]
    total = sum(len(writer.samples_of(number)) for number in share)
    done = total - sum(len(writer.samples_of(number)) for number in todo)
    title = "prepare" if world == 1 else f"prepare (share {rank + 1} of {world})"
    with show_progress(title, total, done, enabled=progress) as advance:
        if workers is None:
            todo = _begin_here(job, todo, advance)
        run_jobs(job, todo, _crew(workers, todo), advance)


def _crew(workers: int | None, todo: Sequence[int]) -> int:
    return min(own_cpus() if workers is None else workers, len(todo))


def _begin_here(job: ShardJob, todo: list[int], advance: Advance) -> list[int]:
    """Do what other processes would not have begun with yet, and return the rest."""
    begun = time.monotonic()
    while todo and time.monotonic() - begun < _SECONDS_TO_START:
        run_jobs(job, todo[:1], 0, advance)
        todo = todo[1:]
    return todo


def _take_over_rest(
    job: ShardJob, rank: int, workers: int | None, progress: bool, patience: float
) -> None:
    """Wait for other ranks, and do their shards when nothing new appears for too long."""
    writer = job.writer
    missing = writer.missing()
    if missing and progress:
        sys.stderr.write(f"prepare: waiting for {len(missing)} shards of other processes\n")
    last_change = time.monotonic()
    while missing and not writer.is_complete():
        ours: list[int] = []
        if time.monotonic() - last_change > patience:
            # Different ranks begin at different places.
            crew = max(_crew(workers, missing), 1)
            first = (rank * crew) % len(missing)
            ours = (missing + missing)[first : first + crew]
            run_jobs(job, ours, _crew(workers, ours), lambda _count: None)
        else:
            time.sleep(min(1.0, patience / 4))
        still = writer.missing()
        if set(missing) - set(still) - set(ours):
            last_change = time.monotonic()
        missing = still
