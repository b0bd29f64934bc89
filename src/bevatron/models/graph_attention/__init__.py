"""Attention on graphs: the programmable layer, GAT and related layers, node classification."""

from bevatron.models.common.model_folder import ModelKind
from bevatron.models.graph_attention.config import PRESETS, GraphAttentionConfig
from bevatron.models.graph_attention.convert import from_agnn_conv, from_gat_conv, from_gatv2_conv
from bevatron.models.graph_attention.formula.layer import Layer
from bevatron.models.graph_attention.formula.planner import Plan, Widths, plan
from bevatron.models.graph_attention.layers import Sgc, agnn, agnn_paper, gat, gatv2, gcn, gin, va
from bevatron.models.graph_attention.metrics import NodeMetrics
from bevatron.models.graph_attention.model import NodeClassifier, graph_features, graph_matrix
from bevatron.models.graph_attention.task import NodeTask

KIND = "graph_attention"
"""Kind of this model in model folders."""

_folder = ModelKind(KIND, GraphAttentionConfig, NodeClassifier)
save_model, load_model = _folder.save, _folder.load

__all__ = [
    "KIND",
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
