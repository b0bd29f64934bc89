"""Reference values for the tests of AlphaFold2."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def golden(shared):
    """Read a file of reference values by its name."""
    from reference_arrays import Golden

    return lambda name: Golden(shared / "golden/alphafold2" / f"{name}.npz")
