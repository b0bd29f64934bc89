"""`bevatron inspect`: tables, figures in a folder, all of it in one HTML file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bevatron.data.packing import CostModel
from bevatron.data.store.store import Store
from bevatron.data.summary import inspect
from bevatron.errors import StoreError
from bevatron.files import make_writable
from bevatron.output import number, print_table
from bevatron.recipes.dispatch import of_samples
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.typing import IntArray

MOST_STEPS = 2000
"""Steps of a plan that are drawn, the first."""


@dataclass(frozen=True)
class PlanOptions:
    """Settings of the epochs that are planned for comparison.

    Attributes
    ----------
    capacity
        Maximum number of atoms, residues or tokens per batch; None = 16 times the mean sample, at
        least the largest.
    ranks : processes that share the epoch
    cost_nodes, cost_edges, cost_constant : what is balanced: a*atoms + b*edges + c per structure
    seed : seed of the epoch
    """

    capacity: int | None = None
    ranks: int = 8
    cost_nodes: float = 1.0
    cost_edges: float = 0.0
    cost_constant: float = 0.0
    seed: int = 0


def inspect_store(
    path: Path | str, out: Path | None = None, plan: PlanOptions | None = None
) -> tuple[list[inspect.Table], Path]:
    """Describe and draw what is in a store, and with ``plan`` how batches would fill the ranks.

    Raises StoreError if there is no finished store at ``path``, or ``out`` cannot be written.

    Parameters
    ----------
    out : where figures and ``inspect.html`` go; a folder ``STORE-inspect`` by default
    plan : compare fixed-count batches, Algorithm 1 and ours

    Returns
    -------
    The tables, and the HTML file.
    """
    store = Store.open(path)
    out = store.path.with_name(f"{store.path.name}-inspect") if out is None else out
    make_writable(out, StoreError)
    report = Report(f"Store {store.path.name}", str(store.path), figures=out)
    system = of_samples(store.manifest["settings"].get("kind", "structures"))
    shown = system.inspected()
    tables: list[inspect.Table] = list(shown.describe(store))
    for table in tables:
        report.section(table.title if table.title != str(store.path) else "Overview")
        report.table(table.headers, table.rows)
    report.section("Figures")
    shown.draw(report, store)
    if plan is not None:
        tables.append(_compare(report, store, shown.sizes(store), plan, system.samples))
    return tables, report.write(out / "inspect.html")


def show_tables(tables: Sequence[inspect.Table]) -> None:
    """Print tables."""
    for table in tables:
        rows = [[number(value) for value in row] for row in table.rows]
        print_table(table.headers, rows, table.title)


def _compare(
    report: Report, store: Store, sizes: Mapping[str, IntArray], options: PlanOptions, samples: str
) -> inspect.Table:
    atoms, *others = sizes.values()
    edges = others[0] if others else np.zeros_like(atoms)
    usable = atoms > 0
    atoms, edges = atoms[usable], edges[usable]
    capacity = options.capacity or max(int(16 * atoms.mean()), int(atoms.max()))
    cost = CostModel(options.cost_nodes, options.cost_edges, options.cost_constant)
    plans = inspect.compare_plans(
        atoms, edges, capacity, options.ranks, cost, options.seed, store.describe
    )
    unit = next(iter(sizes))
    table = inspect.plan_table(plans, capacity, options.ranks, unit, samples)
    report.section("Batches").text(table.title + ".").table(table.headers, table.rows)
    costs = {each.name: each.plan.costs[:MOST_STEPS] for each in plans}
    report.figure(
        plots.batch_balance(costs, capacity if cost == CostModel() else None, _unit(cost, unit)),
        "Work of each rank in each step. All ranks wait for the slowest; white is idle.",
        "plan",
    )
    return table


def _unit(cost: CostModel, unit: str) -> str:
    if cost == CostModel():
        return unit
    weights = dict(cost.weights)
    parts = [(weights["nodes"], unit), (weights["edges"], "edges"), (cost.constant, "")]
    terms = [f"{value:g} {name}".strip() for value, name in parts if value]
    return " + ".join(terms)
