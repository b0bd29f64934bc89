"""``bevatron compare``: the settings in which runs differ, their errors and curves side by side."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from bevatron.config import RENAMED
from bevatron.errors import ConfigError
from bevatron.output import note, number, print_table
from bevatron.recipes import DEFAULT
from bevatron.train.logger import METRICS
from bevatron.train.report.measures import measure_name
from bevatron.train.report.training import History, duration, training_loss

ABSENT = "-"
"""Cell of a setting or an error that a run does not have."""

VALID = "valid "
"""Beginning of the name of a validation metric."""


@dataclass(frozen=True)
class ComparedRun:
    """The contents of a run's folder that are compared.

    Attributes
    ----------
    name : the end of its path that distinguishes it
    folder : the run's
    history : its configuration and its records
    """

    name: str
    folder: Path
    history: History

    @classmethod
    def of_folder(cls, folder: Path, name: str) -> Self:
        """Read a run's folder; ConfigError if it holds no run."""
        if not (folder / METRICS).is_file():
            raise ConfigError(f"{folder}: holds no run, there is no {METRICS} in it")
        return cls(name, folder, History.of_run(folder))

    @property
    def settings(self) -> dict[str, str]:
        """All settings by key as text, the folder aside."""
        found = dict(_flat(self.history.config))
        found.pop("output", None)
        return found

    @property
    def measures(self) -> dict[str, float]:
        """Epochs or steps, time, the loss, and the validation metrics of the best of them."""
        epochs = self.history.epochs
        if not epochs:
            return {}
        best = next((record for record in reversed(epochs) if record["best"]), epochs[-1])
        return {
            f"{self.history.unit}s": self.history.place(epochs[-1]),
            **({f"best {self.history.unit}": self.history.place(best)} if best["valid"] else {}),
            "seconds": sum(
                record["time"]["seconds"] + record["time"]["validation_seconds"]
                for record in epochs
            ),
            "loss": best["loss"],
            **{f"{VALID}{name}": value for name, value in best["valid"].items()
               if value is not None},
        }  # fmt: skip


@dataclass(frozen=True)
class Comparison:
    """Runs side by side.

    Attributes
    ----------
    runs : in the order in which they were given
    """

    runs: Sequence[ComparedRun]

    def settings(self) -> dict[str, list[str]]:
        """Return the settings that differ: key -> value of each run."""
        each = [run.settings for run in self.runs]
        keys = dict.fromkeys(key for settings in each for key in settings)
        rows = {key: [settings.get(key, ABSENT) for settings in each] for key in keys}
        return {key: row for key, row in rows.items() if len(set(row)) > 1}

    def measures(self) -> dict[str, list[str]]:
        """Return the errors, epochs and times: name as it is written -> value of each run."""
        each = [run.measures for run in self.runs]
        return {
            _written(name)[0]: [_cell(name, measures.get(name)) for measures in each]
            for name in self._names()
        }

    def values(self) -> dict[str, Any]:
        """Return all of it as plain values, run by run."""
        differing = self.settings()
        return {
            run.name: {
                "folder": run.folder,
                "settings": {key: row[n] for key, row in differing.items()},
                "measures": run.measures,
            }
            for n, run in enumerate(self.runs)
        }

    def show(self) -> None:
        """Print both tables, and name the runs that have no measures yet."""
        for title, table in self._tables().items():
            rows = [[name, *cells] for name, cells in table.items()]
            if rows:
                print_table(["", *(run.name for run in self.runs)], rows, title)
        for line in self._left_out():
            note(f"note: {line}")
        for run in self.runs:
            if not run.history.epochs:
                done = "epoch is finished" if run.history.unit == "epoch" else "step is validated"
                note(f"note: {run.folder}: no {done} yet")

    def write(self, out: Path) -> None:
        """Write a page with tables and curves, ``.html``, or the curves alone, ``.png``.

        Raises ConfigError for another name.
        """
        from bevatron.train.report import plots
        from bevatron.train.report.page import Report

        if out.suffix not in {".html", ".png"}:
            raise ConfigError(f"{out}: expected a name that ends in .html or .png")
        unit = " or ".join(dict.fromkeys(run.history.unit for run in self.runs))
        figure = plots.curves(self._panels(), unit)
        if out.suffix == ".png":
            plots.save(figure, out)
            return
        report = Report("Runs", ", ".join(str(run.folder) for run in self.runs))
        report.notes(self._left_out())
        for title, table in self._tables().items():
            rows = [[name, *cells] for name, cells in table.items()]
            if rows:
                report.section(title).table(["", *(run.name for run in self.runs)], rows)
        report.section("Curves").figure(figure, f"By {unit}.")
        report.write(out)

    def _tables(self) -> dict[str, dict[str, list[str]]]:
        """Return the tables to show; of different systems only what several runs have."""
        settings, measures = self.settings(), self.measures()
        if len(self._systems) > 1:
            settings = {key: row for key, row in settings.items() if len({*row} - {ABSENT}) > 1}
            measures = {
                name: row
                for name, row in measures.items()
                if sum(cell != ABSENT for cell in row) > 1
            }
        return {"Settings that differ": settings, "Measures at the best validation": measures}

    @property
    def _systems(self) -> list[str]:
        recipes = (str(run.history.config.get("recipe", DEFAULT)) for run in self.runs)
        return [*dict.fromkeys(recipes)]

    def _left_out(self) -> list[str]:
        """Say what the tables lack."""
        if len(self._systems) < 2:
            return []
        systems = " and ".join(self._systems)
        return [
            f"runs of {systems}: --json has the settings and measures that only one of them has"
        ]

    def _names(self) -> list[str]:
        """Return the measures of all runs, terms of the loss last.

        Of the errors of a potential those that tables show.
        """
        from bevatron.recipes.mace.evaluate import SHOWN

        found: dict[str, None] = {}
        for run in self.runs:
            errors = [name for name in run.measures if name.startswith(VALID)]
            shown = [name for name in errors if _metric(name)[1] in SHOWN]
            hidden = {*errors} - {*shown} if shown else set()
            found |= dict.fromkeys(name for name in run.measures if name not in hidden)
        return sorted(found, key=lambda name: _metric(name)[1].startswith("loss_"))

    def _panels(self) -> list[Any]:
        """Make a panel of the loss, and of every validation metric that several runs have."""
        from bevatron.train.logger import column
        from bevatron.train.report.plots import Curve, Panel

        losses = [training_loss(run.history, run.name) for run in self.runs]
        panels = [Panel(_written("loss")[0], "", [curve for curve in losses if np.size(curve.y)])]
        runs = [run for run in self.runs if run.history.epochs]
        for name in self._names():
            if not name.startswith(VALID) or sum(name in run.measures for run in runs) < 2:
                continue
            title, factor = _written(name)
            curves = [
                Curve(
                    run.name,
                    [run.history.place(record) for record in run.history.epochs],
                    factor * column(run.history.epochs, "valid", name.removeprefix(VALID)),
                )
                for run in runs
            ]
            if any(np.nan_to_num(np.asarray(curve.y)).any() for curve in curves):
                falls = bool(_ERRORS & set(_metric(name)[1].split("_")))
                panels.append(Panel(title, "", curves, logarithmic=falls))
        return panels[: 1 + MOST_PANELS]


MOST_PANELS = 8
"""Number of validation metrics that are drawn."""

_ERRORS = {"loss", "mae", "rmse", "mse"}
"""Words in the names of measures that fall by orders of magnitude; other axes are linear."""


def compare_runs(folders: Sequence[Path]) -> Comparison:
    """Read runs to be compared.

    Raises ConfigError for fewer than two, one given twice, or a folder without a run.
    """
    if len(folders) < 2:
        raise ConfigError("compare: expected the folders of two runs or more")
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if places.count(place) > 1:
            raise ConfigError(f"{folder}: is given twice")
    names = short_names(places)
    return Comparison(
        [ComparedRun.of_folder(f, name) for f, name in zip(folders, names, strict=True)]
    )


def short_names(paths: Sequence[Path]) -> list[str]:
    """Return the shortest ends of paths that distinguish them.

    Examples
    --------
    >>> short_names([Path("/a/x/run"), Path("/a/y/run")])
    ['x/run', 'y/run']
    """
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def _flat(values: Mapping[str, Any], path: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            found += _flat(value, f"{path}{key}.")
        else:
            text = yaml.safe_dump(value, default_flow_style=True, width=10**6)
            found.append(
                (f"{path}{RENAMED.get(key, key)}", text.removesuffix("\n").removesuffix("\n..."))
            )
    return found


def _metric(name: str) -> tuple[str, str]:
    """Return the head or mode of a validation metric, which may be empty, and the metric."""
    group, _, metric = name.removeprefix(VALID).rpartition("/")
    return group, metric


def _written(name: str) -> tuple[str, int]:
    """Return the name of a measure as it is written, and the factor of its values there."""
    from bevatron.recipes.mace.evaluate import SHOWN

    if not name.startswith(VALID):
        return {"seconds": "time", "loss": "training loss"}.get(name, name), 1
    group, metric = _metric(name)
    if metric in SHOWN:
        quantity, unit = SHOWN[metric]
        return f"{quantity} ({unit})" + (f", {group}" if group else ""), 1000
    return f"validation {measure_name(name.removeprefix(VALID))}", 1


def _cell(name: str, value: float | None) -> str:
    if value is None:
        return ABSENT
    return duration(value) if name == "seconds" else number(_written(name)[1] * value)
