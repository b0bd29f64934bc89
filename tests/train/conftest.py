"""Makes the tiny task and the steps of other tests importable."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "capture")]
