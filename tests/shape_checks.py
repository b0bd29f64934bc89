"""Annotations are checked while the tests run: types by beartype, shapes by jaxtyping with it.

jaxtyping binds the arguments of every call to names, which takes far longer than the check itself.
A function that mentions no shape is left to beartype alone: the same types are checked. Of one that
does, each combination of types and shapes is checked once: what else is checked depends on nothing
but these.
"""

import contextlib
import dataclasses
import functools
import threading
import types
import typing

import jaxtyping
import numpy as np
import torch
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

checking = True
"""False in a process that leaves the checks to another that calls the same functions."""
_check = beartype(conf=BeartypeConf(is_pep484_tower=True))
_with_shapes = jaxtyping.jaxtyped


def checked(function):
    """Check calls of a function; one whose annotations beartype cannot read stays unchecked."""
    try:
        return _check(function)
    except BeartypeDecorHintException:
        # Such as typing.Self, which beartype knows only inside a class it decorates as a whole.
        return function


def install(package):
    """Check all functions and dataclasses of a package that is not imported yet."""
    jaxtyping.jaxtyped = _jaxtyped  # what the hook writes above every function and class
    jaxtyping.install_import_hook(package, "shape_checks.checked")


def _jaxtyped(target=None, *, typechecker):
    if target is None:
        return functools.partial(_jaxtyped, typechecker=typechecker)
    if not isinstance(target, type):
        return _checked_when_called(target, typechecker) if target.__annotations__ else target
    if dataclasses.is_dataclass(target) and "__init__" in vars(target):
        target.__init__ = _jaxtyped(target.__init__, typechecker=typechecker)
    return target


def _checked_when_called(function, typechecker):
    """Make the checks of a function at its first call: most are never called."""
    checked = None

    @functools.wraps(function)
    def call(*args, **kwargs):
        nonlocal checked
        if not checking or torch.compiler.is_compiling():
            return function(*args, **kwargs)
        if checked is None:
            checked = _checked_by_shapes(function, typechecker)
        return checked(*args, **kwargs)

    return call


def _checked_by_shapes(function, typechecker):
    is_local = "<locals>" in function.__qualname__
    if not is_local and not any(map(_mentions_shapes, function.__annotations__.values())):
        return typechecker(function)
    if not is_local:
        return functools.partial(_Checks(function, typechecker).call, function)
    # Annotations may follow from what is around the function.
    key = (function.__code__, repr(function.__annotations__))
    if key not in _of_code:
        _of_code[key] = _Checks(function, typechecker)
    return functools.partial(_of_code[key].call, function)


_of_code = {}
"""The checks of functions that are defined in others, each time those are called."""


def _hollow(function):
    """Copy a function without what it encloses: a tensor kept in it would keep its graph."""
    cells = tuple(types.CellType() for _ in function.__closure__ or ())
    hollow = types.FunctionType(function.__code__, function.__globals__, closure=cells)
    hollow.__defaults__, hollow.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    functools.update_wrapper(hollow, function, updated=())
    del hollow.__wrapped__
    return hollow


class _Checks:
    """Checks each combination of the types and shapes of arguments and result once."""

    most = 4096

    def __init__(self, function, typechecker):
        # What is called in its place; its signature is the function's.
        @functools.wraps(_hollow(function))
        def stand_in(*args, **kwargs):
            return self.running.stack.pop()(*args, **kwargs)

        self.check = _with_shapes(stand_in, typechecker=typechecker)
        self.running = threading.local()
        self.seen = {}
        # A length may be computed of the values.
        self.once = not any("{" in str(hint) for hint in function.__annotations__.values())

    def call_checked(self, function, /, *args, **kwargs):
        """Call a function with all checks."""
        self.running.__dict__.setdefault("stack", []).append(function)
        return self.check(*args, **kwargs)

    def call(self, function, /, *args, **kwargs):
        """Call a function with the checks that have not been made."""
        try:
            shapes = _shapes((args, kwargs)) if self.once else None
            results = self.seen.get(shapes)
        except TypeError:  # too long, or a length that is a symbol
            return self.call_checked(function, *args, **kwargs)
        if results is None:
            result = self.call_checked(function, *args, **kwargs)
            if not self.once or len(self.seen) >= self.most:
                return result
            results = self.seen[shapes] = set()
        else:
            result = function(*args, **kwargs)
            try:
                if _shapes(result) in results:
                    return result
            except TypeError:
                pass
            self.call_checked(lambda *_, **__: result, *args, **kwargs)
        with contextlib.suppress(TypeError):
            results.add(_shapes(result))
        return result


def _shapes(value):
    """What a check of a value depends on; TypeError if it is too long."""
    kind = type(value)
    sort = _sort_of(kind)
    if sort is None:
        return kind
    if sort == "array":
        return kind, value.shape, value.dtype
    if sort == "literal":
        return kind, value
    if len(value) > 32:
        raise TypeError
    return kind, *map(_shapes, value.items() if sort == "dict" else value)


@functools.cache
def _sort_of(kind):
    sorts = {
        (torch.Tensor, np.ndarray): "array",
        (str, bool): "literal",  # one may be asked for
        (dict,): "dict",
        (tuple, list): "list",
    }
    return next((sort for kinds, sort in sorts.items() if issubclass(kind, kinds)), None)


def _mentions_shapes(annotation):
    """Whether a shape stands anywhere in an annotation; of one in quotes it is assumed."""
    if isinstance(annotation, list | tuple):
        return any(map(_mentions_shapes, annotation))
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    is_shape = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_shape or any(map(_mentions_shapes, typing.get_args(annotation)))
