"""A reader of made-up structures, importable in worker processes."""

import os
import signal
import time
from dataclasses import dataclass

import numpy as np

from bevatron.errors import DataError


@dataclass(frozen=True)
class FakeReader:
    num_samples: int = 40
    version: str = "a"
    delay: float = 0.0
    sources: tuple[str, ...] = ("water.xyz", "salt.xyz")

    @property
    def fingerprint(self):
        return f"fake-{self.num_samples}-{self.version}"

    def read(self, start, stop):
        for index in range(start, stop):
            time.sleep(self.delay)
            yield structure(index)

    def describe(self, index):
        return f"{self.sources[index % 2]}, frame {index // 2}"


def structure(index):
    rng = np.random.default_rng([7, index])
    n = 0 if index == 5 else int(rng.integers(1, 6))
    labelled = index % 3 != 0
    return {
        "atomic_numbers": rng.choice([1, 8, 11], n).astype(np.int32),
        "positions": rng.normal(size=(n, 3)),
        "cell": np.zeros((3, 3)),
        "pbc": np.array([True, False, index % 2 == 0]),
        "energy": np.array(-1.5 * n if labelled else np.nan),
        "forces": rng.normal(size=(n if labelled else 0, 3)),
        "stress": np.full((3, 3), np.nan),
        "weights": np.ones(4),
        "head": np.array(0, dtype=np.int32),
        "source": np.array([index % 2, index // 2]),
        "group": np.frombuffer(b"even" if index % 2 == 0 else b"", dtype=np.uint8),
    }


def all_pairs(sample):
    """Every atom is a neighbour of every other."""
    n = len(sample["atomic_numbers"])
    receivers, senders = np.nonzero(~np.eye(n, dtype=bool))
    edges = np.stack([senders, receivers], axis=1).astype(np.int32)
    return {**sample, "edges": edges, "edge_shifts": np.zeros((len(edges), 3), dtype=np.int32)}


def refuse_sample_23(sample):
    if tuple(sample["source"]) == (1, 11):
        raise DataError("two atoms coincide")
    return all_pairs(sample)


def crash_at_sample_23(sample):
    if tuple(sample["source"]) == (1, 11):
        raise ZeroDivisionError("division by zero")
    return all_pairs(sample)


def die_at_sample_23(sample):
    if tuple(sample["source"]) == (1, 11):
        os.kill(os.getpid(), signal.SIGKILL)
    return all_pairs(sample)


def die_in_a_message(job, advance):
    """Work whose process is killed while it sends its parent a thousand bytes."""
    os.write(advance.connection.fileno(), (1000).to_bytes(4) + b"half")
    os.kill(os.getpid(), signal.SIGKILL)


def forget_edges(sample):
    return sample


def wrong_type(sample):
    sample = all_pairs(sample)
    return {**sample, "positions": sample["positions"].astype(np.float32)}
