"""The hidden layers of a radial network, from edge lengths on."""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_alike, check_axes, check_shapes

__all__ = ["radial_network"]

_operator = registry.operator("radial_network", __name__, takes=support.float32_or_float64)


def radial_network(
    lengths: Float[Tensor, " E"],
    frequencies: Float[Tensor, " B"],
    prefactor: Float[Tensor, ""],
    r_max: Float[Tensor, ""],
    order: int,
    weights: Sequence[Float[Tensor, "_ _"]],
) -> Float[Tensor, "E H"]:
    r"""Compute :math:`h = s(\dots s(s(b(r) W_1) W_2) \dots W_n)` with s = silu.

    b is `radial_basis`. The result is the input of the last, linear layer of a radial network; see
    `radial_tensor_product`. It depends on a single number per edge. Raises KernelError if Triton is
    requested and cannot run (the kernel takes the constants of the basis as fixed); ValueError if
    the shapes do not match, or lengths and weights have several types.

    Parameters
    ----------
    lengths : Å, above zero
    frequencies, prefactor, r_max, order : see `radial_basis`
    weights : one per layer, normalisation included, [B, H_1], [H_1, H_2], ..

    Examples
    --------
    >>> import torch
    >>> from bevatron.maths.radial import bessel_parameters
    >>> w, c = bessel_parameters(5.0, 2, torch.float32)
    >>> weights = [torch.ones(2, 3), torch.ones(3, 1)]
    >>> radial_network(torch.tensor([1.0, 5.0]), w, c, torch.tensor(5.0), 5, weights)
    tensor([[1.8780],
            [0.0000]])
    """
    try:
        (E,), (B,) = lengths.shape, frequencies.shape
        rows, columns = zip(*(weight.shape for weight in weights), strict=True)
    except ValueError:
        check_axes("radial_network", "[edges]", lengths=lengths)
        check_axes("radial_network", "[functions]", frequencies=frequencies)
        rows, columns = (), ()
    if not rows or rows != (B, *columns[:-1]):
        raise ValueError(
            f"radial_network: weights {[tuple(weight.shape) for weight in weights]} do not go with "
            f"{len(frequencies)} functions or with each other"
        )
    wanted = {
        "lengths": (lengths, (E,)),
        "frequencies": (frequencies, (B,)),
        "prefactor": (prefactor, ()),
        "r_max": (r_max, ()),
    }
    check_shapes("radial_network", wanted, lengths=lengths)
    check_alike(
        "radial_network", {"lengths": lengths, "frequencies": frequencies, "weights": weights}
    )
    run = _operator.dispatch(lengths)
    result: Tensor = run(lengths, frequencies, prefactor, r_max, order, list(weights))
    return result
