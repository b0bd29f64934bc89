"""Known layers: GAT, GATv2, AGNN and VA call their kernel; GCN, SGC and GIN are formulas.

Edge values, if a graph has them, multiply the attention after the softmax. Whether vertices attend
to themselves is a property of the graph: GAT, AGNN, GCN and SGC expect self loops.
"""

from bevatron.models.graph_attention.layers.agnn import agnn, agnn_paper
from bevatron.models.graph_attention.layers.convolution import Sgc, gcn, gin
from bevatron.models.graph_attention.layers.gat import gat
from bevatron.models.graph_attention.layers.gatv2 import gatv2
from bevatron.models.graph_attention.layers.va import va

__all__ = ["Sgc", "agnn", "agnn_paper", "gat", "gatv2", "gcn", "gin", "va"]
