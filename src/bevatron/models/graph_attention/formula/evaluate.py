"""Evaluates a planned Psi on a graph: vectors and small matmuls first, then passes over the edges.

Everything has a heads axis: vectors [n, H], features [n, H, k], edge values [nnz, H], learned
weights [H, ...]; H is 1 for what all heads share. Scores and all edge values are at least float32,
even under autocast.
"""

from collections.abc import Callable, Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional as F

from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.csr.dropout import as_seed, keep_mask
from bevatron.kernels.graph.dot_attention import SMALLEST_NORM
from bevatron.kernels.graph.graph_blocks import Leaf, graph_softmax, row_sum, sampled, weighted_sum
from bevatron.kernels.shared.dtypes import wide
from bevatron.models.graph_attention.formula.expression import Expression, Kind
from bevatron.models.graph_attention.formula.planner import leaves, regions
from bevatron.models.graph_attention.graph_layer import scores
from bevatron.models.graph_attention.matrix import (
    Matrix,
    of_columns,
    over_vertices,
    sum_of_columns,
    whole_rows,
)

_fixed: "WeakKeyDictionary[Csr, dict[tuple[Expression, torch.dtype], Csr]]" = WeakKeyDictionary()


class Evaluator:
    """Values of a formula's nodes on one graph, each computed once.

    Parameters
    ----------
    matrix : the graph; of a partitioned one, values are of this rank's vertices and rows
    features : H, [n, 1, in]; called when a node needs it
    projected : X, [n, H, out]; called when a node needs it, unless ``fold`` is given
    parameters : learned tensors by name, each with a first axis of heads
    fold : phi's matrix [H, in, out] if the aggregation comes first: X @ a is then H @ (Phi a)
    training : whether attention is dropped
    dtype : type of numbers on the edges that come from the graph alone
    """

    def __init__(
        self,
        matrix: Matrix,
        psi: Expression,
        features: Callable[[], Tensor],
        projected: Callable[[], Tensor],
        parameters: Mapping[str, Tensor],
        *,
        fold: Tensor | None = None,
        training: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.matrix, self.parameters, self.fold = matrix, parameters, fold
        self.features, self.projected = features, projected
        self.training, self.dtype = training, dtype
        self._regions = set(regions(psi))
        self._values: dict[Expression, Tensor] = {}
        self._columns: dict[Expression, Tensor] = {}

    @property
    def csr(self) -> Csr:
        """The rows whose edges are evaluated."""
        return whole_rows(self.matrix)

    def columns(self, node: Expression) -> Tensor:
        """Return the value of a node of vertices for the columns of the matrix."""
        if node not in self._columns:
            self._columns[node] = of_columns(self.matrix, self(node))
        return self._columns[node]

    def __call__(self, node: Expression) -> Tensor:
        """Return the value of a node that is not virtual."""
        if node not in self._values:
            with torch.autocast(self.matrix.device.type, enabled=False):
                self._values[node] = self._compute(node)
        return self._values[node]

    def number(self, node: Expression) -> float | Tensor:
        """Return a scalar node as a plain number if it is one, else as a tensor [H]."""
        if node.op == "number":
            return float(node.options[0])
        value = self(node)
        return value if value.ndim else float(value)

    def _compute(self, node: Expression) -> Tensor:
        if node in self._regions:
            return self._region(node)
        if node.op in _LEAVES:
            return self._leaf(node)
        if node.op in _FUNCTIONS or node.op in _OPERATORS:
            return _apply(node, [self._operand(operand, node.kind) for operand in node.operands])
        compute: Callable[[Expression], Tensor] = getattr(self, f"_{node.op}")
        return compute(node)

    def _operand(self, node: Expression, kind: Kind) -> Tensor | float:
        """Return a value that broadcasts to a node of a kind: scalars get one value per head."""
        if node.kind is not Kind.SCALAR:
            return self(node)
        value = self.number(node)
        if isinstance(value, float) or kind in {Kind.SCALAR, Kind.VECTOR, Kind.SPARSE}:
            return value
        return value[:, None] if kind is Kind.FEATURES else value[:, None, None]

    def _leaf(self, node: Expression) -> Tensor:
        if node.op == "H":
            return self.features()
        if node.op == "X":
            return self.projected()
        if node.op in {"weight", "scalar"}:
            return self.parameters[node.options[0]]
        if node.op == "A" and self.csr.values is not None:
            return self.csr.values[:, None]
        one = torch.ones((), dtype=self.dtype, device=self.csr.device)
        return one.expand(self.csr.nnz, 1)

    def _project(self, node: Expression) -> Tensor:
        left, right = node.operands
        if self.fold is not None and left.op == "X":
            return scores(self(_HIDDEN), self._fold_vector(self(right)))
        if left.kind is Kind.WIDE:
            product = torch.einsum("nhk,nhj->hkj", self(left.operands[0]), self(right))
            return over_vertices(self.matrix, product)
        x, w = self(left), self(right)
        if node.kind is Kind.VECTOR:
            return scores(x, w)
        if left.kind is Kind.WEIGHT:
            return torch.matmul(x, w) if w.ndim == 3 else torch.matmul(x, w[..., None])[..., 0]
        return torch.einsum("nhk,hkj->nhj", x, w.to(x.dtype))

    def _fold_vector(self, vector: Tensor) -> Tensor:
        assert self.fold is not None
        return torch.einsum("hkj,hj->hk", self.fold, vector.to(self.fold.dtype))

    def _shift(self, node: Expression) -> Tensor:
        x, bias = (self(operand) for operand in node.operands)
        return x + bias.to(x.dtype)

    def _norm(self, node: Expression) -> Tensor:
        x = wide(self(node.operands[0]))
        square = x.square().sum(-1)
        tiny = square <= SMALLEST_NORM**2
        # The inner `where` keeps the derivative of the root finite in lanes the outer one drops.
        length = torch.where(tiny, 1.0, square).sqrt()
        return torch.where(tiny, SMALLEST_NORM, length)

    def _normalize(self, node: Expression) -> Tensor:
        (inner,) = node.operands
        x = self(inner)
        length = self(Expression("norm", (inner,), Kind.VECTOR))
        return x / length[..., None].to(x.dtype)

    def _scale_rows(self, node: Expression) -> Tensor:
        u, x = (self(operand) for operand in node.operands)
        return u[..., None].to(x.dtype) * x

    def _row_sum(self, node: Expression) -> Tensor:
        return row_sum(self.csr, self(node.operands[0]))

    def _softmax(self, node: Expression) -> Tensor:
        return graph_softmax(self.csr, self(node.operands[0]))

    def _dropout(self, node: Expression) -> Tensor:
        values = self(node.operands[0])
        if not self.training:
            return values
        seed = as_seed(None, self.csr.device)
        mask = keep_mask(self.csr, seed, values.shape[1], node.options[0])
        return values * mask.to(values.dtype)

    def _aggregate(self, node: Expression) -> Tensor:
        matrix, x = node.operands
        transposed = matrix.op == "transpose"
        csr, values = self.csr, self(matrix.operands[0] if transposed else matrix)
        if transposed:
            csr, values = csr.transpose(), values[csr.position]
        held = self(x) if transposed else self.columns(x)
        if x.kind is Kind.VECTOR:
            held = held[..., None]
        found = weighted_sum(csr, values, held)
        found = sum_of_columns(self.matrix, found) if transposed else found
        return found[..., 0] if x.kind is Kind.VECTOR else found

    def _region(self, region: Expression) -> Tensor:
        """Evaluate all that is elementwise around a sparse node in one pass over the edges."""
        gathered: list[Leaf] = []
        places: dict[Expression, tuple[int, ...] | float] = {}
        for node in leaves(region, self._regions - {region}):
            found = self._gathered(node)
            if isinstance(found, float):
                places[node] = found
                continue
            places[node] = tuple(range(len(gathered), len(gathered) + len(found)))
            gathered += found
        if all(leaf[0] == "everywhere" for leaf in gathered):
            one = torch.ones((), dtype=self.dtype, device=self.csr.device)
            gathered.append(("edge", one.expand(self.csr.nnz, 1)))
        heads = max(
            tensor.shape[0 if leaf[0] == "everywhere" else 1]
            for leaf in gathered
            for tensor in leaf[1:]
        )

        def formula(here: Sequence[Tensor]) -> Tensor:
            def value(node: Expression) -> Tensor | float:
                place = places.get(node)
                if isinstance(place, float):
                    return place
                if place is not None:
                    first, *rest = (here[number] for number in place)
                    return first * rest[0] if rest else first
                return _apply(node, [value(operand) for operand in node.operands])

            result = torch.as_tensor(value(region), dtype=here[-1].dtype, device=here[-1].device)
            return result if result.ndim == 2 else result.expand(len(here[-1]), heads)

        return sampled(self.csr, formula, gathered, heads)

    def _gathered(self, node: Expression) -> list[Leaf] | float:
        """Return the inputs of a pass's leaf from rows, columns and edges."""
        if node.kind is Kind.SCALAR:
            value = self.number(node)
            return value if isinstance(value, float) else [("everywhere", value)]
        if node.op == "pattern" or (node.op == "A" and self.csr.values is None):
            return 1.0
        if node.op == "product":
            left, right = node.operands
            held = right.operands[0] if right.op == "transpose" else right
            return [("dot", self(left), self.columns(held))]
        if node.op == "outer":
            u, v = node.operands
            return [("row", self(u)), ("column", self.columns(v))]
        if node.op == "replicate":
            return [("row", self(node.operands[0]))]
        if node.op == "transpose":
            return [("column", self.columns(node.operands[0].operands[0]))]
        return [("edge", self(node))]


def fixed_matrix(matrix: Matrix, psi: Expression, dtype: torch.dtype) -> Csr:
    """Return the graph with the values of a Psi that depends on the graph alone, computed once."""
    csr = whole_rows(matrix)
    if psi.op == "A" or (psi.op == "pattern" and csr.values is None):
        return csr
    if psi.op == "pattern":
        return csr.with_values(None)
    trained = csr.values is not None and csr.values.requires_grad
    known = {} if trained else _fixed.setdefault(csr, {})
    if (psi, dtype) not in known:
        # The cached values must serve training too, even if inference asks first.
        with torch.inference_mode(mode=False):
            evaluate = Evaluator(matrix, psi, _nothing, _nothing, {}, dtype=dtype)
            known[psi, dtype] = csr.with_values(evaluate(psi)[:, 0].to(dtype))
    return known[psi, dtype]


_HIDDEN = Expression("H", (), Kind.FEATURES)
_LEAVES = frozenset({"H", "X", "A", "pattern", "weight", "scalar"})
_FUNCTIONS: dict[str, Callable[..., Tensor]] = {
    "exp": torch.exp,
    "log": torch.log,
    "power": torch.pow,
    "inverse": lambda x: torch.where(x == 0, 0.0, 1.0 / torch.where(x == 0, 1.0, x)),
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": F.leaky_relu,
}
_OPERATORS: dict[str, Callable[..., Tensor]] = {
    "add": torch.add,
    "subtract": torch.subtract,
    "multiply": torch.multiply,
    "divide": torch.divide,
}


_NUMBER = torch.zeros((), dtype=torch.float64)


def _apply(node: Expression, values: Sequence[Tensor | float]) -> Tensor:
    like = next((value for value in values if isinstance(value, Tensor)), _NUMBER)
    held = [value if isinstance(value, Tensor) else like.new_tensor(value) for value in values]
    if node.op in _OPERATORS:
        return _OPERATORS[node.op](*held)
    return _FUNCTIONS[node.op](*held, *node.options)


def _nothing() -> Tensor:
    raise AssertionError("a fixed Psi does not look at features")
