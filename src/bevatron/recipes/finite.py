"""Predictions that are not numbers are refused, not written."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from bevatron.errors import DivergenceError


def check_finite(values: Mapping[str, npt.NDArray[Any]], where: Callable[[], str]) -> None:
    """Refuse predictions that are NaN or infinite.

    Parameters
    ----------
    values
        Predictions by name.
    where
        Names the sample.

    Raises
    ------
    DivergenceError
        Naming sample and prediction.

    Examples
    --------
    >>> check_finite({"energy": np.array(np.nan)}, lambda: "a.xyz, frame 3")
    Traceback (most recent call last):
    bevatron.errors.DivergenceError: a.xyz, frame 3: the model predicts nan as energy; ...
    """
    for name, predicted in values.items():
        bad = ~np.isfinite(predicted)
        if bad.any():
            raise DivergenceError(
                f"{where()}: the model predicts {predicted[bad].flat[0]} as {name}; look whether "
                "the input is sensible (atoms on top of each other, huge numbers) and the model "
                "predicts others, or take a higher precision"
            )
