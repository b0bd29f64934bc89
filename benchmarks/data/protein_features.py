"""Features of every structure and alignment beside those of OpenFold's and Protenix's pipelines.

    python -m benchmarks.data.protein_features PEERS COMPONENTS SHARED_DATA

PEERS holds the folders ``openfold`` and ``protenix`` that `benchmarks/data/protein_peers.py` wrote,
COMPONENTS the dictionary that it gave to Protenix. Values that differ are counted, and their
entries are listed in the JSON beside the page.
"""

import argparse
import csv
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.common.report import write_result
from benchmarks.data.protein_peers import stem

from bevatron.data.proteins.alignments import merge_alignment
from bevatron.data.proteins.chains import chain_entry
from bevatron.data.proteins.clusters_of_rows import GAP
from bevatron.data.proteins.featurize import describe, featurize
from bevatron.data.proteins.filters import filter_chains
from bevatron.data.proteins.rigid_groups import group_frames
from bevatron.data.proteins.sample import element_class
from bevatron.data.proteins.stored_alignment import StoredAlignment
from bevatron.data.proteins.template_atoms import place_template
from bevatron.data.proteins.template_hits import usable_hits
from bevatron.data.proteins.torsions import torsions
from bevatron.data.readers.proteins import (
    open_components,
    read_alignment,
    read_hits,
    read_structure,
)
from bevatron.data.readers.proteins.alphabet import CLASSES
from bevatron.errors import DataError

HHBLITS = np.array([CLASSES.index(letter) for letter in "ACDEFGHIKLMNPQRSTVWYX-"])
"""Our class of each of OpenFold's."""


class Tally:
    """Values compared and values that differ, by feature."""

    def __init__(self) -> None:
        self.compared: Counter[str] = Counter()
        self.different: Counter[str] = Counter()
        self.where: dict[str, dict[str, int]] = defaultdict(dict)

    def add(self, feature: str, entry: str, different: Any, number: int | None = None) -> None:
        """Count an array of whether values differ, or numbers of different and all values."""
        count = int(np.sum(different))
        self.compared[feature] += int(np.size(different)) if number is None else number
        self.different[feature] += count
        if count:
            self.where[feature][entry] = self.where[feature].get(entry, 0) + count

    def rows(self, peer: str) -> list[dict[str, Any]]:
        """Return the rows of the table."""
        return [
            {
                "peer": peer, "feature": feature, "values": self.compared[feature],
                "different": self.different[feature], "in entries": len(self.where[feature]),
            }
            for feature in self.compared
        ]  # fmt: skip


def structures(shared: Path) -> Iterator[Path]:
    for folder in ("complexes", "proteins"):
        yield from sorted((shared / folder / "mmcif").glob("*.cif*"))
    for pattern in ("prot_dna/*/*.pdb*", "bm5/*/*.pdb*"):
        yield from sorted((shared / "complexes").glob(pattern))


def alignments(shared: Path) -> Iterator[Path]:
    for pattern in (
        "complexes/msa*/**/*.a3m*",
        "complexes/bm5/msa/*.a3m*",
        "proteins/msa/*/*.a3m*",
    ):
        yield from sorted(shared.glob(pattern))


def loaded(folder: Path, path: Path) -> Any:
    """Return what a peer made of a file, None if there is nothing."""
    file = folder / f"{stem(path)}.npz"
    return np.load(file) if file.exists() else None


# ---- Templates ----


def compare_templates(path: Path, peer: Any, classes: Any, tally: Tally) -> None:
    """Compare which template hits are accepted, and the residues and atoms of these.

    ``classes`` are ours of each of the peer's residue types, gaps last.
    """
    hits, folder = read_hits(path), path.parents[1]
    with (folder / "chains.csv").open() as stream:
        queries = {
            f"{x['pdb_id']}_{x['auth_chain']}": x["sequence"] for x in csv.DictReader(stream)
        }
    opened = cache(lambda code: read_structure(folder / "mmcif" / f"{code}.cif.gz"))
    for number in sorted({int(key.partition("/")[0]) for key in peer.files}):
        sequence = queries[hits.queries[number]]
        name = f"{hits.queries[number]} {hits.targets[number]}"
        usable = list(usable_hits(sequence, hits.take(np.array([number])), opened))
        tally.add("templates accepted", name, bool(usable) == (f"{number}/refused" in peer), 1)
        if not usable or f"{number}/error" in peer:
            continue
        ours, mask = place_template(*usable[0], len(sequence)), peer[f"{number}/mask"]
        aatype = np.minimum(classes[peer[f"{number}/aatype"]], GAP)
        tally.add("template_aatype", name, ours.aatype != aatype)
        tally.add("template_atom_mask", name, ours.mask != mask)
        both = mask & ours.mask
        position = peer[f"{number}/position"]
        moved = (position[both] - ours.positions[both]).mean(axis=0)  # the origin is any
        far = not_close(ours.positions + moved, position).any(axis=-1)
        tally.add("template_atom_positions", name, far[both])


# ---- OpenFold ----


def compare_chains(path: Path, peer: Any, tally: Tally) -> None:
    """Compare the protein chains of a structure, by author's label."""
    entry = read_structure(path)
    for label in peer["chains"].tolist():
        name = f"{stem(path)} {label}"
        if f"{label}/error" in peer:
            tally.add("chains that OpenFold refuses", name, 1, 1)
            continue
        named = (entry.chains.author == label) & (entry.chains.kind == "protein")
        chain, *more = np.flatnonzero(named).tolist() or [None]
        tally.add("chains", name, chain is None or bool(more), 1)
        if chain is None or more:
            continue
        try:
            ours = chain_entry(entry, chain)
        except DataError:
            tally.add("chains that we refuse", name, 1, 1)
            continue
        theirs = {
            key.partition("/")[2]: peer[key] for key in peer.files if key.startswith(f"{label}/")
        }
        compare_chain(name, ours, theirs, tally)
        tally.add("resolution", name, not_close(
            np.nan_to_num(ours["resolution"]), theirs["resolution"].ravel()[0]))  # fmt: skip
        date = str(theirs["release_date"].ravel()[0])
        tally.add("release date", name, bool(date) and str(entry.released) != date, 1)


def not_close(ours: Any, theirs: Any, bound: float = 1e-3) -> Any:
    return np.abs(np.asarray(ours) - theirs) > bound


def compare_chain(name: str, ours: Any, theirs: Any, tally: Tally) -> None:
    if len(ours["aatype"]) != len(theirs["aatype"]):
        tally.add("length of the chain", name, 1, 1)
        return
    tally.add("length of the chain", name, 0, 1)
    tally.add("aatype", name, ours["aatype"] != theirs["aatype"])
    mask = theirs["all_atom_mask"] > 0
    tally.add("all_atom_mask", name, ours["all_atom_mask"] != mask)
    both = mask & ours["all_atom_mask"]
    far = not_close(ours["all_atom_positions"], theirs["all_atom_positions"]).any(axis=-1)
    tally.add("all_atom_positions", name, far[both])
    same = ~((ours["all_atom_mask"] != mask).any(axis=1) | (far & both).any(axis=1))
    same &= ours["aatype"] == theirs["aatype"]
    whole = same & np.concatenate([[True], same[:-1]])  # pre-omega and phi take the residue before
    position, resolved, aatype = (
        torch.tensor(ours["all_atom_positions"]),
        torch.tensor(ours["all_atom_mask"]).float(),
        torch.tensor(ours["aatype"]).long(),
    )
    found = torsions(position, resolved, aatype)
    exists = theirs["torsion_angles_mask"] > 0
    tally.add("torsion_angles_mask", name, ((found.mask.numpy() > 0) != exists)[whole])
    far = not_close(found.sin_cos.numpy(), theirs["torsion_angles_sin_cos"]).any(axis=-1)
    tally.add("torsion_angles_sin_cos", name, far[whole][exists[whole]])
    frames = group_frames(position, resolved, aatype)
    exists = theirs["rigidgroups_gt_exists"] > 0
    tally.add("rigidgroups_gt_exists", name, ((frames.resolved.numpy() > 0) != exists)[same])
    for part, values in (("rotation", np.s_[..., :3, :3]), ("translation", np.s_[..., :3, 3])):
        mine = getattr(frames.frames, part).numpy()
        far = not_close(mine, theirs["rigidgroups_gt_frames"][values])
        far = far.reshape(*exists.shape, -1).any(axis=-1)
        tally.add(f"rigidgroups_gt_frames, {part}", name, far[same][exists[same]])


def compare_pdb(path: Path, peer: Any, tally: Tally) -> None:
    """Compare the observed residues of the protein chains of a file of PDB format."""
    entry = read_structure(path)
    for label in peer["chains"].tolist():
        name = f"{stem(path)} {label}"
        named = np.flatnonzero(
            (entry.chains.author == label.strip()) & (entry.chains.kind == "protein")
        )
        if f"{label}/error" in peer or len(named) != 1:
            continue
        ours = chain_entry(entry, int(named[0]))
        first, past = entry.chains.residue_ptr[named[0] : named[0] + 2]
        index = {
            number: row
            for row, number in enumerate(entry.residues.author_number[first:past].tolist())
            if ours["all_atom_mask"][row].any()
        }
        numbers = peer[f"{label}/residue_index"].tolist()
        if len(set(numbers)) < len(numbers):
            continue
        found = np.array([index.get(number, -1) for number in numbers])
        has = found >= 0
        tally.add("PDB format: residues", name, len(index) != has.sum(), 1)
        if len(index) != has.sum():
            continue
        mask = peer[f"{label}/atom_mask"][has] > 0
        tally.add(
            "PDB format: aatype", name, ours["aatype"][found[has]] != peer[f"{label}/aatype"][has]
        )
        mine = ours["all_atom_mask"][found[has]]
        tally.add("PDB format: all_atom_mask", name, mine != mask)
        far = not_close(
            ours["all_atom_positions"][found[has]], peer[f"{label}/atom_positions"][has]
        )
        tally.add("PDB format: all_atom_positions", name, far.any(axis=-1)[mask & mine])


def compare_alignment(path: Path, peer: Any, tally: Tally) -> None:
    """Compare the distinct rows of an alignment and their deletions."""
    name, read = stem(path), read_alignment(path)
    stored = merge_alignment({
        "rows": read.rows, "deletions": read.deletions, "species": np.zeros(len(read.rows), int),
        "files": np.zeros(1, int), "file_rows": np.array([len(read.rows)]),
    })  # fmt: skip
    ours = StoredAlignment.of(stored, name)
    rows, deletions = ours.read(slice(None), np.arange(ours.num_columns))
    theirs = HHBLITS[peer["msa"]].astype(np.int8)
    # OpenFold tells rows apart by their letters, of which some are one class: B and D, U and C.
    first = np.sort(np.unique(theirs, axis=0, return_index=True)[1])
    tally.add("distinct rows", name, abs(len(first) - len(rows)), len(first))
    tally.add("rows of other letters alone", name, len(theirs) - len(first), len(theirs))
    if len(first) == len(rows):
        tally.add("msa", name, rows != theirs[first])
        tally.add("deletion_matrix", name, deletions != peer["deletions"][first])


# ---- Protenix ----


def names_of(chars: Any) -> list[str]:
    return ["".join(chr(c + 32) for c in row).strip() for row in np.asarray(chars).tolist()]


def chains_of(ours: Any, peer: Any) -> dict[int, int]:
    """Find our chain, from 0, of each of Protenix's by label and the place of its atoms."""
    token = np.repeat(np.arange(len(ours["restype"])), ours["num_atoms"])
    chain = ours["asym_id"][token] - 1
    labels = [each["label"].partition("-")[0] for each in describe(ours)["chains"]]
    asym = peer["asym_id"][peer["atom_to_token_idx"]]
    seen = peer["resolved"] > 0
    found: dict[int, int] = {}
    for number in np.unique(asym).tolist():
        members = np.flatnonzero(asym == number)
        label = str(peer["label"][members[0]])
        resolved = members[seen[members]]
        best = (np.inf, -1)
        for mine in (i for i, text in enumerate(labels) if text == label):
            own = ours["position"][(chain == mine) & ours["resolved"]]
            if len(own) and len(resolved):
                some = peer["coordinate"][resolved[:3]]
                apart = np.linalg.norm(own[None] - some[:, None], axis=-1).min(axis=1).max()
                best = min(best, (float(apart), mine))
        if best[1] >= 0 and best[1] not in found.values():
            found[number] = best[1]
    return found


def matched(ours: Any, peer: Any) -> tuple[np.ndarray, dict[int, int]]:
    """Return our atom of each of Protenix's, -1 for none, and our chain of each of its chains."""
    chains = chains_of(ours, peer)
    token = np.repeat(np.arange(len(ours["restype"])), ours["num_atoms"])
    places = {
        key: atom
        for atom, key in enumerate(zip(
            (ours["asym_id"][token] - 1).tolist(), ours["residue_index"][token].tolist(),
            names_of(ours["ref_atom_name_chars"]), strict=True,
        ))
    }  # fmt: skip
    of_token = peer["atom_to_token_idx"]
    keys = zip(
        (chains.get(number, -1) for number in peer["asym_id"][of_token].tolist()),
        peer["residue_index"][of_token].tolist(), peer["atom_name"].tolist(), strict=True,
    )  # fmt: skip
    return np.array([places.get(key, -1) for key in keys]), chains


def compare_complex(path: Path, peer: Any, components: Any, tally: Tally) -> None:
    """Compare the atoms and tokens of the first assembly that both have."""
    name, structure = stem(path), read_structure(path)
    whole = structure.assembly("1") if structure.assemblies else structure
    ours = featurize(filter_chains(whole)[0], components)
    atom, chains = matched(ours, peer)
    has, count = atom >= 0, len(ours["position"])
    tally.add("chains of Protenix", name, len(np.unique(peer["asym_id"])) - len(chains),
              len(np.unique(peer["asym_id"])))  # fmt: skip
    # Unknown residues stand in the gaps of files without sequences.
    filler = (peer["component"] == "UNK") & (peer["resolved"] == 0) & (path.suffixes[0] == ".pdb")
    tally.add("atoms of Protenix", name, ~has[~filler])
    extra = np.ones(count, dtype=bool)
    extra[atom[has]] = False
    token = np.repeat(np.arange(len(ours["restype"])), ours["num_atoms"])
    shared = np.isin(ours["asym_id"][token] - 1, list(chains.values()))
    tally.add("our atoms, in chains of Protenix's", name, extra[shared])
    tally.add("our chains", name, ours["asym_id"].max() - len(chains), int(ours["asym_id"].max()))
    compare_atoms(name, ours, peer, atom, tally)
    compare_tokens(name, ours, peer, atom, tally)
    compare_pairs(name, ours, peer, atom, tally)
    resolution = np.nan_to_num(ours["resolution"], nan=-1.0)
    tally.add("resolution", name, not_close(resolution, peer["resolution"][0]))


def compare_atoms(name: str, ours: Any, peer: Any, atom: Any, tally: Tally) -> None:
    has = atom >= 0
    mine = atom[has]
    tally.add("ref_element", name, element_class(ours["ref_element"])[mine]
              != peer["ref_element"][has])  # fmt: skip
    tally.add("ref_charge", name, ours["ref_charge"][mine] != np.round(peer["ref_charge"][has]))
    tally.add("ref_atom_name_chars", name, (ours["ref_atom_name_chars"][mine]
              != peer["ref_atom_name_chars"][has]).any(axis=1))  # fmt: skip
    resolved = peer["resolved"][has] > 0
    tally.add("resolved", name, ours["resolved"][mine] != resolved)
    both = resolved & ours["resolved"][mine]
    far = not_close(ours["position"][mine], peer["coordinate"][has], 2e-3).any(axis=1)
    tally.add("position", name, far[both])
    tally.add(
        "ref_space_uid", name, unlike(ours["ref_space_uid"][mine], peer["ref_space_uid"][has])
    )


def unlike(ours: Any, theirs: Any) -> Any:
    """Whether each member is in another group than most members of its group there."""
    _, first, group = np.unique(theirs, return_index=True, return_inverse=True)
    wrong = ours != np.asarray(ours)[first][group]
    numbers, counts = np.unique(np.asarray(ours)[first], return_counts=True)
    return wrong | np.isin(ours, numbers[counts > 1])


def compare_tokens(name: str, ours: Any, peer: Any, atom: Any, tally: Tally) -> None:
    """Compare tokens by their centre atoms."""
    centre = np.flatnonzero(peer["pae_rep_atom_mask"] > 0)
    token = np.repeat(np.arange(len(ours["restype"])), ours["num_atoms"])
    known = centre[atom[centre] >= 0]
    theirs, mine = peer["atom_to_token_idx"][known], token[atom[known]]
    tally.add("centre_atom", name, ours["centre_atom"][mine] != atom[known])
    for feature in ("restype", "residue_index"):
        tally.add(feature, name, ours[feature][mine] != peer[feature][theirs])
    for feature in ("entity_id", "asym_id"):
        tally.add(feature, name, unlike(ours[feature][mine], peer[feature][theirs]))
    kinds = np.stack([peer[f"is_{kind}"] for kind in ("protein", "rna", "dna", "ligand")])
    tally.add("molecule_type", name, ours["molecule_type"][mine] != kinds.argmax(axis=0)[known])
    marked = np.flatnonzero(peer["distogram_rep_atom_mask"] > 0)
    marked = marked[atom[marked] >= 0]
    tally.add("representative_atom", name,
              ours["representative_atom"][token[atom[marked]]] != atom[marked])  # fmt: skip
    polymer = np.bincount(peer["atom_to_token_idx"])[theirs] > 1
    tally.add("has_frame, polymers", name,
              (ours["has_frame"][mine] != (peer["has_frame"][theirs] > 0))[polymer])  # fmt: skip
    both = polymer & ours["has_frame"][mine] & (peer["has_frame"][theirs] > 0)
    frames = atom[peer["frame_atom_index"][theirs[both]]]
    tally.add(
        "frame_atoms, polymers", name, (ours["frame_atoms"][mine[both]] != frames).any(axis=1)
    )
    for feature, other in (("molecule_id", "mol_id"), ("molecule_entity", "entity_mol_id")):
        values = ours[feature][ours["asym_id"][mine] - 1]
        tally.add(feature, name, unlike(values, peer[other][known]))


def compare_pairs(name: str, ours: Any, peer: Any, atom: Any, tally: Tally) -> None:
    """Compare bonds of atoms and tokens, and the permutations of residues."""
    token = np.repeat(np.arange(len(ours["restype"])), ours["num_atoms"])
    of_token = np.full(len(peer["restype"]), -1)
    has = atom >= 0
    of_token[peer["atom_to_token_idx"][has]] = token[atom[has]]
    kept_tokens, kept = set(of_token.tolist()) - {-1}, set(atom.tolist()) - {-1}
    for feature, own, other, number, members in (
        ("bonds", "bonds", "bonds", atom, kept),
        ("polymer_ligand_bonds", "polymer_ligand_bonds", "bond_mask", atom, kept),
        ("token_bonds", "token_bonds", "token_bonds", of_token, kept_tokens),
    ):
        theirs = pairs(number[peer[other]])
        mine = {pair for pair in pairs(ours[own]) if members >= set(pair)}
        tally.add(f"{feature}, theirs alone", name, len(theirs - mine), len(theirs))
        tally.add(f"{feature}, ours alone", name, len(mine - theirs), len(mine))
    spaces, residues = peer["ref_space_uid"], ours["ref_space_uid"]
    sizes, number = np.bincount(residues), (peer["permutations"] >= 0).sum(axis=1)
    _, first, count = np.unique(spaces, return_index=True, return_counts=True)
    residue = residues[atom[first]]
    complete = ~np.isin(spaces[first], spaces[~has]) & (sizes[residue] == count)
    listed = np.maximum(np.diff(ours["permutation_ptr"]) // sizes, 1)
    differ = listed[residue] != number[first]
    tally.add("number of permutations of a residue", name, differ[complete])


def pairs(array: Any) -> set[tuple[int, ...]]:
    """Return pairs as a set; those with an atom that we lack are left out."""
    return {tuple(sorted(row)) for row in np.asarray(array).tolist() if min(row) >= 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", type=Path)
    parser.add_argument("components", type=Path)
    parser.add_argument("shared", type=Path)
    arguments = parser.parse_args()
    components = open_components(arguments.components)
    tallies = {"OpenFold": Tally(), "Protenix": Tally()}
    refused: dict[str, dict[str, str]] = {peer: {} for peer in tallies}

    def each(peer: str, path: Path, compare: Any, *more: Any) -> None:
        found = loaded(arguments.peers / peer.lower(), path)
        if found is None:
            refused[peer][stem(path)] = "not run"
        elif "error" in found:
            refused[peer][stem(path)] = str(found["error"])
        else:
            tallies[peer].add("entries", stem(path), 0, 1)
            try:
                compare(path, found, *more, tallies[peer])
            except DataError as error:
                why = str(error).removeprefix(str(path))
                tallies[peer].add("entries that we refuse", stem(path) + why, 1, 1)

    for path in structures(arguments.shared):
        each("OpenFold", path, compare_pdb if ".pdb" in path.name else compare_chains)
        each("Protenix", path, compare_complex, components)
    for path in alignments(arguments.shared):
        each("OpenFold", path, compare_alignment)
    for path in arguments.shared.glob("proteins/templates/*.tsv*"):
        each("OpenFold", path, compare_templates, HHBLITS)
        each("Protenix", path, compare_templates, np.arange(len(CLASSES)))
    rows = [row for peer, tally in tallies.items() for row in tally.rows(peer)]
    where = {peer: tally.where for peer, tally in tallies.items()}
    write_result("data/protein_features", rows, NOTES, extra={"where": where, "refused": refused})


NOTES = """Protenix 2.0.0 with biotite 1.4.0, OpenFold at ce0029e1. Values of all entries that both
read; the JSON lists where they differ, and which entries a peer refused or was not run on. Chains,
residues and atoms are matched by label, number and name, copies of chains by their coordinates.
Numbers that only name a group (entities, chains, molecules) are compared as groups. Files of PDB
format: OpenFold reads chains of one model without insertion codes; Protenix reads mmCIF that gemmi
made of them, of all but the unbound proteins of bm5. After 300 s or 24 GB (7cth, 998,820 atoms)
Protenix was stopped. Template hits: those of the shared table between shared chains, with the
table's pairs. What differs, and why we keep it:

- Alternative locations: the one with the largest occupancy, as OpenFold does; Protenix takes the
  first of the file (`position`, a few `bonds`).
- Selenomethionine: selenium stands for the sulphur of methionine; Protenix leaves that sulphur
  without a position (`resolved`). In files of PDB format OpenFold knows no residue but the standard
  ones; in templates both take X, as the hits have it, where the chain has a methionine.
- Arginine: NH1 is the atom nearer CD; OpenFold does this in mmCIF, not in files of PDB format (all
  differences of `all_atom_positions` there are atoms of arginine).
- Modified residues: the class of the parent that the file or gemmi's table names; OpenFold has
  another table (BP5, PBF, CSE, SEN), Protenix takes letters of the dictionary that its DNA and RNA
  do not know (5IU, GTP) (`aatype`, `restype`).
- A chain is a protein if the file says so; Protenix calls short inhibitors and caps (ACE, NH2)
  ligands, so their bonds are bonds of a polymer and a ligand there (`molecule_type`,
  `molecule_id`, `polymer_ligand_bonds`, `token_bonds`), and what is beside a cap or a modified
  residue keeps its OXT (`atoms of Protenix`).
- Atoms that leave at a bond go although they were not observed (PLM, QUI); an observed OXT or OP3
  stays, also where files join chains.
- Caps and ions at less than 1.7 Å of another chain, without a bond in the file, count as clashing
  (ACE of 1DFJ and 1WEJ, gold of 1H9T); Protenix keeps them.
- Residues behind a ligand of the same chain are taken for ligands, as gemmi does (3LVK and 3SZK of
  bm5, in which chains were joined); there Protenix alone makes peptide bonds.
- Residues that follow each other but were observed more than 2.4 Å apart are not bonded (`bonds`).
- Atoms that the file names as before 2007 are found by those names (02J, bm5); Protenix has no
  place for them.
- Bonds to ligands that only some copies of a chain have are kept as observed; Protenix removes them
  (1igy, 1juh, 3o21, 6flr).
- Assemblies of more than 20 chains are kept whole, crops are of 20 chains; Protenix keeps 20 or
  more in the entry (`our chains`).
- Two components at one place of a sequence are one residue, the more occupied one; OpenFold counts
  both (length of chain B of 1pfe, N2C and NCY).
- Two residues at one place of a sequence (3jqh): the first of the file; OpenFold mixes their atoms.
- Two copies under one name and number (3BP8, unbound): both are kept; OpenFold keeps one.
- 1HMA, with a header among its atoms, is refused by line.
- A release date of 1900-01-01 is none.
"""

if __name__ == "__main__":
    main()
