"""Writes the source of the Triton kernels of one channelwise product, its coefficients unrolled.

The product couples x [m1] of an edge's sender, harmonics Y [m2] and weights w [p] to

    T(x, Y, w)[p, m3] = w[p] sum of C[p, m1, m2, m3] x[m1] Y[m2]

for every channel. A program owns a block of channels of one receiver and walks its edges in order:
what is summed over them stays in registers and nothing needs an atomic addition.

- forward: out += T(x, Y, w)
- backward, from the gradient g of out: of each edge gx, gy, gw with
  <gx, .> = <g, T(., Y, w)> and so on; gy is a sum over channels, so each block gives its part.
- double backward, from gradients ax, ay, aw of gx, gy, gw: those of
  <g, T(ax, Y, w) + T(x, ay, w) + T(x, Y, aw)> by g (dg, summed over edges), x, y and w; and gw
  again, for who did not keep it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bevatron.kernels.equivariant.channelwise_tensor_product.couplings import Coupling, Product


@dataclass(frozen=True)
class Variant:
    """What a kernel is to compute and how.

    Attributes
    ----------
    kind
        ``forward``, ``backward`` or ``double_backward``.
    given
        In a double backward those of ax, ay, aw that there are.
    wanted
        ``out`` of a forward; of a backward any of gx, gy, gw; of a double backward any of dg, dx,
        dy, dw, gw.
    dtype
        ``float32`` or ``float64``.
    block, edges
        Channels of a program and edges that it computes at once, powers of two.
    pieces
        Programs that share the edges of one receiver; only one may sum over them.
    permuted
        Whether rows of the edges' tensors are found through a permutation; otherwise they are
        sorted by receiver.
    """

    kind: str
    given: frozenset[str] = frozenset()
    wanted: frozenset[str] = frozenset()
    dtype: str = "float32"
    block: int = 32
    edges: int = 1
    pieces: int = 1
    permuted: bool = False


def write_source(product: Product, variant: Variant) -> str:
    """Return a module's text that defines the function `kernel_name` for `triton.jit`."""
    return _Writer(product, variant).text()


class _Writer:
    """Collects the lines of one kernel; every method adds those of one step.

    Names in the kernel: ``x_i_m`` component m of block i of x, ``y_j_m`` of the harmonics, ``w_p``
    the weights of path p, ``g_p_m`` the gradient of the result; ``ax_i_m`` and so on likewise. What
    belongs to edges has a row for each of those computed at once.
    """

    def __init__(self, product: Product, variant: Variant) -> None:
        self.product, self.variant = product, variant
        self.lines: list[str] = []
        self.depth = 0
        self.inputs = ["x", "y", "w", *(n for n in ("ax", "ay", "aw") if n in variant.given)]
        # What the sum over edges and the gradients by x and by Y are called, if they are wanted.
        self.sums = next((n for n in ("out", "dg") if n in variant.wanted), "")
        self.by_x = next((n for n in ("gx", "dx") if n in variant.wanted), "")
        self.by_y = next((n for n in ("gy", "dy") if n in variant.wanted), "")
        self._there = "there" if variant.edges > 1 else ""
        self.by_w = [name for name in ("gw", "dw") if name in variant.wanted]

    def text(self) -> str:
        """Write the kernel."""
        self._header()
        for c, m in self._rows():
            if self.variant.kind != "forward":
                self._load_node(f"g_{c.number}_{m}", "g", c, m)
            if self.sums:
                self._add(f"sum_{c.number}_{m} = {self._zeros()}")
        edges = self.variant.edges
        self._load_edges("begin", "")
        self._add(f"for i in range(begin, end, {edges}):")
        self.depth += 1
        # The next edges are under way while these are computed.
        after = f"i + {edges}" if edges > 1 else "tl.minimum(i + 1, end - 1)"
        loaded = self._load_edges(after, "next_")
        self._compute()
        for name in loaded:
            self._add(f"{name} = next_{name}")
        self.depth -= 1
        for c, m in self._rows() if self.sums else ():
            self._load_node("before", self.sums, c, m, "carry")
            total = f"before + tl.sum(sum_{c.number}_{m}, axis=0)[None, :]"
            self._store(f"{self.sums}_ptr + {self._place(c, m)}", total, self._mask(c.path.x))
        return "\n".join(self.lines) + "\n"

    def _header(self) -> None:
        """Find this program's receiver, its edges in first..stop and its channels."""
        block, parts = self.variant.block, num_blocks(self.product, self.variant)
        names = [f"{name}_ptr" for name in argument_names(self.variant)]
        names += ["senders_ptr", "receiver_ptr"]
        names += ["permutation_ptr"] if self.variant.permuted else []
        self._add(f"def {kernel_name(self.variant)}({', '.join(names)}, first, stop, num_rows):")
        self.depth = 1
        pieces = self.variant.pieces
        self._add("pid = tl.program_id(0).to(tl.int64)")
        self._add(f"node = pid // {parts * pieces}")
        self._add(f"part = pid % {parts}")
        self._add(f"lane = tl.arange(0, {block})[None, :]")
        self._add(f"k = part * {block} + lane")
        for i, irrep in enumerate(self.product.irreps_in):
            if self._mask(i):
                self._add(f"mask_{i} = k < {irrep.mul}")
        self._add("origin = tl.load(receiver_ptr + node)")
        self._add("begin = tl.maximum(origin, first)")
        self._add("end = tl.minimum(tl.load(receiver_ptr + node + 1), stop)")
        if pieces > 1:
            self._add(f"piece = pid // {parts} % {pieces}")
            self._add("count = tl.maximum(end - begin, 0)")
            self._add(f"end = begin + count * (piece + 1) // {pieces}")
            self._add(f"begin += count * piece // {pieces}")
        self._add("if begin < end:")
        self.depth = 2
        if self.sums:
            # A launch before this one has summed the edges before first.
            self._add("carry = origin < begin")

    def _compute(self) -> None:
        """Compute what the loaded edges give."""
        for name in self.by_w:
            for c in self._ordered():
                self._add(f"{name}_{c.number} = {self._zeros()}")
        for i, irrep in enumerate(self.product.irreps_in) if self.by_x else ():
            for m in range(irrep.dim):
                self._add(f"{self.by_x}_{i}_{m} = {self._zeros()}")
        harmonics = self.product.irreps_harmonics
        self.halfway: list[tuple[int, str]] = []
        self.summed = 0
        for number in range(-(-harmonics.dim // self.variant.block)) if self.by_y else ():
            self._add(f"{self.by_y}_{number} = {self._zeros()}")
        for j, irrep in enumerate(harmonics):
            for m in range(irrep.dim) if self.by_y else ():
                self._add(f"{self.by_y}_{j}_{m} = {self._zeros()}")
            for i, other, couplings in self.product.pairs:
                if other == j:
                    self._pair(i, j, couplings)
            for m in range(irrep.dim) if self.by_y else ():
                self._sum_harmonics(j, m)
        if self.by_y:
            self._store_harmonics()
        self._store_edges()

    def _store_edges(self) -> None:
        """Store gradients by weights and by x."""
        irreps, num_weights = self.product.irreps_in, self.product.num_weights
        for name in self.by_w:
            for c in self._ordered():
                where = f"{name}_ptr + row * {num_weights} + {c.path.weights.start} + k"
                self._store(where, f"{name}_{c.number}", self._mask(c.path.x, self._there))
        for i, irrep in enumerate(irreps) if self.by_x else ():
            for m in range(irrep.dim):
                where = f"{self.by_x}_ptr + (edge - first) * {irreps.dim} + "
                where += self.product.column(irreps.slices[i].start, irrep, m)
                self._store(where, f"{self.by_x}_{i}_{m}", self._mask(i, self._there))

    def _store_harmonics(self) -> None:
        """Store the gradient by the harmonics, summed over channels: lane s component s."""
        dim, block = self.product.irreps_harmonics.dim, self.variant.block
        for start in range(0, dim, block):
            where = f"{self.by_y}_ptr + (part * num_rows + row) * {dim} + {start} + lane"
            mask = f"lane < {dim - start}"
            mask = f"{self._there} & ({mask})" if self._there else mask
            self._store(where, f"{self.by_y}_{start // block}", mask)

    def _sum_harmonics(self, j: int, m: int) -> None:
        """Put a component's sum over channels into its lane."""
        place = self.product.irreps_harmonics.slices[j].start + m
        number, lane = divmod(place, self.variant.block)
        name = f"{self.by_y}_{number}"
        if self.variant.edges == 1:
            self._halve(f"{self.by_y}_{j}_{m}")
            if lane == self.variant.block - 1 or place == self.product.irreps_harmonics.dim - 1:
                self._add(f"{name} = {self._last_sum()}")
            return
        total = f"tl.sum({self.by_y}_{j}_{m}, axis=1)[:, None]"
        self._add(f"{name} = tl.where(lane == {lane}, {total}, {name})")

    def _halve(self, name: str) -> None:
        """Take one more value to be summed over lanes.

        Two values become one whose even lanes sum pairs of lanes of the first and whose odd lanes
        those of the second; two such become one of which every fourth lane has a sum over four; and
        so on. In the end lane s has all of value s: n values take about n exchanges between lanes,
        of which each by itself would take five.
        """
        level = 0
        while self.halfway and self.halfway[-1][0] == level:
            _, first = self.halfway.pop()
            name = self._merge(level, first, name)
            level += 1
        self.halfway.append((level, name))

    def _merge(self, level: int, first: str, second: str) -> str:
        step = 1 << level
        self._add(f"odd = (lane & {step}) != 0")
        self._add(f"given = tl.where(odd, {first}, {second})")
        self._add(f"kept = tl.where(odd, {second}, {first})")
        self.summed += 1
        name = f"half_{self.summed}"
        self._add(f"{name} = kept + tl.gather(given, lane ^ {step}, 1)")
        return name

    def _last_sum(self) -> str:
        """Complete what `_halve` began; return the sums' name."""
        level, name = self.halfway.pop()
        while self.halfway:
            if self.halfway[-1][0] > level:
                name = self._merge(level, name, self._zeros())
            else:
                name = self._merge(level, self.halfway.pop()[1], name)
            level += 1
        while 1 << level < self.variant.block:
            self._add(f"{name} += tl.gather({name}, lane ^ {1 << level}, 1)")
            level += 1
        return name

    def _load_edges(self, first: str, prefix: str) -> list[str]:
        """Load all of some edges; return the names of what was loaded."""
        loaded = ["edge", "there", "row"]
        there, masked = "", ""
        if self.variant.edges > 1:
            self._add(f"{prefix}edge = {first} + tl.arange(0, {self.variant.edges})[:, None]")
            there, masked = f"{prefix}there", f", mask={prefix}there, other=0"
            self._add(f"{there} = {prefix}edge < end")
        else:
            # Loads without a mask are scheduled much better.
            loaded.remove("there")
            self._add(f"{prefix}edge = {first}")
        self._add(f"{prefix}sender = tl.load(senders_ptr + {prefix}edge{masked})")
        row = f"{prefix}edge - first"
        if self.variant.permuted:
            row = f"tl.load(permutation_ptr + {prefix}edge{masked})"
        self._add(f"{prefix}row = {row}")
        for name in self.inputs:
            for own, rows, column, block in self._columns(name):
                loaded.append(own)
                where = f"{name}_ptr + {prefix}{rows} + {column}"
                mask = there if block is None else self._mask(block, there)
                self._load(prefix + own, where, mask)
        return loaded

    def _columns(self, name: str) -> list[tuple[str, str, str, int | None]]:
        """List each component of an input of edges: its name, row, column and block of x."""
        if name.endswith("x"):
            irreps = self.product.irreps_in
            return [
                (
                    f"{name}_{i}_{m}",
                    f"sender * {irreps.dim}",
                    self.product.column(part.start, irrep, m),
                    i,
                )
                for i, (irrep, part) in enumerate(zip(irreps, irreps.slices, strict=True))
                for m in range(irrep.dim)
            ]
        if name.endswith("y"):
            irreps = self.product.irreps_harmonics
            return [
                (f"{name}_{j}_{m}", f"row * {irreps.dim}", f"{part.start + m}", None)
                for j, part in enumerate(irreps.slices)
                for m in range(part.stop - part.start)
            ]
        row = f"row * {self.product.num_weights}"
        return [
            (f"{name}_{c.number}", row, f"{c.path.weights.start} + k", c.path.x)
            for c in self._ordered()
        ]

    def _pair(self, i: int, j: int, couplings: Sequence[Coupling]) -> None:
        """Couple block i of x with block j of the harmonics."""
        given, wanted = self.variant.given, self.variant.wanted
        used = sorted({(m1, m2) for c in couplings for row in c.rows for m1, m2, _ in row})
        # u couples as T(ax, Y, .) + T(x, ay, .) does; v as T(x, Y, .).
        first = {"ax": "ax_{i}_{a} * y_{j}_{b}", "ay": "x_{i}_{a} * ay_{j}_{b}"}
        with_u = [first[name] for name in ("ax", "ay") if name in given]
        with_v = wanted & {"out", "gw"} or ("aw" in given and self.sums)
        for a, b in used:
            if with_u and wanted & {"dg", "dw"}:
                terms = [t.format(i=i, j=j, a=a, b=b) for t in with_u]
                self._add(f"u_{a}_{b} = {' + '.join(terms)}")
            if with_v:
                self._add(f"v_{a}_{b} = x_{i}_{a} * y_{j}_{b}")
        for c in couplings:
            for m3, row in enumerate(c.rows):
                self._row(c, m3, row, bool(with_u), bool(with_v))
        for a, b in used:
            self._edge_gradients(i, j, a, b, couplings)

    def _row(
        self, c: Coupling, m3: int, row: Sequence[tuple[int, int, float]], u: bool, v: bool
    ) -> None:
        """Add one component of a path's result to what is summed along it."""
        wanted, p = self.variant.wanted, c.number
        g = f"g_{p}_{m3}"
        if u and wanted & {"dg", "dw"}:
            self._add(f"t = {_combine((f'u_{a}_{b}', value) for a, b, value in row)}")
            if "dg" in wanted:
                self._add(f"sum_{p}_{m3} += w_{p} * t")
            if "dw" in wanted:
                self._add(f"dw_{p} += {g} * t")
        if v:
            self._add(f"t = {_combine((f'v_{a}_{b}', value) for a, b, value in row)}")
            if "out" in wanted:
                self._add(f"sum_{p}_{m3} += w_{p} * t")
            if "dg" in wanted and "aw" in self.variant.given:
                self._add(f"sum_{p}_{m3} += aw_{p} * t")
            if "gw" in wanted:
                self._add(f"gw_{p} += {g} * t")
        if self.by_x or self.by_y:
            self._add(f"h_{p}_{m3} = w_{p} * {g}")
            if "aw" in self.variant.given:
                self._add(f"ah_{p}_{m3} = aw_{p} * {g}")

    def _edge_gradients(
        self, i: int, j: int, a: int, b: int, couplings: Sequence[Coupling]
    ) -> None:
        """Add to the gradients by x and Y what component a of x and b of Y have in common."""
        if not (self.by_x or self.by_y):
            return
        given = self.variant.given
        terms = [
            (f"{c.number}_{m3}", value)
            for c in couplings
            for m3, row in enumerate(c.rows)
            for m1, m2, value in row
            if (m1, m2) == (a, b)
        ]
        if self.variant.kind == "backward":
            factors = {"q": ("x", "y")}
        else:
            factors = {"q": ("ax" if "ax" in given else "", "ay" if "ay" in given else "")}
            factors |= {"aq": ("x", "y")} if "aw" in given else {}
        for q, (x, y) in factors.items():
            prefix = "h_" if q == "q" else "ah_"
            by_x, by_y = self.by_x if y else "", self.by_y if x else ""
            if not (by_x or by_y):
                continue
            self._add(f"{q} = {_combine((prefix + name, value) for name, value in terms)}")
            if by_x:
                self._add(f"{by_x}_{i}_{a} += {q} * {y}_{j}_{b}")
            if by_y:
                self._add(f"{by_y}_{j}_{b} += {q} * {x}_{i}_{a}")

    def _ordered(self) -> list[Coupling]:
        """List the couplings as their paths are numbered."""
        return sorted(self.product.couplings, key=lambda c: c.number)

    def _rows(self) -> list[tuple[Coupling, int]]:
        """List all components of the result."""
        return [(c, m) for c in self._ordered() for m in range(c.path.out.dim)]

    def _place(self, c: Coupling, m: int) -> str:
        """Where a component of a path's result lies."""
        column = self.product.column(c.start, c.path.out, m)
        return f"node * {self.product.dim_out} + {column}"

    def _load_node(self, name: str, tensor: str, c: Coupling, m: int, also: str = "") -> None:
        self._load(name, f"{tensor}_ptr + {self._place(c, m)}", self._mask(c.path.x, also))

    def _load(self, name: str, where: str, mask: str) -> None:
        masked = f", mask={mask}, other=0.0" if mask else ""
        self._add(f"{name} = tl.load({where}{masked}).to(tl.{self.variant.dtype})")

    def _store(self, where: str, value: str, mask: str) -> None:
        self._add(f"tl.store({where}, {value}{f', mask={mask}' if mask else ''})")

    def _mask(self, block: int, also: str = "") -> str:
        """Write the mask of a block of x whose channels do not fill the programs'."""
        channels = num_blocks(self.product, self.variant) * self.variant.block
        if self.product.irreps_in[block].mul == channels:
            return also
        return f"mask_{block} & {also}" if also else f"mask_{block}"

    def _zeros(self) -> str:
        shape = f"[{self.variant.edges}, {self.variant.block}]"
        return f"tl.zeros({shape}, dtype=tl.{self.variant.dtype})"

    def _add(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)


def kernel_name(variant: Variant) -> str:
    """Name a kernel as traces are to show it: by its kind and what it computes."""
    return "_".join(["channelwise", variant.kind, *sorted(variant.wanted)])


def argument_names(variant: Variant) -> list[str]:
    """Name the tensors that a kernel takes, before those of the order."""
    names = ["x", "y", "w", *(["g"] if variant.kind != "forward" else [])]
    names += [name for name in ("ax", "ay", "aw") if name in variant.given]
    results = ("out", "dg", "gx", "gy", "gw", "dx", "dy", "dw")
    return names + [name for name in results if name in variant.wanted]


def num_blocks(product: Product, variant: Variant) -> int:
    """Count the programs that share the channels of one receiver."""
    return max(-(-product.channels // variant.block), 1)


def _combine(terms: Iterable[tuple[str, float]]) -> str:
    """Write a linear combination; factors of one vanish."""
    text = ""
    for name, factor in terms:
        sign = "-" if factor < 0 else "+"
        size = name if abs(abs(factor) - 1.0) < 1e-15 else f"{abs(factor)!r} * {name}"
        text += f" {sign} {size}" if text else (f"-{size}" if factor < 0 else size)
    return text
