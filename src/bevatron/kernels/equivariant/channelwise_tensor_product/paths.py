"""The paths of a channelwise tensor product: which degrees couple, and in which order."""

from dataclasses import dataclass
from functools import cache

from bevatron.errors import ConfigError
from bevatron.maths.irreps import Irrep, Irreps


@dataclass(frozen=True)
class Path:
    """One coupling of a block of x with a block of the harmonics.

    Attributes
    ----------
    x, harmonics : the two blocks, as positions in their irreps
    l1, l2 : their degrees
    out : irrep of the result; as many copies as the block of x has
    weights : the slice of its weights, one per channel
    """

    x: int
    harmonics: int
    l1: int
    l2: int
    out: Irrep
    weights: slice


@dataclass(frozen=True)
class PathTable:
    """All paths in the order of the weights and of the result.

    Attributes
    ----------
    paths
        Sorted by the result's (degree, parity), odd before even; among equals by block of x, then
        by block of the harmonics: e3nn's order after `Irreps.sort`.
    irreps_mid : irreps of the result, one block per path
    num_weights : weights per edge
    """

    paths: tuple[Path, ...]
    irreps_mid: Irreps
    num_weights: int


@cache
def path_table(irreps_in: Irreps, irreps_harmonics: Irreps, irreps_out: Irreps) -> PathTable:
    """List every coupling of ``irreps_in`` with ``irreps_harmonics`` whose result is wanted.

    Raises ConfigError if the harmonics have a block with more than one copy.

    Parameters
    ----------
    irreps_in : irreps of the node features
    irreps_harmonics : irreps of the edges' harmonics, one copy of each
    irreps_out : degrees and parities to keep; the number of copies does not matter

    Examples
    --------
    >>> table = path_table(Irreps.parse("8x0e+8x1o"), Irreps.harmonics(1), Irreps.parse("0e+1o"))
    >>> str(table.irreps_mid), table.num_weights
    ('8x0e+8x0e+8x1o+8x1o', 32)
    """
    wanted = {(block.l, block.parity) for block in irreps_out}
    found: list[tuple[int, int, Irrep]] = []
    for i, left in enumerate(irreps_in):
        for j, right in enumerate(irreps_harmonics):
            if right.mul != 1:
                raise ConfigError(
                    f"channelwise tensor product: the harmonics '{irreps_harmonics}' have more "
                    "than one copy of a degree, one of each is expected"
                )
            parity = left.parity * right.parity
            degrees = range(abs(left.l - right.l), left.l + right.l + 1)
            found += [(i, j, Irrep(left.mul, d, parity)) for d in degrees if (d, parity) in wanted]
    found.sort(key=lambda entry: (entry[2].l, entry[2].parity))
    paths, start = [], 0
    for i, j, out in found:
        weights = slice(start, start + out.mul)
        paths.append(Path(i, j, irreps_in[i].l, irreps_harmonics[j].l, out, weights))
        start += out.mul
    return PathTable(tuple(paths), Irreps(tuple(path.out for path in paths)), start)
