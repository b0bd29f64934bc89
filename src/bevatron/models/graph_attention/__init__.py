"""Attention on graphs: the programmable layer, GAT and its kin, node classification."""

from bevatron.models.graph_attention.config import PRESETS, GraphAttentionConfig
from bevatron.models.graph_attention.convert import (
    from_agnn_conv,
    from_gat_conv,
    from_gatv2_conv,
)
from bevatron.models.graph_attention.formula.planner import Plan, Widths, plan
from bevatron.models.graph_attention.layer import Layer
from bevatron.models.graph_attention.layers import Sgc, agnn, agnn_paper, gat, gatv2, gcn, gin, va
from bevatron.models.graph_attention.metrics import NodeMetrics
from bevatron.models.graph_attention.model import NodeClassifier, graph_features, graph_matrix
from bevatron.models.graph_attention.storage import load_model, save_model
from bevatron.models.graph_attention.task import NodeTask

__all__ = [
    "PRESETS",
    "GraphAttentionConfig",
    "Layer",
    "NodeClassifier",
    "NodeMetrics",
    "NodeTask",
    "Plan",
    "Sgc",
    "Widths",
    "agnn",
    "agnn_paper",
    "from_agnn_conv",
    "from_gat_conv",
    "from_gatv2_conv",
    "gat",
    "gatv2",
    "gcn",
    "gin",
    "graph_features",
    "graph_matrix",
    "load_model",
    "plan",
    "save_model",
    "va",
]
