"""Smooth lDDT of many copies of a structure, without a tensor of all pairs of atoms."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_shapes

__all__ = ["smooth_lddt"]

_operator = registry.operator("smooth_lddt", __name__, takes=support.up_to_float32)


def smooth_lddt(
    predicted: Float[Tensor, "structures copies atoms 3"],
    truth: Float[Tensor, "structures atoms 3"],
    radius: Float[Tensor, "structures atoms"],
) -> Float[Tensor, "structures copies"]:
    r"""Compute the smooth lDDT of every copy of each structure.

    .. math:: \frac{\sum_{lm} c_{lm} \frac14 \sum_t \sigma(t - |d_{lm} - d^{true}_{lm}|)}
              {10^{-10} + \sum_{lm} c_{lm}}

    with t of 0.5, 1, 2, 4 Å, and c = 1 for different atoms l, m of radius above 0 that are closer
    in the truth than the radius of l: algorithm 27 of AlphaFold3's supplement. Raises
    ValueError if shapes or types do not fit; KernelError if Triton is requested and cannot run. The
    kernel has first derivatives.

    Parameters
    ----------
    predicted : Å; the only input with a gradient, if no two counted atoms coincide
    truth : Å; finite
    radius : Å; 0 for an atom that does not count

    Returns
    -------
    Tensor
        In the type of ``predicted``, at least float32.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[0.0, 0, 0], [3, 0, 0]])
    >>> smooth_lddt(x[None, None], x[None], torch.full((1, 2), 15.0))
    tensor([[0.8041]])
    """
    if not predicted.dtype == truth.dtype == radius.dtype:
        raise ValueError(
            f"smooth_lddt: predicted is of {predicted.dtype}, truth of {truth.dtype}, radius of "
            f"{radius.dtype}; make them alike"
        )
    if predicted.ndim != 4 or predicted.shape[-1] != 3:
        raise ValueError(
            f"smooth_lddt: predicted has shape {tuple(predicted.shape)}, expected "
            "[structures, copies, atoms, 3]"
        )
    structures, _, atoms, _ = predicted.shape
    wanted = {"truth": (truth, (structures, atoms, 3)), "radius": (radius, (structures, atoms))}
    check_shapes("smooth_lddt", wanted, f"predicted {tuple(predicted.shape)}")
    result: Tensor = _operator.dispatch(predicted)(predicted, truth, radius)
    return result
