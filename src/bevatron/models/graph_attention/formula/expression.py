"""The language of Psi: symbolic formulas over a graph.

``A * (H @ H.T) / outer(norm(H), norm(H))`` builds a tree of `Expression`; nothing is computed until
a planner has seen the whole tree. Every node has a kind, which says what can exist in memory:

==============  ==========================================================================
scalar          a number, or a learned one (`scalar`)
vector          one number per vertex, [n]
features        one row per vertex, [n, k]; ``.T`` of it is *wide*, [k, n]
weight          a learned matrix or vector, [k, m] or [k] (`weight`)
sparse          n x n, values on the edges of A only
virtual         n x n, dense: never computed as a whole, only where a sparse matrix samples it
==============  ==========================================================================

Row i of an n x n matrix is the vertex that attends, column j the one attended to.
"""

import enum
import numbers
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from bevatron.errors import ConfigError


class Kind(enum.Enum):
    """Kind of a node of a formula; see the table of the module."""

    SCALAR = "a scalar"
    VECTOR = "a vector [n]"
    FEATURES = "features [n, k]"
    WIDE = "transposed features [k, n]"
    WEIGHT = "a weight"
    SPARSE = "a sparse n x n matrix"
    SPARSE_T = "a transposed sparse n x n matrix"
    VIRTUAL = "a dense n x n matrix"


@dataclass(frozen=True)
class Expression:
    """One node of a formula; made by operators and the functions of this module.

    Attributes
    ----------
    op : name of the operation: ``product``, ``multiply``, ``softmax``, ...
    kind : kind of the result
    options : plain values of the operation: a slope, a name, a shape
    """

    op: str
    operands: tuple["Expression", ...]
    kind: Kind
    options: tuple[Any, ...] = ()

    __array_priority__: ClassVar[float] = 1000.0

    def __post_init__(self) -> None:
        # Formulas are looked up in every pass of a model; each lookup would hash the whole tree.
        found = hash((self.op, self.operands, self.kind.name, self.options))
        object.__setattr__(self, "_hash", found)

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined,no-any-return]

    def __reduce__(self) -> tuple[Any, ...]:
        # The hash of text differs from process to process.
        return Expression, (self.op, self.operands, self.kind, self.options)

    def __add__(self, other: Any) -> "Expression":
        return _elementwise("add", self, _lift(other))

    def __radd__(self, other: Any) -> "Expression":
        return _elementwise("add", _lift(other), self)

    def __sub__(self, other: Any) -> "Expression":
        return _elementwise("subtract", self, _lift(other))

    def __rsub__(self, other: Any) -> "Expression":
        return _elementwise("subtract", _lift(other), self)

    def __mul__(self, other: Any) -> "Expression":
        return _elementwise("multiply", self, _lift(other))

    def __rmul__(self, other: Any) -> "Expression":
        return _elementwise("multiply", _lift(other), self)

    def __truediv__(self, other: Any) -> "Expression":
        return _elementwise("divide", self, _lift(other))

    def __rtruediv__(self, other: Any) -> "Expression":
        return _elementwise("divide", _lift(other), self)

    def __neg__(self) -> "Expression":
        return _elementwise("multiply", _lift(-1.0), self)

    def __pow__(self, exponent: float) -> "Expression":
        return _function("power", self, float(exponent))

    def __matmul__(self, other: Any) -> "Expression":
        return _matmul(self, _lift(other))

    @property
    def T(self) -> "Expression":  # noqa: N802  as in numpy and torch
        """The transposed matrix."""
        flipped = {
            Kind.FEATURES: Kind.WIDE,
            Kind.WIDE: Kind.FEATURES,
            Kind.SPARSE: Kind.SPARSE_T,
            Kind.SPARSE_T: Kind.SPARSE,
            Kind.VIRTUAL: Kind.VIRTUAL,
        }
        if self.kind not in flipped:
            raise ConfigError(f"psi: {self} is {self.kind.value}, which has no transpose")
        if self.op == "transpose":
            return self.operands[0]
        if self.kind is Kind.VIRTUAL:
            return _transposed(self)
        return Expression("transpose", (self,), flipped[self.kind])

    @property
    def pattern(self) -> "Expression":
        """A with all edge values replaced by one."""
        if self.op not in {"A", "pattern"}:
            raise ConfigError(f"psi: only A has a pattern, {self} is {self.kind.value}")
        return Expression("pattern", (), Kind.SPARSE)

    def __str__(self) -> str:
        return _text(self)


A = Expression("A", (), Kind.SPARSE)
"""The graph with its edge values, one where it has none."""

H = Expression("H", (), Kind.FEATURES)
"""The layer's input, [n, in]."""

X = Expression("X", (), Kind.FEATURES)
"""The projected input Phi(H), [n, out]; of one head if there are several."""


def weight(name: str, *shape: int | str) -> Expression:
    """Name a learned matrix or vector of the layer.

    Parameters
    ----------
    name : its name among the layer's parameters
    shape : sizes; ``"in"`` and ``"out"`` mean the widths of H and X

    Examples
    --------
    >>> str(softmax(A.pattern * leaky_relu(replicate(X @ weight("a", "out")))))
    'softmax(pattern(A) * leaky_relu(replicate(X @ a), 0.2))'
    """
    if not name.isidentifier() or len(shape) not in {1, 2}:
        raise ConfigError(
            f"psi: weight({name!r}, {shape}) needs an identifier and one or two sizes"
        )
    return Expression("weight", (), Kind.WEIGHT, (name, shape))


def scalar(name: str, initial: float = 1.0) -> Expression:
    """Name a learned number of the layer, such as AGNN's beta."""
    if not name.isidentifier():
        raise ConfigError(f"psi: scalar({name!r}) needs an identifier")
    return Expression("scalar", (), Kind.SCALAR, (name, float(initial)))


def outer(u: Expression, v: Expression) -> Expression:
    """Rank one, u v^T: entry (i, j) is u_i v_j."""
    _expect("outer", u, Kind.VECTOR)
    _expect("outer", v, Kind.VECTOR)
    return Expression("outer", (u, v), Kind.VIRTUAL)


def replicate(u: Expression) -> Expression:
    """Rank one, u 1^T: row i is u_i throughout; ``replicate(v).T`` is 1 v^T."""
    _expect("replicate", u, Kind.VECTOR)
    return Expression("replicate", (u,), Kind.VIRTUAL)


def joint(left: Expression, right: Expression, a: Expression, slope: float = 0.2) -> Expression:
    """Scores that need row and column together: a . leaky_relu(left_i + right_j), as in GATv2."""
    _expect("joint", left, Kind.FEATURES)
    _expect("joint", right, Kind.FEATURES)
    _expect("joint", a, Kind.WEIGHT)
    return Expression("joint", (left, right, a), Kind.VIRTUAL, (float(slope),))


def norm(features: Expression) -> Expression:
    """Length of every row, at least 1e-12 so that it can divide."""
    _expect("norm", features, Kind.FEATURES)
    return Expression("norm", (features,), Kind.VECTOR)


def normalize(features: Expression) -> Expression:
    """Rows of length one; a row of zeros stays zero."""
    _expect("normalize", features, Kind.FEATURES)
    return Expression("normalize", (features,), Kind.FEATURES)


def scale_rows(u: Expression, features: Expression) -> Expression:
    """diag(u) F: row i times u_i."""
    _expect("scale_rows", u, Kind.VECTOR)
    _expect("scale_rows", features, Kind.FEATURES)
    return Expression("scale_rows", (u, features), Kind.FEATURES)


def row_sum(matrix: Expression) -> Expression:
    """Sum of every row of a sparse matrix; of A it is the weighted degree."""
    _expect("row_sum", matrix, Kind.SPARSE)
    return Expression("row_sum", (matrix,), Kind.VECTOR)


def softmax(matrix: Expression) -> Expression:
    """Softmax over the edges of every row."""
    _expect("softmax", matrix, Kind.SPARSE)
    return Expression("softmax", (matrix,), Kind.SPARSE)


def dropout(matrix: Expression, p: float) -> Expression:
    """Drop each edge with probability p while training and divide the others by 1 - p."""
    _expect("dropout", matrix, Kind.SPARSE)
    if not 0.0 <= p < 1.0:
        raise ConfigError(f"psi: dropout of {p} is not in 0 <= p < 1")
    return Expression("dropout", (matrix,), Kind.SPARSE, (float(p),)) if p else matrix


def exp(x: Expression) -> Expression:
    """Exponential of every number; of a sparse matrix on its edges."""
    return _function("exp", x)


def log(x: Expression) -> Expression:
    """Natural logarithm."""
    return _function("log", x)


def sqrt(x: Expression) -> Expression:
    """Square root."""
    return _function("power", x, 0.5)


def inverse(x: Expression) -> Expression:
    """Return 1 / x, and 0 where x is 0: the degree of a vertex without edges divides nothing."""
    return _function("inverse", x)


def tanh(x: Expression) -> Expression:
    """Hyperbolic tangent."""
    return _function("tanh", x)


def sigmoid(x: Expression) -> Expression:
    """Logistic function."""
    return _function("sigmoid", x)


def relu(x: Expression) -> Expression:
    """max(x, 0)."""
    return _function("leaky_relu", x, 0.0)


def leaky_relu(x: Expression, slope: float = 0.2) -> Expression:
    """Return x where it is positive, slope times x elsewhere."""
    return _function("leaky_relu", x, float(slope))


def is_vector(node: Expression) -> bool:
    """Whether a weight, learned or composed, has one axis."""
    if node.op == "weight":
        return len(node.options[1]) == 1
    return bool(node.operands) and is_vector(node.operands[-1])


def walk(root: Expression) -> list[Expression]:
    """All distinct nodes of a formula, operands before what uses them."""
    found: dict[Expression, None] = {}

    def visit(node: Expression) -> None:
        if node not in found:
            for operand in node.operands:
                visit(operand)
            found[node] = None

    visit(root)
    return list(found)


def number(value: float) -> Expression:
    """Return a fixed number as an expression."""
    return Expression("number", (), Kind.SCALAR, (float(value),))


def _transposed(node: Expression) -> Expression:
    """Push a transposition down to the replications of an n x n matrix."""
    if node.op == "replicate":
        return Expression("transpose", (node,), Kind.VIRTUAL)
    if node.op == "product":
        left, right = node.operands
        return Expression("product", (right.T, left.T), Kind.VIRTUAL)
    if node.op == "outer":
        return Expression("outer", node.operands[::-1], Kind.VIRTUAL)
    if node.op == "joint":
        raise ConfigError(f"psi: {node} cannot be transposed; swap its first two arguments")
    flipped = tuple(o.T if o.kind is Kind.VIRTUAL else o for o in node.operands)
    return Expression(node.op, flipped, Kind.VIRTUAL, node.options)


def _lift(value: Any) -> Expression:
    if isinstance(value, Expression):
        return value
    if isinstance(value, numbers.Real):
        return number(float(value))
    raise ConfigError(
        f"psi: {type(value).__name__} cannot be used in a formula; name learned tensors with "
        "weight(...) or scalar(...)"
    )


def _expect(what: str, node: Expression, kind: Kind) -> None:
    if not isinstance(node, Expression) or node.kind is not kind:
        found = node.kind.value if isinstance(node, Expression) else type(node).__name__
        hint = ""
        if isinstance(node, Expression) and node.kind is Kind.VIRTUAL:
            hint = "; multiply it by A first, so that only edges are computed"
        raise ConfigError(f"psi: {what} takes {kind.value}, but {node} is {found}{hint}")


def _function(op: str, x: Expression, *options: float) -> Expression:
    if x.kind in {Kind.WIDE, Kind.SPARSE_T}:
        raise ConfigError(f"psi: apply {op} before transposing {x.operands[0]}")
    return Expression(op, (x,), x.kind, options)


_FOLDED: dict[str, Callable[[float, float], float]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "divide": operator.truediv,
}
_SIGNS = {"add": "+", "subtract": "-", "multiply": "*", "divide": "/"}


def _elementwise(op: str, a: Expression, b: Expression) -> Expression:
    kinds = {a.kind, b.kind}
    formula = f"{_text(a, 1)} {_SIGNS[op]} {_text(b, 1)}"
    if a.op == b.op == "number":
        return number(_FOLDED[op](a.options[0], b.options[0]))
    if kinds & {Kind.WIDE, Kind.SPARSE_T}:
        raise ConfigError(f"psi: {formula}: transpose the result instead of its operands")
    if Kind.SPARSE in kinds and kinds & {Kind.SCALAR, Kind.VIRTUAL} and op in {"add", "subtract"}:
        raise ConfigError(
            f"psi: {formula} has numbers where A has no edge, n x n of them; multiply by A or "
            "A.pattern what is to be added"
        )
    if op == "divide" and b.kind is Kind.SPARSE and a.kind is not Kind.SPARSE:
        raise ConfigError(f"psi: {formula} divides by zero where A has no edge; swap the operands")
    if (a.kind, b.kind, op) == (Kind.FEATURES, Kind.WEIGHT, "add") and is_vector(b):
        return Expression("shift", (a, b), Kind.FEATURES)
    if kinds == {Kind.SPARSE, Kind.VIRTUAL}:
        kind = Kind.SPARSE
    elif len(kinds) == 1:
        kind = a.kind
    elif Kind.SCALAR in kinds:
        kind = next(k for k in (a.kind, b.kind) if k is not Kind.SCALAR)
    else:
        raise ConfigError(
            f"psi: {formula} combines {a.kind.value} and {b.kind.value}; use outer, replicate or "
            "scale_rows to say how they go together"
        )
    return Expression(op, (a, b), kind)


def _matmul(a: Expression, b: Expression) -> Expression:
    kinds = (a.kind, b.kind)
    formula = f"{_text(a, 1)} @ {_text(b, 1)}"
    results = {
        (Kind.FEATURES, Kind.WIDE): ("product", Kind.VIRTUAL),
        (Kind.SPARSE, Kind.FEATURES): ("aggregate", Kind.FEATURES),
        (Kind.SPARSE, Kind.VECTOR): ("aggregate", Kind.VECTOR),
        (Kind.SPARSE_T, Kind.FEATURES): ("aggregate", Kind.FEATURES),
        (Kind.SPARSE_T, Kind.VECTOR): ("aggregate", Kind.VECTOR),
        (Kind.WIDE, Kind.FEATURES): ("project", Kind.WEIGHT),
    }
    if kinds in results:
        op, kind = results[kinds]
        return Expression(op, (a, b), kind)
    if b.kind is Kind.WEIGHT and a.kind in {Kind.FEATURES, Kind.WEIGHT}:
        vector = a.kind is Kind.FEATURES and is_vector(b)
        return Expression("project", (a, b), Kind.VECTOR if vector else a.kind)
    if a.kind is Kind.VIRTUAL and b.kind is Kind.FEATURES and a.op == "product":
        # (F G^T) B = F (G^T B): two thin products instead of one of n x n.
        left, right = a.operands
        return left @ (right @ b)
    if Kind.VIRTUAL in kinds:
        raise ConfigError(
            f"psi: {formula} needs a dense n x n matrix; multiply the n x n factor by A, so that "
            "only edges are computed"
        )
    raise ConfigError(f"psi: {formula} multiplies {a.kind.value} by {b.kind.value}")


def _text(node: Expression, level: int = 0) -> str:
    """Format a formula; ``level`` 1 puts sums and products in brackets."""
    if node.op in {"A", "H", "X"}:
        return node.op
    if node.op == "pattern":
        return "pattern(A)"
    if node.op == "number":
        return f"{node.options[0]:g}"
    if node.op in {"weight", "scalar"}:
        return str(node.options[0])
    if node.op == "transpose":
        return f"{_text(node.operands[0], 1)}.T"
    signs = {**_SIGNS, "shift": "+", "product": "@", "aggregate": "@", "project": "@"}
    if node.op in signs:
        left, right = (_text(operand, 1) for operand in node.operands)
        if node.op in {"multiply", "divide"} and node.operands[0].op in {"multiply", "divide"}:
            left = _text(node.operands[0])
        text = f"{left} {signs[node.op]} {right}"
        return f"({text})" if level else text
    if node.op == "power":
        return f"{_text(node.operands[0], 1)} ** {node.options[0]:g}"
    inside = ", ".join([*map(_text, node.operands), *(f"{o:g}" for o in node.options)])
    return f"{node.op}({inside})"
