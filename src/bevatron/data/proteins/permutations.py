"""Permutations of the atoms of a residue that keep its bond graph."""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from bevatron.typing import Array

MAX_PERMUTATIONS = 1000
"""Maximum number per residue (inositol hexakisphosphate has 559,872); the first are kept."""


def automorphisms(
    colours: Sequence[int] | Array, bonds: Array, most: int = MAX_PERMUTATIONS
) -> npt.NDArray[np.int32]:
    """List the permutations p of n atoms with colour(p(i)) = colour(i) that map bonds onto bonds.

    Orders of bonds, charges and stereochemistry are not part of the graph: both oxygens of a
    carboxylate and both methyl groups of valine are exchanged, as alignments of AlphaFold3 do.

    Parameters
    ----------
    colours : [n]
        Chemical element; what must stay where it is has a colour of its own.
    bonds : int [b, 2]
        Bonded atoms.
    most : how many to list

    Returns
    -------
    int32 [permutations, n]
        p(i) of each atom i; the first is the identity.

    Examples
    --------
    >>> automorphisms([6, 8, 8], np.array([[0, 1], [0, 2]])).tolist()
    [[0, 1, 2], [0, 2, 1]]
    """
    neighbours: list[set[int]] = [set() for _ in colours]
    for i, j in np.asarray(bonds).tolist():
        neighbours[i].add(j)
        neighbours[j].add(i)
    classes = _refined([int(colour) for colour in colours], neighbours)
    if len(set(classes)) == len(classes):
        return np.arange(len(classes), dtype=np.int32)[None]
    found = []
    for permutation in _search(classes, neighbours):
        found.append(permutation)
        if len(found) == most:
            break
    return np.array(found, dtype=np.int32)


def _refined(colours: list[int], neighbours: list[set[int]]) -> list[int]:
    """Divide atoms of equal colour by the colours around them until nothing changes."""
    number = len(set(colours))
    while True:
        around = [tuple(sorted(colours[j] for j in near)) for near in neighbours]
        keys = list(zip(colours, around, strict=True))
        numbers = {key: i for i, key in enumerate(sorted(set(keys)))}
        colours = [numbers[key] for key in keys]
        if len(numbers) == number:
            return colours
        number = len(numbers)


def _search(classes: list[int], neighbours: list[set[int]]) -> Iterator[list[int]]:
    """Yield automorphisms, the identity first, each atom after one that it is bonded to."""
    members: dict[int, list[int]] = {}
    for atom, number in enumerate(classes):
        members.setdefault(number, []).append(atom)
    order, anchors = _walk(classes, members, neighbours)
    earlier = [
        [other for other in order[:place] if other in neighbours[atom]]
        for place, atom in enumerate(order)
    ]
    image = [-1] * len(classes)
    used: set[int] = set()

    def candidates(place: int) -> Iterator[int]:
        atom = order[place]
        anchor = anchors[place]
        among = members[classes[atom]] if anchor < 0 else sorted(neighbours[image[anchor]])
        if atom in among:
            among = [atom, *(other for other in among if other != atom)]
        wanted = {image[other] for other in earlier[place]}
        for other in among:
            if (
                other not in used
                and classes[other] == classes[atom]
                # Bonds onto bonds; equal numbers of them then leave none without a partner.
                and wanted <= neighbours[other]
            ):
                yield other

    # A stack of iterators: ligands have more atoms than Python's recursion allows.
    stack = [candidates(0)]
    while stack:
        place = len(stack) - 1
        atom = order[place]
        if image[atom] >= 0:
            used.discard(image[atom])
            image[atom] = -1
        chosen = next(stack[-1], -1)
        if chosen < 0:
            stack.pop()
            continue
        image[atom] = chosen
        used.add(chosen)
        if len(stack) == len(order):
            yield list(image)
        else:
            stack.append(candidates(len(stack)))


def _walk(
    classes: list[int], members: dict[int, list[int]], neighbours: list[set[int]]
) -> tuple[list[int], list[int]]:
    """Order the atoms along bonds from the rarest classes; return also each atom's predecessor."""
    order: list[int] = []
    anchors: list[int] = []
    seen: set[int] = set()
    for start in sorted(range(len(classes)), key=lambda atom: len(members[classes[atom]])):
        if start in seen:
            continue
        seen.add(start)
        anchor = {start: -1}
        queue = [start]
        for atom in queue:
            order.append(atom)
            anchors.append(anchor[atom])
            for other in sorted(neighbours[atom] - seen):
                seen.add(other)
                anchor[other] = atom
                queue.append(other)
    return order, anchors
