"""Generated kernels: their text as Triton would cut it out, known by a hash of all of it."""

import inspect

import pytest

pytest.importorskip("triton")
from triton.runtime.jit import JITFunction

from bevatron.kernels.shared.triton_generated import generated

SOURCE = """
@jit
def part(
    x_ptr, N: tl.constexpr,
):
    return tl.load(x_ptr) + N


def kernel(x_ptr, N: tl.constexpr):
    text = "def of no function"
    tl.store(x_ptr, part(x_ptr, N))

"""


@pytest.fixture(autouse=True)
def _compiled(monkeypatch):
    """Not interpreted: where a kernel is compiled its text counts."""
    monkeypatch.setattr("triton.knobs.runtime.interpret", False)


def made(source):
    return generated(source, "kernel", "bevatron.kernels.some.triton", layouts=False)


def test_the_text_of_each_function_is_that_which_inspect_finds():
    kernel = made(SOURCE)
    for function in (kernel, kernel.fn.__globals__["part"]):
        assert isinstance(function, JITFunction)
        text = inspect.getsource(function.fn)
        assert function.src == text[text.index("def ") :]


def test_kernels_are_known_by_all_of_their_text():
    kernels = [made(SOURCE), made(SOURCE), made(SOURCE.replace("+ N", "- N"))]
    keys = [kernel.cache_key for kernel in kernels]
    assert keys[0] == keys[1] != keys[2]
