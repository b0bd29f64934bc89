"""Files of texts and data sets beside the tests can be imported by all of them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
