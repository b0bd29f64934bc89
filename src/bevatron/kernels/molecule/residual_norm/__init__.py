"""Residual, row dropout and layer normalisation of one or two branches in one pass."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared.checks import check_vectors

__all__ = ["MOST_BRANCHES", "residual_norm"]

_operator = registry.operator("residual_norm", __name__)

MOST_BRANCHES = 2


def residual_norm(
    x: Float[Tensor, "N C"],
    branches: Sequence[Float[Tensor, "N C"]],
    weights: Sequence[Float[Tensor, " C"]],
    biases: Sequence[Float[Tensor, " C"]],
    *,
    scales: Sequence[Float[Tensor, " N"] | None] | None = None,
    eps: float = 1e-3,
) -> Float[Tensor, "N C"]:
    r"""Add each branch to the input, normalise, and sum over the branches.

    .. math::

        y_i = \sum_k \Big( w_k \odot \operatorname{norm}\big(x_i + s_{k,i}\, u_{k,i}\big)
        + b_k \Big)

    With one branch it is a residual connection followed by the norm; with two it merges the
    parallel branches of a block (message passing and attention in GPS++). Raises ValueError if a
    shape, type or number of branches does not fit.

    Parameters
    ----------
    x : the input of the branches
    branches : u_1 and perhaps u_2, of the shape and type of ``x``
    weights, biases : w_k and b_k, one of each per branch
    scales
        s_k, a factor per row: zero if the row (or a whole molecule) is dropped, 1/(1 - p) if
        it is kept; not differentiated. None = 1.
    eps : added to the variance

    Returns
    -------
    Tensor
        Same shape and type as ``x``; computed in float32 for 16-bit types and rounded once.

    Examples
    --------
    >>> import torch
    >>> x, branch = torch.tensor([[1.0, 2.0]]), torch.tensor([[0.0, 4.0]])
    >>> one, zero = torch.ones(2), torch.zeros(2)
    >>> residual_norm(x, [branch], [one], [zero], eps=0.0)
    tensor([[-1.,  1.]])
    """
    scales = [None] * len(branches) if scales is None else list(scales)
    lengths = {len(branches), len(weights), len(biases), len(scales)}
    if len(lengths) != 1 or not 1 <= len(branches) <= MOST_BRANCHES:
        raise ValueError(
            f"residual_norm: {len(branches)} branches, {len(weights)} weights, {len(biases)} "
            f"biases and {len(scales)} scales, expected one of each for 1 or 2 branches"
        )
    for branch, weight, bias, scale in zip(branches, weights, biases, scales, strict=True):
        if branch.shape != x.shape or branch.dtype != x.dtype:
            raise ValueError(
                f"residual_norm: a branch is {branch.dtype} {tuple(branch.shape)}, expected "
                f"{x.dtype} {tuple(x.shape)}"
            )
        check_vectors("residual_norm", x, weight=weight, bias=bias)
        if scale is not None and scale.shape != x.shape[:1]:
            raise ValueError(
                f"residual_norm: a scale has shape {tuple(scale.shape)}, expected ({len(x)},)"
            )
    run = _operator.dispatch(x)
    result: Tensor = run(x, list(branches), list(weights), list(biases), scales, eps)
    return result
