"""What OpenFold's and Protenix's own pipelines make of structures and alignments, one file each.

Runs in an environment of theirs; `benchmarks.data.protein_features` compares the files with ours.

    PYTHONPATH=OPENFOLD python benchmarks/data/protein_peers.py openfold OUT FILE ...
    PROTENIX_ROOT_DIR=ROOT python benchmarks/data/protein_peers.py protenix OUT FILE ...

For Protenix, ROOT/common/components.cif holds the chemical components of all files, one block each,
and ROOT/common/components.cif.rdkit_mol.pkl is what its scripts.gen_ccd_cache makes of them.
"""

import argparse
import gzip
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

SECONDS = 300
"""Of one file at most."""


@contextmanager
def limited() -> Iterator[None]:
    """Raise TimeoutError in a block that takes too long."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took longer than {SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)


def stem(path: Path) -> str:
    """Name a file without suffixes, together with its folders."""
    name = path.name.removesuffix(".gz")
    return f"{path.parents[1].name}_{path.parent.name}_{name.removesuffix(Path(name).suffix)}"


def text_of(path: Path) -> str:
    return (gzip.open(path, "rt") if path.suffix == ".gz" else path.open()).read()


# ---- OpenFold ----


def openfold_chains(path: Path) -> dict[str, Any]:
    """Return ``CHAIN/feature`` of all protein chains of an mmCIF file."""
    import torch
    from openfold.data import data_pipeline, data_transforms, mmcif_parsing

    parsed = mmcif_parsing.parse(file_id=path.name[:4], mmcif_string=text_of(path))
    if parsed.mmcif_object is None:
        raise ValueError("; ".join(map(str, parsed.errors.values())))
    parsed.mmcif_object.header.setdefault("release_date", "")
    found: dict[str, Any] = {}
    for chain in parsed.mmcif_object.chain_to_seqres:
        try:
            made = data_pipeline.make_mmcif_features(parsed.mmcif_object, chain)
        except Exception as error:  # noqa: BLE001  a peer may raise anything
            found[f"{chain}/error"] = f"{type(error).__name__}: {error}"
            continue
        names = ("all_atom_positions", "all_atom_mask", "resolution")
        found |= {f"{chain}/{name}": np.asarray(made[name]) for name in names}
        found[f"{chain}/release_date"] = made["release_date"].astype(str)
        aatype = made["aatype"].argmax(axis=-1)
        found[f"{chain}/aatype"] = aatype.astype(np.int8)
        tensors = {
            "aatype": torch.tensor(aatype),
            "all_atom_positions": torch.tensor(made["all_atom_positions"]),
            "all_atom_mask": torch.tensor(made["all_atom_mask"]),
        }
        tensors = data_transforms.atom37_to_torsion_angles("")(tensors)
        tensors = data_transforms.atom37_to_frames(tensors)
        for name in ("torsion_angles_sin_cos", "torsion_angles_mask",
                     "rigidgroups_gt_frames", "rigidgroups_gt_exists"):  # fmt: skip
            found[f"{chain}/{name}"] = tensors[name].numpy()
    return {**found, "chains": np.array(list(parsed.mmcif_object.chain_to_seqres))}


def openfold_alignment(path: Path) -> dict[str, Any]:
    """Return rows and deletions of an alignment, distinct rows only."""
    from openfold.data import data_pipeline, parsers

    made = data_pipeline.make_msa_features([parsers.parse_a3m(text_of(path))])
    return {
        "msa": made["msa"].astype(np.int8),
        "deletions": np.minimum(made["deletion_matrix_int"], 255).astype(np.uint8),
        "species": made["msa_species_identifiers"].astype(str),
    }


def openfold(path: Path) -> dict[str, Any]:
    return openfold_alignment(path) if ".a3m" in path.name else openfold_chains(path)


# ---- Protenix ----


def protenix(path: Path) -> dict[str, Any]:
    """Return the features of the first assembly of an mmCIF file, whole."""
    from protenix.data.core.featurizer import Featurizer
    from protenix.data.core.parser import MMCIFParser
    from protenix.data.tokenizer import AtomArrayTokenizer

    with_assembly(path)
    parser = MMCIFParser(mmcif_file=path)
    atoms = parser.get_bioassembly()["atom_array"]
    if atoms is None:
        raise ValueError("no atom is left")
    atoms.set_annotation("resolution", [parser.resolution] * len(atoms))
    tokens = AtomArrayTokenizer(atoms).get_token_array()
    made = Featurizer(tokens, atoms, ref_pos_augment=False, lig_atom_rename=False)
    features = {name: value.numpy() for name, value in made.get_all_input_features().items()}
    permutations = made.get_atom_permutation_list()
    width = max(map(len, permutations))
    label = made.get_labels()
    return {
        **{name: features[name] for name in (
            "residue_index", "asym_id", "entity_id", "sym_id", "ref_pos", "ref_charge",
            "ref_space_uid", "has_frame", "frame_atom_index", "atom_to_token_idx", "is_protein",
            "is_ligand", "is_dna", "is_rna", "resolution", "mol_id", "entity_mol_id",
            "pae_rep_atom_mask", "distogram_rep_atom_mask",
        )},
        "restype": features["restype"].argmax(axis=-1),
        "ref_element": features["ref_element"].argmax(axis=-1),
        "ref_atom_name_chars": features["ref_atom_name_chars"].argmax(axis=-1),
        "token_bonds": np.argwhere(features["token_bonds"]),
        "bond_mask": np.argwhere(features["bond_mask"]),
        "bonds": atoms.bonds.as_array()[:, :2],
        "coordinate": label["coordinate"].numpy(), "resolved": label["coordinate_mask"].numpy(),
        "permutations": np.array([row + [-1] * (width - len(row)) for row in permutations]),
        "atom_name": atoms.atom_name.astype(str), "label": atoms.label_asym_id.astype(str),
        "residue": atoms.res_id, "component": atoms.res_name.astype(str),
    }  # fmt: skip


def with_assembly(path: Path) -> None:
    """Add the identity to an unpacked file without an assembly, which Protenix refuses."""
    from biotite.structure.io.pdbx import CIFCategory, CIFFile

    file = CIFFile.read(path)
    if "pdbx_struct_assembly" in file.block:
        return
    labels = np.unique(file.block["atom_site"]["label_asym_id"].as_array(str)).tolist()
    one = {"id": "1", "oligomeric_count": str(len(labels))}
    gen = {"assembly_id": "1", "oper_expression": "1", "asym_id_list": ",".join(labels)}
    identity = {f"matrix[{i}][{j}]": str(int(i == j)) for i in (1, 2, 3) for j in (1, 2, 3)}
    identity |= {f"vector[{i}]": "0" for i in (1, 2, 3)}
    file.block["pdbx_struct_assembly"] = CIFCategory(one)
    file.block["pdbx_struct_assembly_gen"] = CIFCategory(gen)
    file.block["pdbx_struct_oper_list"] = CIFCategory({"id": "1", **identity})
    file.write(path)


def plain(path: Path, folder: Path) -> Path:
    """Copy a file, unpacked."""
    unpacked = folder / path.name.removesuffix(".gz")
    unpacked.write_text(text_of(path))
    return unpacked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=("openfold", "protenix"))
    parser.add_argument("out", type=Path)
    parser.add_argument("files", type=Path, nargs="+")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for path in arguments.files:
        out = arguments.out / f"{stem(path)}.npz"
        if out.exists():
            continue
        try:
            with tempfile.TemporaryDirectory() as folder, limited():
                if arguments.peer == "openfold":
                    found = openfold(path)
                else:
                    found = protenix(plain(path, Path(folder)))
        except Exception as error:  # noqa: BLE001  a peer may raise anything
            found = {"error": np.array(f"{type(error).__name__}: {error}")}
            print(path.name, found["error"], file=sys.stderr, flush=True)
        np.savez_compressed(out, **found)


if __name__ == "__main__":
    main()
