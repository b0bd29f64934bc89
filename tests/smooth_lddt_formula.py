"""Smooth lDDT as it is published, on dense tensors."""

import torch


def all_pairs(predicted, truth, radius):
    """Algorithm 27, for autograd.

    Parameters
    ----------
    predicted : [..., copies, atoms, 3]
    truth : [..., atoms, 3]
    radius : [..., atoms], of the first atom of a pair; 0 for an atom that does not count
    """

    def distances(x):
        squared = (x[..., :, None, :] - x[..., None, :, :]).square().sum(-1)
        return (squared + torch.eye(x.shape[-2], dtype=x.dtype)).sqrt()

    true = distances(truth)
    counts = (true < radius[..., :, None]) & (radius > 0)[..., None, :]
    counts &= ~torch.eye(truth.shape[-2], dtype=torch.bool)
    counts = counts[..., None, :, :].double()
    error = (distances(predicted) - true[..., None, :, :]).abs()
    score = sum(torch.sigmoid(t - error) for t in (0.5, 1, 2, 4)) / 4
    return (score * counts).sum((-2, -1)) / (counts.sum((-2, -1)) + 1e-10)
