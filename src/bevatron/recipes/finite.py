"""Predictions that are not numbers are refused, not written."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.errors import DivergenceError


def check_finite(values: Mapping[str, npt.NDArray[Any]], where: Callable[[], str]) -> None:
    """Refuse predictions that are NaN or infinite.

    Raises DivergenceError naming the sample and what is predicted.

    Examples
    --------
    >>> check_finite({"energy": np.array(-1.5)}, lambda: "a.xyz, frame 3")
    """
    bad = [name for name, predicted in values.items() if not np.isfinite(predicted).all()]
    if bad:
        raise DivergenceError(
            f"{where()}: the model predicts NaN or infinity ({', '.join(bad)}); check the input "
            "(atoms on top of each other, huge numbers), or predict in a higher precision"
        )
