"""Features and samples of proteins are those of their version, on any machine, of any size."""

import numpy as np
import protein_texts as proteins
import pytest
from xxhash import xxh3_64

from bevatron.data.proteins.alignment_files import AlignmentReader
from bevatron.data.proteins.alignments import (
    ALIGNMENTS_VERSION,
    merge_alignment,
    prepare_alignments,
)
from bevatron.data.proteins.chain_samples import ChainSizes
from bevatron.data.proteins.crop import CropSizes
from bevatron.data.proteins.featurize import featurize
from bevatron.data.proteins.poses import collected
from bevatron.data.proteins.sample import SampleSizes, Sources, sample
from bevatron.data.readers.proteins import open_components, read_structure
from bevatron.recipes.alphafold2 import stores as chains
from bevatron.recipes.alphafold2.data import ChainDataConfig, load_chains
from bevatron.recipes.alphafold3 import stores as complexes

# What changes the numbers of a version needs a new one, so that stores of the old are refused.
PINNED = {
    ("complexes", 5): "e6f5e83b03c309a9",
    ("chains", 5): "eef392c831dcf82f",
    ("alignments", 2): "22f9d3d4ee4bd2eb",
}
# Unlike rows, more than a sample holds, so that it says which were drawn.
ROWS = f">query\n{proteins.SEQUENCE}\n" + "".join(
    f">row{i}_HUMAN\n"
    + "".join(
        ("CDEFHIKLMNPQRTVWY"[(i + place) % 17] if (i * 7 + place) % 5 < 2 else letter)
        + "acd" * (place == i % 11)
        for place, letter in enumerate(proteins.SEQUENCE)
    )
    + "\n"
    for i in range(40)
)
SAMPLES = {"alphafold3": "73a74a0385150589", "alphafold2": "2709a62357e4baa0"}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A protein, also as PDB files with and without a name of the chain, and what belongs to it."""
    root = tmp_path_factory.mktemp("pins")
    (root / "a.cif").write_bytes(proteins.cif())
    (root / "a.pdb").write_bytes(proteins.pdb())
    (root / "unnamed.pdb").write_bytes(proteins.pdb(chain=" "))
    (root / "a.a3m").write_bytes(proteins.A3M)
    (root / "rows.a3m").write_text(ROWS)
    (root / "components").mkdir()
    (root / "components/components.cif").write_bytes(proteins.COMPONENTS)
    return root


@pytest.fixture(scope="module")
def components(files):
    return open_components(files / "components/components.cif")


def digest(values):
    """Hash names, types, shapes and values, numbers to 0.001: the last bits differ by machine."""
    found = xxh3_64()
    for name in sorted(values):
        array = np.asarray(values[name])
        if array.dtype.kind == "f":
            array = np.nan_to_num(array.astype(np.float64), nan=-1e6)
            array = np.floor(array * 1000 + 0.5).astype(np.int64)
        found.update(f"{name} {array.dtype} {array.shape}".encode())
        found.update(np.ascontiguousarray(array).tobytes())
    return found.hexdigest()


def test_features_are_those_of_their_version(files, components):
    featurizers = [
        complexes.ComplexFeaturizer(str(files / "components/components.cif"), strict=True),
        chains.ChainFeaturizer(strict=True),
    ]
    entries: list = [{}, {}]
    for name in ("a.cif", "a.pdb", "unnamed.pdb"):
        path = np.frombuffer(str(files / name).encode(), np.uint8)
        for featurize_file, found in zip(featurizers, entries, strict=True):
            entry = featurize_file({"path": path, "number": np.array(0)})
            found |= {f"{name} {field}": value for field, value in entry.items()}
    (rows,) = AlignmentReader([files / "a.a3m"]).read(0, 1)
    found = {
        ("complexes", complexes.FEATURES_VERSION): digest(entries[0]),
        ("chains", chains.FEATURES_VERSION): digest(entries[1]),
        ("alignments", ALIGNMENTS_VERSION): digest(merge_alignment(rows)),
    }
    assert found == PINNED


def test_a_seed_gives_the_same_sample_on_another_machine(files, components, tmp_path):
    entry = featurize(read_structure(files / "a.cif").assembly("1"), components)
    rng = np.random.default_rng(0)
    keys = dict.fromkeys(entry["component"].tolist())
    poses = collected({key: rng.normal(size=(2, 7, 3)).astype(np.float32) for key in keys})
    alignments = prepare_alignments(
        AlignmentReader([files / "rows.a3m"]), tmp_path / "alignments", workers=0
    )
    sizes = SampleSizes(CropSizes(tokens=14, atoms=90), rows=8)
    of_complex = sample(entry, 7, Sources(poses, alignments), sizes, [1])
    chains.prepare_chains([files / "a.cif", files / "rows.a3m"], tmp_path / "s", workers=0)
    config = ChainDataConfig(train=(tmp_path / "s",), valid_size=0.0)
    limits = ChainSizes(residues=8, msa_rows=4, extra_rows=6, deleted_blocks=2)
    of_chain = load_chains(config, limits, 2).draws(limits, 0).sources[0].dataset.sample(0, 7)
    assert {"alphafold3": digest(of_complex), "alphafold2": digest(of_chain)} == SAMPLES


# ---- integer types hold what there is ----


def test_more_residues_and_atoms_than_16_bits_hold(components, tmp_path):
    number = 70_000
    (tmp_path / "long.cif").write_bytes(proteins.calphas(("GLY",) * number))
    entry = featurize(read_structure(tmp_path / "long.cif"), components)
    np.testing.assert_array_equal(entry["residue_index"], np.arange(1, number + 1))
    np.testing.assert_array_equal(entry["column"], np.arange(number))
    np.testing.assert_array_equal(np.unique(entry["ref_space_uid"]), np.arange(number))
    first = np.cumsum(entry["num_atoms"]) - entry["num_atoms"]
    np.testing.assert_array_equal(entry["centre_atom"], first + 1)
    np.testing.assert_array_equal(entry["frame_atoms"], first[:, None] + [0, 1, 2])
    np.testing.assert_array_equal(entry["entity_atom"], np.arange(len(entry["entity_atom"])))
    assert entry["bonds"].max() == len(entry["position"]) - 1 > 4 * 65_536
    of_chain = chains.ChainFeaturizer().entry(str(tmp_path / "long.cif"))
    assert of_chain["residue_index"][-1] == number - 1
    assert of_chain["chain_length"].tolist() == [number]


def test_more_chains_and_copies_than_8_bits_hold(components, tmp_path):
    tables = proteins.tables_of(("GLY", "ALA"))
    numbers = [str(number) for number in range(1, 301)]
    tables["pdbx_struct_oper_list"] = {
        tag: numbers if tag == "id" else [column[0]] * 300
        for tag, column in tables["pdbx_struct_oper_list"].items()
    }
    tables["pdbx_struct_oper_list"]["vector[1]"] = [40 * i for i in range(300)]
    tables["pdbx_struct_assembly_gen"]["oper_expression"] = ["(1-300)"]
    (tmp_path / "many.cif").write_bytes(proteins.cif(tables=tables))
    entry = featurize(read_structure(tmp_path / "many.cif").assembly("1"), components)
    expected = np.repeat(np.arange(1, 301), 2)
    for name in ("asym_id", "sym_id"):
        np.testing.assert_array_equal(entry[name], expected, name)
    np.testing.assert_array_equal(entry["molecule_id"], np.arange(1, 301))
    keys = dict.fromkeys(entry["component"].tolist())
    poses = collected({key: np.ones((1, 6, 3), dtype=np.float32) for key in keys})
    whole = sample(entry, 0, Sources(poses), SampleSizes(CropSizes(10_000, 100_000)), [300])
    np.testing.assert_array_equal(whole["asym_id"], expected)
    assert whole["molecule_copies"].tolist() == [300] * 300
    np.testing.assert_array_equal(whole["molecule_copy"], np.arange(300))


def test_more_rows_and_species_than_16_bits_hold(tmp_path):
    rng = np.random.default_rng(1)
    number = 70_000
    rows = rng.integers(0, 20, (number, 8)).astype(np.int8)
    raw = {
        "rows": rows, "deletions": np.zeros(rows.shape, dtype=np.uint16),
        "species": np.arange(number) + 2**31 - number, "files": np.array([0]),
        "file_rows": np.array([number]),
    }  # fmt: skip
    merged = merge_alignment(raw)
    assert int(merged["num_rows"]) == merged["file_rows"].sum() == number
    assert merged["species"].max() == 2**31 - 1
    np.testing.assert_array_equal(np.sort(merged["species_row"]), np.arange(number))
