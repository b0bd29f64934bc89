"""Runs what comes before and after the kernel of a chunk beside the kernels of other chunks."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from bevatron.kernels.channelwise_tensor_product.triton_launch import Chunk

Work = Callable[[Chunk], None]

BESIDE = False
"""Whether a second stream is used."""


def beside(
    parts: Sequence[Chunk],
    device: torch.device,
    make: Work,
    compute: Work,
    use: Work | None = None,
) -> None:
    """Run make, compute and use for every chunk; on a GPU compute beside those of its neighbours.

    Products on matrix units and kernels that wait for memory leave each other room. A second stream
    makes the next chunk and uses the last while one is computed. All ``compute`` are in their order
    on the current stream, all others in theirs on the second, so sums that go from chunk to chunk
    keep their order. What ``make`` writes may share memory with that of the chunk two before.
    """
    if device.type != "cuda" or slots(parts) == 1:
        for chunk in parts:
            make(chunk)
            compute(chunk)
            if use is not None:
                use(chunk)
        return
    main, second = torch.cuda.current_stream(device), _second_stream(device)
    second.wait_stream(main)
    made = []
    with torch.cuda.stream(second):
        for chunk in parts[:2]:
            make(chunk)
            made.append(second.record_event())
    for place, chunk in enumerate(parts):
        main.wait_event(made[place])
        compute(chunk)
        computed = main.record_event()
        with torch.cuda.stream(second):
            second.wait_event(computed)
            if use is not None:
                use(chunk)
            if place + 2 < len(parts):
                make(parts[place + 2])
                made.append(second.record_event())
    # All memory was taken on the current stream, where it may be given back from here on.
    main.wait_stream(second)


def slots(parts: Sequence[Chunk]) -> int:
    """Count the chunks that need memory at the same time."""
    return 2 if BESIDE and len(parts) > 1 else 1


@cache
def _second_stream(device: torch.device) -> Any:
    # Of higher priority: its programs are few and large and would find no room behind many small.
    return torch.cuda.Stream(device, priority=-1)
