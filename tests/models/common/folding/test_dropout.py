"""Dropout that is a function of a seed."""

import pytest
import torch

from bevatron.models.common.folding import add_dropped, keep_masks

RATE = 0.25


def draw(seed=11, call=0, count=3, shape=(40, 40, 32), dtype=torch.float32):
    return keep_masks(torch.tensor(seed), call, torch.zeros(shape, dtype=dtype), count, RATE)


def test_a_mask_has_the_rate_and_keeps_the_mean():
    masks = draw(count=50)
    assert masks.shape == (50, 40, 32)
    assert masks.unique().tolist() == pytest.approx([0.0, 1 / (1 - RATE)])
    # 64,000 draws: four standard deviations.
    assert abs((masks == 0).float().mean().item() - RATE) < 4 * (RATE * (1 - RATE) / 64_000) ** 0.5


def test_seed_call_and_layer_each_give_another_mask():
    masks = draw()
    others = [masks[0], masks[1], draw(call=1)[0], draw(seed=12)[0], draw(seed=11 + 2**40)[0]]
    for number, one in enumerate(others):
        for other in others[number + 1 :]:
            # Independent masks agree in a share of 0.625.
            assert abs((one == other).float().mean().item() - 0.625) < 0.06
    assert torch.equal(masks, draw())


def test_neighbouring_entries_are_independent():
    kept = (draw(count=40) > 0).float().flatten()
    for shift in (1, 2, 32, 40 * 32):
        pairs = torch.corrcoef(torch.stack([kept[:-shift], kept[shift:]]))
        assert abs(pairs[0, 1].item()) < 0.02


@pytest.mark.parametrize(("shared", "axis"), [("rows", 0), ("columns", 1)])
def test_the_mask_is_shared_along_its_axis_and_added_with_the_residual(shared, axis):
    x, update = torch.randn(2, 40, 40, 32, dtype=torch.float64)
    mask = draw(dtype=torch.float64)[1]
    added = add_dropped(x, update, mask, shared) - x
    factor = (added / update).movedim(axis, 0)
    assert torch.allclose(factor, mask.expand(40, 40, 32))
    assert torch.equal(add_dropped(x, update, None), x + update)


def test_masks_of_a_batch_differ_between_samples():
    masks = draw(shape=(2, 40, 40, 32))
    assert masks.shape == (3, 2, 40, 32)
    assert not torch.equal(masks[:, 0], masks[:, 1])
