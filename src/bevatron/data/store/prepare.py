"""`prepare`: compute the static features once, in parallel, and write them as a store.

The samples of a reader are split into shards. Any process may write any shard, even twice: its
content depends only on the inputs. The process that finds all shards finished writes the manifest.
A killed run therefore continues when it is started again, and processes on many nodes share the
work through the folder alone.
"""

import json
import os
import secrets
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
from bevatron.output import counted, note
from bevatron.typing import Arrays

Featurize = Callable[[Arrays], Arrays]
"""Picklable function from a raw sample to the stored one. A method ``many``, from a list to a list,
is called with all samples of a shard at once."""

Summarise = Callable[[Sequence[Arrays]], dict[str, Any]]
"""Picklable function from the samples of a shard to additive statistics.

See `bevatron.data.summary.structures`.
"""

_RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
)

_SECONDS_TO_START = 2.0
"""Approximate start-up time of a worker process."""


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
    """Compute the features of all samples and write them as a store, or continue an earlier call.

    Raises DataError if a sample cannot be read or featurized; the message names it; StoreError if
    ``out`` holds other files or a store of other inputs, a worker died, or the folder is not
    writable.

    Parameters
    ----------
    featurize : picklable function from a raw sample to the stored one; None stores raw samples
    fields : fields of a stored sample; ``featurize`` must return all of them
    settings : plain values that determine the features (a cutoff, ...); part of the fingerprint
    samples_per_shard : None chooses 16 to 1024 by the number of samples
    workers
        Number of worker processes; 0 = this process. None starts in this process and, if the work
        takes longer than starting workers, continues with one per usable CPU.
    rank, world
        This process among all that call `prepare` with the same folder; None reads the environment
        variables of torchrun, Open MPI or Slurm.
    progress : whether to show progress; None shows it on rank 0 only
    summarise : picklable function whose results, merged over shards, become ``manifest["summary"]``
    overwrite : whether a store of other inputs in ``out`` may be replaced
    patience
        Seconds without a new shard after which this process takes over unfinished shards of other
        ranks.

    Returns
    -------
    Store
        The finished store; every rank waits for it.
    """
    if workers is not None and workers < 0:
        raise ConfigError(f"workers: expected at least 0, got {workers}")
    rank, world = rank_and_world(rank, world)
    writer = _begin(reader, out, fields, settings, samples_per_shard, overwrite)
    if writer.is_complete():
        writer.tidy()
        return Store.open(writer.out)
    job = ShardJob(writer, reader, featurize, summarise)
    progress = rank == 0 if progress is None else progress
    _prepare_own_shards(job, rank, world, workers, progress)
    _take_over_rest(job, rank, workers, progress, patience)
    if not writer.is_complete():
        writer.finish()
    return Store.open(writer.out)


def write_store(
    out: str | Path,
    fields: Sequence[Field],
    shards: Iterable[Columns],
    *,
    settings: Mapping[str, Any] | None = None,
    sources: Sequence[str] = (),
    overwrite: bool = False,
) -> Store:
    """Write a store from flat arrays, one `Columns` per shard, without a reader.

    Raises StoreError if ``out`` holds other files; ValueError if a shard before the last has
    another number of samples.

    Parameters
    ----------
    shards : equal numbers of samples, except that the last may have fewer
    settings, sources : stored in the manifest
    overwrite : whether a store in ``out`` may be replaced
    """
    remaining = iter(shards)
    first = next(remaining, None)
    size = first.num_samples if first is not None else 1
    # The content is known only at the end, so the fingerprint is a random one.
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
    """Read, featurize and write one shard; runs in worker processes."""

    writer: StoreWriter
    reader: SampleReader
    featurize: Featurize | None
    summarise: Summarise | None

    def __call__(self, number: int, advance: Advance) -> None:
        """Write shard ``number`` unless it is finished.

        Raises DataError if a sample cannot be read or featurized or lacks a field; the message
        names it; StoreError if the shard cannot be written.
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
        except Exception:  # noqa: BLE001  one at a time finds the sample
            once_more = iter(given)
            samples = [self._sample(once_more, index, self.featurize) for index in indices]
        return samples

    def _sample(
        self, raw: Iterator[Arrays], index: int, featurize: Featurize | None, *, stored: bool = True
    ) -> Arrays:
        """Read and featurize one sample; errors name it."""
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


def rank_and_world(rank: int | None = None, world: int | None = None) -> tuple[int, int]:
    """Return rank and number of processes: the arguments, else the environment's, else (0, 1).

    Raises ConfigError if only one of them is given or the rank is out of range.
    """
    if (rank is None) != (world is None):
        raise ConfigError("rank and world: give both or neither")
    if rank is None or world is None:
        rank, world = 0, 1
        for rank_name, world_name in _RANK_VARIABLES:
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
        # Tuples become lists, as in the manifest.
        return dict(json.loads(json.dumps(values, allow_nan=False)))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"settings: expected plain values ({error})") from None


def _prepare_own_shards(
    job: ShardJob, rank: int, world: int, workers: int | None, progress: bool
) -> None:
    writer = job.writer
    share = range(rank, writer.num_shards, world)
    todo = [number for number in share if not writer.is_finished(number)]
    total = sum(len(writer.samples_of(number)) for number in share)
    done = total - sum(len(writer.samples_of(number)) for number in todo)
    title = "prepare" if world == 1 else f"prepare (share {rank + 1} of {world})"
    unit = str(writer.inputs["settings"].get("unit", "frame"))  # as `Store.describe` names one
    units = f"{unit[:-1]}ies" if unit.endswith("y") else f"{unit}s"
    with show_progress(title, total, done, units, enabled=progress) as advance:
        if workers is None:
            todo = _run_first_jobs(job, todo, advance)
        run_jobs(job, todo, _num_workers(workers, todo), advance)


def _num_workers(workers: int | None, todo: Sequence[int]) -> int:
    return min(own_cpus() if workers is None else workers, len(todo))


def _run_first_jobs(job: ShardJob, todo: list[int], advance: Advance) -> list[int]:
    """Run jobs here for as long as workers would take to start, and return the rest."""
    begun = time.monotonic()
    while todo and time.monotonic() - begun < _SECONDS_TO_START:
        run_jobs(job, todo[:1], 0, advance)
        todo = todo[1:]
    return todo


def _take_over_rest(
    job: ShardJob, rank: int, workers: int | None, progress: bool, patience: float
) -> None:
    """Wait for other ranks, and take over their shards when no new shard appears for too long."""
    writer = job.writer
    missing = writer.missing()
    if missing and progress:
        note(f"prepare: waiting for {counted(len(missing), 'shard')} of other processes")
    last_change = time.monotonic()
    while missing and not writer.is_complete():
        ours: list[int] = []
        if time.monotonic() - last_change > patience:
            # Ranks start at different shards.
            count = max(_num_workers(workers, missing), 1)
            first = (rank * count) % len(missing)
            ours = (missing + missing)[first : first + count]
            run_jobs(job, ours, _num_workers(workers, ours), lambda _count: None)
        else:
            time.sleep(min(1.0, patience / 4))
        still = writer.missing()
        if set(missing) - set(still) - set(ours):
            last_change = time.monotonic()
        missing = still
