"""The benchmarks of AlphaFold2 at tiny sizes: they run, and what they compare is the same."""

import json

import pytest
from benchmarks.alphafold2 import evoformer_block, train_step
