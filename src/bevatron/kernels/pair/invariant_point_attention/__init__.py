"""Attention over residues that sees points in space; algorithm 22 of AlphaFold2's supplement."""

from jaxtyping import Float
from torch import Tensor

from bevatron.kernels import registry
from bevatron.kernels.shared import support
from bevatron.kernels.shared.checks import check_alike, check_axes, check_shapes

__all__ = ["invariant_point_attention"]

_operator = registry.operator("invariant_point_attention", __name__, takes=support.up_to_float32)


def invariant_point_attention(
    q: Float[Tensor, "*batch Nq H D"],
    k: Float[Tensor, "*batch Nk H D"],
    v: Float[Tensor, "*batch Nk H D"],
    q_points: Float[Tensor, "*batch Nq 3 H P"],
    k_points: Float[Tensor, "*batch Nk 3 H P"],
    v_points: Float[Tensor, "*batch Nk 3 H V"],
    bias: Float[Tensor, "*batch H Nq Nk"],
    z: Float[Tensor, "*batch Nq Nk Z"],
    head_weights: Float[Tensor, " H"],
) -> tuple[
    Float[Tensor, "*batch Nq H D"], Float[Tensor, "*batch Nq 3 H V"], Float[Tensor, "*batch Nq H Z"]
]:
    r"""Sum values, points and pairs with weights that depend on the distances of points.

    .. math::
        a_{ij} = \operatorname{softmax}_j\Big(\sqrt{\tfrac{1}{3 D}}\, q_i \cdot k_j + b_{ij} -
        \tfrac{\gamma}{2} \sqrt{\tfrac{2}{27 P}} \sum_p |\vec q_{ip} - \vec k_{jp}|^2\Big)

    with :math:`\gamma` the softplus of the head's weight: lines 7 to 10 of algorithm 22 of
    AlphaFold2's supplement. Raises ValueError if shapes or types do not fit; KernelError if Triton
    is requested and cannot run. The kernels have first derivatives.

    Parameters
    ----------
    q, k, v : of each head
    q_points, k_points, v_points
        In one frame for all residues, in units of 10 Å; all x, then all y, then all z, as
        AlphaFold2's projections store them.
    bias
        Added to the logits as it is: the scaled bias of the pair, and the mask. A query needs a key
        whose bias is finite.
    z : the pair
    head_weights : before the softplus

    Returns
    -------
    tuple of Tensor
        :math:`\sum_j a_{ij} v_j`, :math:`\sum_j a_{ij} \vec v_{jp}` in the frame and layout of
        ``v_points``, and :math:`\sum_j a_{ij} z_{ij}`, in the type of ``q``.

    Examples
    --------
    >>> import torch
    >>> one = torch.ones(2, 1, 1)
    >>> points = torch.zeros(2, 3, 1, 1)
    >>> points[1] = 100.0  # farther from the first residue than it sees
    >>> near = torch.zeros(1, 2, 2), torch.ones(2, 2, 1), torch.zeros(1)
    >>> v = torch.tensor([1.0, 3.0]).view(2, 1, 1)
    >>> invariant_point_attention(one, one, v, points, points, points, *near)[0].flatten()
    tensor([1., 3.])
    """
    name = "invariant_point_attention"
    tensors = {
        "q": q,
        "k": k,
        "v": v,
        "q_points": q_points,
        "k_points": k_points,
        "v_points": v_points,
        "bias": bias,
        "z": z,
        "head_weights": head_weights,
    }
    check_alike(name, tensors)
    if q.ndim < 3 or q_points.ndim != q.ndim + 1 or v_points.ndim != q.ndim + 1:
        raise ValueError(
            f"{name}: q has shape {tuple(q.shape)}, q_points {tuple(q_points.shape)}, v_points "
            f"{tuple(v_points.shape)}, expected [..., N, H, D] and [..., N, 3, H, P]"
        )
    *batch, Nq, H, D = q.shape
    try:
        Nk, P, V, Z = k.shape[-3], q_points.shape[-1], v_points.shape[-1], z.shape[-1]
    except IndexError:
        check_axes(name, "[..., Nk, H, D]", k=k)
        check_axes(name, "[..., Nq, Nk, Z]", z=z)
        raise
    wanted = {
        "k": (k, (*batch, Nk, H, D)),
        "v": (v, (*batch, Nk, H, D)),
        "q_points": (q_points, (*batch, Nq, 3, H, P)),
        "k_points": (k_points, (*batch, Nk, 3, H, P)),
        "v_points": (v_points, (*batch, Nk, 3, H, V)),
        "bias": (bias, (*batch, H, Nq, Nk)),
        "z": (z, (*batch, Nq, Nk, Z)),
        "head_weights": (head_weights, (H,)),
    }
    check_shapes(name, wanted, q=q, k=k)
    if Nq and not Nk:
        raise ValueError(f"{name}: {Nq} queries and no key; a query needs one at least")
    found: tuple[Tensor, Tensor, Tensor] = _operator.dispatch(q)(*tensors.values())
    return found
