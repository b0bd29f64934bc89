"""What the planner decides and says."""

import pytest
import torch

from bevatron.errors import ConfigError
from bevatron.kernels.graph.csr import Csr, sums
from bevatron.kernels.graph.graph_blocks import piece_elements
from bevatron.models.graph_attention.formula.expression import (
    A,
    H,
    X,
    exp,
    joint,
    leaky_relu,
    norm,
    outer,
    replicate,
    row_sum,
    softmax,
    weight,
)
from bevatron.models.graph_attention.formula.layer import Layer
from bevatron.models.graph_attention.formula.planner import Widths, plan, virtual_nodes
from bevatron.models.graph_attention.layers import agnn, agnn_paper, gat, gatv2, gcn, va
from dispatched import LargestTensor

cosine = A * (H @ H.T) / outer(norm(H), norm(H))
attention = softmax(
    A.pattern * leaky_relu(replicate(X @ weight("a", "out")) + replicate(X @ weight("b", "out")).T)
)


def test_every_dense_node_is_marked_with_the_pass_that_samples_it():
    marked = {str(node): str(sample) for node, sample in virtual_nodes(cosine)}
    whole = str(cosine)
    assert marked == {"H @ H.T": whole, "outer(norm(H), norm(H))": whole}
    two = softmax(A * exp(H @ H.T)) * (X @ X.T)
    marked = {str(node): str(sample) for node, sample in virtual_nodes(two)}
    assert marked["exp(H @ H.T)"] == "A * exp(H @ H.T)"
    assert marked["X @ X.T"] == str(two)


@pytest.mark.parametrize(
    ("psi", "aggregate", "kernel"),
    [
        (attention, "sum", "graph_attention"),
        (attention, "mean", "graph_attention"),
        (attention, "max", "composed"),
        (cosine, "sum", "dot_attention"),
        (cosine, "mean", "composed"),
        (A, "max", "spmm"),
        (A.pattern / replicate(row_sum(A.pattern)), "sum", "spmm"),
        (softmax(A * exp(H @ H.T)), "sum", "composed"),
    ],
)
def test_kernels_are_chosen_by_form_and_semiring(psi, aggregate, kernel):
    assert plan(psi, aggregate, Widths(8, 4)).kernel == kernel


def test_edge_values_inside_a_softmax_need_the_composed_form():
    inside = softmax(A * leaky_relu(attention.operands[0].operands[1].operands[0]))
    assert plan(inside, "sum", Widths(8, 4), weighted=False).kernel == "graph_attention"
    weighted = plan(inside, "sum", Widths(8, 4), weighted=True)
    assert weighted.kernel == "composed"
    assert "edge values are inside the softmax" in weighted.explain()


@pytest.mark.parametrize(
    ("psi", "inputs", "outputs", "order"),
    [
        (A, 100, 10, "project"),
        (A, 10, 100, "aggregate"),
        (attention, 100, 10, "project"),
        (attention, 10, 100, "aggregate"),
        (cosine, 100, 10, "aggregate"),
        (A * (X @ X.T), 10, 100, "project"),
    ],
)
def test_phi_comes_where_it_costs_less(psi, inputs, outputs, order):
    assert plan(psi, "sum", Widths(inputs, outputs)).order == order


def test_words_per_edge_are_those_of_the_formulas():
    gat_plan = plan(attention, "sum", Widths(100, 16))
    assert (gat_plan.words_forward, gat_plan.words_backward) == (16 + 2, 16 + 5)
    assert gat_plan.kept_per_edge == 0
    dot = plan(cosine, "sum", Widths(16, 4))
    assert (dot.words_forward, dot.words_backward, dot.kept_per_edge) == (16 + 1, 3 * 16 + 2, 0)
    separate = plan(A * (H @ H.T), "sum", Widths(16, 4), order="project")
    assert separate.words_forward == 16 + 4 + 1
    propagation = plan(cosine, "sum", Widths(16, 16), order="project", projects=False)
    assert (propagation.words_forward, propagation.words_backward) == (16 + 1, 3 * 16 + 2)
    composed = plan(softmax(A * exp(H @ H.T)), "sum", Widths(16, 4))
    assert composed.kept_per_edge == 2


def test_explain_says_what_and_why():
    text = plan(attention, "sum", Widths(1433, 8, 8)).explain()
    assert (
        "psi: softmax(pattern(A) * leaky_relu(replicate(X @ a) + replicate(X @ b).T, 0.2))" in text
    )
    assert "virtual n x n: " in text
    assert "kernel: graph_attention\nbecause psi is softmax(leaky_relu(u 1^T + 1 v^T))" in text
    assert "order: Phi first, 64 words per edge, not 11464" in text
    assert "words per edge: 73 forward" in text


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda: softmax(H @ H.T), "softmax takes a sparse n x n matrix, but H @ H.T is a dense"),
        (lambda: exp(H @ H.T) @ H, r"exp\(H @ H.T\) @ H needs a dense n x n matrix"),
        (lambda: A + 1.0, "has numbers where A has no edge"),
        (lambda: A + H @ H.T, "has numbers where A has no edge"),
        (lambda: 1.0 / A, "divides by zero where A has no edge"),
        (lambda: H * norm(H), "use outer, replicate or scale_rows"),
        (lambda: A * torch.ones(3), "Tensor cannot be used in a formula"),
        (lambda: H @ A, "multiplies features"),
        (lambda: norm(H).T, "has no transpose"),
        (lambda: plan(H @ H.T, "sum", Widths(2, 2)), "multiply it by A, so that only edges"),
        (
            lambda: plan(A * joint(H, H, weight("a", "in")), "sum", Widths(2, 2)),
            "joint scores are computed by the kernel of GATv2 alone",
        ),
    ],
)
def test_what_would_be_dense_or_senseless_is_refused(write, message):
    with pytest.raises(ConfigError, match=message):
        write()


def test_a_product_of_thin_matrices_is_put_in_the_cheap_order():
    assert str((H @ H.T) @ X) == "H @ (H.T @ X)"


LAYERS = {
    "gat": lambda: gat(16, 8, heads=2),
    "gatv2": lambda: gatv2(16, 8, heads=2),
    "agnn": lambda: agnn(16),
    "agnn of the paper": lambda: agnn_paper(16, 16),
    "va": lambda: va(16, 16),
    "va, softmax": lambda: va(16, 16, form="softmax"),
    "gcn": lambda: gcn(16, 16),
    "composed": lambda: Layer(16, 16, psi=softmax(A * exp(0.1 * (H @ H.T)))),
    "composed, several": lambda: Layer(16, 16, psi=A * exp(0.1 * (H @ H.T)) * (X @ X.T)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_no_tensor_of_n_times_n_or_edges_times_features_appears(name, monkeypatch):
    n, degree, width = 120, 40, 16
    monkeypatch.setattr(sums, "PIECE", 4096)
    row = torch.arange(n).repeat_interleave(degree)
    col = (row * 7 + torch.arange(degree).repeat(n) * 3) % n
    csr = Csr.from_coo(row, col, (n, n))
    csr.position  # noqa: B018
    layer = LAYERS[name]().double()
    hidden = torch.randn(n, width, dtype=torch.float64, requires_grad=True)
    with LargestTensor() as largest, piece_elements(4096):
        layer(csr, hidden).square().sum().backward()
    assert largest.nbytes < 8 * min(n * n, csr.nnz * width) * 0.75, largest.op
