"""Makes the tiny tasks, the scripts of ranks and the benchmarks importable; a crop of a chain."""

import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
OTHERS = ("train", "models/alphafold2", "models/alphafold3")
sys.path[:0] = [str(Path(__file__).parent), *(str(TESTS / folder) for folder in OTHERS)]
sys.path.append(str(TESTS.parent))


@pytest.fixture(scope="module")
def chain(shared):
    """A crop of a protein with its alignment."""
    from real_chain import crop_of_1ubi

    from bevatron.data.proteins.chain_samples import ChainSizes

    sizes = ChainSizes(residues=19, msa_rows=3, extra_rows=3, templates=1)
    return crop_of_1ubi(shared, sizes, 1)
