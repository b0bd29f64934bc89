"""Attention with a shared bias in plain PyTorch: the specification."""

from torch import Tensor


def pair_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    gate: Tensor | None,
    layout: str,
) -> Tensor:
    """Compute ``sigmoid(gate) * softmax(scale q k^T + bias) v`` over the keys that are kept.

    Every operation is in the type of the inputs; of float64 the result is exact.
    """
    if layout == "BSNHD":
        q, k, v = (tensor.transpose(2, 3) for tensor in (q, k, v))
    logits = (scale * q) @ k.transpose(-1, -2)
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, :, None, None, :], float("-inf"))
    if bias is None and mask is None:
        result = logits.softmax(-1) @ v
    else:
        # Of a query without keys any finite logits: softmax of minus infinities is NaN.
        empty = (logits == float("-inf")).all(-1, keepdim=True)
        result = logits.masked_fill(empty, 0.0).softmax(-1) @ v
        result = result.masked_fill(empty, 0.0)
    if layout == "BSNHD":
        result = result.transpose(2, 3)
    return result if gate is None else gate.to(result.dtype).sigmoid() * result
