"""The commands that belong to no single system."""

import textwrap
from pathlib import Path
from typing import Annotated, Literal

import tyro
import yaml

from bevatron.output import Result, say
from bevatron.recipes.arguments import Out, StoreFolder, positional
from bevatron.recipes.starter import filled_in


def inspect(
    store: StoreFolder,
    out: Path | None = None,
    plan: bool = False,
    capacity: int | None = None,
    ranks: int = 8,
) -> Result:
    """Print and draw what is in a store.

    Parameters
    ----------
    out : folder for figures and inspect.html; STORE-inspect by default
    plan : also show how fixed-count batches, Algorithm 1 and balanced batches fill the ranks
    capacity : maximum number of atoms, residues or tokens per batch, for --plan
    ranks : processes that share an epoch, for --plan

    Examples
    --------
    bevatron inspect water-store --plan
    bevatron inspect water-store --plan --capacity 512 --ranks 4
    """
    from bevatron.recipes.inspect import PlanOptions, inspect_store, show_tables

    options = PlanOptions(capacity=capacity, ranks=ranks) if plan else None
    tables, page = inspect_store(store, out, options)

    def show() -> None:
        show_tables(tables)
        say(f"figures: {page}")

    return Result({"page": page, "tables": {t.title: t.records() for t in tables}}, show)


def compare(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional, positional("RUN ...")],
    out: Path | None = None,
) -> Result:
    """Print the settings in which runs differ, and their errors side by side.

    Parameters
    ----------
    runs : folders of runs, finished or under way
    out : page with the curves too, NAME.html; or the curves alone, NAME.png

    Examples
    --------
    bevatron compare runs/water runs/wide
    bevatron compare runs/* --out compared.html
    """
    from bevatron.recipes.compare import compare_runs

    found = compare_runs(runs)
    if out is not None:
        found.write(out)

    def show() -> None:
        found.show()
        say(*([] if out is None else [f"curves: {out}"]))

    return Result(found.values(), show)


def init(
    system: Annotated[str, tyro.conf.Positional, positional("SYSTEM")],
    data: str | None = None,
    output: str | None = None,
) -> Result:
    """Print a starter configuration: the keys that matter, with their defaults and what they mean.

    Parameters
    ----------
    system : ``mace``, gpspp, graph, alphafold2 or alphafold3
    data : file to train on, instead of the placeholder
    output : folder of the run, instead of the placeholder

    Examples
    --------
    bevatron init mace > water.yaml
    bevatron init mace --data water.extxyz --output runs/water > water.yaml
    """
    from bevatron.recipes import system as find

    given = {"DATA": data, "RUN": output}
    known = {name: value for name, value in given.items() if value is not None}
    text = filled_in(find(system).starter_text(), known)
    return Result(yaml.safe_load(text), lambda: say(text.rstrip()))


def env() -> Result:
    """Print versions, devices, and which kernels run here, or why they do not."""
    from bevatron.recipes.environment import describe_environment

    sections = describe_environment()

    def show() -> None:
        for title, rows in sections:
            width = min(max((len(name) for name, _ in rows), default=0), 26)
            say(title)
            for name, value in rows:
                if len(name) > width:
                    say(
                        f"  {name}",
                        *textwrap.wrap(
                            value, 84, initial_indent=4 * " ", subsequent_indent=4 * " "
                        ),
                    )
                else:
                    say(f"  {name:<{width}}  {value}")

    return Result({title: dict(rows) for title, rows in sections}, show)


def demo(out: Out = Path("demo-run")) -> int:
    """Train, evaluate and use a small model of each system on bundled data.

    Parameters
    ----------
    out : folder for everything that it writes

    Examples
    --------
    bevatron demo
    bevatron demo my-demo
    """
    from bevatron.recipes.demo import run_demo

    return run_demo(out)


def completion(
    shell: Annotated[Literal["bash", "zsh"], tyro.conf.Positional, positional("SHELL")],
) -> None:
    """Print a script that completes commands and options in a shell.

    Parameters
    ----------
    shell : ``bash`` or zsh

    Examples
    --------
    source <(bevatron completion bash)
    bevatron completion bash > ~/.local/share/bash-completion/completions/bevatron
    """
    from bevatron.cli.completion import completion_script

    say(completion_script(shell))
