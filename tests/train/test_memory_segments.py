"""The memory that a pool holds is what torch's allocator takes for the same tensors."""

import numpy as np
import pytest
import torch

from bevatron.train.memory_segments import MIB, Segments


def held_after(*sizes):
    pool = Segments()
    for size in sizes:
        pool.take(size)
    return pool.held


def test_tensors_share_segments_by_their_sizes():
    assert held_after(1) == 2 * MIB
    assert held_after(MIB, MIB) == 2 * MIB
    assert held_after(MIB, MIB, 1) == 4 * MIB
    assert held_after(MIB + 1) == 20 * MIB
    assert held_after(MIB, MIB + 1) == 22 * MIB
    assert held_after(9 * MIB, 9 * MIB, 2 * MIB) == 20 * MIB
    assert held_after(10 * MIB, 10 * MIB) == 20 * MIB
    assert held_after(10 * MIB + 1) == 12 * MIB


def test_a_rest_of_a_mebibyte_is_not_used():
    pool = Segments()
    pool.give(pool.take(12 * MIB))
    assert pool.take(11 * MIB).size == 12 * MIB
    pool.give(pool.take(12 * MIB))
    assert pool.take(11 * MIB - 512).size == 11 * MIB - 512
    assert pool.held == 24 * MIB


def random_tensors(count):
    """Sizes to take, None to give back, each with a number that says what."""
    drawn = np.random.default_rng(0)
    num_live = 0
    for _ in range(count):
        if num_live and drawn.random() < 0.5:
            num_live -= 1
            yield None, int(drawn.integers(num_live + 1))
        else:
            num_live += 1
            yield int(2 ** drawn.uniform(4, 25)), 0


def test_of_free_neighbours_nothing_is_lost():
    pool, live = Segments(), []
    for size, place in random_tensors(3000):
        if size is None:
            pool.give(live.pop(place))
        else:
            live.append(pool.take(size))
    for block in live:
        pool.give(block)
    free = [block for blocks in pool._free.values() for *_, block in blocks]
    assert sum(block.size for block in free) == pool.held
    assert all(block.before is None and block.after is None for block in free)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_torch_takes_as_much():
    pool, live = Segments(), []
    with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
        before = torch.cuda.memory_reserved()
        for size, place in random_tensors(5000):
            if size is None:
                block, _tensor = live.pop(place)
                pool.give(block)
                del _tensor
            else:
                tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
                live.append((pool.take(size), tensor))
                del tensor
            assert torch.cuda.memory_reserved() - before == pool.held
