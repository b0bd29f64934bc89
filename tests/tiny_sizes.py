"""Sizes of models that train in a moment."""

GPSPP = {
    "num_layers": 1, "node_width": 16, "edge_width": 8, "global_width": 4, "num_heads": 2,
    "ffn_width": 16, "expansion": 2, "embedding_width": 4, "num_kernels": 4,
}  # fmt: skip
