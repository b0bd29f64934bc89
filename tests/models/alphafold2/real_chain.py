"""A crop of a real protein."""

import numpy as np

from bevatron.data.proteins.chain_batch import collate_chain
from bevatron.data.proteins.chain_samples import sample_chain
from bevatron.data.proteins.chains import chain_entry
from bevatron.data.proteins.rows_in_memory import rows_in_memory
from bevatron.data.readers.proteins import read_structure
from bevatron.data.readers.proteins.alignments import read_alignment


def crop_of_1ubi(shared, sizes, cycles):
    """A crop of ubiquitin with its alignment; its random number is 7."""
    folder = shared / "data/proteins"
    entry = chain_entry(read_structure(folder / "mmcif/1ubi.cif.gz"), 0)
    (file,) = (folder / "msa/1ubi_A").iterdir()
    rows = rows_in_memory([read_alignment(file, "protein")])
    sample = sample_chain(entry, rows, 7, sizes, cycles)
    sample["seed"] = np.array(7)
    return collate_chain([sample], np.array([0]), [1.0])
