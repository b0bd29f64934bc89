"""A complex to predict, independent of its file format."""

import string
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from bevatron.data.readers.proteins.alphabet import LETTERS, Polymer
from bevatron.errors import DataError

MOST_RESIDUES = 10_000_000
"""Maximum number of residues; more than any structure has."""

MOST_CHAINS = 10_000
"""Maximum number of copies of an entity."""

Kind = Polymer | Literal["ligand"]
"""Kind of an entity; ions are ligands."""


@dataclass(frozen=True)
class Modification:
    """A residue of a polymer that is another chemical component; positions count from 1."""

    position: int
    code: str


@dataclass(frozen=True)
class AtomName:
    """An atom of a chain.

    Attributes
    ----------
    chain
    position : residue of a polymer or component of a ligand, from 1
    atom
        Name in the chemical component; of a ligand given as SMILES or as a file, element and number
        (``C3``, from 1) or index of the atom (``2``, from 0).
    """

    chain: str
    position: int
    atom: str


@dataclass(frozen=True)
class Template:
    """A structure to use as template.

    Attributes
    ----------
    structure : a file, or the text of an mmCIF file
    pairs : int32 [pairs, 2]
        Positions in query and template, from 0; None if they are to be found.
    chains : chains of the template, one for each chain of the entity; empty if they are to be found
    """

    structure: Path | str
    pairs: npt.NDArray[np.int32] | None = None
    chains: tuple[str, ...] = ()


@dataclass(frozen=True)
class Entity:
    """A molecule, in one copy or several.

    Attributes
    ----------
    kind
    chains : name of each copy
    sequence : one letter for each residue of a polymer, in upper case
    codes : components of a ligand, from the chemical component dictionary or the user's own
    smiles : a ligand as SMILES
    file : a ligand as a structure file
    modifications : residues that are other components
    cyclic : whether the ends of the polymer are joined
    unpaired, paired
        Alignment as file or as text of an a3m file; empty text for none, None if the user does not
        say.
    templates : None if the user does not say, an empty tuple for none
    description : the user's own words
    """

    kind: Kind
    chains: tuple[str, ...] = ()
    sequence: str = ""
    codes: tuple[str, ...] = ()
    smiles: str = ""
    file: Path | None = None
    modifications: tuple[Modification, ...] = ()
    cyclic: bool = False
    unpaired: Path | str | None = None
    paired: Path | str | None = None
    templates: tuple[Template, ...] | None = None
    description: str = ""

    @property
    def length(self) -> int:
        """Number of residues, or of components of a ligand."""
        return len(self.sequence) or len(self.codes) or 1


@dataclass(frozen=True)
class Complex:
    """Molecules to be predicted together.

    Attributes
    ----------
    name
    entities
    bonds : covalent bonds beyond those of the polymers and the components themselves
    seeds : random seeds; empty if the user does not say
    components : the user's own chemical components, as file or as text in mmCIF
    ignored
        What the file asks for that has no place here (``constraints[0].pocket``), for a warning.
    file : where it was read, for messages
    """

    name: str
    entities: tuple[Entity, ...]
    bonds: tuple[tuple[AtomName, AtomName], ...] = ()
    seeds: tuple[int, ...] = ()
    components: Path | str | None = None
    ignored: tuple[str, ...] = ()
    file: str = field(default="", compare=False)

    @property
    def where(self) -> str:
        """What messages call it: its file, else its name."""
        return self.file or self.name


def chain_names() -> Iterator[str]:
    """Yield A, B ... Z, AA, BA ... ZA, AB and so on, as the AlphaFold Server names chains."""
    for length in range(1, 5):
        for letters in product(string.ascii_uppercase, repeat=length):
            yield "".join(reversed(letters))


def named_chains(entities: Sequence[Entity], copies: Sequence[int]) -> tuple[Entity, ...]:
    """Give names to the copies of entities that have none."""
    taken = {chain for entity in entities for chain in entity.chains}
    free = (name for name in chain_names() if name not in taken)
    return tuple(
        entity
        if entity.chains
        else replace(entity, chains=tuple(next(free) for _ in range(number)))
        for entity, number in zip(entities, copies, strict=True)
    )


def checked_sequence(kind: Polymer, text: str, where: str) -> str:
    """Return a sequence without blanks, in upper case; of a protein without a final stop, ``*``.

    Raises DataError if it is empty or holds a letter that is not a residue, such as a U in DNA:
    nobody can tell deoxyuridine from a chain of RNA under the wrong name.
    """
    sequence = "".join(text.split()).upper()
    if kind == "protein":
        sequence = sequence.removesuffix("*")
    if not sequence:
        raise DataError(f"{where}: the sequence is empty; expected one letter for each residue")
    known = set(LETTERS[kind]) - ({"U"} if kind == "dna" else set())
    if wrong := set(sequence) - known:
        letter = next(each for each in sequence if each in wrong)
        advice = "; write T, and for deoxyuridine its modification DU (in JSON or YAML)"
        raise DataError(
            f"{where}: '{letter}' at position {sequence.index(letter) + 1} is not a residue of "
            f"{kind}{advice if letter == 'U' else ''}"
        )
    return sequence


def checked_complex(made: Complex, where: str) -> Complex:
    """Return a complex whose chains, modifications and bonds fit together.

    Raises DataError if a chain occurs twice or has a name that mmCIF cannot hold, or a modification
    or bond names what is not there.
    """
    if not made.entities:
        raise DataError(f"{where}: holds no chain or ligand")
    lengths: dict[str, int] = {}
    for entity in made.entities:
        for chain in entity.chains:
            if chain in {"?", "."} or "\0" in chain:
                raise DataError(f"{where}: mmCIF cannot hold a chain called {chain!r}; rename it")
            if chain in lengths:
                raise DataError(f"{where}: chain '{chain}' occurs twice; every copy needs a name")
            lengths[chain] = entity.length
        for modification in entity.modifications:
            if not 1 <= modification.position <= entity.length:
                raise DataError(
                    f"{where}: '{modification.code}' modifies residue {modification.position} of "
                    f"chain '{entity.chains[0]}', which has {entity.length} residues"
                )
    for atom in (atom for bond in made.bonds for atom in bond):
        if atom.chain not in lengths:
            raise DataError(
                f"{where}: a bond names chain '{atom.chain}', which is not among "
                f"{', '.join(list(lengths)[:20])}"
            )
        if not 1 <= atom.position <= lengths[atom.chain]:
            raise DataError(
                f"{where}: a bond names position {atom.position} of chain '{atom.chain}', which "
                f"has {lengths[atom.chain]}"
            )
    return made
