"""Annotations of shapes are checked while the tests run, by jaxtyping with beartype."""

from beartype import BeartypeConf, beartype
from beartype.roar import BeartypeDecorHintException

_check = beartype(conf=BeartypeConf(is_pep484_tower=True))


def checked(function):
    """Check calls of a function; one whose annotations beartype cannot read stays unchecked."""
    try:
        return _check(function)
    except BeartypeDecorHintException:
        # Such as typing.Self, which beartype knows only inside a class it decorates as a whole.
        return function
