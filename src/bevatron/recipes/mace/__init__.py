"""MACE: from structures to a trained potential and its uses."""
