"""Formulas evaluated the way nobody should: with dense n x n matrices."""

import torch

from bevatron.models.graph_attention.formula.expression import Kind

FUNCTIONS = {
    "exp": torch.exp,
    "log": torch.log,
    "power": torch.pow,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky_relu": torch.nn.functional.leaky_relu,
}
SIGNS = {
    "add": torch.add,
    "subtract": torch.subtract,
    "multiply": torch.multiply,
    "divide": torch.divide,
}


def dense(psi, adjacency, hidden, projected, learned):
    """Value of a formula for one head.

    ``adjacency`` is n x n with NaN where there is no edge.
    """
    absent = adjacency.isnan()
    filled = adjacency.nan_to_num(0.0)
    known = {}

    def value(node):
        if node not in known:
            known[node] = compute(node)
        return known[node]

    def compute(node):
        operands = [value(operand) for operand in node.operands]
        if node.kind is Kind.SPARSE and node.op in FUNCTIONS:
            return FUNCTIONS[node.op](
                operands[0].masked_fill(absent, 1.0), *node.options
            ).masked_fill(absent, 0.0)
        if node.kind is Kind.SPARSE and node.op in SIGNS:
            left, right = operands
            if node.op == "divide" and right.ndim:
                right = right.masked_fill(absent, 1.0)
            return SIGNS[node.op](left, right).masked_fill(absent, 0.0)
        if node.op in FUNCTIONS:
            return FUNCTIONS[node.op](operands[0], *node.options)
        if node.op in SIGNS:
            return SIGNS[node.op](*operands)
        return RULES[node.op](node, operands)

    def softmax(node, operands):
        scores = operands[0].masked_fill(absent, -torch.inf)
        empty = absent.all(1, keepdim=True)
        return scores.masked_fill(empty, 0.0).softmax(1).masked_fill(absent, 0.0)

    RULES = {
        "A": lambda node, o: filled,
        "pattern": lambda node, o: (~absent).double(),
        "H": lambda node, o: hidden,
        "X": lambda node, o: projected,
        "number": lambda node, o: torch.tensor(node.options[0], dtype=torch.float64),
        "weight": lambda node, o: learned[node.options[0]],
        "scalar": lambda node, o: learned[node.options[0]],
        "transpose": lambda node, o: o[0].T,
        "product": lambda node, o: o[0] @ o[1],
        "project": lambda node, o: o[0] @ o[1],
        "aggregate": lambda node, o: o[0] @ o[1],
        "shift": lambda node, o: o[0] + o[1],
        "outer": lambda node, o: torch.outer(*o),
        "replicate": lambda node, o: o[0][:, None].expand(-1, len(o[0])),
        "norm": lambda node, o: o[0].norm(dim=1),
        "normalize": lambda node, o: o[0] / o[0].norm(dim=1, keepdim=True),
        "scale_rows": lambda node, o: o[0][:, None] * o[1],
        "row_sum": lambda node, o: o[0].sum(1),
        "softmax": softmax,
        "joint": lambda node, o: (
            torch.nn.functional.leaky_relu(o[0][:, None] + o[1][None], *node.options) @ o[2]
        ),
    }
    return value(psi)


def dense_layer(layer, adjacency, hidden):
    """A layer's result, sum over the edges, from dense matrices; Phi first."""
    parts = []
    for head in range(layer.widths.heads):
        weight = None if layer.weight is None else layer.weight[head]
        x = hidden if weight is None else hidden @ weight
        learned = {name: p[head] for name, p in layer.learned.items()}
        if layer.inner_bias is not None:
            x = x + layer.inner_bias[head]
        if layer.phi is not None:
            x = layer.phi(hidden)
        parts.append(dense(layer.psi, adjacency, hidden, x, learned) @ x)
    z = torch.cat(parts, 1) if layer.combine == "concat" else torch.stack(parts).mean(0)
    return z if layer.bias is None else z + layer.bias
