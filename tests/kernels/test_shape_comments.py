"""In a Triton kernel every load and every dot states the shape of its block in a comment."""

import ast
import io
import linecache
import re
import tokenize
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from bevatron import kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FOLDER = Path(kernels.__file__).parent
OPERATORS = sorted({path.parent for path in FOLDER.rglob("triton*.py")})
SHAPE = re.compile(r"\[[\w\s*+/(),.-]*\]")
"""``# [BLOCK_Q, D]``; for a scalar ``# []``, for two blocks ``# q [BLOCK_Q, D], lse [BLOCK_Q]``."""


def uncommented(source):
    """Lines of statements that load a block or multiply two and state no shape.

    The comment is on a line of the statement (of ``if``, ``for`` and ``with`` their first lines) or
    on the line above it.
    """
    trailing, alone = set(), set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and SHAPE.search(token.string):
            (trailing if token.line[: token.start[1]].strip() else alone).add(token.start[0])
    found = []
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.stmt):
            continue
        own = [n for n in ast.iter_child_nodes(statement) if not isinstance(n, ast.stmt)]
        if not any(is_block(node) for part in own for node in ast.walk(part)):
            continue
        last = max(part.end_lineno for part in own if hasattr(part, "end_lineno"))
        if not hasattr(statement, "body"):
            last = statement.end_lineno
        if statement.lineno - 1 not in alone and trailing.isdisjoint(
            range(statement.lineno, last + 1)
        ):
            found.append(statement.lineno)
    return sorted(found)


def is_block(node):
    """Whether a node is ``tl.dot(...)``, ``tl.load(...)`` or ``descriptor.load(...)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return node.func.attr == "load" or ast.unparse(node.func) == "tl.dot"


@pytest.mark.parametrize("folder", OPERATORS, ids=lambda folder: folder.name)
def test_loads_and_dots_state_their_shapes(folder):
    for path in sorted(folder.glob("triton*.py")):
        lines = uncommented(path.read_text())
        assert not lines, f"{path.relative_to(FOLDER)}: no shape comment in lines {lines}"


def random(*shape):
    return torch.rand(*shape, device=DEVICE, requires_grad=True)


def spherical_harmonics():
    vectors = random(2, 3)
    return kernels.spherical_harmonics(1, vectors), (vectors,)


def equivariant_linear():
    x, *weights = random(2, 4), random(1, 1), random(1, 1)
    return kernels.equivariant_linear(x, weights), (x, *weights)


def symmetric_contraction():
    a, elements = random(2, 8, 4), torch.tensor([0, 1], device=DEVICE)
    weights = {0: [random(3, 1, 8), random(3, 2, 8)]}
    return kernels.symmetric_contraction(a, weights, elements, "8x0e", 2), (a, *weights[0])


def channelwise_tensor_product():
    x, harmonics, weights = random(2, 8), random(1, 4), random(1, 16)
    edges, irreps = torch.tensor([[0], [1]], device=DEVICE), ("8x0e", "0e+1o", "0e+1o")
    y = kernels.channelwise_tensor_product(x, harmonics, weights, edges, *irreps)
    return y, (x, harmonics, weights)


@pytest.mark.parametrize(
    "operator",
    [spherical_harmonics, equivariant_linear, symmetric_contraction, channelwise_tensor_product],
    ids=lambda operator: operator.__name__,
)
def test_generated_kernels_state_their_shapes(operator):
    with kernels.use("triton"):
        y, inputs = operator()
        gradients = torch.autograd.grad(y.square().sum(), inputs, create_graph=True)
        torch.autograd.grad(sum(gradient.square().sum() for gradient in gradients), inputs)
    sources = [
        "".join(entry[2])  # an entry not yet read has no lines; those of others may be
        for name, entry in linecache.cache.items()
        if name.startswith(f"<bevatron {operator.__name__} ")
    ]
    assert len(sources) > 1
    for source in sources:
        assert not uncommented(source), source


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = tl.load(p)  # [BLOCK]", []),
        ("# [BLOCK]\nx = tl.load(p)", []),
        ("x = tl.load(\n    p\n).to(T)  # [BLOCK, 2 * D]", []),
        ("first = tl.load(p)  # []", []),
        ("x = tl.load(p)", [1]),
        ("x = tl.load(p)  # the input", [1]),
        ("s = '# [BLOCK]'; x = tl.load(p)", [1]),
        ("x = tl.load(p)  # [BLOCK]\ny = 1\ntotal += tl.dot(x, w)", [3]),
        ("x = X.load([row, 0])", [1]),
        ("def kernel():\n    if tl.load(p) > 0:\n        y = 0  # [BLOCK]", [2]),
        ("def kernel():\n    if tl.load(p) > 0:  # []\n        y = tl.load(q)", [3]),
        ("def kernel():\n    return tl.dot(x, w)", [2]),
    ],
)
def test_a_missing_shape_comment_is_found(source, lines):
    assert uncommented(source) == lines
