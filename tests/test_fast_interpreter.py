"""Operations of interpreted kernels are those of Triton, also where they are computed at once."""

import itertools
import os

import numpy as np
import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are not interpreted", allow_module_level=True)
language = pytest.importorskip("triton.language")
pytest.importorskip("bevatron.kernels.graph.spmm.triton")  # makes the interpreter fast
fast_interpreter = pytest.importorskip("fast_interpreter")
interpreter = pytest.importorskip("triton.runtime.interpreter")

KINDS = ["int1", "int8", "int32", "int64", "uint32", "float16", "float32", "float64", "bfloat16"]
SHAPES = [(), (4,), (4, 1), (1, 8), (4, 8)]
NUMBERS = [0, 1, -1, 3, 2**31, -(2**33), 0.0, -0.0, 1.5, float("nan"), 1e-60, True]


@pytest.fixture
def prepared():
    """Prepare the language as a launch does."""

    def kernel():
        return language

    scope = interpreter._patch_lang(kernel)
    yield interpreter.interpreter_semantic
    scope.restore()


def operands():
    draw = np.random.default_rng(0)
    for name, shape in itertools.product(KINDS, SHAPES):
        kind = getattr(language, name)
        values = draw.normal(0, 5, shape or (1,)).round(1)
        if name == "bfloat16":
            values = values.astype(np.float32).view(np.uint32) >> 16
        yield block(values.astype(interpreter._get_np_dtype(kind)), kind, shape)
    for shape in SHAPES:
        addresses = draw.integers(0, 2**40, shape or (1,)).astype(np.uint64)
        yield block(addresses, language.pointer_type(language.float32), shape)


def block(values, kind, shape):
    handle = interpreter.TensorHandle(values, kind)
    return language.tensor(handle, language.block_type(kind, list(shape)) if shape else kind)


def outcome(operation, *arguments, **named):
    try:
        with np.errstate(all="ignore"):
            result = operation(*arguments, **named)
    except Exception as error:
        return type(error), str(error)
    data = result.handle.data
    types = str(result.type), str(result.dtype), str(result.handle.dtype), str(data.dtype)
    return *types, data.shape, data.tobytes(), result.numel.value, str(result.shape)


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("name", fast_interpreter._OPERATIONS)
def test_operations_have_the_types_values_and_errors_of_triton_s(prepared, name):
    fast = getattr(language.semantic.TritonSemantic, name)
    blocks = list(operands())
    pairs = list(itertools.product(blocks, blocks))
    pairs += itertools.product(blocks, NUMBERS)
    pairs += itertools.product(NUMBERS, blocks)
    options = [True] if name in {"add", "sub", "mul"} else []
    succeeded = 0
    for left, right in pairs:
        expected = outcome(fast.__wrapped__, prepared, left, right, *options)
        assert outcome(fast, prepared, left, right, *options) == expected, (left.type, right)
        succeeded += len(expected) > 2
    assert succeeded > 500
    if options:
        assert outcome(fast, prepared, blocks[10], blocks[10], sanitize_overflow=False) == outcome(
            fast, prepared, blocks[10], blocks[10], False
        )
