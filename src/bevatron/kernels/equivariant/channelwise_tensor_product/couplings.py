"""The non-zero coefficients of a channelwise product, path by path: what its kernels unroll."""

from dataclasses import dataclass
from math import sqrt

from bevatron.kernels.equivariant.channelwise_tensor_product.paths import Path, path_table
from bevatron.maths.constants import computed_once
from bevatron.maths.irreps import Irrep, Irreps, Layout, as_layout
from bevatron.maths.so3 import wigner_3j


@dataclass(frozen=True)
class Coupling:
    """A path with its non-zero coefficients, (m1, m2, value) for each m3."""

    path: Path
    number: int
    start: int
    rows: tuple[tuple[tuple[int, int, float], ...], ...]


@dataclass(frozen=True, eq=False)
class Product:
    """Couplings by the blocks they join (i of x, j of the harmonics), and the data's layout."""

    irreps_in: Irreps
    irreps_harmonics: Irreps
    pairs: tuple[tuple[int, int, tuple[Coupling, ...]], ...]
    num_weights: int
    dim_out: int
    layout: Layout

    @property
    def channels(self) -> int:
        """Channels of the widest block of x."""
        return max((block.mul for block in self.irreps_in), default=0)

    def column(self, start: int, irrep: Irrep, m: int) -> str:
        """Write the offset of component m of channel k in the block that starts at ``start``."""
        if self.layout == "ir_mul":
            return f"{start + m * irrep.mul} + k"
        return f"{start} + k * {irrep.dim} + {m}"

    @property
    def couplings(self) -> list[Coupling]:
        """All couplings."""
        return [coupling for *_, group in self.pairs for coupling in group]


@computed_once
def product_of(
    irreps_in: str, irreps_harmonics: str, irreps_out: str, layout: Layout = "mul_ir"
) -> Product:
    """List the couplings of a product; the arguments are those of the operator."""
    blocks, harmonics = Irreps.parse(irreps_in), Irreps.parse(irreps_harmonics)
    table = path_table(blocks, harmonics, Irreps.parse(irreps_out))
    groups: dict[tuple[int, int], list[Coupling]] = {}
    for number, (path, out) in enumerate(zip(table.paths, table.irreps_mid.slices, strict=True)):
        values = (sqrt(path.out.dim) * wigner_3j(path.l1, path.l2, path.out.l)).tolist()
        rows = tuple(
            tuple(
                (m1, m2, values[m1][m2][m3])
                for m1 in range(2 * path.l1 + 1)
                for m2 in range(2 * path.l2 + 1)
                if abs(values[m1][m2][m3]) > 1e-12
            )
            for m3 in range(path.out.dim)
        )
        coupling = Coupling(path, number, out.start, rows)
        groups.setdefault((path.x, path.harmonics), []).append(coupling)
    # By harmonics first, so that their gradients complete, and can be stored, as early as possible.
    order = sorted(groups, key=lambda pair: (pair[1], pair[0]))
    pairs = tuple((i, j, tuple(groups[i, j])) for i, j in order)
    return Product(blocks, harmonics, pairs, table.num_weights, table.irreps_mid.dim, layout)


def named_product(name: str) -> Product:
    """Parse a product: irreps of x, of the harmonics and of the result, and a layout.

    Custom operators take them as one string, separated by blanks.
    """
    irreps_in, irreps_harmonics, irreps_out, layout = name.split(" ")
    return product_of(irreps_in, irreps_harmonics, irreps_out, as_layout(layout))
