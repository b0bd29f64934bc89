"""Sets of heavy atoms of residues, and everything that depends on the component alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from bevatron.data.proteins.conformers import component_key, heavy_atoms, make_poses
from bevatron.data.proteins.frames import NO_FRAME, pose_frames
from bevatron.data.proteins.permutations import automorphisms
from bevatron.data.proteins.tokens import STANDARD, Standard
from bevatron.data.readers.proteins.components import Component, Dictionary
from bevatron.typing import Array

NAME_LENGTH = 4
"""Number of characters of an atom's name."""

_FIRST_CHARACTER = 32
_MOST_KNOWN = 20_000


@dataclass(frozen=True)
class Variant:
    """A residue's component with those n of its heavy atoms that the residue has.

    Attributes
    ----------
    component
    standard : what the residue stands for as one token; None if its atoms are tokens
    key : `component_key` of the component
    row : int32 [n]
        Each atom's place among the heavy atoms of the component.
    element : uint8 [n]
        Atomic numbers.
    charge : int8 [n]
        Formal charges.
    chars : uint8 [n, 4]
        Characters of the name, ord(c) - 32; 0 after its end.
    bonds : int32 [b, 2]
        Bonded atoms, places in the residue.
    centre, representative : int32 [t]
        Atoms that stand for each token; t is 1, or n if the atoms are tokens.
    frame : int32 [t, 3]
        Atoms of each token's frame, all `NO_FRAME` if it has none.
    """

    component: Component
    standard: Standard | None
    key: int
    row: npt.NDArray[np.int32]
    element: npt.NDArray[np.uint8]
    charge: npt.NDArray[np.int8]
    chars: npt.NDArray[np.uint8]
    bonds: npt.NDArray[np.int32]
    centre: npt.NDArray[np.int32]
    representative: npt.NDArray[np.int32]
    frame: npt.NDArray[np.int32]
    places: dict[str, int]
    _permutations: dict[frozenset[int], npt.NDArray[np.int32]]

    @property
    def num_tokens(self) -> int:
        """Number of tokens, t."""
        return len(self.centre)

    def permutations(self, fixed: frozenset[int]) -> npt.NDArray[np.int32]:
        """List the permutations of the atoms, [permutations, n]; the first is the identity.

        Parameters
        ----------
        fixed : atoms bonded to other residues; they stay
        """
        if fixed not in self._permutations:
            colours = self.element.astype(np.int64)
            for number, atom in enumerate(sorted(fixed)):
                colours[atom] = 1000 + number
            self._permutations[fixed] = automorphisms(colours, self.bonds)
        return self._permutations[fixed]


class Variants:
    """Creates each variant once."""

    def __init__(self, components: Dictionary) -> None:
        self._components = components
        self._found: dict[tuple[str, bool, tuple[str, ...]], Variant] = {}
        self._whole: dict[str, tuple[Component, int, dict[str, int]]] = {}
        self._frames: dict[str, Array] = {}

    def get(self, code: str, polymer: bool, names: Sequence[str]) -> Variant:
        """Return the variant of a residue.

        Parameters
        ----------
        code : its component
        polymer : whether it is in a polymer, where standard residues are one token
        names : its atoms, in the order of the dictionary
        """
        key = (code, polymer, tuple(names))
        if key not in self._found:
            if len(self._found) == _MOST_KNOWN:  # some hundred MB
                self._found.clear()
                self._whole.clear()
            self._found[key] = self._made(code, STANDARD.get(code) if polymer else None, names)
        return self._found[key]

    def _made(self, code: str, standard: Standard | None, names: Sequence[str]) -> Variant:
        component, key, rows = self._component(code)
        row = np.array([rows[name] for name in names], dtype=np.int32)
        whole = heavy_atoms(component)[row]
        places = {name: place for place, name in enumerate(names)}
        if standard is None:
            centre = representative = np.arange(len(names), dtype=np.int32)
            frame = self._pose_frames(component, row)
        else:
            centre = _first(places, (standard.centre,))
            representative = _first(places, (standard.representative, standard.centre))
            frame = np.array([[places.get(name, NO_FRAME) for name in standard.frame]], np.int32)
            frame[(frame < 0).any(axis=1)] = NO_FRAME
        return Variant(
            component=component,
            standard=standard,
            key=key,
            row=row,
            element=component.elements[whole],
            charge=component.charges[whole],
            chars=name_chars(names),
            bonds=_inner_bonds(component, whole),
            centre=centre,
            representative=representative,
            frame=frame,
            places=places,
            _permutations={},
        )

    def _component(self, code: str) -> tuple[Component, int, dict[str, int]]:
        if code not in self._whole:
            component = self._components[code]
            names = component.atoms[heavy_atoms(component)].tolist()
            rows = {name: row for row, name in enumerate(names)}
            self._whole[code] = (component, component_key(component), rows)
        return self._whole[code]

    def _pose_frames(self, component: Component, row: Array) -> Any:
        """Frames in the first reference pose, which every pool of poses begins with."""
        if len(row) < 3:
            return pose_frames(np.zeros((len(row), 3)))
        if component.code not in self._frames:
            self._frames[component.code] = make_poses(component, 1)[0]
        return pose_frames(self._frames[component.code][row])


_KNOWN: "WeakKeyDictionary[Dictionary, Variants]" = WeakKeyDictionary()


def variants_of(components: Dictionary) -> Variants:
    """Return this process's cache of the variants of a dictionary."""
    if components not in _KNOWN:
        _KNOWN[components] = Variants(components)
    return _KNOWN[components]


def name_chars(names: Sequence[str]) -> npt.NDArray[np.uint8]:
    """Write names as four characters each, ord(c) - 32 (table 5 of AlphaFold3's supplement).

    Examples
    --------
    >>> name_chars(["CA"]).tolist()
    [[35, 33, 0, 0]]
    """
    text = "".join(name[:NAME_LENGTH].ljust(NAME_LENGTH) for name in names)
    codes = np.frombuffer(text.encode("ascii", "replace"), dtype=np.uint8)
    return (codes.reshape(-1, NAME_LENGTH) - _FIRST_CHARACTER).astype(np.uint8)


def _first(places: dict[str, int], names: Sequence[str]) -> npt.NDArray[np.int32]:
    """Index of the first name that occurs, else of the first atom, [1]."""
    found = next((places[name] for name in names if name in places), 0)
    return np.array([found], dtype=np.int32)


def _inner_bonds(component: Component, atoms: Array) -> npt.NDArray[np.int32]:
    """Bonds among some atoms of a component, by their places, the smaller first, sorted."""
    place = np.full(len(component.atoms), -1, dtype=np.int32)
    place[atoms] = np.arange(len(atoms), dtype=np.int32)
    pairs = place[component.bonds]
    pairs = np.sort(pairs[(pairs >= 0).all(axis=1)], axis=1)
    return np.unique(pairs, axis=0).astype(np.int32).reshape(-1, 2)
