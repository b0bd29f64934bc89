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
    logits = scale * (q @ k.transpose(-1, -2))
    if bias is not None:
        logits = logits + bias.to(logits.dtype)
    if mask is None:
        weights = logits.softmax(-1)
    else:
        keep = mask[:, :, None, None, :]
        empty = ~mask.any(-1)[:, :, None, None, None]
        # A row without keys: any finite logits, since softmax of minus infinity is NaN.
        logits = logits.masked_fill(~keep, float("-inf")).masked_fill(empty, 0.0)
        weights = logits.softmax(-1).masked_fill(~keep, 0.0)
    result = weights @ v
    if layout == "BSNHD":
        result = result.transpose(2, 3)
    return result if gate is None else gate.to(result.dtype).sigmoid() * result
