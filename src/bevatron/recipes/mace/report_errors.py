"""The errors in a report of MACE: tables, bars, parity plots, and the data sets."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from ase.data import chemical_symbols

from bevatron.output import Cell, span
from bevatron.recipes.mace.evaluate import SHOWN, Errors, Evaluation, Predictions, error_table
from bevatron.train.report import plots
from bevatron.train.report.page import Report
from bevatron.typing import FloatArray

MOST_GROUPS = 40


def headline(name: str, evaluation: Evaluation) -> dict[str, Cell]:
    """Return the errors of one data set for the top of the page."""
    return {
        f"{quantity}, {name} ({unit})": 1e3 * evaluation.total[metric]
        for metric, (quantity, unit) in SHOWN.items()
        if metric.endswith("rmse") and metric in evaluation.total
    }


def show_data(report: Report, evaluations: Mapping[str, Evaluation], found: Sequence[str]) -> None:
    """Describe the data sets and what the readers found."""
    rows: list[list[Cell]] = []
    for name, evaluation in evaluations.items():
        values = evaluation.predictions
        forces = values.forces[~np.isnan(values.forces).any(axis=1)]
        elements = np.unique(values.atomic_numbers)
        rows.append(
            [
                name,
                len(values.num_atoms),
                int(values.num_atoms.sum()),
                span(values.num_atoms.min(), values.num_atoms.max()),
                float(values.num_edges.sum() / max(values.num_atoms.sum(), 1)),
                int(np.isfinite(values.energy).sum()),
                int(_per_structure(values, np.isfinite(values.forces).all(axis=1)).sum()),
                int(np.isfinite(values.stress).all(axis=(1, 2)).sum()),
                float(np.sqrt(np.mean(forces**2))) if len(forces) else None,
                " ".join(chemical_symbols[z] for z in elements),
            ]
        )
    headers = (
        "set", "structures", "atoms", "atoms each", "neighbours per atom", "with energy",
        "with forces", "with stress", "force RMS (eV/Å)", "elements",
    )  # fmt: skip
    report.table(headers, rows)
    if found:
        report.details("What the readers found", "\n".join(found))


def _per_structure(values: Predictions, of_atoms: Any) -> Any:
    """Mark the structures whose first atom has a flag set."""
    first = np.cumsum(values.num_atoms) - values.num_atoms
    return of_atoms[first[values.num_atoms > 0]]


def show_errors(
    report: Report, evaluations: Mapping[str, Evaluation], name: str, evaluation: Evaluation
) -> None:
    """Show errors of all data sets, and of one by group, file, head and element."""
    report.table(*_error_table("set", {key: value.total for key, value in evaluations.items()}))
    for sentence in constant_shifts(evaluation.predictions):
        report.text(sentence)
    titles = {"group": "Errors by group", "file": "Errors by file", "head": "Errors by head"}
    for kind, title in titles.items():
        if kind in evaluation.tables:
            rows = evaluation.tables[kind]
            headers, cells = _error_table(kind, rows)
            report.table(headers, cells, f"{title}, {name}")
            _error_bars(report, rows, f"{title}, {name}", f"errors_by_{kind}")
    if "element" in evaluation.tables:
        rows = evaluation.tables["element"]
        report.table(*_error_table("element", rows), f"Force errors by element, {name}")
        _error_bars(report, rows, f"Force errors by element, {name}", "errors_by_element")


def constant_shifts(values: Predictions) -> list[str]:
    """Say of each head whose energy errors are mostly one constant how large that is.

    Mostly: without their mean, the errors per atom have at most half their RMSE.

    Returns
    -------
    One sentence for each such head.
    """
    error = (values.predicted_energy - values.energy) / values.num_atoms
    sentences = []
    for head in dict.fromkeys(values.head):
        own = 1e3 * error[[name == head for name in values.head] & np.isfinite(error)]
        if len(own) < FEWEST_FOR_A_SHIFT:
            continue
        rmse, rest = float(np.sqrt(np.mean(own**2))), float(own.std())
        if rest <= 0.5 * rmse:
            of_head = f" of head '{head}'" if len(set(values.head)) > 1 else ""
            sentences.append(
                f"The energy error{of_head} is mostly one constant shift of {own.mean():+.3g} "
                f"meV/atom: without it the RMSE is {rest:.3g} instead of {rmse:.3g} meV/atom. A "
                "shift changes neither forces nor differences between structures of one "
                "composition. Its cause is another energy reference, E0 that do not fit these "
                "data, or training that has not converged."
            )
    return sentences


FEWEST_FOR_A_SHIFT = 5
"""Energies; fewer agree by chance."""


def _error_table(kind: str, rows: Mapping[str, Errors]) -> tuple[list[str], list[list[Cell]]]:
    names, cells = error_table(rows)
    headers = [kind, *("{} ({})".format(*SHOWN[name]) for name in names)]
    return headers, [[label, *values] for label, values in cells.items()]


def _error_bars(report: Report, rows: Mapping[str, Errors], title: str, name: str) -> None:
    metric = "forces_rmse"
    having = [label for label in rows if metric in rows[label]]
    if len(having) < 2:
        return
    having = sorted(having, key=lambda label: -rows[label][metric])[:MOST_GROUPS]
    series = {
        kind: [1e3 * rows[label][key] for label in having]
        for key, kind in ((metric, "RMSE"), ("forces_mae", "MAE"))
    }
    report.figure(plots.bars(having, series, "force error (meV/Å)", title), "", name)


def show_parity(
    report: Report, name: str, evaluation: Evaluation, energies: Mapping[str, Mapping[int, float]]
) -> None:
    """Draw predictions of one data set against labels."""
    values = evaluation.predictions
    offset = _offsets(values, energies)
    groups = values.group if 1 < len(set(values.group)) <= len(plots.PALETTE) else None
    quantity = "energy per atom" + (" - E0" if offset.any() else "")
    report.figure(
        plots.parity(
            (values.energy - offset) / values.num_atoms,
            (values.predicted_energy - offset) / values.num_atoms,
            quantity,
            "eV",
            groups,
        ),
        f"Energies of the {name} set"
        + (", less those of the isolated atoms (E0)." if offset.any() else "."),
        "parity_energy",
    )
    few = values.forces.size <= plots.MOST_POINTS
    elements = (
        [chemical_symbols[z] for z in values.atomic_numbers for _ in range(3)] if few else None
    )
    report.figure(
        plots.parity(values.forces, values.predicted_forces, "force component", "eV/Å", elements),
        f"Force components of the {name} set.",
        "parity_forces",
    )
    if np.isfinite(values.stress).any():
        row, column = np.triu_indices(3)  # a stress is symmetric
        label, said = (
            1e3 * stress[:, row, column] for stress in (values.stress, values.predicted_stress)
        )
        report.figure(
            plots.parity(label, said, "stress component", "meV/Å³"),
            f"Stress components of the {name} set.",
            "parity_stress",
        )


def _offsets(values: Predictions, energies: Mapping[str, Mapping[int, float]]) -> FloatArray:
    """Sum E0 over each structure; zeros where unknown."""
    if not energies:
        return np.zeros(len(values.num_atoms))
    head = np.repeat(values.head, values.num_atoms)
    e0 = np.zeros(len(values.atomic_numbers))
    for name, table in energies.items():
        for z, energy in table.items():
            e0[(head == name) & (values.atomic_numbers == z)] = energy
    owner = np.repeat(np.arange(len(values.num_atoms)), values.num_atoms)
    return np.bincount(owner, weights=e0, minlength=len(values.num_atoms)).astype(np.float64)
