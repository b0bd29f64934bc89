"""Smooth lDDT of many copies of a structure, without a tensor of all pairs of atoms."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import as_one_type, check_axes, check_shapes

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
        In the type of ``truth``, at least float32.

    Examples
    --------
    >>> import torch
    >>> x = torch.tensor([[0.0, 0, 0], [3, 0, 0]])
    >>> smooth_lddt(x[None, None], x[None], torch.full((1, 2), 15.0))
    tensor([[0.8041]])
    """
    try:
        structures, copies, atoms, _ = predicted.shape
    except ValueError:
        check_axes("smooth_lddt", "[structures, copies, atoms, 3]", predicted=predicted)
        raise
    wanted = {
        "predicted": (predicted, (structures, copies, atoms, 3)),
        "truth": (truth, (structures, atoms, 3)),
        "radius": (radius, (structures, atoms)),
    }
    check_shapes("smooth_lddt", wanted, predicted=predicted)
    # Under autocast a prediction may be narrow; its distances shall not be.
    predicted, radius = as_one_type("smooth_lddt", truth=truth, predicted=predicted, radius=radius)
    result: Tensor = _operator.dispatch(predicted)(predicted, truth, radius)
    return result
