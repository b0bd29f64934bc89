"""Makes the tiny tasks, the scripts of ranks and the benchmarks importable; a crop of a chain."""

import sys
from pathlib import Path

import numpy as np
import pytest

TESTS = Path(__file__).parents[1]
OTHERS = ("train", "models/alphafold2", "models/alphafold3")
sys.path[:0] = [str(Path(__file__).parent), *(str(TESTS / folder) for folder in OTHERS)]
sys.path.append(str(TESTS.parent))


@pytest.fixture(scope="module")
def chain(shared):
    """A crop of a protein with its alignment."""
    from bevatron.data.proteins.chain_batch import collate_chain
    from bevatron.data.proteins.chain_samples import ChainSizes, sample_chain
    from bevatron.data.proteins.chains import chain_entry
    from bevatron.data.proteins.rows_in_memory import rows_in_memory
    from bevatron.data.readers.proteins import read_structure
    from bevatron.data.readers.proteins.alignments import read_alignment

    folder = shared / "data/proteins"
    entry = chain_entry(read_structure(folder / "mmcif/1ubi.cif.gz"), 0)
    (file,) = (folder / "msa/1ubi_A").iterdir()
    rows = rows_in_memory([read_alignment(file, "protein")])
    sizes = ChainSizes(residues=19, msa_rows=3, extra_rows=3, templates=1)
    sample = sample_chain(entry, rows, 7, sizes, cycles=1)
    sample["seed"] = np.array(5)
    return collate_chain([sample], np.array([0]), [1.0])
