"""Models, one folder each."""
