"""Old names of public functions, accepted with a DeprecationWarning for one release."""

import sys
import warnings
from collections.abc import Callable
from typing import Any


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """Return a module's ``__getattr__`` that accepts old names.

    Parameters
    ----------
    module
        ``__name__`` of the module.
    names
        Old name -> name.
    """

    def find(old: str) -> Any:
        if old not in names:
            raise AttributeError(f"module '{module}' has no attribute '{old}'")
        new = names[old]
        warnings.warn(
            f"{module}: {old} has been renamed to {new}", DeprecationWarning, stacklevel=2
        )
        return getattr(sys.modules[module], new)

    return find
