"""Makes the tiny tasks, the scripts of ranks and the benchmarks importable."""

import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
OTHERS = ("train", "models/alphafold2", "models/alphafold3")
sys.path[:0] = [str(Path(__file__).parent), *(str(TESTS / folder) for folder in OTHERS)]
sys.path.append(str(TESTS.parent))
