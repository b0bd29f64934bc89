"""Runs scripts one after the other in this process: imports take as long as what they do.

Kernels are interpreted where there is no GPU, as in tests; shapes are not checked.
"""

import importlib
import os
import runpy
import sys
from pathlib import Path

import torch

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
        importlib.import_module("fast_interpreter").install()
        importlib.import_module("bounds").install()
    for script in sys.argv[1:]:
        runpy.run_path(script, run_name="__main__")
