"""Triton's interpreter without its wastes, a third of the time of an interpreted kernel.

It prepares the module ``triton.language`` again for every device function that a kernel calls,
although the launch has done so, makes a table of types for every question about one of them, and
describes the type and the shape of every block anew. What it computes stays the same.
"""

import functools
import math

from triton import language
from triton.runtime import interpreter

_prepare = interpreter._patch_lang
_numpy_type = functools.cache(interpreter._get_np_dtype)
_describe = language.block_type.__init__
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
    language.block_type.__init__ = _describe_block
    language.tensor.__init__ = _make_tensor


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
        _block_types[key] = dict(vars(self))
    vars(self).update(_block_types[key])


def _make_tensor(self, handle, type):  # noqa: A002
    self.handle, self.type, self.dtype = handle, type, type.scalar
    sizes = type.shape if type.is_block() else ()
    if sizes not in _shapes:
        shape = language.core.tuple([language.constexpr(size) for size in sizes])
        _shapes[sizes] = language.constexpr(math.prod(sizes)), shape
    self.numel, self.shape = _shapes[sizes]
