"""Generated kernels: their text as Triton would cut it out, known by a hash of all of it."""

import inspect
import linecache
import threading

import pytest

pytest.importorskip("triton")
from triton import knobs
from triton.runtime.jit import JITFunction

from bevatron.kernels.shared.triton_generated import generated, quick_blocks

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
def _compiled():
    """Not interpreted: where a kernel is compiled its text counts."""
    with knobs.runtime.scope():
        knobs.runtime.interpret = False
        yield


def made(source):
    return generated(source, "kernel", "bevatron.kernels.some.triton", layouts=False)


def test_the_text_of_each_function_equals_inspect_s():
    kernel = made(SOURCE)
    for function in (kernel, kernel.fn.__globals__["part"]):
        assert isinstance(function, JITFunction)
        text = inspect.getsource(function.fn)
        assert function.src == text[text.index("def ") :]


def test_kernels_are_known_by_all_of_their_text():
    kernels = [made(SOURCE), made(SOURCE), made(SOURCE.replace("+ N", "- N"))]
    keys = [kernel.cache_key for kernel in kernels]
    assert keys[0] == keys[1] != keys[2]


def test_no_two_kernels_share_the_place_of_their_text(monkeypatch):
    """Whatever else happens to the place where `inspect` looks for it."""
    monkeypatch.setattr(linecache, "cache", {})
    first = made(SOURCE).fn.__code__.co_filename
    linecache.clearcache()
    assert made(SOURCE).fn.__code__.co_filename != first


def test_inspect_is_restored_after_two_threads_made_kernels():
    before, entered, leave = inspect.getblock, threading.Event(), threading.Event()

    def make():
        with quick_blocks():
            entered.set()
            leave.wait()

    other = threading.Thread(target=make)
    with quick_blocks():
        other.start()
        entered.wait(0.2)
    leave.set()
    other.join()
    assert inspect.getblock is before


def test_other_threads_get_the_source_of_their_functions_meanwhile():
    def inner():
        return 1

    found = []
    with quick_blocks():
        other = threading.Thread(target=lambda: found.append(inspect.getsource(inner)))
        other.start()
        other.join()
    assert found == ["    def inner():\n        return 1\n"]
