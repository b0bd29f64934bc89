"""Triton's interpreter without its wastes, more than half of the time of an interpreted kernel.

It looks for the functions of ``triton.language`` at each launch and prepares the module again for
every device function that a kernel calls, makes a table of types for every question about one of
them, describes the type and the shape of every block anew, compares equal shapes as if they were
code, fills a block with each scalar that it meets, looks for an overflow of integers in eight
operations and says nothing of it, and takes the source of a kernel apart word by word. What it
computes stays the same.
"""

import ast
import functools
import inspect
import linecache
import math
import textwrap

import numpy as np
from triton import language
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_prepare = interpreter._patch_lang
_numpy_type = functools.cache(interpreter._get_np_dtype)
_describe = language.block_type.__init__
_equals = language.dtype.__eq__
_broadcast = TritonSemantic.broadcast_impl_value
_rewrite = interpreter.FunctionRewriter.rewrite_ast
_block_types = {}
"""Attributes of a block's type, by those of its elements and by its shape."""
_shapes = {}
"""Number of elements and shape as a kernel sees them, by the sizes."""
_prepared = set()
"""What the launch that runs has prepared so far: triton.language, its core, or both."""


def install():
    """Make all later launches faster; an interpreter that is built otherwise stays as it is."""
    if not hasattr(interpreter, "_LangPatchScope"):
        return
    interpreter._patch_lang = _of_launch
    interpreter._get_np_dtype = _type_of
    interpreter.InterpretedFunction.__call__ = _call_device_function
    interpreter._patch_builtin = _prepare_builtins
    interpreter.FunctionRewriter.rewrite_ast = _rewritten
    language.block_type.__init__ = _describe_block
    language.dtype.__eq__ = _is_type
    language.tensor.__init__ = _make_tensor
    TritonSemantic.broadcast_impl_value = _broadcast_blocks
    for name, (operate, kinds) in _OPERATIONS.items():
        replaced = _operation(getattr(TritonSemantic, name), operate, kinds)
        setattr(TritonSemantic, name, replaced)


@functools.cache
def _languages(function):
    named = function.__globals__.values()
    return {one.__name__ for one in (language, language.core) if any(one is v for v in named)}


def _of_launch(function):
    _prepared.clear()
    _prepared.update(_languages(function))
    return _prepare(function)


def _call_device_function(self, *arguments, **options):
    if not _languages(self.fn) <= _prepared:
        _prepared.update(_languages(self.fn))
        _prepare(self.fn)
    try:
        return self.rewrite()(*arguments, **options)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


def _type_of(kind):
    if isinstance(kind, language.block_type):
        kind = kind.element_ty
    return interpreter.np.dtype("uint64") if kind.is_ptr() else _numpy_type(kind)


def _describe_block(self, element_ty, shape):
    sizes = tuple([getattr(size, "value", size) for size in shape])
    key = type(element_ty), element_ty.name, sizes
    if key not in _block_types:
        _describe(self, element_ty, shape)
        _block_types[key] = {**vars(self), "sizes": sizes}
    vars(self).update(_block_types[key])


def _make_tensor(self, handle, type):  # noqa: A002
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.sizes = sizes = type.sizes if type.is_block() else ()
    if sizes not in _shapes:
        shape = language.core.tuple([language.constexpr(size) for size in sizes])
        _shapes[sizes] = language.constexpr(math.prod(sizes)), shape
    self.numel, self.shape = _shapes[sizes]


def _is_type(self, other):
    return self is other or _equals(self, other)


def _broadcast_blocks(self, lhs, rhs):
    left, right = lhs.type, rhs.type
    if not left.is_block() or not right.is_block():
        if left.is_block():
            return lhs, _filled(self, rhs, left)
        return (_filled(self, lhs, right), rhs) if right.is_block() else (lhs, rhs)
    if left.sizes == right.sizes:
        return lhs, rhs
    pairs = list(zip(left.sizes, right.sizes, strict=False))
    if len(left.sizes) != len(right.sizes) or any(a != b and 1 not in (a, b) for a, b in pairs):
        return _broadcast(self, lhs, rhs)
    shape = [b if a == 1 else a for a, b in pairs]
    return _stretched(self, lhs, shape), _stretched(self, rhs, shape)


def _filled(self, scalar, block):
    kind = block.with_element_ty(scalar.type.scalar)
    return self.tensor(self.builder.create_splat(kind, scalar.handle), kind)


def _stretched(self, block, shape):
    kind = language.block_type(block.type.scalar, shape)
    if kind.sizes == block.type.sizes:
        return block
    return self.tensor(self.builder.create_broadcast(block.handle, shape), kind)


_INTEGERS = {"int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"}
_FLOATS = {"fp16", "fp32", "fp64"}
_NUMBERS = _INTEGERS | _FLOATS
_OPERATIONS = {
    "add": (np.add, _NUMBERS),
    "sub": (np.subtract, _NUMBERS),
    "mul": (np.multiply, _NUMBERS),
    "truediv": (np.divide, _FLOATS - {"fp16"}),  # that of halves is in float32
    "and_": (np.bitwise_and, _INTEGERS | {"int1"}),
    "or_": (np.bitwise_or, _INTEGERS | {"int1"}),
    "less_than": (np.less, _NUMBERS),
    "less_equal": (np.less_equal, _NUMBERS),
    "greater_than": (np.greater, _NUMBERS),
    "greater_equal": (np.greater_equal, _NUMBERS),
    "equal": (np.equal, _NUMBERS),
    "not_equal": (np.not_equal, _NUMBERS),
}
"""What NumPy computes at once of two operands of these types; it does not know bfloat16."""
_types = {}
"""Types of blocks by the names of their elements' types and their shapes."""
_constants = {}
"""Numbers that kernels compute with, by the names of their types and their values."""


def _operation(original, operate, kinds):
    """Compute at once of two operands of one type; of others in the steps of Triton."""
    name = original.__name__
    is_comparison = operate(1, 1).dtype == bool

    @functools.wraps(original)
    def compute(self, left, right, *check, **named):
        a, b = _constant(self, left, right), _constant(self, right, left)
        if a is None or b is None or (a.sizes and b.sizes and len(a.sizes) != len(b.sizes)):
            return original(self, left, right, *check, **named)
        kind = a.dtype
        if kind.is_ptr() != b.dtype.is_ptr():
            pointer, offset = (a, b) if kind.is_ptr() else (b, a)
            if name != "add" or offset.dtype.name not in _INTEGERS:
                return original(self, left, right, *check, **named)
            handle = self.builder.create_addptr(pointer.handle, offset.handle)
            return self.tensor(handle, _type(pointer.dtype, handle.data.shape, a, b))
        is_widened = kind.name != b.dtype.name and {kind.name, b.dtype.name} == {"int32", "int64"}
        if kind.name not in kinds or not (is_widened or kind.name == b.dtype.name):
            return original(self, left, right, *check, **named)
        data = operate(a.handle.data, b.handle.data)
        is_left_widened = is_widened and kind.name == "int32"
        handle = interpreter.TensorHandle(data, b.dtype if is_left_widened else a.handle.dtype)
        result = language.int1 if is_comparison else b.dtype if is_left_widened else kind
        return self.tensor(handle, _type(result, data.shape, a, b))

    return compute


def _type(kind, shape, *operands):
    if not any(operand.sizes for operand in operands):
        return kind
    if (kind.name, shape) not in _types:
        _types[kind.name, shape] = language.block_type(kind, list(shape))
    return _types[kind.name, shape]


def _constant(self, value, other):
    """Return a tensor as it is, and a number as one of the other operand's type if it fits."""
    if type(value) is language.tensor:
        return value
    if type(other) is not language.tensor:
        return None
    kind, sort = other.dtype, type(value)
    if kind.is_ptr():
        return self.to_tensor(value) if sort is int else None
    if kind.name in _INTEGERS:
        fits = sort is int and kind.get_int_min_value() <= value <= kind.get_int_max_value()
    else:
        fits = kind.name in _FLOATS and sort in {int, float}
    if not fits:
        return None
    if (kind.name, value) not in _constants:
        _constants[kind.name, value] = self.scalar_constant(value, kind)
    return _constants[kind.name, value]


def _prepare_builtins(package, builder, scope):
    for name, call in _builtins(package):
        scope.set_attr(package, name, call)


@functools.cache
def _builtins(package):
    """Return the functions of the language: the interpreter's arguments are always the same."""
    members = inspect.getmembers(package, language.core.is_builtin)
    return [(name, _with_semantic(getattr(one, "__wrapped__", one))) for name, one in members]


def _with_semantic(function):
    def call(*args, _semantic=None, **kwargs):
        return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    return call


def _rewritten(self):
    """Make what is assigned a tensor, as the interpreter does, of lines that Python has counted."""
    code = self.fn.__code__
    lines = linecache.getlines(code.co_filename)
    if not lines:
        return _rewrite(self)
    last = max(end for _, end, _, _ in code.co_positions() if end)
    before = code.co_firstlineno - 1
    while not lines[before].lstrip().startswith("def "):
        before += 1
    self.filename, self.def_file_lineno = code.co_filename, before + 1
    tree = ast.parse("\n" * before + textwrap.dedent("".join(lines[before:last])))
    _assign_tensors(tree.body[0])
    return self._compile_and_exec(tree)


def _assign_tensors(node):
    for child in [*node.body, *getattr(node, "orelse", ())]:
        if isinstance(child, ast.Assign):
            convert = ast.parse("interpreter_semantic.to_tensor(0, False)", mode="eval").body
            convert.args[0] = child.value
            child.value = ast.copy_location(convert, child.value)
        elif hasattr(child, "body"):
            _assign_tensors(child)
