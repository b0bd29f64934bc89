"""What holds for the tasks of AlphaFold2 and of AlphaFold3."""

import torch

from bevatron.task import StepNumbers
from from_the_host import NothingFromTheHost


def loss_of(task, model, batch):
    return task.loss(model, batch, task.normalisers(batch))


def check_step_is_a_function_of_its_numbers(task_of, model, batch):
    """``task_of(step)`` makes a task that has begun the step with the seed 77 + step."""
    first, again, other = (loss_of(task_of(step)[0], model, batch).total for step in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.isclose(first, other)
    task, _ = task_of(1)
    loss_of(task, model, batch)
    task.begin_step(StepNumbers(0, 77))  # the seed is filled in place
    assert torch.equal(loss_of(task, model, batch).total, first)


def check_step_can_be_captured(task, model, batch):
    counts = task.normalisers(batch)
    task.loss(model, batch, counts)  # copies constant tables
    with NothingFromTheHost():
        found = task.loss(model, batch, counts).total
        torch.autograd.grad(found, list(model.parameters()), allow_unused=True)
