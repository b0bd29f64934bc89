"""State dicts of PyTorch Geometric's GATConv, GATv2Conv and AGNNConv as layers of ours.

Layouts: GATConv ``lin.weight`` [H*C, in], ``att_src`` and ``att_dst`` [1, H, C], ``bias``;
GATv2Conv ``lin_l`` (sources), ``lin_r`` (receivers), ``att`` [1, H, C], ``bias``; AGNNConv ``beta``
[1] if it is learned. Source and receiver are the columns and rows of our matrices.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from bevatron.errors import ConfigError
from bevatron.models.graph_attention.graph_layer import Combine
from bevatron.models.graph_attention.layers.agnn import Agnn
from bevatron.models.graph_attention.layers.gat import Gat
from bevatron.models.graph_attention.layers.gatv2 import GatV2


def from_gat_conv(
    state: Mapping[str, Tensor],
    *,
    combine: Combine = "concat",
    slope: float = 0.2,
    attention_dropout: float = 0.0,
) -> Gat:
    """Build the layer equivalent to a ``GATConv`` with this state dict.

    Raises ConfigError if the layer has edge features, matrices of its own for sources and receivers
    or a residual connection, naming the key.

    Parameters
    ----------
    state
        Its ``state_dict()``; older layouts with ``lin_src.weight`` too, if source and receiver
        share one matrix.
    combine : ``mean`` for ``concat=False``; the state dict does not say
    slope, attention_dropout : its ``negative_slope`` and ``dropout``
    """
    _refuse("GATConv", state, combine)
    matrix = state.get("lin.weight", state.get("lin_src.weight"))
    if matrix is None:
        raise ConfigError(_missing("GATConv", "lin.weight", state))
    source, receiver = (_attention("GATConv", name, state) for name in ("att_src", "att_dst"))
    heads, outputs = source.shape
    layer = Gat(
        matrix.shape[1], outputs, heads=heads, combine=combine, slope=slope,
        attention_dropout=attention_dropout, bias="bias" in state,
    ).to(matrix.dtype)  # fmt: skip
    with torch.no_grad():
        _copy(layer.weight, _by_head(matrix, heads))
        _copy(layer.learned["column"], source)
        _copy(layer.learned["row"], receiver)
        if layer.bias is not None:
            _copy(layer.bias, state["bias"])
    return layer


def from_gatv2_conv(
    state: Mapping[str, Tensor],
    *,
    combine: Combine = "concat",
    slope: float = 0.2,
    attention_dropout: float = 0.0,
    share_weights: bool | None = None,
) -> GatV2:
    """Build the layer equivalent to a ``GATv2Conv`` with this state dict.

    Raises ConfigError if the layer has edge features or a residual connection, naming the key.

    Parameters
    ----------
    share_weights
        Whether ``lin_l`` and ``lin_r`` are one parameter; None: if their values are equal.
    state, combine, slope, attention_dropout : see `from_gat_conv`
    """
    _refuse("GATv2Conv", state, combine)
    for key in ("lin_l.weight", "lin_r.weight"):
        if key not in state:
            raise ConfigError(_missing("GATv2Conv", key, state))
    left, right = state["lin_l.weight"], state["lin_r.weight"]
    attention = _attention("GATv2Conv", "att", state)
    heads, outputs = attention.shape
    if left.shape != right.shape:
        raise ConfigError(
            f"GATv2Conv: lin_l.weight {tuple(left.shape)} and lin_r.weight {tuple(right.shape)} "
            "differ: sources and receivers of two kinds are not supported"
        )
    shared = torch.equal(left, right) if share_weights is None else share_weights
    layer = GatV2(
        left.shape[1], outputs, heads=heads, combine=combine, slope=slope,
        attention_dropout=attention_dropout, bias="bias" in state,
        inner_bias="lin_l.bias" in state, share_weights=shared,
    ).to(left.dtype)  # fmt: skip
    with torch.no_grad():
        _copy(layer.weight, _by_head(left, heads))
        _copy(layer.learned["attention"], attention)
        if not shared:
            _copy(layer.learned["query"], _by_head(right, heads))
        if layer.inner_bias is not None:
            _copy(layer.inner_bias, state["lin_l.bias"].reshape(heads, outputs))
            if not shared:
                _copy(layer.learned["bias_query"], state["lin_r.bias"].reshape(heads, outputs))
        if layer.bias is not None:
            _copy(layer.bias, state["bias"])
    return layer


def from_agnn_conv(state: Mapping[str, Tensor], width: int, *, beta: float = 1.0) -> Agnn:
    """Build the layer equivalent to an ``AGNNConv`` with this state dict.

    Raises ConfigError if the state has other keys.

    Parameters
    ----------
    state : its ``state_dict()``: ``beta``, or nothing if beta is not learned
    width : width of the features, which the state does not contain
    beta : its fixed beta, if the state has none
    """
    unknown = sorted(set(state) - {"beta"})
    if unknown:
        raise ConfigError(f"AGNNConv: does not have {unknown[0]}, whose state dict is this?")
    learned = state.get("beta")
    layer = Agnn(width, beta=beta, trained=learned is not None)
    if learned is not None:
        layer = layer.to(learned.dtype)
        with torch.no_grad():
            _copy(layer.learned["beta"], learned)
    return layer


def _refuse(kind: str, state: Mapping[str, Tensor], combine: str) -> None:
    reasons = {
        "lin_edge.weight": "edge features (edge_dim) are not supported; drop them or put their "
        "weights into the graph's edge values",
        "att_edge": "edge features (edge_dim) are not supported; drop them or put their weights "
        "into the graph's edge values",
        "res.weight": "a residual inside the layer is not supported; the model has one",
        "lin_dst.weight": "sources and receivers with matrices of their own are not supported",
    }
    for key, reason in reasons.items():
        if key in state:
            raise ConfigError(f"{kind}: the state dict has {key}: {reason}")
    if combine not in {"concat", "mean"}:
        raise ConfigError(f"{kind}: combine is '{combine}', expected 'concat' or 'mean'")


def _attention(kind: str, key: str, state: Mapping[str, Tensor]) -> Tensor:
    if key not in state:
        raise ConfigError(_missing(kind, key, state))
    return state[key][0]


def _missing(kind: str, key: str, state: Mapping[str, Tensor]) -> str:
    return f"{kind}: the state dict has no {key}, it has {', '.join(sorted(state)) or 'nothing'}"


def _by_head(matrix: Tensor, heads: int) -> Tensor:
    """[H*C, in] as [H, in, C]."""
    return matrix.reshape(heads, -1, matrix.shape[1]).transpose(1, 2)


def _copy(parameter: Tensor | None, values: Tensor) -> None:
    assert parameter is not None
    parameter.copy_(values)
