"""What OpenFold's and Protenix's own pipelines make of structures, alignments and template hits.

Runs in an environment of theirs; `benchmarks.data.protein_features` compares the files with ours.

    PYTHONPATH=OPENFOLD python benchmarks/data/protein_peers.py openfold OUT FILE ...
    PROTENIX_ROOT_DIR=ROOT python benchmarks/data/protein_peers.py protenix OUT FILE ...

One file each. Template hits are a table (.tsv.gz) in a folder beside those of the structures and
the table of chains. For Protenix, which reads mmCIF alone, gemmi rewrites files of PDB format, and
ROOT/common/components.cif holds the chemical components of all files, one block each,
and ROOT/common/components.cif.rdkit_mol.pkl is what its scripts.gen_ccd_cache makes of them.
"""

import argparse
import csv
import gzip
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

SECONDS = 300
"""Of one file at most."""

BONDED = 2.4
"""Å, at most, between residues that follow each other."""


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


# ---- Templates ----


def hits_of(path: Path) -> Iterator[tuple[int, SimpleNamespace, str]]:
    """Yield number and hit, as both peers take it, and the query, where both chains are there."""
    with (path.parents[1] / "chains.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    sequences = {f"{row['pdb_id']}_{row['auth_chain']}": row["sequence"] for row in rows}
    for number, row in enumerate(csv.DictReader(text_of(path).splitlines(), delimiter="\t")):
        if not {row["query"], row["target"]} <= sequences.keys():
            continue
        query, target = row["qaln"], row["taln"]
        hit = SimpleNamespace(
            index=0, name=row["target"], sum_probs=None, query=query, hit_sequence=target,
            aligned_cols=sum("-" not in pair for pair in zip(query, target, strict=True)),
            indices_query=places(query, int(row["qstart"]) - 1),
            indices_hit=places(target, int(row["tstart"]) - 1),
        )  # fmt: skip
        yield number, hit, sequences[row["query"]]


def places(aligned: str, first: int) -> list[int]:
    """Return the number of each residue of an aligned sequence, -1 at gaps."""
    numbers = iter(range(first, first + len(aligned)))
    return [-1 if letter == "-" else next(numbers) for letter in aligned]


def templates(path: Path, accepts: Any, extract: Any) -> dict[str, Any]:
    """Return of every hit whether it is accepted, and classes and atoms of those extracted."""
    found: dict[str, Any] = {}
    for number, hit, sequence in hits_of(path):
        try:
            accepts(hit, sequence)
        except Exception as error:  # noqa: BLE001  a peer may raise anything
            found[f"{number}/refused"] = f"{type(error).__name__}: {error}"
        try:
            made = extract(hit, sequence)
        except Exception as error:  # noqa: BLE001
            found[f"{number}/error"] = f"{type(error).__name__}: {error}"
        else:
            found |= {f"{number}/{name}": value for name, value in made.items()}
    return found


def openfold_templates(path: Path) -> dict[str, Any]:
    from openfold.data import mmcif_parsing
    from openfold.data.templates import _assess_hhsearch_hit as rules
    from openfold.data.templates import _build_query_to_hit_index_mapping as paired
    from openfold.data.templates import _extract_template_features as features

    @cache
    def opened(code: str) -> Any:
        text = text_of(path.parents[1] / "mmcif" / f"{code}.cif.gz")
        parsed = mmcif_parsing.parse(file_id=code, mmcif_string=text)
        return parsed.mmcif_object

    def accepts(hit: Any, sequence: str) -> None:
        rules(hit, hit.name[:4], sequence, {}, datetime.max)

    def extract(hit: Any, sequence: str) -> dict[str, Any]:
        code, _, chain = hit.name.partition("_")
        mapping = paired(hit.query, hit.hit_sequence, hit.indices_hit, hit.indices_query, sequence)
        made, _ = features(
            opened(code), code, mapping, hit.hit_sequence.replace("-", ""), sequence, chain, ""
        )
        return {
            "aatype": made["template_aatype"].argmax(axis=-1).astype(np.int8),
            "position": made["template_all_atom_positions"].astype(np.float32),
            "mask": made["template_all_atom_mask"] > 0,
        }

    return templates(path, accepts, extract)


def protenix_templates(path: Path) -> dict[str, Any]:
    """Do the same with Protenix; the pairs are those of the hit, without realignment by Kalign."""
    from protenix.data.template.template_parser import TemplateParser
    from protenix.data.template.template_utils import TemplateHitFilter, TemplateHitProcessor

    rules = TemplateHitFilter({}, {})._assess_hit  # noqa: SLF001
    features = TemplateHitProcessor("")._extract_template_features  # noqa: SLF001

    @cache
    def opened(name: str) -> Any:
        code, _, chain = name.partition("_")
        text = text_of(path.parents[1] / "mmcif" / f"{code}.cif.gz")
        return TemplateParser.parse(
            file_id=code, mmcif_string=text, auth_chain_id=chain
        ).mmcif_object

    def accepts(hit: Any, sequence: str) -> None:
        rules(hit, hit.name[:4], sequence, datetime.max)

    def extract(hit: Any, sequence: str) -> dict[str, Any]:
        code, _, chain = hit.name.partition("_")
        whole = opened(hit.name).chain_to_seqres[chain]
        moved = whole.index(hit.hit_sequence.replace("-", "")) - max(hit.indices_hit[0], 0)
        mapping = {
            i: j + moved
            for i, j in zip(hit.indices_query, hit.indices_hit, strict=True)
            if min(i, j) >= 0
        }
        made, _ = features(opened(hit.name), code, mapping, whole, sequence, chain)
        return {
            "aatype": made["template_aatype"].astype(np.int8),
            "position": made["template_all_atom_positions"],
            "mask": made["template_all_atom_masks"] > 0,
        }

    return templates(path, accepts, extract)


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


def openfold_pdb(path: Path) -> dict[str, Any]:
    """Return ``CHAIN/feature`` of all chains of a file of PDB format."""
    from openfold.np import protein

    text, found = text_of(path), {}
    lines = [line for line in text.splitlines() if line.startswith("ATOM  ")]
    for chain in dict.fromkeys(line[21] for line in lines):
        try:
            made = protein.from_pdb_string(text, chain)
        except Exception as error:  # noqa: BLE001  a peer may raise anything
            found[f"{chain}/error"] = f"{type(error).__name__}: {error}"
            continue
        names = ("aatype", "atom_positions", "atom_mask", "residue_index")
        found |= {f"{chain}/{name}": getattr(made, name) for name in names}
    return {**found, "chains": np.array(list(dict.fromkeys(line[21] for line in lines)))}


def openfold(path: Path) -> dict[str, Any]:
    for ending, read in (
        (".a3m", openfold_alignment), (".tsv", openfold_templates), (".pdb", openfold_pdb)
    ):  # fmt: skip
        if ending in path.name:
            return read(path)
    return openfold_chains(path)


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


def with_unknown(residues: list[Any]) -> list[str]:
    """Return the names of observed residues and, in gaps, of as many unknown ones as are missing.

    Entities are of one chain each here, or of copies with the same gaps.
    """
    names = [residues[0].name]
    for before, after in pairwise(residues):
        step = after.seqid.num - before.seqid.num
        apart = min(a.pos.dist(b.pos) for a in before for b in after) > BONDED
        missing = max(step - 1, int(step < 0)) if apart else 0
        names += ["UNK"] * missing + [after.name]
    return names


def plain(path: Path, folder: Path) -> Path:
    """Copy a file, unpacked and as mmCIF."""
    unpacked = folder / path.name.removesuffix(".gz")
    unpacked.write_text(text_of(path))
    if unpacked.suffix != ".pdb":
        return unpacked
    import gemmi

    structure = gemmi.read_structure(str(unpacked))
    structure.setup_entities()
    for entity in structure.entities:
        if entity.entity_type == gemmi.EntityType.Polymer and not entity.full_sequence:
            chain = structure[0].get_subchain(entity.subchains[0])
            entity.full_sequence = with_unknown(list(chain))
    structure.assign_label_seq_id()
    rewritten, document = unpacked.with_suffix(".cif"), structure.make_mmcif_document()
    for row in document.sole_block().find(["_pdbx_struct_assembly.oligomeric_count"]):
        row[0] = "1"  # refused without a number, which has no other use
    document.write_file(str(rewritten))
    return rewritten


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
                elif ".tsv" in path.name:
                    found = protenix_templates(path)
                else:
                    found = protenix(plain(path, Path(folder)))
        except Exception as error:  # noqa: BLE001  a peer may raise anything
            found = {"error": np.array(f"{type(error).__name__}: {error}")}
            print(path.name, found["error"], file=sys.stderr, flush=True)
        np.savez_compressed(out, **found)


if __name__ == "__main__":
    main()
