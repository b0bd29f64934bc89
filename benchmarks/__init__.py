"""Measurements; run from the root of the repository as ``python -m benchmarks.AREA.NAME``."""
