"""Generates the Triton kernels of one polynomial, its terms unrolled.

A program owns a tile of ROWS atoms of one element and LANES channels, one channel per thread. The A
of its atoms stay in registers, and each coefficient is loaded once for all atoms of the tile. With
p_M the polynomial of the component M and g the gradient of the result:

- forward: B_M = p_M(A), by Horner's rule over the tree of terms.
- backward: dA = gradient of f = sum_M g_M p_M. Each coefficient is multiplied by g once; then
  Horner's rule and reverse-mode differentiation through it.
- double_backward, for a gradient v of dA: the gradient of <v, grad f> with respect to g, which is
  the derivative of p_M along v, and with respect to A, which is the Hessian of f times v: the
  derivative along v of `backward`.
- weights: the gradient of C, sum_n g_M m_t(A) for each term's product m_t, summed here over the
  atoms of a tile. `weights_along`: the same for <v, grad f>, with the derivative of m_t along v.

The same source is Triton, for the interpreter, and Gluon (`shared.triton_generated`): the channels
of a row lie over the threads of a warp, one each.

Variables of the kernels are blocks [ROWS, LANES] unless a comment says otherwise. A node of the
tree at depth d is a product s{d} of d components, and q{d} the sum of its subtree divided by that
product; a leading d means the derivative along v.
"""

from collections.abc import Iterable, Mapping

from bevatron.kernels.equivariant.symmetric_contraction.polynomial import Node, Polynomial

KINDS = ("forward", "backward", "double_backward", "weights", "weights_along")

_SIGNATURE = """
def contraction_{kind}(
    {pointers}, order_ptr, table_ptr,
    K: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_S: tl.constexpr,
    ROWS: tl.constexpr, LANES: tl.constexpr, ACC: tl.constexpr,
):
    tile = tl.program_id(0)
    group = tl.load(table_ptr + tile * 3)  # []
    start = tl.load(table_ptr + tile * 3 + 1)  # []
    end = tl.load(table_ptr + tile * 3 + 2)  # []
    if start >= end:
        return
    k = tl.program_id(1) * LANES + tl.arange(0, LANES{lane_layout})
    inside = k < K
"""

_ROWS = """
{margin}position = {start} + tl.arange(0, ROWS{row_layout})
{margin}valid = position < end
{margin}n = tl.load(order_ptr + position, mask=valid, other=0).to(tl.int64)  # [ROWS]
{margin}mask = valid[:, None] & inside[None, :]
{margin}offset = n[:, None] * ({size} * K) + (k * STRIDE_K)[None, :]
{margin}row = n[:, None] * ({num_m} * K)
"""

_BOTH = "tl.BlockedLayout([ROWS, 1], [1, 32], [1, LANES // 32], [1, 0])"
_LAYOUTS = {
    "row_layout": f", layout=tl.SliceLayout(1, {_BOTH})",
    "lane_layout": f", layout=tl.SliceLayout(0, {_BOTH})",
    "both_layout": f", layout={_BOTH}",
}


def write_source(polynomial: Polynomial, kind: str, chunk: int = 64, layouts: bool = True) -> str:
    """Return the source of a module that defines the function ``contraction_<kind>``.

    Parameters
    ----------
    kind : one of `KINDS`
    chunk
        Number of terms that a program of the kinds ``weights`` sums at a time, one register each.
    layouts : whether to write the layouts that Gluon requires and Triton does not accept
    """
    writer = _Writer(polynomial, kind, _LAYOUTS if layouts else dict.fromkeys(_LAYOUTS, ""))
    if kind == "forward":
        writer.forward()
    elif kind == "backward":
        writer.backward()
    elif kind == "double_backward":
        writer.double_backward()
    else:
        writer.weights(chunk, along=kind == "weights_along")
    return "\n".join(writer.lines) + "\n"


def num_chunks(polynomial: Polynomial, chunk: int) -> int:
    """Return the number of chunks into which the kinds ``weights`` split the terms."""
    return -(-len(polynomial.terms) // chunk)


class _Writer:
    """Collects the lines of a kernel."""

    def __init__(self, polynomial: Polynomial, kind: str, layouts: Mapping[str, str]) -> None:
        self.polynomial, self.kind, self.layouts = polynomial, kind, layouts
        self.lines: list[str] = []
        self.margin = "    "
        self.started: set[str] = set()

    def forward(self) -> None:
        """Write b = B_M = p_M(A)."""
        self._begin("b_ptr, a_ptr, c_ptr", "start")
        self._load_components("a")
        self._coefficients()
        for m in range(self.polynomial.num_m):
            tree = self.polynomial.tree().restricted(m)
            self._add(f"b{m} = {self._horner(tree, 0) if tree.children else self._zeros()}")
            self._store_m("b", m)

    def backward(self) -> None:
        """Write e = dA, the gradient of f."""
        self._begin("e_ptr, g_ptr, a_ptr, c_ptr", "start")
        self._load_components("a")
        self._load_m("g")
        self._coefficients()
        self._reverse(self.polynomial.tree(), 0)
        self._store_components("e")

    def double_backward(self) -> None:
        """Write u_M, the derivative of p_M along v, and h, the Hessian of f times v."""
        self._begin("u_ptr, h_ptr, v_ptr, g_ptr, a_ptr, c_ptr", "start")
        self._load_components("a")
        self._load_components("v")
        self._load_m("g")
        self._coefficients()
        self._reverse_along(self.polynomial.tree(), 0)
        self._store_components("h")
        for m in range(self.polynomial.num_m):
            if f"u{m}" not in self.started:
                self._add(f"u{m} = {self._zeros()}")
            self._store_m("u", m)

    def weights(self, chunk: int, along: bool) -> None:
        """Write each tile's partial sum of the gradient of C, one chunk of terms per program."""
        pointers = "part_ptr, " + ("v_ptr, " if along else "") + "g_ptr, a_ptr"
        count = len(self.polynomial.terms)
        parts = range(num_chunks(self.polynomial, chunk))
        arguments = f"{pointers}, order_ptr, k, inside, start, end"
        constants = "K, STRIDE_K, STRIDE_S, ROWS, LANES, ACC"
        for part in parts:
            last = min((part + 1) * chunk, count)
            typed = ", ".join(f"{name.strip()}: tl.constexpr" for name in constants.split(","))
            self.lines += ["", "@jit", f"def part{part}({arguments}, {typed}):"]
            self._sum_products(part * chunk, last, along)
        self._signature(pointers)
        self._add(f"part_ptr += tile.to(tl.int64) * ({count} * K) + k")
        for part in parts:
            self._add(f"if tl.program_id(2) == {part}:")
            self._add(f"    part{part}({arguments}, {constants})")

    def _sum_products(self, first: int, last: int, along: bool) -> None:
        """Write the sums over a tile's atoms of g_M times the terms' products, and store them."""
        tree = self.polynomial.tree(first, last)
        for term in range(first, last):
            self._add(f"t{term} = tl.zeros([LANES], ACC{self.layouts['lane_layout']})")
        self._add("for first in range(start, end, ROWS):")
        self.margin += "    "
        self._rows("first")
        products = [product for _, product in self.polynomial.terms[first:last]]
        components = sorted({component for product in products for component in product})
        self._load_components("a", components)
        if along:
            self._load_components("v", components)
        self._load_m("g", sorted({m for m, _ in self.polynomial.terms[first:last]}))
        self._products(tree, 0, along)
        self.margin = self.margin[4:]
        for term in range(first, last):
            self._add(f"tl.store(part_ptr + {term} * K, t{term}, mask=inside)")

    def _horner(self, node: Node, depth: int) -> str:
        """Write the sum of a subtree divided by its product; return its name or expression."""
        terms = [self._c(term) for term in node.terms.values()]
        if not node.children:
            return terms[0]
        name, total = f"q{depth}", terms[0] if terms else ""
        for component, child in node.children.items():
            product = f"{self._horner(child, depth + 1)} * a{component}"
            value = f"{total} + {product}" if total else product
            # A coefficient is loaded on the line that uses it.
            self._add(f"{name} = {value}  # [ROWS, LANES]")
            total = name
        return name

    def _reverse(self, node: Node, depth: int) -> None:
        """Write q{depth} of a node and accumulate the gradients of its children."""
        self._add_terms(node, depth)
        for component, child in node.children.items():
            below = depth + 1
            if child.children:
                self._product(depth, component, along=False)
            self._reverse(child, below)
            if depth == 0:
                self._sum(f"e{component}", f"q{below}")
            else:
                self._sum(f"e{component}", f"q{below} * s{depth}")
                self._sum(f"q{depth}", f"q{below} * a{component}")

    def _reverse_along(self, node: Node, depth: int) -> None:
        """Write q{depth} and its derivative and accumulate the gradients of node and children."""
        self._add_terms(node, depth, along=True)
        self.started.discard(f"dq{depth}")
        for component, child in node.children.items():
            below = depth + 1
            self._product(depth, component, along=True)
            self._reverse_along(child, below)
            grows = bool(child.children)
            if depth == 0:
                if grows:
                    self._sum(f"h{component}", f"dq{below}")
                continue
            self._sum(f"h{component}", f"q{below} * ds{depth}")
            self._sum(f"q{depth}", f"q{below} * a{component}")
            self._sum(f"dq{depth}", f"q{below} * v{component}")
            if grows:
                self._sum(f"h{component}", f"dq{below} * s{depth}")
                self._sum(f"dq{depth}", f"dq{below} * a{component}")

    def _add_terms(self, node: Node, depth: int, along: bool = False) -> None:
        """Start q{depth} with the coefficients of a node times the gradients of their M."""
        self.started.discard(f"q{depth}")
        for m, term in node.terms.items():
            self._add(f"c0 = {self._c(term)}  # [1, LANES]")
            self._sum(f"q{depth}", f"c0 * g{m}")
            if along:
                self._sum(f"u{m}", f"c0 * ds{depth}")

    def _products(self, node: Node, depth: int, along: bool) -> None:
        """Write the products of all terms below a node and accumulate the sums of the terms."""
        for component, child in node.children.items():
            below = depth + 1
            self._product(depth, component, along)
            for m, term in child.terms.items():
                name = f"ds{below}" if along else f"s{below}"
                self._add(f"t{term} += tl.sum({name} * g{m}, 0)  # [LANES]")
            self._products(child, below, along)

    def _product(self, depth: int, component: int, along: bool) -> None:
        """Write the product of a child, and its derivative along v, from those of its parent."""
        s, ds = f"s{depth + 1}", f"ds{depth + 1}"
        a, v = f"a{component}", f"v{component}"
        self._add(f"{s} = s{depth} * {a}" if depth else f"{s} = {a}")
        if along:
            self._add(f"{ds} = ds{depth} * {a} + s{depth} * {v}" if depth else f"{ds} = {v}")

    def _sum(self, name: str, value: str) -> None:
        """Add a value to a variable, or create the variable."""
        self._add(f"{name} = {name} + {value}" if name in self.started else f"{name} = {value}")
        self.started.add(name)

    def _c(self, term: int) -> str:
        # Coefficients already have the accumulator type.
        return f"tl.load(c + {term} * K, mask=inside, other=0.0)[None, :]"

    def _zeros(self) -> str:
        return f"tl.zeros([ROWS, LANES], ACC{self.layouts['both_layout']})"

    def _add(self, line: str) -> None:
        self.lines.append(self.margin + line)

    def _begin(self, pointers: str, start: str) -> None:
        self._signature(pointers)
        self._rows(start)

    def _signature(self, pointers: str) -> None:
        text = _SIGNATURE.format(kind=self.kind, pointers=pointers, **self.layouts)
        self.lines += text.split("\n")[:-1]

    def _rows(self, start: str) -> None:
        text = _ROWS.format(
            margin=self.margin,
            start=start,
            size=self.polynomial.size,
            num_m=self.polynomial.num_m,
            **self.layouts,
        )
        self.lines += text.split("\n")[1:-1]

    def _coefficients(self) -> None:
        self._add(f"c = c_ptr + group.to(tl.int64) * ({len(self.polynomial.terms)} * K) + k")

    def _load_components(self, name: str, components: Iterable[int] | None = None) -> None:
        for i in components if components is not None else range(self.polynomial.size):
            load = f"tl.load({name}_ptr + offset + {i} * STRIDE_S, mask=mask, other=0.0)"
            self._add(f"{name}{i} = {load}.to(ACC)  # [ROWS, LANES]")

    def _store_components(self, name: str) -> None:
        for i in range(self.polynomial.size):
            value = f"{name}{i}" if f"{name}{i}" in self.started else self._zeros()
            self._add(f"tl.store({name}_ptr + offset + {i} * STRIDE_S, {value}, mask=mask)")

    def _load_m(self, name: str, chosen: Iterable[int] | None = None) -> None:
        for m in chosen if chosen is not None else range(self.polynomial.num_m):
            load = f"tl.load({self._offset(name, m)}, mask=mask, other=0.0)"
            self._add(f"{name}{m} = {load}.to(ACC)  # [ROWS, LANES]")

    def _store_m(self, name: str, m: int) -> None:
        self._add(f"tl.store({self._offset(name, m)}, {name}{m}, mask=mask)")

    def _offset(self, name: str, m: int) -> str:
        first, step, shift = self.polynomial.places[m]
        return f"{name}_ptr + row + ({first} * K + {shift}) + (k * {step})[None, :]"
