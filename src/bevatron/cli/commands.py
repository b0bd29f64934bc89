"""The commands that belong to no single system: inspect, env, demo."""

from pathlib import Path

from bevatron.recipes.arguments import Out, StoreFolder, say


def inspect(
    store: StoreFolder,
    out: Path | None = None,
    plan: bool = False,
    capacity: int | None = None,
    ranks: int = 8,
) -> None:
    """Print and draw what is in a store.

    Parameters
    ----------
    store
        A prepared store.
    out
        Folder for figures and inspect.html; STORE-inspect by default.
    plan
        Also show how fixed-count batches, Algorithm 1 and balanced batches fill the ranks.
    capacity
        Maximum number of atoms per batch, for --plan.
    ranks
        Processes that share an epoch, for --plan.
    """
    from bevatron.recipes.inspect import PlanOptions, inspect_store

    options = PlanOptions(capacity=capacity, ranks=ranks) if plan else None
    say(f"figures: {inspect_store(store, out, options)}")


def env() -> None:
    """Print versions, devices, and which kernels run here, or why they do not."""
    from bevatron.recipes.environment import describe_environment

    for title, rows in describe_environment():
        width = max((len(name) for name, _ in rows), default=0)
        say(title, *(f"  {name:<{width}}  {value}" for name, value in rows))


def demo(out: Out = Path("demo-run")) -> int:
    """Train, evaluate and use a small model of each system on bundled data.

    Parameters
    ----------
    out
        Folder for everything that it writes.
    """
    from bevatron.recipes.demo import run_demo

    return run_demo(out)
