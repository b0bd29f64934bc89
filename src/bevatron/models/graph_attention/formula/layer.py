"""The programmable layer: H' = sigma(Phi(sum over the edges, weighted by Psi)).

Besta et al., SC 2023, equation 1: Z = (Phi o +)(Psi(A, H), H). Psi is a formula
(`bevatron.models.graph_attention.formula.expression`), + one of the semirings sum, mean, max, min,
Phi a matrix or an MLP. The planner decides how it is computed; `Layer.explain` prints its decision.
"""

from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from bevatron.errors import ConfigError
from bevatron.kernels.graph import dot_attention as dot
from bevatron.kernels.graph import graph_attention as additive
from bevatron.kernels.graph.csr import Csr
from bevatron.kernels.graph.graph_blocks import weighted_sum
from bevatron.kernels.graph.spmm import spmm
from bevatron.models.graph_attention.formula.evaluate import Evaluator, fixed_matrix
from bevatron.models.graph_attention.formula.expression import Expression, number, walk
from bevatron.models.graph_attention.formula.forms import (
    AdditiveForm,
    DotForm,
    FixedForm,
    JointForm,
)
from bevatron.models.graph_attention.formula.planner import (
    Aggregate,
    Order,
    Plan,
    Widths,
    attends,
    plan,
)
from bevatron.models.graph_attention.graph_layer import (
    Activation,
    Combine,
    Features,
    GraphLayer,
    dense_features,
)
from bevatron.models.graph_attention.matrix import (
    Attends,
    Matrix,
    dot_attention,
    graph_attention,
    of_columns,
    whole_rows,
)


class Layer(GraphLayer):
    r"""One layer of a graph neural network, composed of Psi, a semiring, Phi and an activation.

    Raises ConfigError if Psi would need a dense n x n result, or arguments contradict each other.

    Parameters
    ----------
    inputs, outputs
        Widths of H and of one head's result; may be left out if ``phi`` is an ``nn.Linear``.
    psi : formula of the n x n matrix that weighs the edges; it must be sparse
    aggregate
        Semiring. ``mean`` divides by the sum of Psi's row; ``max`` and ``min`` are tropical: the
        values of Psi are added to the features, and a Psi of the pattern alone adds nothing.
    phi
        ``"linear"``: a learned matrix for each head; an ``nn.Linear``, used as it is; any other
        module from [n, inputs] to [n, outputs], such as an MLP; None: nothing.
    activation : applied to the result
    heads, combine : heads with weights of their own, concatenated or averaged
    bias : add a learned vector after the aggregation (not with a module as ``phi``)
    inner_bias : add a learned vector to X itself, before the aggregation
    root : number or learned scalar with which each vertex counts itself: Psi + root * identity
    order : ``project`` (Phi first), ``aggregate``, or ``auto``, the cheaper one
    value_dropout
        Probability that an element of the values is dropped in training. Psi is computed from the
        features before dropout, so it must not consist of dot products of them.

    Examples
    --------
    >>> from bevatron.models.graph_attention.formula.expression import A, H, norm, outer
    >>> layer = Layer(8, 4, psi=A * (H @ H.T) / outer(norm(H), norm(H)), activation=torch.relu)
    >>> csr = Csr.from_coo(torch.tensor([0, 1, 1]), torch.tensor([1, 0, 2]), (3, 3))
    >>> layer(csr, torch.randn(3, 8)).shape
    torch.Size([3, 4])
    >>> print(layer.explain().splitlines()[2])
    kernel: dot_attention
    """

    def __init__(
        self,
        inputs: int | None = None,
        outputs: int | None = None,
        *,
        psi: Expression,
        aggregate: Aggregate = "sum",
        phi: nn.Module | Literal["linear"] | None = "linear",
        activation: Activation | None = None,
        heads: int = 1,
        combine: Combine = "concat",
        bias: bool = True,
        inner_bias: bool = False,
        root: Expression | float | None = None,
        order: Order | Literal["auto"] = "auto",
        value_dropout: float = 0.0,
        input_dropout: float = 0.0,
        own_glorot: bool = False,
    ) -> None:
        if input_dropout and (phi != "linear" or order != "project"):
            raise ConfigError('input_dropout: needs phi="linear" and order="project"')
        inputs, outputs = _widths(inputs, outputs, phi, heads)
        root = number(root) if isinstance(root, int | float) else root
        nodes = walk(psi) + ([] if root is None else walk(root))
        linear = not isinstance(phi, nn.Module) or isinstance(phi, nn.Linear)
        super().__init__(
            *(inputs, outputs),
            learned=_shapes(nodes, inputs, outputs, heads),
            initial={node.options[0]: node.options[1] for node in nodes if node.op == "scalar"},
            phi=phi,
            activation=activation,
            heads=heads,
            combine=combine,
            bias=bias,
            inner_bias=inner_bias and linear,
            input_dropout=input_dropout,
            own_glorot=own_glorot,
        )
        self.widths = Widths(inputs, outputs, heads)
        self.psi, self.aggregate, self.order = psi, aggregate, order
        self.root, self.linear, self.value_dropout = root, linear, value_dropout
        self._plans: dict[bool, Plan] = {}
        form = self.plan(weighted=False).form
        if value_dropout and isinstance(form, DotForm | JointForm):
            raise ConfigError(
                f"value_dropout: {psi} sums the very features that its scores are made of; drop "
                "those before the layer"
            )

    def plan(self, *, weighted: bool) -> Plan:
        """Return how the layer computes on graphs with or without edge values."""
        if weighted not in self._plans:
            order = self.order
            if self.inner_bias is not None or (self.weight is None and self.phi is None):
                order = "project"
            self._plans[weighted] = plan(
                self.psi,
                self.aggregate,
                self.widths,
                linear=self.linear,
                projects=self._projects,
                weighted=weighted,
                order=order,
            )
        return self._plans[weighted]

    def explain(self, *, weighted: bool = False) -> str:
        """Explain how the layer is computed, and why."""
        return self.plan(weighted=weighted).explain()

    def extra_repr(self) -> str:
        """Describe the layer when it is printed."""
        widths = self.widths
        return (
            f"{widths.inputs} -> {widths.heads} x {widths.outputs}, psi={self.psi}, "
            f"{self.aggregate}, {self.plan(weighted=False).kernel}"
        )

    def attends(self, *, weighted: bool = False) -> Attends:
        """Return the plan's requirement on a partition, with or without edge values."""
        return attends(self.plan(weighted=weighted), weighted=weighted)

    def attend(self, matrix: Matrix, features: Features) -> Float[Tensor, "n H out"]:
        """Evaluate the formula according to the plan."""
        chosen = self.plan(weighted=matrix.values is not None)
        project_first = chosen.order == "project"
        hidden = _Once(lambda: dense_features(features)[:, None])
        projected = _Once(lambda: self.project(features))
        evaluate = Evaluator(
            matrix,
            chosen.psi,
            hidden,
            projected,
            dict(self.learned.items()),
            fold=None if project_first else self.matrix(),
            training=self.training,
            dtype=torch.promote_types(_features_dtype(features), torch.float32),
        )
        value = projected() if project_first else hidden()
        if not isinstance(chosen.form, FixedForm) and value.shape[1] < self.widths.heads:
            value = value.expand(-1, self.widths.heads, -1)
        kept = F.dropout(value, self.value_dropout, self.training)
        summed = self._sum(chosen, matrix, evaluate, kept)
        if self.root is not None:
            root = torch.as_tensor(evaluate.number(self.root), device=value.device)
            summed = summed + root.reshape(1, -1, 1).to(value.dtype) * value
        return summed if project_first else self.project_sum(summed)

    def _sum(self, chosen: Plan, matrix: Matrix, evaluate: Evaluator, value: Tensor) -> Tensor:
        """Aggregate ``value`` [n, H, k] over the edges, weighted by Psi."""
        form, shape = chosen.form, value.shape[:2]
        needs = attends(chosen, weighted=matrix.values is not None)
        if needs == "gat" and isinstance(form, AdditiveForm):
            row, column = evaluate(form.row).expand(shape), evaluate(form.column).expand(shape)
            dropout = form.dropout if self.training else 0.0
            return graph_attention(matrix, value, row, column, form.slope, dropout)
        if needs == "dot" and isinstance(form, DotForm):
            options = {"normalize": form.cosine, "softmax": form.softmax}
            return dot_attention(matrix, value, **options, scale=evaluate.number(form.scale))
        csr, value = whole_rows(matrix), of_columns(matrix, value)
        if isinstance(form, FixedForm):
            dtype = torch.promote_types(value.dtype, torch.float32)
            return spmm(fixed_matrix(matrix, form.psi, dtype), value, self.aggregate)
        if isinstance(form, AdditiveForm):
            row, column = evaluate(form.row), evaluate.columns(form.column)
            return additive.graph_attention(
                csr if form.weights_outside else csr.with_values(None),
                *(value, row.expand(-1, shape[1]), column.expand(-1, shape[1]), form.slope),
                form.dropout if self.training else 0.0,
            )
        if isinstance(form, JointForm):
            return self._joint(form, chosen, csr, evaluate)
        if isinstance(form, DotForm):
            return self._dot(form, chosen, csr, evaluate, value)
        return self._composed(csr, evaluate(chosen.psi), value)

    def _joint(self, form: JointForm, chosen: Plan, csr: Csr, evaluate: Evaluator) -> Tensor:
        if chosen.order != "project" or form.key.op != "X":
            raise ConfigError(f"psi: {chosen.psi}: joint scores take X as second argument")
        key, query = evaluate.columns(form.key), evaluate(form.query)
        return additive.graph_attention_v2(
            csr if form.weights_outside else csr.with_values(None),
            key,
            query.to(key.dtype).expand(-1, *key.shape[1:]),
            evaluate(form.weight).to(key.dtype),
            form.slope,
            form.dropout if self.training else 0.0,
        )

    def _dot(
        self, form: DotForm, chosen: Plan, csr: Csr, evaluate: Evaluator, value: Tensor
    ) -> Tensor:
        heads = value.shape[1]
        key = evaluate.columns(form.key).expand(-1, heads, -1)
        same = form.query == form.key and csr is evaluate.matrix
        query = None if same else evaluate(form.query).expand(-1, heads, -1)
        if form.column_scale is not None:
            # A column without entries may have an infinite scale, 1 over a degree of 0.
            scale = _where_entries(evaluate.columns(form.column_scale), csr.col_ptr)
            value = value * scale[..., None].to(value.dtype)
        result = dot.dot_attention(
            csr if form.weights_outside else csr.with_values(None),
            key.to(value.dtype),
            query=None if query is None else query.to(value.dtype),
            value=None if chosen.one_fetch else value,
            normalize=form.cosine,
            softmax=form.softmax,
            scale=evaluate.number(form.scale),
        )
        if form.row_scale is None:
            return result
        scale = _where_entries(evaluate(form.row_scale), csr.row_ptr)
        return result * scale[..., None].to(result.dtype)

    def _composed(self, csr: Csr, values: Tensor, value: Tensor) -> Tensor:
        """Aggregate with edge values [nnz, H] that no fused kernel computes."""
        if self.aggregate == "sum":
            return weighted_sum(csr, values, value)
        values = values.expand(-1, value.shape[1])
        parts = [
            spmm(csr.with_values(values[:, head]), value[:, head], self.aggregate)
            for head in range(value.shape[1])
        ]
        return torch.stack(parts, dim=1)

    @property
    def _projects(self) -> bool:
        """Whether X is anything other than H."""
        own = (self.weight, self.phi, self.inner_bias)
        return any(part is not None for part in own)


class _Once:
    """Calls a function once and caches its result."""

    def __init__(self, function: Callable[[], Tensor]) -> None:
        self._function = function
        self._value: Tensor | None = None

    def __call__(self) -> Tensor:
        if self._value is None:
            self._value = self._function()
        return self._value


def _where_entries(vector: Tensor, ptr: Tensor) -> Tensor:
    return torch.where(ptr.diff()[:, None] > 0, vector, 0.0)


def _features_dtype(features: Features) -> torch.dtype:
    """Return the floating-point type of dense or sparse features."""
    if isinstance(features, Tensor):
        return features.dtype
    return torch.get_default_dtype() if features.values is None else features.values.dtype


def _shapes(
    nodes: list[Expression], inputs: int, outputs: int, heads: int
) -> dict[str, tuple[int, ...]]:
    """Shapes of a formula's parameters, by name."""
    sizes = {"in": inputs, "out": outputs}
    found: dict[str, tuple[int, ...]] = {}
    for node in nodes:
        if node.op == "scalar":
            shape: tuple[int, ...] = (heads,)
        elif node.op == "weight":
            own = (sizes[s] if isinstance(s, str) else s for s in node.options[1])
            shape = (heads, *own)
        else:
            continue
        name = node.options[0]
        if found.setdefault(name, shape) != shape:
            raise ConfigError(f"psi: {name} has shapes {found[name][1:]} and {shape[1:]}")
    return found


def _widths(
    inputs: int | None, outputs: int | None, phi: nn.Module | str | None, heads: int
) -> tuple[int, int]:
    if isinstance(phi, nn.Linear):
        if (inputs or phi.in_features, outputs or phi.out_features) != (
            phi.in_features,
            phi.out_features,
        ):
            raise ConfigError(f"layer: {inputs} -> {outputs} does not fit phi, which is {phi}")
        inputs, outputs = phi.in_features, phi.out_features
    if phi is None:
        outputs = outputs or inputs
        if inputs != outputs:
            raise ConfigError(f"layer: without phi {inputs} features cannot become {outputs}")
    if inputs is None or outputs is None:
        raise ConfigError("layer: inputs and outputs are needed unless phi is an nn.Linear")
    if heads > 1 and phi != "linear":
        raise ConfigError(f"layer: {heads} heads need phi='linear', a matrix for each")
    return inputs, outputs
