"""A run whose processes are killed at random times ends as one that nothing interrupts."""

from functools import partial

import pytest
import tiny
import torch
from kill_loop import (
    draws,
    largest_difference,
    make,
    same_to_the_last_bit,
    train_through,
)

from bevatron.parallel import failures
from bevatron.train import fit

STEPS = 30

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="torch with CUDA cannot go on after a fork"
)


@pytest.fixture(scope="module", autouse=True)
def _quick(tmp_path_factory):
    """Let torch import here what every forked process would."""
    with pytest.MonkeyPatch.context() as patch:
        fit(tiny.make_run(tmp_path_factory.mktemp("warm"), count=4, train={"epochs": 1}))
        patch.setattr(failures, "GRACE_SECONDS", 2.0)
        patch.setattr(failures, "WATCH_SECONDS", 0.6)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Runs on one and on two ranks that nothing interrupts."""
    folder = tmp_path_factory.mktemp("whole")
    for world in (1, 2):
        train_through(folder / f"{world}", partial(make, steps=STEPS), 0, 0, lambda _, w=world: w)
    return folder


def test_on_the_same_ranks_it_ends_alike_to_the_last_bit(whole, tmp_path):
    killed = train_through(tmp_path, partial(make, steps=STEPS), 3, 8, lambda _: 2)
    assert len(killed) == 3
    assert all(f"error: rank {kill.victim[-1]} failed: " in kill.told for kill in killed), killed
    assert same_to_the_last_bit(tmp_path, whole / "2")
    assert draws(tmp_path) == draws(whole / "2")


def test_on_other_numbers_of_ranks_it_has_the_same_draws_and_losses(whole, tmp_path):
    train_through(tmp_path, partial(make, steps=STEPS), 3, 3, lambda start: (1, 3, 2, 1)[start])
    assert draws(tmp_path) == draws(whole / "1") == draws(whole / "2")
    assert largest_difference(tmp_path, whole / "1") < 1e-10
    assert largest_difference(whole / "2", whole / "1") < 1e-10
