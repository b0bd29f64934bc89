"""Operators of the optimiser.

Dimensions: P parameters (tensors) of a model, n elements of a flat tensor that holds all of them.
"""
