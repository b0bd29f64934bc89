"""GPS++: from molecules to trained models and their uses."""
