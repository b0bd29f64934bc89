"""The fields of a stored sample."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Field:
    """One named array of a sample.

    Attributes
    ----------
    name : key in the sample and column in the store
    dtype : numpy type name, little-endian in the store
    shape : shape of the fixed axes
    ragged : whether there is a first axis whose length differs from sample to sample
    meaning : one line: what it is, its unit, how absence is written
    in_parts
        Whether it is read and verified part by part: the checksum of a sample leaves out its
        values. Who reads a part compares it with checksums in another field.
    """

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    ragged: bool = False
    meaning: str = ""
    in_parts: bool = False

    def check(self, array: np.ndarray) -> None:
        """Raise ValueError unless ``array`` has this field's type and shape."""
        expected = (array.shape[0], *self.shape) if self.ragged and array.ndim else self.shape
        if array.dtype != np.dtype(self.dtype) or array.shape != expected:
            rows = "rows, " if self.ragged else ""
            raise ValueError(
                f"field '{self.name}': expected {self.dtype} ({rows}{self.shape}), "
                f"got {array.dtype} {array.shape}"
            )
