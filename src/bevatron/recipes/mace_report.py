"""The report of a run of MACE: learning curves, errors, parity, batch balance, timing.

`report_of_run` evaluates the finished model and calls `write_report`, which composes report.html
and the pictures in ``plots/`` from metrics.jsonl and from labels and predictions side by side.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from ase.data import chemical_symbols
from torch import distributed

from bevatron.data.dataset import Dataset, Subset
from bevatron.data.packing import Plan
from bevatron.models.mace import load_model
from bevatron.recipes.evaluation import Errors, Evaluation, Predictions, evaluate_dataset
from bevatron.recipes.potential import Potential
from bevatron.recipes.structures import StructureData, batch_sizes, isolated_atoms
from bevatron.train import plots
from bevatron.train.epochs import pack_samples
from bevatron.train.journal import read_journal
from bevatron.train.plots import Curve, Panel
from bevatron.train.report import Cell, Report
from bevatron.train.run import FitResult
from bevatron.train.settings import BatchConfig
from bevatron.typing import FloatArray

Record = dict[str, Any]

MOST_TRAINING_STRUCTURES = 200
"""How many training structures are evaluated, for comparison with those not trained on."""

MOST_GROUPS = 40

COLUMNS = {
    "energy_per_atom_mae": "energy MAE (meV/atom)",
    "energy_per_atom_rmse": "energy RMSE (meV/atom)",
    "forces_mae": "force MAE (meV/Å)",
    "forces_rmse": "force RMSE (meV/Å)",
    "stress_mae": "stress MAE (meV/Å³)",
    "stress_rmse": "stress RMSE (meV/Å³)",
}
"""Metric -> heading of its column; values are shown times 1000."""


def report_of_run(
    folder: Path,
    data: StructureData,
    batch: BatchConfig,
    result: FitResult,
    num_ranks: int | None = None,
) -> Path:
    """Evaluate the model of a finished run and write its report.

    Parameters
    ----------
    folder
        The run's folder, with model, config.yaml and metrics.jsonl.
    data
        The data sets of the run.
    batch
        How batches were made.
    result
        What the trainer says of the run.
    num_ranks
        Processes that shared the run; None = those of torch's process group.

    Returns
    -------
    Path
        report.html
    """
    config = read_config(folder)
    model = load_model(folder)
    dtype = str(config["train"].get("dtype", "float64"))
    # Structures name their heads themselves; the potential's own does not matter here.
    potential = Potential(model, _device(config), dtype, model.config.heads[0])
    chosen: dict[str, Dataset] = {}
    if data.test is not None:
        chosen["test"] = data.test
    if data.valid is not None:
        chosen["validation"] = data.valid
    # Isolated atoms only give E0.
    trained = np.setdiff1d(np.arange(len(data.train)), isolated_atoms(data.train))
    number = min(MOST_TRAINING_STRUCTURES, len(trained))
    some = np.sort(np.random.default_rng(0).permutation(trained)[:number])
    name = "training" if number == len(trained) else f"training ({number} of {len(trained)})"
    chosen[name] = Subset(data.train, some)
    capacity = max(batch.capacities().get("atoms", 0), 512)
    evaluations = {
        name: evaluate_dataset(potential, dataset, capacity) for name, dataset in chosen.items()
    }
    seed = int(config["train"].get("seed", 0))
    if num_ranks is None:
        num_ranks = distributed.get_world_size() if distributed.is_initialized() else 1
    plan = pack_samples(batch_sizes(Subset(data.train, trained)), None, batch, num_ranks, seed, 0)
    notes = [] if result.stopped_by is None else [f"stopped by {result.stopped_by}"]
    return write_report(
        folder,
        evaluations,
        plan=plan,
        batch=batch,
        energies=isolated_energies(model),
        summary={
            "epochs": result.epochs,
            "best epoch": result.best_epoch + 1 if result.best is not None else None,
            "parameters": sum(p.numel() for p in potential.model.parameters()),
            "training time": duration(result.seconds),
        },
        notes=notes,
        found=data.report,
    )


def write_report(
    folder: Path,
    evaluations: Mapping[str, Evaluation],
    *,
    plan: Plan | None = None,
    batch: BatchConfig | None = None,
    energies: Mapping[str, Mapping[int, float]] | None = None,
    summary: Mapping[str, Cell] | None = None,
    notes: Sequence[str] = (),
    found: Sequence[str] = (),
) -> Path:
    """Compose report.html and ``plots/*.png`` in the folder of a run.

    Parameters
    ----------
    folder
        With metrics.jsonl and config.yaml.
    evaluations
        Name of a data set -> errors and predictions; the first one is shown in detail.
    plan, batch
        An epoch's batches and how they were made.
    energies
        Head -> atomic number -> E0 in eV, subtracted where energies are drawn.
    summary
        More numbers for the top of the page.
    notes
        Remarks that a reader must not miss; resumes are added from metrics.jsonl.
    found
        What the readers found in the files.

    Returns
    -------
    Path
        report.html
    """
    records = list(read_journal(folder / "metrics.jsonl"))
    epochs = _last_of_each([record for record in records if record["kind"] == "epoch"])
    config = read_config(folder)
    report = Report(f"MACE: {folder.resolve().name}", str(folder), figures=folder / "plots")
    first = next(iter(evaluations.items()), None)
    report.highlights({**(_headline(*first) if first else {}), **(summary or {})})
    report.notes([*notes, *_events_in_words(records)])
    report.section("Data")
    _data(report, evaluations, found)
    if epochs:
        report.section("Learning curves")
        _learning_curves(report, epochs, records, config)
    if first:
        report.section("Errors")
        _errors(report, evaluations, *first)
        report.section("Parity")
        _parity(report, *first, energies or {})
    if plan is not None:
        report.section("Batch balance")
        _balance(report, plan, batch)
    if epochs:
        report.section("Timing")
        _timing(report, epochs)
    report.section("Settings").config(config).versions()
    return report.write(folder / "report.html")


def read_config(folder: Path) -> dict[str, Any]:
    """Read the configuration that a run wrote."""
    values = yaml.safe_load((folder / "config.yaml").read_text())
    return {"train": {}, **values}


def isolated_energies(model: torch.nn.Module) -> dict[str, dict[int, float]]:
    """Return E0 of each head and element of a model."""
    config: Any = model.config
    return {
        head: dict(zip(config.atomic_numbers, row, strict=True))
        for head, row in zip(config.heads, config.atomic_energies, strict=True)
    }


def duration(seconds: float) -> str:
    """Write a time for a reader.

    Examples
    --------
    >>> duration(42.4), duration(200), duration(7300)
    ('42 s', '3 min 20 s', '2 h 1 min')
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def _device(config: Mapping[str, Any]) -> str:
    asked = config["train"].get("device") or "auto"
    if asked != "auto":
        return str(asked)
    return "cuda" if torch.cuda.is_available() else "cpu"


def _last_of_each(epochs: Sequence[Record]) -> list[Record]:
    return list({record["epoch"]: record for record in epochs}.values())


def _headline(name: str, evaluation: Evaluation) -> dict[str, Cell]:
    wanted = {
        "energy_per_atom_rmse": f"energy RMSE, {name} (meV/atom)",
        "forces_rmse": f"force RMSE, {name} (meV/Å)",
        "stress_rmse": f"stress RMSE, {name} (meV/Å³)",
    }
    total = evaluation.total
    return {words: 1e3 * total[metric] for metric, words in wanted.items() if metric in total}


def _events_in_words(records: Sequence[Record]) -> Iterator[str]:
    for record in records:
        epoch, step = record.get("epoch", 0) + 1, record.get("step", 0)
        if record["kind"] == "resume":
            changes = "; ".join(
                f"{key} was {before}, is {now}" for key, (before, now) in record["changes"].items()
            )
            yield f"resumed in epoch {epoch}, after step {step}, with other settings: {changes}"
        elif record["kind"] == "repacked":
            yield (
                f"the samples left of epoch {epoch} after step {step} were packed anew, "
                "each still seen exactly once"
            )


def _data(report: Report, evaluations: Mapping[str, Evaluation], found: Sequence[str]) -> None:
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
                f"{values.num_atoms.min()} - {values.num_atoms.max()}",
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
    """Say which structures have a flag set on their first atom."""
    first = np.cumsum(values.num_atoms) - values.num_atoms
    return of_atoms[first[values.num_atoms > 0]]


def _learning_curves(
    report: Report, epochs: Sequence[Record], records: Sequence[Record], config: Mapping[str, Any]
) -> None:
    x = [record["epoch"] + 1 for record in epochs]

    def values(*keys: str, factor: float = 1.0) -> FloatArray:
        found = [_value(record, keys) for record in epochs]
        return factor * np.array([np.nan if v is None else v for v in found], dtype=np.float64)

    loss = [Curve("training", x, values("loss")), Curve("validation", x, values("valid", "loss"))]
    panels = [Panel("Loss", "loss", _shown(loss))]
    for quantity, title, unit in (
        ("energy_per_atom", "Energy, validation", "error (meV/atom)"),
        ("forces", "Forces, validation", "error (meV/Å)"),
        ("stress", "Stress, validation", "error (meV/Å³)"),
    ):
        both = [
            Curve(kind.upper(), x, values("valid", f"{quantity}_{kind}", factor=1e3))
            for kind in ("rmse", "mae")
        ]
        if _shown(both):
            panels.append(Panel(title, unit, _shown(both)))
    terms = sorted({name for record in epochs for name in record.get("terms", {})})
    if len(terms) > 1:
        curves = [Curve(name, x, values("terms", name)) for name in terms]
        panels.append(Panel("Terms of the loss", "training loss", curves))
    panels.append(Panel("Learning rate", "learning rate", [Curve("", x, values("lr"))]))
    if len(panels) < 6:
        norm = Curve("", x, values("grad_norm"))
        panels.append(Panel("Gradient", "norm before clipping", [norm]))
    events = list(_events(records, config))
    best = [record["epoch"] + 1 for record in epochs if record.get("best")]
    words = "Marked: " + ", ".join(f"{name} (epoch {place:g})" for place, name in events) + "."
    report.figure(
        plots.curves(panels, events=events),
        f"Averages over each epoch. {f'Best validation in epoch {best[-1]}. ' if best else ''}"
        f"{words if events else ''}",
        "learning_curves",
    )


def _shown(curves: Sequence[Curve]) -> list[Curve]:
    return [curve for curve in curves if np.isfinite(np.asarray(curve.y, dtype=float)).any()]


def _value(record: Record, keys: Sequence[str]) -> float | None:
    value: Any = record
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return None if value is None else float(value)


def _events(records: Sequence[Record], config: Mapping[str, Any]) -> Iterator[tuple[float, str]]:
    stage = ((config.get("loss") or {}).get("stage_two") or {}).get("start_epoch")
    if stage is None:
        stage = (config.get("schedule") or {}).get("stage_two_start")
    if stage is not None and any(record.get("epoch", -1) >= stage for record in records):
        yield stage + 1, "stage two"
    for record in records:
        if record["kind"] in {"resume", "repacked"}:
            words = "resumed" if record["kind"] == "resume" else "packed anew"
            yield record["epoch"] + 1, words


def _errors(
    report: Report, evaluations: Mapping[str, Evaluation], name: str, evaluation: Evaluation
) -> None:
    report.table(*_error_table("set", {key: value.total for key, value in evaluations.items()}))
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


def _error_table(kind: str, rows: Mapping[str, Errors]) -> tuple[list[str], list[list[Cell]]]:
    shown = [metric for metric in COLUMNS if any(metric in row for row in rows.values())]
    cells: list[list[Cell]] = [
        [label, *(1e3 * row[m] if m in row else None for m in shown)] for label, row in rows.items()
    ]
    return [kind, *(COLUMNS[metric] for metric in shown)], cells


def _error_bars(report: Report, rows: Mapping[str, Errors], title: str, name: str) -> None:
    metric = "forces_rmse"
    having = [label for label in rows if metric in rows[label]]
    if len(having) < 2:
        return
    having = sorted(having, key=lambda label: -rows[label][metric])[:MOST_GROUPS]
    series = {
        words: [1e3 * rows[label][key] for label in having]
        for key, words in ((metric, "RMSE"), ("forces_mae", "MAE"))
    }
    report.figure(plots.bars(having, series, "force error (meV/Å)", title), "", name)


def _parity(
    report: Report, name: str, evaluation: Evaluation, energies: Mapping[str, Mapping[int, float]]
) -> None:
    values = evaluation.predictions
    offset = _offsets(values, energies)
    groups = values.group if len(set(values.group)) <= len(plots.PALETTE) else None
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
        report.figure(
            plots.parity(values.stress, values.predicted_stress, "stress component", "eV/Å³"),
            f"Stress components of the {name} set.",
            "parity_stress",
        )


def _offsets(values: Predictions, energies: Mapping[str, Mapping[int, float]]) -> FloatArray:
    """Sum up E0 of each structure; zeros where they are not known."""
    if not energies:
        return np.zeros(len(values.num_atoms))
    head = np.repeat(values.head, values.num_atoms)
    e0 = np.zeros(len(values.atomic_numbers))
    for name, table in energies.items():
        for z, energy in table.items():
            e0[(head == name) & (values.atomic_numbers == z)] = energy
    owner = np.repeat(np.arange(len(values.num_atoms)), values.num_atoms)
    return np.bincount(owner, weights=e0, minlength=len(values.num_atoms)).astype(np.float64)


def _balance(report: Report, plan: Plan, batch: BatchConfig | None) -> None:
    algorithm = batch.algorithm if batch is not None else "batches"
    capacity = None if plan.capacity is None else float(plan.capacity[0])
    sizes = plan.batch_sizes
    report.table(
        ("batches", "ranks", "steps", "structures per batch", "fill (%)",
         "slowest rank over mean (%)", "repeats"),
        [[
            algorithm, plan.num_ranks, plan.num_steps, f"{sizes.min()} - {sizes.max()}",
            None if np.isnan(plan.fill) else 100 * plan.fill, 100 * (plan.imbalance - 1),
            plan.num_repeats,
        ]],
        "The first epoch",
    )  # fmt: skip
    atoms = batch is None or (batch.cost_nodes, batch.cost_edges, batch.cost_constant) == (1, 0, 0)
    unit = "atoms" if atoms else "cost"
    if plan.num_ranks > 1:
        figure = plots.batch_balance({algorithm: plan.costs}, capacity if atoms else None, unit)
        caption = "What each rank has to do in each step; all ranks wait for the slowest."
    else:
        figure = plots.histogram(
            {"batches": plan.costs.ravel()}, f"{unit} of a batch", "Sizes of batches", "batches"
        )
        caption = "How much is in the batches of the first epoch."
        caption += f" Capacity: {capacity:,.0f} {unit}." if capacity and atoms else ""
    report.figure(figure, caption, "batch_balance")


def _timing(report: Report, epochs: Sequence[Record]) -> None:
    seconds = np.array([record["time"]["seconds"] for record in epochs])
    waited = seconds * np.array([record["time"]["wait_share"] for record in epochs])
    validation = np.array([record["time"]["validation_seconds"] for record in epochs])
    atoms = np.array([record["time"].get("atoms_per_s", np.nan) for record in epochs], dtype=float)
    graphs = np.array(
        [record["time"].get("graphs_per_s", np.nan) for record in epochs], dtype=float
    )
    report.table(
        ("", "seconds", "share (%)"),
        [
            [name, float(part.sum()), float(100 * part.sum() / (seconds + validation).sum())]
            for name, part in (
                ("training steps", seconds - waited),
                ("waiting for data", waited),
                ("validation", validation),
            )
        ],
        f"{len(epochs)} epochs; median {np.nanmedian(graphs):,.0f} structures/s, "
        f"{np.nanmedian(atoms):,.0f} atoms/s while training",
    )
    x = [record["epoch"] + 1 for record in epochs]
    parts = [
        Curve("training steps", x, seconds - waited),
        Curve("waiting for data", x, waited),
        Curve("validation", x, validation),
    ]
    report.figure(
        plots.curves(
            [
                Panel("Time of an epoch", "seconds", parts, logarithmic=False, from_zero=True),
                Panel(
                    "Speed",
                    "atoms per second",
                    [Curve("", x, atoms)],
                    logarithmic=False,
                    from_zero=True,
                ),
            ]
        ),
        "Where the time of each epoch went, and how fast training was.",
        "timing",
    )
