"""Predicted positions of an entry's atoms as a structure, to be written as mmCIF."""

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.conformers import component_key
from bevatron.data.proteins.featurize import describe
from bevatron.data.readers.proteins.components import Dictionary
from bevatron.data.readers.proteins.structure import Links, Structure, structure_of_columns
from bevatron.typing import Array, Arrays

SULFUR = 16

Int32s = npt.NDArray[np.int32]


def predicted_structure(
    entry: Arrays,
    components: Dictionary,
    position: npt.NDArray[np.float32],
    plddt: npt.NDArray[np.float32],
) -> Structure:
    """Return the structure of an entry with predicted positions.

    Parameters
    ----------
    entry : with `featurize.ENTRY_FIELDS`
    components : the dictionary that it was made with
    position : float32 [A, 3]
        Å, of all atoms of the entry.
    plddt : float32 [A]
        0 to 100; becomes the B-factor.
    """
    words = describe(entry)
    chain, number, column = _of_residues(entry)
    sequences = [each["sequence"] for each in words["chains"]]
    letters = [
        sequences[c][p] if p >= 0 else ""
        for c, p in zip(chain.tolist(), column.tolist(), strict=True)
    ]
    codes = {component_key(components[code]): code for code in words["components"]}
    # A ligand of the user's own has a colon in its code, which other programs may refuse.
    named = [codes[key].replace(":", "_") for key in np.asarray(entry["component"]).tolist()]
    owner = np.asarray(entry["ref_space_uid"]).astype(np.int32)
    names = np.array(atom_names(entry), dtype=np.str_)
    chains = {key: [each[key] for each in words["chains"]] for key in ("label", "author", "kind")}
    entity = np.zeros(len(sequences), dtype=np.int32)
    entity[np.asarray(entry["asym_id"]) - 1] = entry["entity_id"]
    return structure_of_columns(
        words["name"],
        {
            "name": names,
            "element": entry["ref_element"],
            "position": position,
            "b_factor": plddt,
            "charge": entry["ref_charge"],
            "residue": owner,
        },
        {"component": named, "letter": letters, "chain": chain, "number": number},
        {**chains, "entity": entity},
        _links(entry, names, chain),
    )


def atom_names(entry: Arrays) -> list[str]:
    """Return the names of an entry's atoms.

    Examples
    --------
    >>> atom_names({"ref_atom_name_chars": np.array([[35, 33, 0, 0], [47, 21, 7, 0]])})
    ['CA', "O5'"]
    """
    rows = np.asarray(entry["ref_atom_name_chars"]).tolist()
    return ["".join(chr(char + 32) for char in row if char) for row in rows]


def _of_residues(entry: Arrays) -> tuple[Int32s, Int32s, Int32s]:
    """Return chain from 0, number and column of each residue, from its first token."""
    tokens = np.repeat(np.arange(len(entry["num_atoms"])), np.asarray(entry["num_atoms"]))
    first = tokens[np.unique(np.asarray(entry["ref_space_uid"]), return_index=True)[1]]
    chain, number, column = (
        np.asarray(entry[name])[first].astype(np.int32)
        for name in ("asym_id", "residue_index", "column")
    )
    return chain - np.int32(1), number, column


def _links(entry: Arrays, names: Array, chain: Array) -> Links:
    """Return the bonds between residues that are not those of a polymer's backbone."""
    bonds = np.sort(np.asarray(entry["bonds"]).reshape(-1, 2), axis=1)
    ends = np.asarray(entry["ref_space_uid"])[bonds]
    same_chain = chain[ends[:, 0]] == chain[ends[:, 1]]
    first, second = names[bonds[:, 0]], names[bonds[:, 1]]
    joins = ((first == "C") & (second == "N")) | ((first == "O3'") & (second == "P"))
    backbone = joins & same_chain & (ends[:, 1] - ends[:, 0] == 1)
    kept = bonds[(ends[:, 0] != ends[:, 1]) & ~backbone].astype(np.int32)
    sulfurs = (np.asarray(entry["ref_element"])[kept] == SULFUR).all(axis=1)
    return Links(kept, np.where(sulfurs, "disulf", "covale").astype(np.str_))
