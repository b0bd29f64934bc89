"""A folder of three small proteins as it may lie around, and a model that trains in a second."""

import gzip
import shutil

import pytest

from bevatron.recipes.alphafold2.stores import prepare_chains

PROTEINS = "1crn", "1ckb", "1ubi"

_TRIANGLES = {"hidden": 4, "num_heads": 1, "head_width": 4, "transition_factor": 1}
_STACK = {
    "num_blocks": 1, "num_heads": 1, "head_width": 4, "transition_factor": 1, "outer_width": 2,
    "triangles": _TRIANGLES,
}  # fmt: skip
MODEL = {
    "c_m": 8, "c_z": 8, "c_s": 8, "c_t": 4, "c_e": 4, "lddt_width": 4,
    "evoformer": _STACK, "extra_msa": _STACK,
    "templates": {"num_blocks": 1, "num_heads": 1, "head_width": 4, "triangles": _TRIANGLES},
    "structure": {"num_blocks": 2, "num_heads": 2, "head_width": 4, "angle_width": 8},
}  # fmt: skip


@pytest.fixture(scope="session")
def folder(shared, tmp_path_factory):
    """Structures and alignments of three proteins, one of them twice, and two damaged files."""
    root = tmp_path_factory.mktemp("chains") / "anything"
    source = shared / "data/proteins"
    for name in PROTEINS:
        inside = root / "some" / name
        inside.mkdir(parents=True)
        shutil.copy(source / f"mmcif/{name}.cif.gz", inside)
        for file in (source / f"msa/{name}_A").iterdir():
            shutil.copy(file, inside)
    again = gzip.decompress((source / "mmcif/1crn.cif.gz").read_bytes())
    (root / "again.cif.gz").write_bytes(gzip.compress(again + b"# deposited again\n"))
    (root / "damaged.cif").write_text("nothing of a structure")
    (root / "damaged.a3m").write_text(">a\n")
    return root


@pytest.fixture(scope="session")
def store(folder, tmp_path_factory):
    """A store of these chains."""
    out = tmp_path_factory.mktemp("stores") / "chains"
    prepare_chains([folder], out, workers=0, progress=False)
    return out


@pytest.fixture(scope="session")
def tiny_model():
    """Sizes of a tiny model, as plain values."""
    return MODEL
