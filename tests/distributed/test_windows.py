"""Processes that share one GPU and read each other's memory, as those of several GPUs do."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from forks import end_of, free_port

SCRIPT = Path(__file__).parent / "window_ranks.py"
# torch reads the memory of another process on the same GPU only if it is told to.
ONE_GPU = {
    "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1",
}

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def run(
    mode: str, world: int, folder: Path, seconds: float, device: str = "cuda:0"
) -> tuple[list[int | None], str]:
    """Start the ranks without a launcher, which would end those that are left."""
    common = os.environ | ONE_GPU | {"MASTER_PORT": str(free_port()), "WORLD_SIZE": str(world)}
    outputs, started = [folder / f"output{rank}" for rank in range(world)], []
    for rank, output in enumerate(outputs):
        with output.open("w") as file:
            one = subprocess.Popen(
                [sys.executable, SCRIPT, mode, device],
                env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=file,
                stderr=file,
            )
        started.append(one.pid)
    codes = end_of(started, seconds)
    return codes, "".join(output.read_text() for output in outputs)


@pytest.mark.parametrize("world", [2, 3])
def test_replayed_exchanges_and_blocks_equal_those_of_one_process(tmp_path, world):
    codes, output = run("compare", world, tmp_path, 150)
    assert codes == [0] * world, output


def test_batches_that_are_made_in_turns_are_pinned_on_all_ranks(tmp_path):
    codes, output = run("load", 3, tmp_path, 150)
    assert codes == [0] * 3, output


def test_a_rank_that_is_killed_ends_another_whose_gpu_waits_for_it(tmp_path):
    codes, output = run("die", 2, tmp_path, 150)
    assert codes == [1, -signal.SIGKILL], output
    assert "rank 1 failed" in output
    last_words = (tmp_path / "output1").stat().st_mtime
    assert time.time() - last_words < 30
