"""Generates the Triton kernels of one channelwise tensor product, its coefficients unrolled.

The product couples x [m1] of an edge's sender, harmonics Y [m2] and weights w [p] to

    T(x, Y, w)[p, m3] = w[p] sum of C[p, m1, m2, m3] x[m1] Y[m2]

for every channel. A program owns a block of channels of one receiver and walks its edges in order,
prefetching the next edges while it computes the current ones. Sums over edges stay in registers;
gradients of edges are written as they are computed. There are no atomics.

- forward: out += T(x, Y, w)
- backward, from the gradient g of out: gx, gy and gw of each edge, with
  <gx, .> = <g, T(., Y, w)> and so on; gy is a sum over channels, so each block of channels writes
  a partial sum.
- double backward, from gradients ax, ay, aw of gx, gy, gw: the gradients of
  <g, T(ax, Y, w) + T(x, ay, w) + T(x, Y, aw)> with respect to g (dg, summed over edges), x, Y and
  w; and gw again for callers that did not keep it.

The same source is Triton, for the interpreter, and Gluon (`shared.triton_generated`). In a
generated kernel a variable with channels is a block [EDGES, BLOCK] (written out, such as
[1, 32]), one without, such as a harmonic, [EDGES, 1], or a scalar [] where EDGES is 1.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bevatron.kernels.equivariant.channelwise_tensor_product.couplings import Coupling, Product

LAYOUT = "tl.BlockedLayout([1, 1], [1, 32], [1, 1], [1, 0])"
"""Channels of a block: one per thread of a warp."""


@dataclass(frozen=True)
class Variant:
    """Specification of a generated kernel.

    Attributes
    ----------
    kind : ``forward``, ``backward`` or ``double_backward``
    given : the gradients among ax, ay, aw that a double backward receives
    wanted
        The results: ``out`` of a forward, any of gx, gy, gw of a backward, any of dg, dx, dy, dw,
        gw of a double backward.
    dtype : ``float32`` or ``float64``
    block, edges : channels of a program and number of edges it computes at once; powers of two
    pieces : number of programs that share the edges of a receiver; 1 if the kernel sums over edges
    permuted
        Whether rows of the edges' tensors are gathered through a permutation; otherwise they are
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


def write_source(product: Product, variant: Variant, layouts: bool = False) -> str:
    """Return the source of a module that defines the function `kernel_name`.

    ``layouts``: whether to write the layouts that Gluon requires and Triton does not accept, for
    one edge at once.
    """
    return _Writer(product, variant, layouts).text()


class _Writer:
    """Collects the lines of one kernel; every method adds the lines of one step.

    Names in the kernel: ``x_i_m`` component m of block i of x, ``y_j_m`` of the harmonics, ``w_p``
    the weights of path p, ``g_p_m`` the gradient of the result; ``ax_i_m`` and so on likewise.
    Variables of edges have one row per edge computed at once.
    """

    def __init__(self, product: Product, variant: Variant, layouts: bool) -> None:
        self.product, self.variant, self.layouts = product, variant, layouts
        self.lines: list[str] = []
        self.depth = 0
        self.inputs = ["x", "y", "w", *(n for n in ("ax", "ay", "aw") if n in variant.given)]
        # Names of the sum over edges and of the gradients of x, Y and w, if they are wanted.
        self.sums = next((n for n in ("out", "dg") if n in variant.wanted), "")
        self.by_x = next((n for n in ("gx", "dx") if n in variant.wanted), "")
        self.by_y = next((n for n in ("gy", "dy") if n in variant.wanted), "")
        self.by_w = [name for name in ("gw", "dw") if name in variant.wanted]
        # The mask of edges, and the shapes of a block of channels and of one number per edge.
        self._valid = "valid" if variant.edges > 1 else ""
        self._channels_shape = f"[{variant.edges}, {variant.block}]"
        self._edges_shape = f"[{variant.edges}, 1]" if variant.edges > 1 else "[]"

    def text(self) -> str:
        """Write the whole kernel."""
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
        # Prefetch the next edges while the current ones are computed.
        after = f"i + {edges}" if edges > 1 else "tl.minimum(i + 1, end - 1)"
        loaded = self._load_edges(after, "next_")
        self._compute()
        for name in loaded:
            self._add(f"{name} = next_{name}")
        self.depth -= 1
        for c, m in self._rows() if self.sums else ():
            self._load_node("previous", self.sums, c, m, "carry")
            total = f"sum_{c.number}_{m}"
            if edges > 1:
                total = f"tl.sum({total}, axis=0)[None, :]"
            where, shape = f"{self.sums}_ptr + {self._offset(c, m)}", f"[1, {self.variant.block}]"
            self._store(where, f"previous + {total}", self._mask(c.path.x), shape)
        return "\n".join(self.lines) + "\n"

    def _header(self) -> None:
        """Write the signature; find the program's receiver, channels and edges in first..stop."""
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
        lanes = f", layout=tl.SliceLayout(0, {LAYOUT})" if self.layouts else ""
        self._add(f"lane = tl.arange(0, {block}{lanes})[None, :]")
        self._add(f"k = part * {block} + lane")
        for i, irrep in enumerate(self.product.irreps_in):
            if self._mask(i):
                self._add(f"mask_{i} = k < {irrep.mul}")
        self._add("origin = tl.load(receiver_ptr + node)  # []")
        self._add("begin = tl.maximum(origin, first)")
        self._add("end = tl.minimum(tl.load(receiver_ptr + node + 1), stop)  # []")
        if pieces > 1:
            self._add(f"piece = pid // {parts} % {pieces}")
            self._add("count = tl.maximum(end - begin, 0)")
            self._add(f"end = begin + count * (piece + 1) // {pieces}")
            self._add(f"begin += count * piece // {pieces}")
        self._add("if begin < end:")
        self.depth = 2
        if self.sums:
            # An earlier launch has already summed the edges before first.
            self._add("carry = origin < begin")

    def _compute(self) -> None:
        """Compute the contributions of the loaded edges."""
        for name in self.by_w:
            for c in self._ordered():
                self._add(f"{name}_{c.number} = {self._zeros()}")
        for i, irrep in enumerate(self.product.irreps_in) if self.by_x else ():
            for m in range(irrep.dim):
                self._add(f"{self.by_x}_{i}_{m} = {self._zeros()}")
        harmonics = self.product.irreps_harmonics
        self.pending: list[tuple[int, str]] = []
        self.num_merged = 0
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
        """Store the gradients of the weights and of x."""
        irreps, num_weights = self.product.irreps_in, self.product.num_weights
        for name in self.by_w:
            for c in self._ordered():
                where = f"{name}_ptr + row * {num_weights} + {c.path.weights.start} + k"
                self._store(where, f"{name}_{c.number}", self._mask(c.path.x, self._valid))
        for i, irrep in enumerate(irreps) if self.by_x else ():
            for m in range(irrep.dim):
                where = f"{self.by_x}_ptr + (edge - first) * {irreps.dim} + "
                where += self.product.column(irreps.slices[i].start, irrep, m)
                self._store(where, f"{self.by_x}_{i}_{m}", self._mask(i, self._valid))

    def _store_harmonics(self) -> None:
        """Store the gradient of the harmonics, summed over channels: lane s holds component s."""
        dim, block = self.product.irreps_harmonics.dim, self.variant.block
        for start in range(0, dim, block):
            where = f"{self.by_y}_ptr + (part * num_rows + row) * {dim} + {start} + lane"
            mask = f"lane < {dim - start}"
            mask = f"{self._valid} & ({mask})" if self._valid else mask
            self._store(where, f"{self.by_y}_{start // block}", mask)

    def _sum_harmonics(self, j: int, m: int) -> None:
        """Reduce a component over channels into its lane."""
        place = self.product.irreps_harmonics.slices[j].start + m
        number, lane = divmod(place, self.variant.block)
        name = f"{self.by_y}_{number}"
        if self.variant.edges == 1:
            self._reduce(f"{self.by_y}_{j}_{m}")
            if lane == self.variant.block - 1 or place == self.product.irreps_harmonics.dim - 1:
                self._add(f"{name} = {self._finish_reduction()}")
            return
        total = f"tl.sum({self.by_y}_{j}_{m}, axis=1)[:, None]"
        where = f"tl.where(lane == {lane}, {total}, {name})"
        self._add(f"{name} = {where}  # {self._channels_shape}")

    def _reduce(self, name: str) -> None:
        """Add one more value to a butterfly reduction over lanes that all values share.

        Merging two values gives one whose even lanes hold sums over pairs of lanes of the first
        value and whose odd lanes those of the second; merging two of these gives sums over four
        lanes in every fourth lane, and so on. In the end lane s holds the whole sum of value s: n
        values take about n shuffles, where separate reductions would take five each.
        """
        level = 0
        while self.pending and self.pending[-1][0] == level:
            _, first = self.pending.pop()
            name = self._merge(level, first, name)
            level += 1
        self.pending.append((level, name))

    def _merge(self, level: int, first: str, second: str) -> str:
        """Write one step of the butterfly: exchange lanes that are 2^level apart."""
        step = 1 << level
        self._add(f"odd = (lane & {step}) != 0")
        self._add(f"sent = tl.where(odd, {first}, {second})")
        self._add(f"kept = tl.where(odd, {second}, {first})")
        self.num_merged += 1
        name = f"merged_{self.num_merged}"
        self._add(f"{name} = kept + tl.gather(sent, lane ^ {step}, 1)  # {self._channels_shape}")
        return name

    def _finish_reduction(self) -> str:
        """Merge what `_reduce` left pending; return the name of the sums."""
        level, name = self.pending.pop()
        while self.pending:
            if self.pending[-1][0] > level:
                name = self._merge(level, name, self._zeros())
            else:
                name = self._merge(level, self.pending.pop()[1], name)
            level += 1
        while 1 << level < self.variant.block:
            gathered = f"tl.gather({name}, lane ^ {1 << level}, 1)"
            self._add(f"{name} += {gathered}  # {self._channels_shape}")
            level += 1
        return name

    def _load_edges(self, first: str, prefix: str) -> list[str]:
        """Load all inputs of the next edges; return the names of what was loaded."""
        loaded = ["edge", "valid", "row"]
        valid, masked = "", ""
        if self.variant.edges > 1:
            self._add(f"{prefix}edge = {first} + tl.arange(0, {self.variant.edges})[:, None]")
            valid, masked = f"{prefix}valid", f", mask={prefix}valid, other=0"
            self._add(f"{valid} = {prefix}edge < end")
        else:
            # The compiler schedules loads without a mask much better.
            loaded.remove("valid")
            self._add(f"{prefix}edge = {first}")
        sender = f"tl.load(senders_ptr + {prefix}edge{masked})"
        self._add(f"{prefix}sender = {sender}  # {self._edges_shape}")
        row = f"{prefix}edge - first"
        if self.variant.permuted:
            row = f"tl.load(permutation_ptr + {prefix}edge{masked})  # {self._edges_shape}"
        self._add(f"{prefix}row = {row}")
        for name in self.inputs:
            for own, rows, column, block in self._columns(name):
                loaded.append(own)
                where = f"{name}_ptr + {prefix}{rows} + {column}"
                mask = valid if block is None else self._mask(block, valid)
                shape = self._edges_shape if name.endswith("y") else self._channels_shape
                self._load(prefix + own, where, mask, shape)
        return loaded

    def _columns(self, name: str) -> list[tuple[str, str, str, int | None]]:
        """List the components of an edge input as (name, row offset, column, block of x)."""
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
        # u are the products of T(ax, Y, .) + T(x, ay, .); v those of T(x, Y, .).
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
        """Accumulate the terms of one component of a path's result."""
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
        """Accumulate the gradients of component a of x and component b of Y."""
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
        """List the couplings in the order of their paths."""
        return sorted(self.product.couplings, key=lambda c: c.number)

    def _rows(self) -> list[tuple[Coupling, int]]:
        """List all components of the result."""
        return [(c, m) for c in self._ordered() for m in range(c.path.out.dim)]

    def _offset(self, c: Coupling, m: int) -> str:
        """Return the offset of a component of a path's result."""
        column = self.product.column(c.start, c.path.out, m)
        return f"node * {self.product.dim_out} + {column}"

    def _load_node(self, name: str, tensor: str, c: Coupling, m: int, also: str = "") -> None:
        where, shape = f"{tensor}_ptr + {self._offset(c, m)}", f"[1, {self.variant.block}]"
        self._load(name, where, self._mask(c.path.x, also), shape)

    def _load(self, name: str, where: str, mask: str, shape: str) -> None:
        masked = f", mask={mask}, other=0.0" if mask else ""
        self._add(f"{name} = tl.load({where}{masked}).to(tl.{self.variant.dtype})  # {shape}")

    def _store(self, where: str, value: str, mask: str, shape: str = "") -> None:
        masked = f", mask={mask}" if mask else ""
        self._add(f"tl.store({where}, {value}{masked}){f'  # {shape}' if shape else ''}")

    def _mask(self, block: int, also: str = "") -> str:
        """Return the mask of a block of x; none is needed if its channels fill all programs."""
        channels = num_blocks(self.product, self.variant) * self.variant.block
        if self.product.irreps_in[block].mul == channels:
            return also
        return f"mask_{block} & {also}" if also else f"mask_{block}"

    def _zeros(self) -> str:
        layout = f", layout={LAYOUT}" if self.layouts else ""
        return f"tl.zeros({self._channels_shape}, dtype=tl.{self.variant.dtype}{layout})"

    def _add(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)


def kernel_name(variant: Variant) -> str:
    """Return the name of a kernel in traces: its kind and its results."""
    return "_".join(["channelwise", variant.kind, *sorted(variant.wanted)])


def argument_names(variant: Variant) -> list[str]:
    """Name the tensors that a kernel takes, before those of the edge order."""
    names = ["x", "y", "w", *(["g"] if variant.kind != "forward" else [])]
    names += [name for name in ("ax", "ay", "aw") if name in variant.given]
    results = ("out", "dg", "gx", "gy", "gw", "dx", "dy", "dw")
    return names + [name for name in results if name in variant.wanted]


def num_blocks(product: Product, variant: Variant) -> int:
    """Return the number of programs that share the channels of a receiver."""
    return max(-(-product.channels // variant.block), 1)


def _combine(terms: Iterable[tuple[str, float]]) -> str:
    """Write a linear combination; factors of one are left out."""
    text = ""
    for name, factor in terms:
        sign = "-" if factor < 0 else "+"
        size = name if abs(abs(factor) - 1.0) < 1e-15 else f"{abs(factor)!r} * {name}"
        text += f" {sign} {size}" if text else (f"-{size}" if factor < 0 else size)
    return text
