"""Attention on graphs: from a graph to a trained node classifier and its uses."""
