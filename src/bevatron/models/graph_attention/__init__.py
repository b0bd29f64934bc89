"""Attention on graphs: the programmable layer, GAT and its kin, node classification."""
