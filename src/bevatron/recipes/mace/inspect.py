"""Tables and figures of ``bevatron inspect`` for a store of structures."""

from bevatron.data.store.store import Store
from bevatron.data.summary import inspect
from bevatron.recipes.mace.data import batch_sizes as sizes
from bevatron.train.report import plots
from bevatron.train.report.page import Report

__all__ = ["describe", "draw", "sizes"]

describe = inspect.describe


def draw(report: Report, store: Store) -> None:
    """Add figures of neighbours and sizes to a report."""
    report.figure(
        plots.ranges(
            {
                name: plots.Counted(degrees, atoms)
                for name, (degrees, atoms) in inspect.neighbours_by_file(store).items()
            },
            "neighbours of an atom within the cutoff",
            "Neighbours per atom",
            counted="atoms",
        ),
        "Median, middle half and the range from 1 to 99 % of the atoms of each file.",
        "neighbours",
    )
    for name, field in (("atoms", "atomic_numbers"), ("edges", "edges")):
        sizes = {name: store.lengths(field)}
        figure = plots.histogram(sizes, f"{name} per structure", f"Sizes in {name}")
        report.figure(figure, f"Number of {name} per structure.", f"sizes_{name}")
