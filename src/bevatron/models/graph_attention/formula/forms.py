"""Recognises the formulas for Psi that a fused kernel computes.

A formula is compared by its factors, so ``A * (H @ H.T) / outer(norm(H), norm(H))``,
``A * (normalize(H) @ normalize(H).T)`` and ``0.5 * A.pattern * (H @ H.T)`` are all recognised as
dot products. Any other formula runs in its composed form.
"""

from dataclasses import dataclass, replace

from bevatron.models.graph_attention.formula.expression import Expression, Kind, number, walk


@dataclass(frozen=True, kw_only=True)
class _Attention:
    """What all forms of attention have.

    Attributes
    ----------
    dropout : dropout rate of the attention
    weights_inside, weights_outside : whether A's edge values multiply scores or attention
    """

    dropout: float = 0.0
    weights_inside: bool = False
    weights_outside: bool = False


@dataclass(frozen=True)
class AdditiveForm(_Attention):
    """softmax(A * leaky_relu(u 1^T + 1 v^T)): GAT.

    Attributes
    ----------
    row, column : vectors u and v
    slope : negative slope of the leaky ReLU; 1 where there is none
    """

    row: Expression
    column: Expression
    slope: float


@dataclass(frozen=True)
class DotForm(_Attention):
    """A * (Q K^T), scaled, with or without norms and softmax: VA, AGNN, transformers.

    Attributes
    ----------
    query, key : Q and K, the same for VA and AGNN
    cosine : whether rows of Q and K count with length one
    softmax : whether a softmax over the row follows
    scale : scalar factor of the products
    row_scale, column_scale : vectors; Psi = diag(row) Psi' diag(column)
    """

    query: Expression
    key: Expression
    cosine: bool
    softmax: bool
    scale: Expression
    row_scale: Expression | None = None
    column_scale: Expression | None = None


@dataclass(frozen=True)
class JointForm(_Attention):
    """softmax(A * joint(left, right, a)): GATv2.

    Attributes
    ----------
    query, key : features of rows and columns
    weight : a
    slope : negative slope of the leaky ReLU
    """

    query: Expression
    key: Expression
    weight: Expression
    slope: float


@dataclass(frozen=True)
class FixedForm:
    """A Psi of the graph alone, diag(row) A diag(column) or another: GCN, SGC, GIN."""

    psi: Expression


@dataclass(frozen=True)
class ComposedForm:
    """Any other Psi with values on the edges."""

    psi: Expression


Form = AdditiveForm | DotForm | JointForm | FixedForm | ComposedForm


def recognise(psi: Expression) -> Form:
    """Find the kernel's form that a formula has."""
    nodes = walk(psi)
    if not any(node.op in {"H", "X", "weight", "scalar", "dropout"} for node in nodes):
        return FixedForm(psi)
    return _attention(psi) or _plain_dot(psi) or ComposedForm(psi)


@dataclass
class _Factors:
    """Factors of a product: the numerator and the denominator."""

    above: list[Expression]
    below: list[Expression]

    @classmethod
    def of(cls, node: Expression) -> "_Factors":
        if node.op == "multiply":
            left, right = (cls.of(operand) for operand in node.operands)
            return cls(left.above + right.above, left.below + right.below)
        if node.op == "divide":
            left, right = (cls.of(operand) for operand in node.operands)
            return cls(left.above + right.below, left.below + right.above)
        return cls([node], [])

    def take(self, *ops: str) -> list[Expression]:
        """Remove and return the factors above with one of these operations."""
        taken = [node for node in self.above if node.op in ops]
        self.above = [node for node in self.above if node.op not in ops]
        return taken

    def take_samples(self) -> tuple[bool, int]:
        """Remove A and its patterns; return whether there are any, and the power of A's values."""
        samples = self.take("A", "pattern")
        return bool(samples), sum(node.op == "A" for node in samples)

    def take_scalars(self) -> Expression:
        """Remove all scalars and return their product."""
        scale = number(1.0)
        for node in self.above:
            if node.kind is Kind.SCALAR:
                scale = node if scale == number(1.0) else scale * node
        for node in self.below:
            if node.kind is Kind.SCALAR:
                scale = scale / node
        self.above = [node for node in self.above if node.kind is not Kind.SCALAR]
        self.below = [node for node in self.below if node.kind is not Kind.SCALAR]
        return scale


def _attention(psi: Expression) -> AdditiveForm | DotForm | JointForm | None:
    """Match [A *] [dropout] softmax(scores)."""
    factors = _Factors.of(psi)
    _, outside = factors.take_samples()
    if len(factors.above) != 1 or factors.below:
        return None
    inner, dropout = _without_dropout(factors.above[0])
    if inner.op != "softmax":
        return None
    scores = _Factors.of(inner.operands[0])
    sampled, inside = scores.take_samples()
    form = _additive(scores) or _joint(scores) or _dot(scores, softmax=True)
    if form is None or not sampled or max(inside, outside) > 1:
        return None
    if isinstance(form, DotForm) and (form.row_scale is not None or form.column_scale is not None):
        return None
    return replace(form, dropout=dropout, weights_inside=inside == 1, weights_outside=outside == 1)


def _plain_dot(psi: Expression) -> DotForm | None:
    """Match A * (F F^T) with factors, no softmax."""
    psi, dropout = _without_dropout(psi)
    factors = _Factors.of(psi)
    sampled, values = factors.take_samples()
    form = _dot(factors, softmax=False)
    if form is None or not sampled or values > 1:
        return None
    return replace(form, dropout=dropout, weights_outside=values == 1)


def _without_dropout(node: Expression) -> tuple[Expression, float]:
    return (node.operands[0], node.options[0]) if node.op == "dropout" else (node, 0.0)


def _additive(scores: _Factors) -> AdditiveForm | None:
    """Match leaky_relu(u 1^T + 1 v^T), the ReLU optional, in either order."""
    if len(scores.above) != 1 or scores.below:
        return None
    (node,) = scores.above
    slope = 1.0
    if node.op == "leaky_relu":
        slope = node.options[0]
        (node,) = node.operands
    if node.op != "add" or not 0.0 <= slope <= 1.0:
        return None
    row = column = None
    for term in node.operands:
        if term.op == "replicate":
            row = term.operands[0]
        elif term.op == "transpose" and term.operands[0].op == "replicate":
            column = term.operands[0].operands[0]
    return None if row is None or column is None else AdditiveForm(row, column, slope)


def _joint(scores: _Factors) -> JointForm | None:
    if [node.op for node in scores.above] != ["joint"] or scores.below:
        return None
    left, right, a = scores.above[0].operands
    return JointForm(left, right, a, scores.above[0].options[0])


def _dot(factors: _Factors, *, softmax: bool) -> DotForm | None:
    """Match scale * Q K^T / outer(norm Q, norm K) with outer and replicated factors."""
    products = factors.take("product")
    if len(products) != 1 or products[0].operands[1].op != "transpose":
        return None
    query, key = products[0].operands[0], products[0].operands[1].operands[0]
    cosine = query.op == "normalize" and key.op == "normalize"
    if cosine:
        query, key = query.operands[0], key.operands[0]
    lengths = tuple(Expression("norm", (side,), Kind.VECTOR) for side in (query, key))
    norms = Expression("outer", lengths, Kind.VIRTUAL)
    if not cosine and norms in factors.below:
        factors.below.remove(norms)
        cosine = True
    scale = factors.take_scalars()
    row: Expression | None = None
    column: Expression | None = None
    for inverse, nodes in ((False, factors.above), (True, factors.below)):
        for node in nodes:
            pair = _rank_one(node)
            if pair is None:
                return None
            row, column = _times(row, pair[0], inverse), _times(column, pair[1], inverse)
    return DotForm(query, key, cosine, softmax, scale, row, column)


def _rank_one(node: Expression) -> tuple[Expression | None, Expression | None] | None:
    if node.op == "outer":
        return node.operands[0], node.operands[1]
    if node.op == "replicate":
        return node.operands[0], None
    if node.op == "transpose" and node.operands[0].op == "replicate":
        return None, node.operands[0].operands[0]
    return None


def _times(
    vector: Expression | None, factor: Expression | None, inverse: bool
) -> Expression | None:
    if factor is None:
        return vector
    factor = factor**-1.0 if inverse else factor
    return factor if vector is None else vector * factor
