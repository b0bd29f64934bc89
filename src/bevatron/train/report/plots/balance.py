"""How batches fill the ranks."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from bevatron.train.report.plots.style import (
    HEAT,
    LEGEND_COLUMNS,
    Values,
    colours,
    legend_below,
    new_axes,
)


def batch_balance(
    costs: Mapping[str, Values], capacity: float | None = None, unit: str = "atoms"
) -> Figure:
    """Draw how batches fill the ranks step by step (Firoz et al. 2025, Figure 12).

    Each plan gets a map of its ranks and steps on a common scale, dark for a large load; below, the
    distribution of the imbalance: largest over mean of each step.

    Parameters
    ----------
    costs : name of the plan -> cost of each batch, [steps, ranks]
    capacity : capacity of a batch; the scale ends there
    unit : unit of the cost
    """
    plans = {name: np.atleast_2d(np.asarray(value, dtype=float)) for name, value in costs.items()}
    top = max([capacity or 0.0, *(plan.max(initial=0.0) for plan in plans.values())]) or 1.0
    heights = [1.0] * len(plans) + [1.15]
    with new_axes(8.6, 1.5 * len(plans) + 2.7, len(plans) + 1, 1, height_ratios=heights) as (
        fig,
        axes,
    ):
        image = None
        for ax, (name, plan) in zip(axes.flat, plans.items(), strict=False):
            steps, ranks = plan.shape
            image = ax.imshow(
                plan.T,
                aspect="auto",
                cmap=HEAT,
                vmin=0,
                vmax=top,
                interpolation="nearest" if steps <= 1000 else "antialiased",
                extent=(0.5, steps + 0.5, ranks - 0.5, -0.5),
            )
            ax.grid(visible=False)
            ax.set_title(f"{name}: {_balance_text(plan, capacity)}", fontsize=10)
            ax.set_ylabel("rank")
            ax.set_yticks(np.unique(np.linspace(0, ranks - 1, min(ranks, 4)).round()))
            ax.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
            ax.set_xlabel("step", labelpad=1)
        if image is not None:
            fig.colorbar(image, ax=list(axes.flat[:-1]), label=f"{unit} of a batch", aspect=30)
        _waiting(axes.flat[-1], plans)
    return fig


def _balance_text(plan: npt.NDArray[Any], capacity: float | None) -> str:
    mean = plan.mean(axis=1)
    ratio = float(plan.max(axis=1).sum() / mean.sum()) if mean.sum() > 0 else 1.0
    text = f"{len(plan):,} steps, slowest rank {100 * (ratio - 1):.1f} % over the mean"
    return f"{text}, fill {100 * plan.mean() / capacity:.1f} %" if capacity else text


def _waiting(ax: Axes, plans: Mapping[str, npt.NDArray[Any]]) -> None:
    for (name, plan), colour in zip(plans.items(), colours(len(plans)), strict=True):
        mean = plan.mean(axis=1)
        ratio = np.sort(plan.max(axis=1)[mean > 0] / mean[mean > 0])
        share = np.linspace(0, 100, len(ratio)) if len(ratio) > 1 else np.array([50.0] * len(ratio))
        ax.plot(share, ratio, color=colour, label=name, marker="o" if len(ratio) == 1 else "")
    ax.set(
        title="Cost of the slowest rank",
        xlabel="share of steps (%), sorted",
        ylabel="largest / mean",
    )
    ax.set_ylim(bottom=1 - 0.02 * (ax.get_ylim()[1] - 1))
    legend_below(ax, LEGEND_COLUMNS)
