"""The legend of dimension letters and units, and the names of shapes built from them.

Dimension letters, as suffixes of tensor names (``x_NC``) and in jaxtyping's shape strings:

=====  =============================================================================
``N``  atoms of a batch (nodes of a graph)
``E``  directed edges: sender -> receiver
``G``  structures of a batch (graphs)
``K``  channels of an equivariant feature
``C``  channels of a plain feature
``Z``  chemical elements that a model knows
``H``  heads (read-outs of a multi-head model, attention heads)
``L``  degree of a spherical harmonic; ``M`` its components, 2L+1
``S``  components of all degrees up to l_max, (l_max+1)^2
``P``  paths of a tensor product
``B``  radial basis functions
``R``  ranks
=====  =============================================================================

Units: length Å, energy eV, force eV/Å, stress eV/Å^3 in ASE's sign (positive = the cell wants to
shrink: stress = +dE/d(strain)/V), virial eV (= -stress * V), mass amu, time fs, temperature K.
A quantity in another unit has it in its name (``drift_ev_per_ps``).
"""

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Array: TypeAlias = npt.NDArray[np.generic]
"""Any numpy array."""

Arrays: TypeAlias = Mapping[str, npt.NDArray[np.generic]]
"""A sample: named arrays."""

FloatArray: TypeAlias = npt.NDArray[np.float64]
IntArray: TypeAlias = npt.NDArray[np.int64]
WordArray: TypeAlias = npt.NDArray[np.uint64]
BoolArray: TypeAlias = npt.NDArray[np.bool_]
