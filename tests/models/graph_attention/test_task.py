"""Loss and metrics of node classification."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bevatron.data.samples import collate_graphs
from bevatron.models.common.ranking import ranking
from bevatron.models.graph_attention import NodeMetrics, NodeTask


class Fixed(torch.nn.Module):
    """Gives the same logits whatever the batch."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.nn.Parameter(logits)

    def forward(self, batch):
        return {"logits": self.logits}


def batch_of(labels, counts=None):
    n = len(labels)
    masks = np.zeros((n, 3), dtype=bool)
    masks[:, 0] = True if counts is None else counts
    fields = {
        "num_nodes": np.array(n),
        "edges": np.zeros((0, 2), dtype=np.int64),
        "features": np.zeros((n, 1), dtype=np.float32),
        "labels": np.asarray(labels),
        "masks": masks,
    }
    return collate_graphs([fields], np.array([0]), [1.0])


def loss_of(task, logits, batch):
    return task.loss(Fixed(logits), batch, task.normalisers(batch))


def test_classes_are_averaged_over_nodes_that_count_and_have_one():
    labels, counts = [2, 0, -1, 1, 1], [True, True, True, True, False]
    logits = torch.randn(5, 3)
    loss = loss_of(NodeTask("classes", 3), logits, batch_of(labels, counts))
    expected = F.cross_entropy(logits[[0, 1, 3]], torch.tensor([2, 0, 1]))
    torch.testing.assert_close(loss.total.float(), expected)
    torch.testing.assert_close(loss.terms["cross_entropy"].float(), expected)
    floats = batch_of(np.array([2.0, 0.0, np.nan, 1.0, 1.0]), counts)
    torch.testing.assert_close(
        loss_of(NodeTask("classes", 3), logits, floats).total.float(), expected
    )


@pytest.mark.parametrize("columns", [1, 3])
def test_answers_without_a_label_do_not_count(columns):
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 2, (6, columns)).astype(np.float32)
    labels[1, 0] = labels[4, columns - 1] = np.nan
    counts = np.array([True, True, True, False, True, True])
    logits = torch.randn(6, columns)
    loss = loss_of(NodeTask("yes_no", columns), logits, batch_of(labels, counts))
    known = torch.as_tensor(counts[:, None] & ~np.isnan(labels))
    expected = F.binary_cross_entropy_with_logits(logits[known], torch.as_tensor(labels)[known])
    torch.testing.assert_close(loss.total.float(), expected)


def test_binary_labels_may_be_whole_numbers():
    logits = torch.randn(4, 1)
    loss = loss_of(NodeTask("yes_no", 1), logits, batch_of([1, 0, -1, 1]))
    expected = F.binary_cross_entropy_with_logits(logits[[0, 1, 3], 0], torch.tensor([1.0, 0, 1]))
    torch.testing.assert_close(loss.total.float(), expected)


def test_a_step_without_a_label_has_no_loss_and_no_gradient():
    model = Fixed(torch.randn(2, 3))
    task, batch = NodeTask("classes", 3), batch_of([-1, -1])
    loss = task.loss(model, batch, task.normalisers(batch)).total
    loss.backward()
    assert loss.item() == 0.0
    assert not model.logits.grad.any()


def test_small_batches_add_up_to_a_large_one():
    task, logits = NodeTask("classes", 2), torch.randn(6, 2)
    labels = [0, 1, 1, -1, 0, 1]
    whole = loss_of(task, logits, batch_of(labels)).total
    halves = [(logits[:2], batch_of(labels[:2])), (logits[2:], batch_of(labels[2:]))]
    count = sum(task.normalisers(b)["cross_entropy"] for _, b in halves)
    parts = [task.loss(Fixed(z), b, {"cross_entropy": count}).total for z, b in halves]
    torch.testing.assert_close(sum(parts), whole)


def pairs(scores, answers):
    """Area under the ROC curve: how often a positive is above a negative."""
    above = scores[answers == 1][:, None] - scores[answers == 0][None]
    return np.mean((above > 0) + 0.5 * (above == 0))


def precision(scores, answers):
    """Average precision, one threshold at each distinct score."""
    total, before = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        taken = scores >= threshold
        recall = (answers[taken] == 1).sum() / (answers == 1).sum()
        total += (recall - before) * (answers[taken] == 1).mean()
        before = recall
    return total


@pytest.mark.parametrize("ties", [False, True])
def test_ranking_measures_are_exact_in_one_process(ties):
    rng = np.random.default_rng(1)
    answers = rng.integers(0, 2, 200)
    scores = rng.normal(size=200) + answers
    if ties:
        scores = scores.round(0)
    task = NodeTask("yes_no", 1)
    metrics = task.metrics()
    for part in (slice(0, 90), slice(90, 200)):
        batch = batch_of(answers[part])
        metrics.update(batch, {"logits": torch.as_tensor(scores[part])[:, None]})
    found = metrics.compute()
    assert found["roc_auc"] == pytest.approx(pairs(scores, answers), abs=1e-12)
    assert found["average_precision"] == pytest.approx(precision(scores, answers), abs=1e-12)
    assert found["accuracy"] == pytest.approx(((scores > 0) == answers).mean())
    assert set(found) == set(metrics.names)


def test_sums_of_ranks_give_the_ranking_of_all():
    rng = np.random.default_rng(2)
    answers = rng.integers(0, 2, (3000, 2)).astype(np.float32)
    answers[::7, 1] = np.nan
    scores = rng.normal(size=(3000, 2)) + np.nan_to_num(answers)
    ranks = []
    for part in (slice(0, 1000), slice(1000, 3000)):
        ranks.append(NodeMetrics("yes_no", 2))
        ranks[-1].update(batch_of(answers[part]), {"logits": torch.as_tensor(scores[part])})
    total = ranks[0].sums() + ranks[1].sums()
    ranks[0].load_sums(total)
    known = ~np.isnan(answers)
    expected = np.mean([pairs(scores[known[:, k], k], answers[known[:, k], k]) for k in (0, 1)])
    assert ranks[0].compute()["roc_auc"] == pytest.approx(expected, abs=1e-4)
    right = ((scores > 0) == (answers == 1))[known]
    assert ranks[0].compute()["accuracy"] == pytest.approx(right.mean())
    alone = NodeMetrics("yes_no", 2)
    alone.update(batch_of(answers), {"logits": torch.as_tensor(scores)})
    alone.load_sums(alone.sums())
    assert alone.compute()["roc_auc"] == pytest.approx(expected, abs=1e-12)


def test_a_rank_with_all_labels_agrees_with_one_that_has_none():
    answers = np.array([0, 1, 0, 1])
    ranks = [NodeMetrics("yes_no", 1), NodeMetrics("yes_no", 1)]
    # Scores that are told apart exactly but not by their bins.
    scores = 5.0 + 1e-9 * torch.arange(4.0, dtype=torch.float64)[:, None]
    ranks[0].update(batch_of(answers), {"logits": scores})
    total = ranks[0].sums() + ranks[1].sums()
    for rank in ranks:
        rank.load_sums(total)
    assert ranks[0].compute() == ranks[1].compute()


def test_a_label_with_one_answer_only_has_no_ranking():
    assert ranking([0, 0], [1, 2]) is None
    metrics = NodeMetrics("yes_no", 1)
    metrics.update(batch_of([1, 1]), {"logits": torch.ones(2, 1)})
    assert metrics.compute() == {"accuracy": 1.0, "loss": pytest.approx(0.3133, abs=1e-4)}


def test_accuracy_of_classes_counts_what_the_mask_says():
    metrics = NodeTask("classes", 2).metrics()
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 1.0], [1.0, 0.0]])
    metrics.update(batch_of([0, 1, 0, -1], [True, True, True, True]), {"logits": logits})
    metrics.update(batch_of([0, 0, 0, 0], [False] * 4), {"logits": logits})
    assert metrics.compute()["accuracy"] == pytest.approx(2 / 3)
    assert set(metrics.compute()) == set(metrics.names)
    assert NodeMetrics("classes", 2).compute() == {}
