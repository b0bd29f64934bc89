"""Benchmarks are imported from the root of the repository, as `python -m benchmarks...` does."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
