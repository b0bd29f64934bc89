"""Fused operators, each with an exact reference."""
