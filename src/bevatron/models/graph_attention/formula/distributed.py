"""Formulas on a graph that is partitioned over processes.

Per-vertex work (projections, scores, biases, activations) is done by each rank for its own
vertices, so a stack of layers takes a `DistributedGraph` where it takes a matrix:
``model.stack(graph, graph.scatter(features))``.
"""

from collections.abc import Callable

from torch import Tensor

from bevatron.models.graph_attention.formula.expression import Expression, Kind, walk
from bevatron.models.graph_attention.formula.forms import AdditiveForm, DotForm
from bevatron.models.graph_attention.formula.planner import Plan
from bevatron.models.graph_attention.graph_layer import only_whole
from bevatron.parallel.graph_partition import DistributedGraph


def sum_over_ranks(
    plan: Plan,
    graph: DistributedGraph,
    evaluate: Callable[[Expression], Tensor],
    number: Callable[[Expression], float | Tensor],
    value: Tensor,
    *,
    training: bool,
) -> Tensor:
    """Aggregate ``value`` [vertices of this rank, H, k] over the edges of the whole graph.

    Parameters
    ----------
    plan, graph, value
        What is computed, on which graph, of which features.
    evaluate, number
        Values of vectors and of scalars in the formula.
    training
        Whether attention is dropped.

    Raises
    ------
    ConfigError
        For a Psi that is neither GAT's nor a dot product or cosine of the features with themselves.
    """
    form = plan.form
    if isinstance(form, AdditiveForm) and _weights_fit(form, graph) and _vertex_only(form):
        shape = value.shape[:2]
        row, column = evaluate(form.row).expand(shape), evaluate(form.column).expand(shape)
        dropout = form.dropout if training else 0.0
        return graph.graph_attention(value, row, column, form.slope, dropout)
    if isinstance(form, DotForm) and _weights_fit(form, graph) and _is_plain(form, plan):
        return graph.dot_attention(
            value,
            normalize=form.cosine,
            softmax=form.softmax,
            scale=number(form.scale),
        )
    raise only_whole(f"psi: {plan.psi}")


def _weights_fit(form: AdditiveForm | DotForm, graph: DistributedGraph) -> bool:
    """Whether the graph's values, if it has any, multiply the attention after the softmax."""
    return graph.values is None or (form.weights_outside and not form.weights_inside)


def _vertex_only(form: AdditiveForm) -> bool:
    """Whether the scores need nothing of the edges, such as a degree."""
    nodes = [*walk(form.row), *walk(form.column)]
    return all(node.kind is not Kind.SPARSE for node in nodes)


def _is_plain(form: DotForm, plan: Plan) -> bool:
    """Whether the features that are summed are those of the scores, unscaled."""
    own = form.query == form.key and plan.one_fetch
    return own and form.row_scale is None and form.dropout == 0
