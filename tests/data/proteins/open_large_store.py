"""Open, plan and sample a large store in a process of its own; prints seconds and bytes."""

import json
import sys
import time
from pathlib import Path

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from made_up_entries import made_up_poses

from bevatron.data.proteins.alignments import Alignments
from bevatron.data.proteins.chain_index import Choices
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.store.store import Store


def peak():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) * 1024


def main(entries_path, alignments_path):
    before, begun = psutil.Process().memory_info().rss, time.process_time()
    store = Store(entries_path, resident_limit=64 * 2**20)
    sources = Sources(made_up_poses(), Alignments.open(alignments_path))
    choices = Choices.of(store)
    share = choices.weight / choices.weight.sum()
    drawn = np.random.default_rng(0).choice(len(share), 16, p=share)
    entries, chains = choices.entry[drawn], choices.chains[drawn]
    sizes = SampleSizes(CropSizes(64), 128)
    rows = [
        len(sample(store[entry], seed, sources, sizes, of[of > 0].tolist())["msa"])
        for seed, (entry, of) in enumerate(zip(entries.tolist(), chains, strict=True))
    ]
    print(
        json.dumps(
            {
                "seconds": time.process_time() - begun,
                "bytes": peak() - before,
                "entries": len(store),
                "choices": len(choices.entry),
                "rows": int(np.max(rows)),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
