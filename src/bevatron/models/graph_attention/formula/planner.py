"""The plan of a layer: order, kernel and the reasons, decided before it runs.

From Psi, the semiring and Phi, the planner marks the n x n nodes that are never allocated, finds
the kernel that computes Psi's form, or else the passes over the edges of the composed form, and
chooses whether Phi or the aggregation comes first by the words read per edge.
"""

import functools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from bevatron.errors import ConfigError
from bevatron.models.graph_attention.formula.expression import Expression, Kind, walk
from bevatron.models.graph_attention.formula.forms import (
    AdditiveForm,
    ComposedForm,
    DotForm,
    FixedForm,
    Form,
    JointForm,
    recognise,
)
from bevatron.models.graph_attention.matrix import Attends

Aggregate = Literal["sum", "mean", "max", "min"]
Order = Literal["project", "aggregate"]
ELEMENTWISE = frozenset(
    {
        "add",
        "subtract",
        "multiply",
        "divide",
        "exp",
        "log",
        "power",
        "inverse",
        "tanh",
        "sigmoid",
        "leaky_relu",
    }
)
"""Elementwise operations."""


@dataclass(frozen=True)
class Widths:
    """Widths of a layer.

    Attributes
    ----------
    inputs, outputs : widths of H and of one head's Phi(H)
    heads : number of heads
    """

    inputs: int
    outputs: int
    heads: int = 1


@dataclass(frozen=True)
class Plan:
    """A layer's way of computing.

    Attributes
    ----------
    psi, form : the formula and its recognised form
    kernel : ``graph_attention``, ``dot_attention``, ``spmm`` or ``composed``
    order : ``project``: Phi first; ``aggregate``: the sum over edges first
    one_fetch : whether the row fetched for a score is the one that is summed (dot products only)
    words_forward, words_backward : predicted numbers read and written per edge, all heads
    kept_per_edge : numbers per edge that live from the forward to the backward pass
    virtual : the n x n nodes, none of which is allocated, and the sparse node that samples each
    reasons : sentences for `explain`
    """

    psi: Expression
    form: Form
    kernel: str
    order: Order
    one_fetch: bool
    words_forward: int
    words_backward: int
    kept_per_edge: int
    virtual: tuple[tuple[Expression, Expression], ...]
    reasons: tuple[str, ...]

    def explain(self) -> str:
        """Explain in a few lines how the layer is computed, and why."""
        lines = [f"psi: {self.psi}"]
        for sample, nodes in _grouped(self.virtual):
            first = [str(node) for node in nodes if node.op not in ELEMENTWISE]
            made = len(nodes) - len(first)
            more = f" and {made} made of them" if made else ""
            listed = ", ".join(first) + more
            lines.append(f"virtual n x n: {listed}; on the edges only, in one pass: {sample}")
        lines.append(f"kernel: {self.kernel}")
        lines += self.reasons
        lines.append(
            f"words per edge: {self.words_forward} forward, {self.words_backward} backward, "
            f"{self.kept_per_edge} kept between them"
        )
        return "\n".join(lines)


def plan(
    psi: Expression,
    aggregate: Aggregate,
    widths: Widths,
    *,
    linear: bool = True,
    projects: bool = True,
    weighted: bool = False,
    order: Order | Literal["auto"] = "auto",
) -> Plan:
    """Decide how a layer Z = Phi(sum over Psi of H) is computed.

    Raises ConfigError if Psi is not sparse, or the requested order would change the result.

    Parameters
    ----------
    psi : the formula
    aggregate : the semiring of the aggregation
    widths : widths of the layer
    linear : whether Phi is a matrix: then it may come before or after a sum or mean
    projects : whether there is a Phi; if not, X is H
    weighted
        Whether the graph has edge values: a kernel that has them outside of the softmax cannot
        have them inside.
    order : what to compute first, instead of letting the planner choose
    """
    if psi.kind is not Kind.SPARSE:
        hint = "; multiply it by A, so that only edges are computed"
        raise ConfigError(
            f"psi: {psi} is {psi.kind.value}, expected a sparse n x n matrix"
            + (hint if psi.kind is Kind.VIRTUAL else "")
        )
    form = recognise(psi)
    obstacle = _obstacle(form, aggregate, weighted)
    if obstacle:
        form = ComposedForm(psi)
    if isinstance(form, ComposedForm) and any(node.op == "joint" for node in walk(psi)):
        raise ConfigError(
            f"psi: {psi}: joint scores are computed by the kernel of GATv2 alone, which sums "
            "[A *] softmax(A.pattern * joint(l, X, a))" + (f"; {obstacle}" if obstacle else "")
        )
    chosen, reason = _choose_order(psi, form, aggregate, widths, linear, order)
    kernel, why = _kernel(form)
    if not projects:
        reason = "order: the aggregation alone, there is no Phi"
    one_fetch = isinstance(form, DotForm) and _one_fetch(form, chosen, projects)
    words = _words(form, widths, chosen, one_fetch)
    reasons = (f"because {obstacle or why}", reason)
    return Plan(psi, form, kernel, chosen, one_fetch, *words, virtual_nodes(psi), reasons)


def attends(chosen: Plan, *, weighted: bool) -> Attends:
    """Return a plan's requirement on a partitioned graph, with or without edge values.

    Partitions support GAT's attention with scores of single vertices, and unscaled dot products of
    the features that are summed; edge values multiply both after the softmax. Any other form needs
    whole rows.
    """
    form = chosen.form
    if not isinstance(form, AdditiveForm | DotForm):
        return "rows"
    if weighted and not (form.weights_outside and not form.weights_inside):
        return "rows"
    if isinstance(form, AdditiveForm):
        scores = [*walk(form.row), *walk(form.column)]
        return "rows" if any(node.kind is Kind.SPARSE for node in scores) else "gat"
    own = form.query == form.key and chosen.one_fetch
    return "dot" if own and form.row_scale is None and form.dropout == 0 else "rows"


def virtual_nodes(psi: Expression) -> tuple[tuple[Expression, Expression], ...]:
    """Find the dense n x n nodes and the sparse node that each is sampled by."""
    found: dict[Expression, Expression] = {}
    for region in regions(psi):
        for node in reversed(walk(region)):
            if node.kind is Kind.VIRTUAL and node not in found:
                found[node] = region
    return tuple(found.items())


@functools.lru_cache(maxsize=256)
def regions(psi: Expression) -> tuple[Expression, ...]:
    """Sparse nodes that are computed in one pass over the edges, each with all that it samples.

    A region ends where a non-elementwise operation, or several operations, use its result.
    """
    users: dict[Expression, int] = {}
    inside: set[Expression] = set()
    nodes = walk(psi)
    for node in nodes:
        for operand in dict.fromkeys(node.operands):
            users[operand] = users.get(operand, 0) + 1
            if node.op in ELEMENTWISE and node.kind is Kind.SPARSE:
                inside.add(operand)
    return tuple(
        node
        for node in nodes
        if node.kind is Kind.SPARSE
        and node.op in ELEMENTWISE
        and (node not in inside or users[node] > 1)
    )


def _obstacle(form: Form, aggregate: Aggregate, weighted: bool) -> str:
    """Return why no kernel can be used although Psi has its form, or nothing."""
    if isinstance(form, ComposedForm | FixedForm):
        return ""
    softmax = not isinstance(form, DotForm) or form.softmax
    if form.weights_inside and weighted:
        return "edge values are inside the softmax and the kernels have them outside"
    if aggregate in {"max", "min"}:
        return f"the fused kernels have no {aggregate}"
    if aggregate == "mean" and (not softmax or form.dropout or (form.weights_outside and weighted)):
        return "a mean divides by the sum of Psi's rows, which the fused kernels do not give"
    if isinstance(form, DotForm) and form.dropout:
        return "the kernel of scalar products has no attention dropout"
    return ""


def _kernel(form: Form) -> tuple[str, str]:
    """Name the kernel of a form and say why."""
    if isinstance(form, AdditiveForm):
        return "graph_attention", (
            "psi is softmax(leaky_relu(u 1^T + 1 v^T)): scores, softmax and sum in one pass"
        )
    if isinstance(form, JointForm):
        return "graph_attention_v2", (
            "psi is softmax(a . leaky_relu(l_i + r_j)): scores, softmax and sum in one pass"
        )
    if isinstance(form, DotForm):
        what = "cosines" if form.cosine else "scalar products"
        rest = ", softmax" if form.softmax else ""
        return "dot_attention", f"psi is made of {what} of rows: scores{rest} and sum in one pass"
    if isinstance(form, FixedForm):
        return "spmm", "psi depends on the graph alone: its values are computed once and kept"
    return "composed", "no fused kernel has this form: numbers on edges are kept, features are not"


def _uses(psi: Expression) -> tuple[bool, bool]:
    """Whether Psi uses X, and whether other than as X @ vector."""
    nodes = walk(psi)
    whole = any(
        operand.op == "X" and not (node.op == "project" and node.kind is Kind.VECTOR)
        for node in nodes
        for operand in node.operands
    )
    return any(node.op == "X" for node in nodes), whole


def _choose_order(
    psi: Expression,
    form: Form,
    aggregate: Aggregate,
    widths: Widths,
    linear: bool,
    order: Order | Literal["auto"],
) -> tuple[Order, str]:
    """Decide whether Phi or the aggregation comes first, and say why."""
    any_x, whole_x = _uses(psi)
    needs_x = whole_x or (any_x and not linear)
    if order == "aggregate" and needs_x:
        raise ConfigError(
            f"order: psi ({psi}) uses X, the projected features, so Phi must come before the "
            "aggregation; set order to 'auto' or 'project'"
        )
    if order != "auto":
        return order, f"order: {_spelled(order)}, as asked for"
    if needs_x:
        return "project", "order: Phi first, because psi uses X"
    if not linear or aggregate in {"max", "min"}:
        what = "an MLP" if not linear else f"a {aggregate}"
        return "aggregate", f"order: the aggregation first, because {what} does not commute"
    before, after = widths.heads * widths.inputs, widths.heads * widths.outputs
    if isinstance(form, DotForm | JointForm) and form.key.op == "H":
        return "aggregate", (
            f"order: the aggregation first, because the row fetched for the score is the one that "
            f"is summed: {before} words per edge instead of {before} + {after}"
        )
    if before < after:
        return "aggregate", f"order: the aggregation first, {before} words per edge, not {after}"
    return "project", f"order: Phi first, {after} words per edge, not {before}"


def _spelled(order: Order) -> str:
    return "Phi first" if order == "project" else "the aggregation first"


def feature_width(node: Expression, widths: Widths) -> int:
    """Columns of a node that is features, for one head."""
    if node.op == "H":
        return widths.inputs
    if node.op == "X":
        return widths.outputs
    if node.op == "project":
        return weight_columns(node.operands[1], widths)
    return feature_width(next(o for o in node.operands if o.kind is Kind.FEATURES), widths)


def weight_columns(node: Expression, widths: Widths) -> int:
    """Columns of a node that is a weight."""
    if node.op == "weight":
        size = node.options[1][-1]
        named = {"in": widths.inputs, "out": widths.outputs}
        return named[size] if isinstance(size, str) else int(size)
    last = node.operands[-1]
    if last.kind is Kind.FEATURES:
        return feature_width(last, widths)
    return weight_columns(last, widths)


def _one_fetch(form: DotForm, order: Order, projects: bool) -> bool:
    """Whether the keys are the features that are summed."""
    alike = {"X" if order == "project" else "H"} if projects else {"X", "H"}
    return form.key.op in alike and form.column_scale is None


def _words(form: Form, widths: Widths, order: Order, one_fetch: bool) -> tuple[int, int, int]:
    """Predict words per edge: forward, backward, kept."""
    heads = widths.heads
    summed = heads * (widths.outputs if order == "project" else widths.inputs)
    if isinstance(form, AdditiveForm):
        return summed + 1 + heads, summed + 2 + 3 * heads, 0
    if isinstance(form, DotForm):
        key = heads * feature_width(form.key, widths)
        value = 0 if one_fetch else summed
        return key + value + 1, 3 * key + 2 * value + 2, 0
    if isinstance(form, JointForm):
        return summed + 1, 3 * summed + 2, 0
    if isinstance(form, FixedForm):
        return summed + 2, summed + 2, 0
    forward, backward, kept = summed + 1 + heads, 2 * (summed + 1 + heads), 0
    for region in regions(form.psi):
        gathered = [node for node in leaves(region) if node.kind is not Kind.SCALAR]
        dots = [
            heads * feature_width(node.operands[0], widths)
            for node in gathered
            if node.op == "product"
        ]
        others = heads * (len(gathered) - len(dots))
        forward += sum(dots) + others + 1 + heads
        backward += 3 * sum(dots) + len(dots) * (2 + 2 * heads) + 2 * others + 1 + heads
        kept += heads
    softmaxes = sum(node.op == "softmax" for node in walk(form.psi))
    return (
        forward + 3 * heads * softmaxes,
        backward + 4 * heads * softmaxes,
        (kept + heads * softmaxes),
    )


def leaves(region: Expression, others: Collection[Expression] = ()) -> list[Expression]:
    """List what a pass over the edges gathers: the nodes where its elementwise part ends.

    Parameters
    ----------
    region : root of the pass
    others : sparse nodes that have passes of their own
    """
    found: dict[Expression, None] = {}

    def visit(node: Expression) -> None:
        for operand in node.operands:
            inner = operand.op in ELEMENTWISE and operand.kind in {Kind.VIRTUAL, Kind.SPARSE}
            if inner and operand not in others:
                visit(operand)
            else:
                found[operand] = None

    visit(region)
    return list(found)


def _grouped(
    virtual: tuple[tuple[Expression, Expression], ...],
) -> list[tuple[Expression, list[Expression]]]:
    groups: dict[Expression, list[Expression]] = {}
    for node, sample in virtual:
        groups.setdefault(sample, []).append(node)
    return list(groups.items())
