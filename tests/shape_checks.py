"""Annotations are checked while the tests run: types by beartype, shapes by jaxtyping with it.

jaxtyping binds the arguments of every call to names, which takes far longer than the check itself.
A function that mentions no shape is left to beartype alone: the same types are checked.
"""

import dataclasses
import functools
import typing

import jaxtyping
from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

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
        if any(map(_mentions_shapes, target.__annotations__.values())):
            return _with_shapes(target, typechecker=typechecker)
        return typechecker(target)
    if dataclasses.is_dataclass(target) and "__init__" in vars(target):
        target.__init__ = _jaxtyped(target.__init__, typechecker=typechecker)
    return target


def _mentions_shapes(annotation):
    """Whether a shape stands anywhere in an annotation; of one in quotes it is assumed."""
    if isinstance(annotation, list | tuple):
        return any(map(_mentions_shapes, annotation))
    if isinstance(annotation, str | typing.ForwardRef):
        return True
    is_shape = isinstance(annotation, type) and issubclass(annotation, jaxtyping.AbstractArray)
    return is_shape or any(map(_mentions_shapes, typing.get_args(annotation)))
