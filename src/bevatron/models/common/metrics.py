"""Running sums of errors that add up over batches, ranks and groups."""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from bevatron.typing import IntArray


class RunningSums:
    """Sums that add up over batches and ranks: one float64 tensor."""

    _sums: Tensor

    def sums(self) -> Float[Tensor, " n"]:
        """Return all running sums as one float64 vector."""
        return self._sums.flatten()

    def load_sums(self, sums: Float[Tensor, " n"]) -> None:
        """Replace the running sums by such a vector."""
        self._sums = sums.detach().double().reshape(self._sums.shape).clone()


class Means(RunningSums):
    """Weighted means of named values; values that are always NaN are left out.

    Examples
    --------
    >>> means = Means(["lddt", "rmsd"])
    >>> found = {"lddt": (torch.tensor(1.5), torch.tensor(2.0)), "rmsd": torch.tensor(torch.nan)}
    >>> means.add(found, torch.tensor(1.0))
    >>> means.compute()
    {'lddt': 0.75}
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._sums = torch.zeros(len(self.names), 2, dtype=torch.float64)

    def add(self, found: Mapping[str, Tensor | tuple[Tensor, Tensor]], weight: Tensor) -> None:
        """Add a sample's values, or (sum, count) pairs, by name, times its weight."""
        self._sums = self._sums.to(weight.device)
        for name, value in found.items():
            total, count = value if isinstance(value, tuple) else (value, torch.ones_like(value))
            counts = torch.where(total.isnan(), 0.0, count.double() * weight.double())
            added = torch.where(counts > 0, total.double() * weight.double(), 0.0)
            self._sums[self.names.index(name)] += torch.stack([added, counts])

    def compute(self) -> dict[str, float]:
        """Compute all means by name."""
        pairs = zip(self.names, self._sums.tolist(), strict=True)
        return {name: total / count for name, (total, count) in pairs if count > 0}


class ErrorSums(RunningSums):
    """Mean absolute and root mean square errors of several quantities, in several groups.

    Every group and quantity has three sums: number of values compared, sum of absolute errors and
    sum of squared errors. Sums of different batches or ranks simply add up.

    Parameters
    ----------
    groups
        Names of the groups that errors are kept for; `compute` gives the total under the bare
        names and, if there is more than one group, each group under ``group/name``.

    Examples
    --------
    >>> sums = ErrorSums(["forces"])
    >>> sums.add({"forces": torch.tensor([[2.0, 3.0, 5.0]])})
    >>> sums.compute()
    {'forces_mae': 1.5, 'forces_rmse': 1.5811388300841898}
    """

    def __init__(self, quantities: Sequence[str], groups: Sequence[str] = ("all",)) -> None:
        self.quantities = tuple(quantities)
        self.groups = tuple(groups)
        self._sums = torch.zeros(len(self.groups), len(self.quantities), 3, dtype=torch.float64)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all errors, in the order of `compute`."""
        groups = self.groups if len(self.groups) > 1 else ()
        prefixes = ["", *(f"{name}/" for name in groups)]
        return tuple(
            f"{prefix}{name}_{error}"
            for prefix in prefixes
            for name in self.quantities
            for error in ("mae", "rmse")
        )

    def add(self, rows: Mapping[str, Float[Tensor, "G 3"]], group: Tensor | None = None) -> None:
        """Add (count, sum of absolute, sum of squared errors) of structures to their groups.

        Parameters
        ----------
        rows : for each quantity one row per structure
        group : [G], the group of each structure; without it all belong to the first
        """
        stacked = torch.stack([rows[name].detach().double() for name in self.quantities], dim=1)
        self._sums = self._sums.to(stacked.device)
        if group is None:
            group = torch.zeros(len(stacked), dtype=torch.int64, device=stacked.device)
        self._sums = self._sums.index_add(0, group, stacked)

    def compute(self) -> dict[str, float]:
        """Compute ``NAME_mae`` and ``NAME_rmse`` of the quantities with data."""
        sums = self._sums.cpu()
        errors = self._errors(sums.sum(dim=0), "")
        if len(self.groups) > 1:
            for name, values in zip(self.groups, sums, strict=True):
                errors.update(self._errors(values, f"{name}/"))
        return errors

    def _errors(self, sums: Tensor, prefix: str) -> dict[str, float]:
        errors = {}
        for name, (count, absolute, squared) in zip(self.quantities, sums.tolist(), strict=True):
            if count > 0:
                errors[f"{prefix}{name}_mae"] = absolute / count
                errors[f"{prefix}{name}_rmse"] = (squared / count) ** 0.5
        return errors


def error_rows(
    error: Float[Tensor, "n *components"],
    counts: Tensor,
    owner: Tensor | None = None,
    num_structures: int | None = None,
) -> Float[Tensor, "G 3"]:
    """Sum up errors per structure: (count, sum of absolute, sum of squared errors).

    Parameters
    ----------
    error : one row per structure, or per atom with ``owner``
    counts : [G] bool, which structures have a label; the others get a row of zeros
    owner : [n], the structure of each row
    num_structures : G, with ``owner``
    """
    error = (
        error.detach().double().flatten(1) if error.ndim > 1 else error.detach().double()[:, None]
    )
    rows = torch.stack(
        [torch.full_like(error[:, 0], error.shape[1]), error.abs().sum(1), error.square().sum(1)],
        dim=1,
    )
    if owner is not None:
        total = rows.new_zeros(num_structures or 0, 3)
        rows = total.index_add(0, owner, rows)
    return torch.where(counts[:, None], rows, torch.zeros_like(rows))


def group_errors(
    rows: Mapping[str, Float[Tensor, "G 3"]], groups: Sequence[str], group: IntArray
) -> dict[str, dict[str, float]]:
    """Compute the errors of named groups of structures, for tables.

    Parameters
    ----------
    rows : rows of `error_rows` by quantity
    group : [G], the group of each structure
    """
    table: dict[str, dict[str, float]] = {}
    for number, name in enumerate(groups):
        members = torch.as_tensor(group == number)
        sums = ErrorSums(list(rows))
        sums.add({key: value.cpu()[members] for key, value in rows.items()})
        table[name] = sums.compute()
    return table
