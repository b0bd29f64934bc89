"""Triton's interpreter without its wastes, more than half of the time of an interpreted kernel.

It prepares the module ``triton.language`` again for every device function that a kernel calls,
although the launch has done so, makes a table of types for every question about one of them,
describes the type and the shape of every block anew, compares equal shapes as if they were code,
and takes the source of a kernel apart word by word. What it computes stays the same.
"""

import ast
import functools
import linecache
import math
import textwrap

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
    interpreter._patch_attr = _call_builtin
    interpreter.FunctionRewriter.rewrite_ast = _rewritten
    language.block_type.__init__ = _describe_block
    language.dtype.__eq__ = _is_type
    language.tensor.__init__ = _make_tensor
    TritonSemantic.broadcast_impl_value = _broadcast_blocks


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
    sizes = type.sizes if type.is_block() else ()
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


def _call_builtin(obj, name, member, builder, scope):
    """Put a function of the language in place: the interpreter's arguments are always the same."""
    function = getattr(member, "__wrapped__", member)

    def call(*args, _semantic=None, **kwargs):
        return function(*args, _semantic=interpreter.interpreter_semantic, **kwargs)

    scope.set_attr(obj, name, call)


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
