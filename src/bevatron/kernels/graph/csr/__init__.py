"""The data structure of graph operators: a sparse matrix in CSR and CSC order, built once."""

from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from bevatron.errors import DataError
from bevatron.kernels.graph.csr.ordering import check_indices, expand, index_type, order_entries
from bevatron.kernels.graph.csr.work import Work, make_work
from bevatron.kernels.shared.checks import described, no_tensor

__all__ = ["Csr", "Work", "no_argument"]


@dataclass(frozen=True, eq=False)
class Csr:
    """A sparse matrix in which row i attends to the columns stored in it.

    For a graph, row i is the receiver and its columns are the senders. Entries are kept row by row
    (CSR: what forward passes read) and column by column (CSC: what backward passes read), so no
    operator transposes or sorts. The structure never changes; `with_values` gives the same
    structure other values.

    Attributes
    ----------
    shape : rows and columns
    row_ptr : [rows + 1] int64, offsets of the rows in CSR order
    col : [nnz], column of each entry in CSR order, ascending within a row; int32 where it fits
    col_ptr : [columns + 1] int64, offsets of the columns in CSC order
    row_of : [nnz], row of each entry in CSC order, ascending within a column
    values
        [nnz] in CSR order, or None: all ones. May require gradients.
    row_ids, col_ids
        Indices of rows and columns that seed a random mask, for a block of a larger matrix; None:
        0, 1, ...

    Examples
    --------
    >>> csr = Csr.from_coo(torch.tensor([0, 2, 0]), torch.tensor([2, 1, 1]), (3, 3))
    >>> csr.row_ptr, csr.col, csr.nnz
    (tensor([0, 2, 2, 3]), tensor([1, 2, 1], dtype=torch.int32), 3)
    >>> csr.col_ptr, csr.row_of
    (tensor([0, 0, 2, 3]), tensor([0, 2, 0], dtype=torch.int32))
    """

    shape: tuple[int, int]
    row_ptr: Tensor
    col: Tensor
    col_ptr: Tensor
    row_of: Tensor
    values: Tensor | None = None
    row_ids: Tensor | None = None
    col_ids: Tensor | None = None
    _made: dict[str, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def from_coo(
        cls,
        row: Int[Tensor, "E"],
        col: Int[Tensor, "E"],
        shape: tuple[int, int],
        values: Float[Tensor, "E"] | None = None,
        *,
        row_ids: Int[Tensor, "rows"] | None = None,
        col_ids: Int[Tensor, "columns"] | None = None,
    ) -> "Csr":
        """Build both orders from entries in any order, on the device where they are.

        Raises DataError if an index is negative or too large, or an entry is stored twice, naming
        the first; ValueError if lengths do not go together.

        Parameters
        ----------
        row, col : row and column of every entry: receiver and sender of every edge
        shape : rows and columns
        values : values of the entries, in their order; gradients flow back to them
        row_ids, col_ids : see `Csr`
        """
        try:
            _check_lengths(row, col, shape, values, row_ids, col_ids)
        except AttributeError as error:
            given = {"row": row, "col": col, "values": values}
            ids = {"row_ids": row_ids, "col_ids": col_ids}
            raise no_tensor("Csr", {**given, **ids}.items()) or error from None
        check_indices("row", row, shape[0])
        check_indices("column", col, shape[1])
        row_ptr, ordered, entry = order_entries(row, col, *shape, unique=True)
        made = cls._from_rows(shape, row_ptr, ordered, row_ids, col_ids, values is not None)
        return made if values is None else made.with_values(values[entry])

    @classmethod
    def from_csr(
        cls,
        row_ptr: Int[Tensor, "_"],
        col: Int[Tensor, "E"],
        shape: tuple[int, int],
        values: Float[Tensor, "E"] | None = None,
        *,
        row_ids: Int[Tensor, "rows"] | None = None,
        col_ids: Int[Tensor, "columns"] | None = None,
    ) -> "Csr":
        """Build from rows that are already in order; columns within a row may be in any order.

        Raises DataError, ValueError as `from_coo`, and if the pointers do not rise from 0 to the
        number of entries.
        """
        error = no_tensor("Csr", {"row_ptr": row_ptr, "col": col}.items())
        if error is not None:
            raise error
        if row_ptr.shape != (shape[0] + 1,):
            raise ValueError(
                f"Csr: row_ptr has shape {tuple(row_ptr.shape)}, expected ({shape[0] + 1},) for "
                f"{shape[0]} rows"
            )
        ends = row_ptr[[0, -1]].tolist()
        if ends != [0, len(col)] or bool((row_ptr.diff() < 0).any()):
            raise DataError(
                f"Csr: row_ptr runs from {ends[0]} to {ends[1]}, expected to rise from 0 to the "
                f"number of entries, {len(col)}"
            )
        return cls.from_coo(
            *(expand(row_ptr, index_type(shape[0]), len(col)), col, shape, values),
            row_ids=row_ids,
            col_ids=col_ids,
        )

    @classmethod
    def _from_rows(
        cls,
        shape: tuple[int, int],
        row_ptr: Tensor,
        col: Tensor,
        row_ids: Tensor | None,
        col_ids: Tensor | None,
        keep_position: bool,
    ) -> "Csr":
        """Add the other order to rows whose columns ascend."""
        row = expand(row_ptr, index_type(shape[0]), len(col))
        col_ptr, row_of, entry = order_entries(col, row, shape[1], shape[0], unique=False)
        del row
        made = cls(shape, row_ptr, col, col_ptr, row_of, None, row_ids, col_ids)
        made._made["rows"] = make_work(row_ptr)
        made._made["columns"] = make_work(col_ptr)
        if keep_position:  # four bytes an entry, which only matrices with values need
            made._made["position"] = entry.to(index_type(len(col)))
        return made

    @property
    def nnz(self) -> int:
        """Number of stored entries."""
        return len(self.col)

    @property
    def device(self) -> torch.device:
        """Device of the matrix."""
        return self.col.device

    @property
    def position(self) -> Int[Tensor, "E"]:
        """Place in CSR order of each entry in CSC order; found when first asked for."""
        if "position" not in self._made:
            row = expand(self.row_ptr, self.row_of.dtype, self.nnz)
            entry = order_entries(self.col, row, *self.shape[::-1], unique=False)[2]
            self._made["position"] = entry.to(index_type(self.nnz))
        found: Tensor = self._made["position"]
        return found

    @property
    def row_index(self) -> Int[Tensor, "E"]:
        """Row of each entry in CSR order; computed at every call."""
        return expand(self.row_ptr, self.row_of.dtype, self.nnz)

    @property
    def row_work(self) -> Work:
        """Division of the rows among programs."""
        found: Work = self._made["rows"]
        return found

    @property
    def col_work(self) -> Work:
        """Division of the columns among programs."""
        found: Work = self._made["columns"]
        return found

    @property
    def values_by_column(self) -> Tensor | None:
        """The values in CSC order, or None."""
        if self.values is None:
            return None
        if self.values.requires_grad and torch.is_grad_enabled():
            return self.values[self.position]
        self._forget_stale()
        if "values_by_column" not in self._made:
            self._made["values_by_column"] = self.values.detach()[self.position]
        found: Tensor = self._made["values_by_column"]
        return found

    @property
    def is_symmetric(self) -> bool:
        """Whether entries (i, j) and (j, i) are equal; values that train are taken to differ."""
        if self.values is not None and self.values.requires_grad:
            return False
        self._forget_stale()
        if "symmetric" not in self._made:
            self._made["symmetric"] = self._compare_orders()
        return bool(self._made["symmetric"])

    def _forget_stale(self) -> None:
        """Forget what was made from values that were changed in place since."""
        version = _version(self.values)
        if self._made.setdefault("version", version) != version:
            self._made["version"] = version
            for name in ("values_by_column", "symmetric"):
                self._made.pop(name, None)

    def _compare_orders(self) -> bool:
        same = self.shape[0] == self.shape[1] and torch.equal(self.row_ptr, self.col_ptr)
        same = same and torch.equal(self.col, self.row_of)
        if same and self.values is not None:
            by_column = self.values_by_column
            assert by_column is not None
            same = torch.equal(self.values, by_column)
        return same

    def with_values(self, values: Float[Tensor, "E"] | None) -> "Csr":
        """Return the same structure, shared, with values given in CSR order."""
        if values is not None and values.shape != (self.nnz,):
            raise ValueError(
                f"Csr: values have shape {tuple(values.shape)}, expected ({self.nnz},), one for "
                "every entry in the order of rows"
            )
        if values is not None:
            values = values.contiguous()
            self.position  # noqa: B018  found once, for all that share it
        kept = {k: v for k, v in self._made.items() if k in {"rows", "columns", "position"}}
        return replace(self, values=values, _made=kept)

    def transpose(self) -> "Csr":
        """Return the transposed matrix; structure is shared, values are put in order."""
        made = {"rows": self.col_work, "columns": self.row_work}
        return Csr(
            self.shape[::-1],
            *(self.col_ptr, self.row_of, self.row_ptr, self.col),
            self.values_by_column,
            self.col_ids,
            self.row_ids,
            made,
        )

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> "Csr":
        """Return a copy on another device (itself if it is there)."""
        if torch.device(device) == self.device:
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> "Csr":
        """Return a copy in page-locked memory, from where it moves without waiting."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, move: Any) -> "Csr":
        def moved(value: Any) -> Any:
            if isinstance(value, Tensor):
                return move(value)
            return value.map(move) if isinstance(value, Work) else value

        parts = {each.name: getattr(self, each.name) for each in fields(self)}
        parts = {name: moved(value) for name, value in parts.items()}
        self._forget_stale()
        made = {name: moved(value) for name, value in self._made.items()}
        parts["_made"] = {**made, "version": _version(parts["values"])}
        return Csr(**parts)


def no_argument(operator: str, csr: object, **tensors: object) -> ValueError | None:
    """Say that a matrix is no `Csr`, or which argument is no tensor; None if nothing is wrong.

    Called once a check has failed, so that valid calls pay nothing.
    """
    if isinstance(csr, Csr):
        return no_tensor(operator, tensors.items())
    return ValueError(
        f"{operator}: csr is {described(csr)}, expected a Csr (Csr.from_coo makes one)"
    )


def _version(values: Tensor | None) -> int:
    """Count how often values were changed in place; 0 if torch does not."""
    return 0 if values is None or values.is_inference() else values._version  # noqa: SLF001


def _check_lengths(
    row: Tensor,
    col: Tensor,
    shape: tuple[int, int],
    values: Tensor | None,
    row_ids: Tensor | None,
    col_ids: Tensor | None,
) -> None:
    if row.shape != col.shape or row.ndim != 1:
        raise ValueError(
            f"Csr: row {tuple(row.shape)} and col {tuple(col.shape)} must be vectors of one length"
        )
    if min(shape) < 0:
        raise ValueError(f"Csr: shape is {shape}, expected two numbers of at least 0")
    if values is not None and values.shape != row.shape:
        raise ValueError(
            f"Csr: values have shape {tuple(values.shape)}, expected {tuple(row.shape)}, one for "
            "every entry"
        )
    for name, ids, length in (("row_ids", row_ids, shape[0]), ("col_ids", col_ids, shape[1])):
        if ids is not None and ids.shape != (length,):
            raise ValueError(f"Csr: {name} has shape {tuple(ids.shape)}, expected ({length},)")
